//! Router: which experts a token visits, and with which weights.

use device::{DevicePtr, DevicePtrMut, Kernel, LaunchConfig, Module, Stream, View, ViewMut};
use half::bf16;

use crate::error::{Checker, Result, int};
use crate::{Kernels, Routing};

/// How logits are compared and weights are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertWeights {
    /// Logits and weights rounded to bf16, as OpenAI's reference does.
    Bf16,
    /// Neither rounded.
    F32,
}

/// For few tokens: logits of all experts, the largest few of them (the lowest index first among equals), and the softmax over those alone.
///
/// Source: `MLPBlock` in openai/gpt-oss `gpt_oss/torch/model.py`; plain definition: `model::reference::route`.
#[derive(Debug)]
pub struct Router<'a> {
    /// `[tokens, k]`
    pub x: View<'a, bf16>,
    /// `[experts, k]`
    pub weight: View<'a, bf16>,
    /// `[experts]`
    pub bias: View<'a, bf16>,
    /// `[tokens]`: 0 for tokens that only fill a batch up. `None`: there are none.
    pub present: Option<View<'a, i32>>,
    /// `[tokens, top]`, most probable first; -1 where a token is not present.
    pub experts: ViewMut<'a, i32>,
    /// `[tokens, top]`
    pub weights: ViewMut<'a, f32>,
    /// Unrounded logits `[tokens, experts]`, where they are wanted: to count picks that another rounding would change.
    pub logits: Option<ViewMut<'a, f32>>,
    /// Experts a token.
    pub top: usize,
    /// Rounding.
    pub mode: ExpertWeights,
    /// With up to [`DISPATCH_TOKENS`] tokens, what [`Dispatch`](crate::Dispatch) would do, in the same launch.
    pub dispatch: Option<RouterDispatch<'a>>,
}

/// Most tokens that [`Router`] can dispatch.
pub const DISPATCH_TOKENS: usize = CLUSTER_TOKENS;

/// As the fields of [`Dispatch`](crate::Dispatch).
#[derive(Debug)]
pub struct RouterDispatch<'a> {
    /// First expert of this rank.
    pub first_expert: usize,
    /// Where the result goes.
    pub routing: &'a mut Routing,
}

/// For many tokens: the choice alone, from logits that [`TileGemm`](crate::TileGemm) has computed. Faster than [`Router`] from about 200
/// tokens on.
#[derive(Debug)]
pub struct ChooseExperts<'a> {
    /// Unrounded, `[tokens, experts]`.
    pub logits: ViewMut<'a, f32>,
    /// Experts to choose from.
    pub num_experts: usize,
    /// `[tokens]`: 0 for tokens that only fill a batch up. `None`: there are none.
    pub present: Option<View<'a, i32>>,
    /// `[tokens, top]`, most probable first; -1 where a token is not present.
    pub experts: ViewMut<'a, i32>,
    /// `[tokens, top]`
    pub weights: ViewMut<'a, f32>,
    /// Experts a token.
    pub top: usize,
    /// Rounding.
    pub mode: ExpertWeights,
}

kernel_args! {
    struct Args = RouterArgs in "router/router.cu" {
        x: DevicePtr<bf16>,
        weight: DevicePtr<bf16>,
        bias: DevicePtr<bf16>,
        experts: DevicePtrMut<i32>,
        weights: DevicePtrMut<f32>,
        logits: DevicePtrMut<f32>,
        tokens: i32,
        num_experts: i32,
        k: i32,
        top: i32,
        round_bf16: i32,
        first_expert: i32,
        slot: DevicePtrMut<i32>,
        gather: DevicePtrMut<i32>,
        offsets: DevicePtrMut<i32>,
        tiles: DevicePtrMut<[i32; 4]>,
        num_tiles: DevicePtrMut<i32>,
        present: DevicePtr<i32>,
        local_experts: i32,
        padding: i32,
    }
}

impl Args {
    /// Without operands.
    const EMPTY: Self = Self {
        x: DevicePtr::NULL,
        weight: DevicePtr::NULL,
        bias: DevicePtr::NULL,
        experts: DevicePtrMut::NULL,
        weights: DevicePtrMut::NULL,
        logits: DevicePtrMut::NULL,
        tokens: 0,
        num_experts: 0,
        k: 0,
        top: 0,
        round_bf16: 0,
        first_expert: 0,
        slot: DevicePtrMut::NULL,
        gather: DevicePtrMut::NULL,
        offsets: DevicePtrMut::NULL,
        tiles: DevicePtrMut::NULL,
        num_tiles: DevicePtrMut::NULL,
        present: DevicePtr::NULL,
        local_experts: 0,
        padding: 0,
    };
}

const _: () = assert!(size_of::<Args>() == 128);

/// Blocks of a cluster, tokens that it takes at a time, and warps of a block: constants of router.cu.
const CLUSTER: usize = 6;
const CLUSTER_TOKENS: usize = 8;
const WARPS: usize = 8;

/// Kernels by the 32-blocks of k that a warp can hold.
#[derive(Debug)]
pub(crate) struct Variants {
    blocks_4: Kernel,
    blocks_15: Kernel,
    choose: Kernel,
}

impl Variants {
    pub(crate) fn load(module: &Module) -> Result<Self> {
        Ok(Self {
            blocks_4: module.kernel("router_4", 0)?,
            blocks_15: module.kernel("router_15", 0)?,
            choose: module.kernel("choose_experts", 0)?,
        })
    }
}

