//! Dispatch: from the experts of each token to the tokens of each expert.

use device::{DeviceBuffer, DevicePtr, DevicePtrMut, LaunchConfig, Stream, View};

use crate::Kernels;
use crate::error::{Checker, Result, int};

/// Most experts of a rank.
pub(crate) const MAX_EXPERTS: usize = 128;

/// Pairs of token and expert in the order of experts: where grouped GEMMs find their rows. A *slot* is a place in that order.
///
/// Made once for the largest batch and filled by [`Dispatch`], step after step.
#[derive(Debug)]
pub struct Routing {
    /// Slot of each pair, `[tokens, top]`; -1 where another rank has the expert.
    pub slot: DeviceBuffer<i32>,
    /// Token of each slot.
    pub gather: DeviceBuffer<i32>,
    /// First slot of each local expert, and the number of all: `[experts + 1]`.
    pub offsets: DeviceBuffer<i32>,
    /// `[expert, first slot, slots, 0]` of each run of at most `tile_slots` slots of one expert.
    pub tiles: DeviceBuffer<[i32; 4]>,
    /// Number of tiles.
    pub num_tiles: DeviceBuffer<i32>,
    /// Most slots of a tile.
    pub tile_slots: usize,
    /// Experts of a token.
    pub top: usize,
    /// Experts of this rank.
    pub num_experts: usize,
}

impl Routing {
    /// Room for `max_tokens` tokens. A slot count of 8 or 16 suits [`SkinnyGemm`](crate::SkinnyGemm), one of 24 if weights are MXFP4.
    ///
    /// # Errors
    /// `Dimension` for more than 128 experts or no slots, `Device` without memory.
    pub fn new(stream: &Stream, max_tokens: usize, top: usize, num_experts: usize, tile_slots: usize) -> Result<Self> {
        let check = Checker("routing");
        check.dimension("experts", num_experts, "1 to 128", (1..=MAX_EXPERTS).contains(&num_experts))?;
        check.dimension("tile slots", tile_slots, "at least 1", tile_slots > 0)?;
        let pairs = max_tokens * top;
        Ok(Self {
            slot: stream.zeros(pairs)?,
            gather: stream.zeros(pairs)?,
            offsets: stream.zeros(num_experts + 1)?,
            tiles: stream.zeros(Self::max_tiles(pairs, num_experts, tile_slots))?,
            num_tiles: stream.zeros(1)?,
            tile_slots,
            top,
            num_experts,
        })
    }

    /// Most tiles that `pairs` pairs can make: a full one for each `tile_slots` pairs, and one tail an expert.
    pub(crate) const fn max_tiles(pairs: usize, num_experts: usize, tile_slots: usize) -> usize {
        let with_tails = pairs / tile_slots + num_experts;
        if with_tails < pairs { with_tails } else { pairs }
    }
}

/// Fills a [`Routing`]. Within an expert, slots follow the order of tokens.
#[derive(Debug)]
pub struct Dispatch<'a> {
    /// From the router, `[tokens, top]`.
    pub experts: View<'a, i32>,
    /// First expert of this rank.
    pub first_expert: usize,
    /// Where the result goes.
    pub routing: &'a mut Routing,
}

kernel_args! {
    struct Args = DispatchArgs in "dispatch/dispatch.cu" {
        experts: DevicePtr<i32>,
        slot: DevicePtrMut<i32>,
        gather: DevicePtrMut<i32>,
        offsets: DevicePtrMut<i32>,
        tiles: DevicePtrMut<[i32; 4]>,
        num_tiles: DevicePtrMut<i32>,
        pairs: i32,
        top: i32,
        first_expert: i32,
        num_experts: i32,
        tile_slots: i32,
        padding: i32,
    }
}

const _: () = assert!(size_of::<Args>() == 72);

impl Dispatch<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if there are more tokens than the routing has room for, `Device` if the launch fails.
    pub fn enqueue(self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("dispatch");
        let (pairs, routing) = (self.experts.len(), self.routing);
        check.size("experts", pairs / routing.top * routing.top, pairs)?;
        check.room("slot", pairs, routing.slot.len())?;
        let args = Args {
            experts: stream.input(&self.experts),
            slot: stream.output(&mut routing.slot.view_mut()),
            gather: stream.output(&mut routing.gather.view_mut()),
            offsets: stream.output(&mut routing.offsets.view_mut()),
            tiles: stream.output(&mut routing.tiles.view_mut()),
            num_tiles: stream.output(&mut routing.num_tiles.view_mut()),
            pairs: int(pairs),
            top: int(routing.top),
            first_expert: int(self.first_expert),
            num_experts: int(routing.num_experts),
            tile_slots: int(routing.tile_slots),
            padding: 0,
        };
        // SAFETY: at most `pairs` slots and `Routing::max_tiles` tiles are written, for which `Routing::new` made room.
        Ok(unsafe { kernels.dispatch.launch(stream, LaunchConfig::linear(1, 1024), &args) }?)
    }
}
