//! The fields of frame headers.

use bytes::{Buf, BufMut, BytesMut};
use kv::KvSlice;
use types::{Incarnation, KvDtype, KvLayout, PageGroup, PeerId, TicketId, WorkerId};

use super::{FrameError, VERSION};
use crate::config::TransportChoice;
use crate::data::{BATCH_SLICES_MAX, Batch, DataOffer, PairRate, Path, StagedSlice};

/// Longest worker name on the wire, in bytes.
const MAX_NAME_LEN: usize = 256;
/// Most layers of one group on the wire.
const MAX_LAYERS: usize = 1024;
/// Most ranks of one side on the wire.
const MAX_RANKS: usize = 256;

pub(super) fn put_peer(out: &mut BytesMut, peer: &PeerId) {
    let name = peer.worker.0.as_bytes();
    assert!(name.len() <= MAX_NAME_LEN, "worker names are checked when the config is read");
    out.put_u16_le(name.len() as u16);
    out.put_slice(name);
    out.put_u64_le(peer.incarnation.0);
}

pub(super) fn put_layout(out: &mut BytesMut, layout: &KvLayout) {
    for group in PageGroup::ALL {
        let layers = layout.layers(group);
        assert!(layers.len() <= MAX_LAYERS, "no model has so many layers");
        out.put_u16_le(layers.len() as u16);
        layers.iter().for_each(|layer| out.put_u32_le(*layer));
    }
    for field in [layout.kv_heads, layout.head_dim, layout.page_tokens, layout.window, layout.tp] {
        out.put_u32_le(field);
    }
    out.put_u8(match layout.dtype {
        KvDtype::F32 => 0,
        KvDtype::Bf16 => 1,
        KvDtype::Fp8 => 2,
    });
}

pub(super) fn put_slice(out: &mut BytesMut, slice: &KvSlice) {
    out.put_u8(match slice.group {
        PageGroup::Full => 0,
        PageGroup::Window => 1,
    });
    for field in [slice.layer, slice.page, slice.head_start, slice.head_count] {
        out.put_u32_le(field);
    }
}

pub(super) fn put_offer(out: &mut BytesMut, offer: &DataOffer) {
    let choice = TransportChoice::ALL.iter().position(|choice| *choice == offer.choice);
    out.put_u8(choice.expect("ALL lists every choice") as u8);
    out.put_u128_le(offer.host);
    out.put_u32_le(offer.nccl);
    out.put_u32_le(offer.batch_bytes_max);
    assert!(offer.gpus.len() <= MAX_RANKS, "no instance has so many ranks");
    out.put_u16_le(offer.gpus.len() as u16);
    offer.gpus.iter().for_each(|gpu| out.put_slice(gpu));
}

pub(super) fn put_rate(out: &mut BytesMut, rate: &PairRate) {
    out.put_u32_le(rate.sender_rank);
    out.put_u32_le(rate.receiver_rank);
    out.put_u8(match rate.path {
        Path::Ipc => 0,
        Path::Nccl => 1,
    });
    out.put_u32_le(rate.mb_per_s);
}

pub(super) fn put_batch(out: &mut BytesMut, batch: &Batch) {
    assert!(batch.slices.len() <= BATCH_SLICES_MAX, "senders cut batches so");
    out.put_u128_le(batch.ticket.0);
    out.put_u64_le(batch.id);
    out.put_u32_le(batch.sender_rank);
    out.put_u32_le(batch.receiver_rank);
    out.put_u64_le(batch.offset);
    out.put_u8(u8::from(batch.is_checked));
    out.put_u16_le(batch.slices.len() as u16);
    for StagedSlice { slice, checksum } in &batch.slices {
        put_slice(out, slice);
        out.put_u32_le(*checksum);
    }
}

/// Reads fields off a header; every read is checked against what is left.
pub(super) struct Fields<'a> {
    pub(super) rest: &'a [u8],
}