impl Router<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` unless k is a multiple of 32, experts at most 128 and top at most 8,
    /// `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("router");
        let num_experts = self.bias.len();
        check.dimension("experts", num_experts, "1 to 128", (1..=128).contains(&num_experts))?;
        let k = self.weight.len() / num_experts;
        check.dimension("k", k, "a multiple of 32", k > 0 && k.is_multiple_of(32))?;
        check.size("weight", num_experts * k, self.weight.len())?;
        check.dimension("top", self.top, "1 to 8 and at most experts", (1..=num_experts.min(8)).contains(&self.top))?;
        let tokens = self.x.len() / k;
        check.size("x", tokens * k, self.x.len())?;
        check.size("experts", tokens * self.top, self.experts.len())?;
        check.size("weights", tokens * self.top, self.weights.len())?;
        check.size("present", tokens, self.present.map_or(tokens, |present| present.len()))?;
        if let Some(logits) = &self.logits {
            check.size("logits", tokens * num_experts, logits.len())?;
        }
        let warp_blocks = (k / 32).div_ceil(CLUSTER * (WARPS / num_experts.div_ceil(16)));
        check.dimension("k", k, "at most 2880 for 128 experts, in proportion more for fewer", warp_blocks <= 15)?;
        if tokens == 0 {
            return Ok(());
        }
        let mut args = Args {
            x: stream.input(&self.x),
            weight: stream.input(&self.weight),
            bias: stream.input(&self.bias),
            experts: stream.output(&mut self.experts),
            weights: stream.output(&mut self.weights),
            present: self.present.map_or(DevicePtr::NULL, |present| stream.input(&present)),
            logits: self.logits.as_mut().map_or(DevicePtrMut::NULL, |logits| stream.output(logits)),
            tokens: int(tokens),
            num_experts: int(num_experts),
            k: int(k),
            top: int(self.top),
            round_bf16: i32::from(self.mode == ExpertWeights::Bf16),
            ..Args::EMPTY
        };
        if let Some(RouterDispatch { first_expert, routing }) = self.dispatch {
            check.dimension("tokens", tokens, "at most 8 to dispatch", tokens <= DISPATCH_TOKENS)?;
            check.size("top", routing.top, self.top)?;
            check.room("slot", tokens * self.top, routing.slot.len())?;
            check.room("slots of a tile", tokens, routing.tile_slots)?;
            args.first_expert = int(first_expert);
            args.local_experts = int(routing.num_experts);
            args.slot = stream.output(&mut routing.slot.view_mut());
            args.gather = stream.output(&mut routing.gather.view_mut());
            args.offsets = stream.output(&mut routing.offsets.view_mut());
            args.tiles = stream.output(&mut routing.tiles.view_mut());
            args.num_tiles = stream.output(&mut routing.num_tiles.view_mut());
        }
        let clusters = tokens.div_ceil(CLUSTER_TOKENS).min(kernels.multiprocessors as usize / CLUSTER);
        let config = LaunchConfig::linear((clusters * CLUSTER) as u32, (WARPS * 32) as u32);
        let kernel = if warp_blocks <= 4 { &kernels.router.blocks_4 } else { &kernels.router.blocks_15 };
        // SAFETY: rows beyond the last token or expert are clamped in the kernel; all others are covered as checked. At most
        // `tokens * top` slots and tiles are written, for which `Routing::new` made room.
        Ok(unsafe { kernel.launch(stream, config, &args) }?)
    }
}

impl ChooseExperts<'_> {
    /// Returns once enqueued.
    ///
    /// # Errors
    /// `Size` if the operands disagree, `Dimension` for more than 128 experts or a top above 8, `Device` if the launch fails.
    pub fn enqueue(mut self, kernels: &Kernels, stream: &Stream) -> Result<()> {
        let check = Checker("choose_experts");
        let num_experts = self.num_experts;
        check.dimension("experts", num_experts, "1 to 128", (1..=128).contains(&num_experts))?;
        check.dimension("top", self.top, "1 to 8 and at most experts", (1..=num_experts.min(8)).contains(&self.top))?;
        let tokens = self.logits.len() / num_experts;
        check.size("logits", tokens * num_experts, self.logits.len())?;
        check.size("experts", tokens * self.top, self.experts.len())?;
        check.size("weights", tokens * self.top, self.weights.len())?;
        check.size("present", tokens, self.present.map_or(tokens, |present| present.len()))?;
        if tokens == 0 {
            return Ok(());
        }
        let args = Args {
            experts: stream.output(&mut self.experts),
            weights: stream.output(&mut self.weights),
            present: self.present.map_or(DevicePtr::NULL, |present| stream.input(&present)),
            logits: stream.output(&mut self.logits),
            tokens: int(tokens),
            num_experts: int(num_experts),
            top: int(self.top),
            round_bf16: i32::from(self.mode == ExpertWeights::Bf16),
            ..Args::EMPTY
        };
        let config = LaunchConfig::linear(tokens.div_ceil(WARPS) as u32, (WARPS * 32) as u32);
        // SAFETY: one warp a token, whose logits, experts and weights are covered as checked.
        Ok(unsafe { kernels.router.choose.launch(stream, config, &args) }?)
    }
}