impl Fields<'_> {
    fn need(&self, len: usize, field: &'static str) -> Result<(), FrameError> {
        if self.rest.len() < len { Err(FrameError::Field(field)) } else { Ok(()) }
    }

    pub(super) fn u8(&mut self, field: &'static str) -> Result<u8, FrameError> {
        self.need(1, field)?;
        Ok(self.rest.get_u8())
    }

    pub(super) fn u16(&mut self, field: &'static str) -> Result<u16, FrameError> {
        self.need(2, field)?;
        Ok(self.rest.get_u16_le())
    }

    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, FrameError> {
        self.need(4, field)?;
        Ok(self.rest.get_u32_le())
    }

    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, FrameError> {
        self.need(8, field)?;
        Ok(self.rest.get_u64_le())
    }

    pub(super) fn offer(&mut self) -> Result<DataOffer, FrameError> {
        let choice = TransportChoice::ALL.get(usize::from(self.u8("transport")?)).copied();
        let choice = choice.ok_or(FrameError::Field("transport"))?;
        self.need(16, "host")?;
        let host = self.rest.get_u128_le();
        let (nccl, batch_bytes_max) = (self.u32("nccl")?, self.u32("batch_bytes_max")?);
        let ranks = usize::from(self.u16("gpus")?);
        if ranks > MAX_RANKS {
            return Err(FrameError::Field("gpus"));
        }
        self.need(16 * ranks, "gpus")?;
        let gpus = (0..ranks).map(|_| self.rest.get_u128().to_be_bytes()).collect();
        Ok(DataOffer { choice, host, gpus, nccl, batch_bytes_max })
    }

    pub(super) fn rates(&mut self) -> Result<Vec<PairRate>, FrameError> {
        let rate = |fields: &mut Self| {
            let (sender_rank, receiver_rank) = (fields.u32("sender_rank")?, fields.u32("receiver_rank")?);
            let path = if fields.flag("path")? { Path::Nccl } else { Path::Ipc };
            Ok(PairRate { sender_rank, receiver_rank, path, mb_per_s: fields.u32("mb_per_s")? })
        };
        (0..self.u16("rates")?).map(|_| rate(self)).collect()
    }

    pub(super) fn batch(&mut self) -> Result<Batch, FrameError> {
        let (ticket, id) = (self.ticket()?, self.u64("batch")?);
        let (sender_rank, receiver_rank) = (self.u32("sender_rank")?, self.u32("receiver_rank")?);
        let (offset, is_checked) = (self.u64("offset")?, self.flag("is_checked")?);
        let slices = usize::from(self.u16("slices")?);
        if slices > BATCH_SLICES_MAX {
            return Err(FrameError::Field("slices"));
        }
        let staged = |fields: &mut Self| Ok(StagedSlice { slice: fields.slice()?, checksum: fields.u32("checksum")? });
        let slices = (0..slices).map(|_| staged(self)).collect::<Result<_, FrameError>>()?;
        Ok(Batch { id, ticket, sender_rank, receiver_rank, offset, slices, is_checked })
    }

    pub(super) fn flag(&mut self, field: &'static str) -> Result<bool, FrameError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(FrameError::Field(field)),
        }
    }

    pub(super) fn version(&mut self) -> Result<(), FrameError> {
        match self.u16("version")? {
            VERSION => Ok(()),
            other => Err(FrameError::Version(other)),
        }
    }

    pub(super) fn ticket(&mut self) -> Result<TicketId, FrameError> {
        self.need(16, "ticket")?;
        Ok(TicketId(self.rest.get_u128_le()))
    }

    pub(super) fn peer(&mut self) -> Result<PeerId, FrameError> {
        let len = usize::from(self.u16("worker")?);
        if len > MAX_NAME_LEN {
            return Err(FrameError::Field("worker"));
        }
        self.need(len + 8, "worker")?;
        let (name, rest) = self.rest.split_at(len);
        self.rest = rest;
        let name = std::str::from_utf8(name).map_err(|_| FrameError::Field("worker"))?;
        Ok(PeerId { worker: WorkerId(name.into()), incarnation: Incarnation(self.rest.get_u64_le()) })
    }

    fn layers(&mut self, field: &'static str) -> Result<Vec<u32>, FrameError> {
        let len = usize::from(self.u16(field)?);
        if len > MAX_LAYERS {
            return Err(FrameError::Field(field));
        }
        (0..len).map(|_| self.u32(field)).collect()
    }

    pub(super) fn layout(&mut self) -> Result<KvLayout, FrameError> {
        let full_layers = self.layers("full_layers")?;
        let window_layers = self.layers("window_layers")?;
        let (kv_heads, head_dim) = (self.u32("kv_heads")?, self.u32("head_dim")?);
        let (page_tokens, window) = (self.u32("page_tokens")?, self.u32("window")?);
        let tp = self.u32("tp")?;
        let dtype = match self.u8("dtype")? {
            0 => KvDtype::F32,
            1 => KvDtype::Bf16,
            2 => KvDtype::Fp8,
            _ => return Err(FrameError::Field("dtype")),
        };
        Ok(KvLayout { full_layers, window_layers, kv_heads, head_dim, page_tokens, window, dtype, tp })
    }

    pub(super) fn slice(&mut self) -> Result<KvSlice, FrameError> {
        let group = match self.u8("group")? {
            0 => PageGroup::Full,
            1 => PageGroup::Window,
            _ => return Err(FrameError::Field("group")),
        };
        Ok(KvSlice {
            group,
            layer: self.u32("layer")?,
            page: self.u32("page")?,
            head_start: self.u32("head_start")?,
            head_count: self.u32("head_count")?,
        })
    }
}
