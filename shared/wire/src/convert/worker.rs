//! Workers, their load, and tickets.

use std::time::Duration;

use types::{
    DpGroup, Incarnation, KvEndpoint, Load, PagePoolLoad, PeerId, Ticket, TicketId, WorkerDescription, WorkerId,
    WorkerReport, WorkerState,
};

use super::layout::{page_group, role, role_to_proto};
use super::{InvalidMessage, Result, message};
use crate::pb;

/// A ticket's name from its bytes.
///
/// # Errors
/// When it is not 16 bytes long.
pub fn ticket_id(bytes: &[u8]) -> Result<TicketId> {
    let bytes = bytes
        .try_into()
        .map_err(|_| InvalidMessage::new("ticket_id", format!("has {} bytes, 16 are needed", bytes.len())))?;
    Ok(TicketId(u128::from_be_bytes(bytes)))
}

impl From<PeerId> for pb::PeerId {
    fn from(peer: PeerId) -> Self {
        Self { worker: peer.worker.to_string(), incarnation: peer.incarnation.0 }
    }
}

impl TryFrom<pb::PeerId> for PeerId {
    type Error = InvalidMessage;

    fn try_from(message: pb::PeerId) -> Result<Self> {
        if message.worker.is_empty() {
            return Err(InvalidMessage::new("worker", "is empty"));
        }
        Ok(Self { worker: WorkerId(message.worker.into()), incarnation: Incarnation(message.incarnation) })
    }
}

impl From<KvEndpoint> for pb::KvEndpoint {
    fn from(endpoint: KvEndpoint) -> Self {
        let KvEndpoint { transport, address } = endpoint;
        Self { transport, address }
    }
}

impl From<pb::KvEndpoint> for KvEndpoint {
    fn from(message: pb::KvEndpoint) -> Self {
        let pb::KvEndpoint { transport, address } = message;
        Self { transport, address }
    }
}

impl From<WorkerDescription> for pb::WorkerDescription {
    fn from(description: WorkerDescription) -> Self {
        Self {
            peer: Some(description.peer.into()),
            role: role_to_proto(description.role),
            fingerprint: Some(description.fingerprint.into()),
            weights_fingerprint: description.weights_fingerprint,
            numerics: description.numerics,
            kv_layout: Some(description.kv_layout.into()),
            parallel: Some(description.parallel.into()),
            max_context_tokens: description.max_context_tokens,
            eos_token_ids: description.eos_token_ids,
            kv_endpoint: description.kv_endpoint.map(Into::into),
            max_sequences: description.max_sequences,
        }
    }
}

impl TryFrom<pb::WorkerDescription> for WorkerDescription {
    type Error = InvalidMessage;

    fn try_from(proto: pb::WorkerDescription) -> Result<Self> {
        let description = Self {
            peer: message(proto.peer, "peer")?,
            role: role(proto.role)?,
            fingerprint: message(proto.fingerprint, "fingerprint")?,
            weights_fingerprint: proto.weights_fingerprint,
            numerics: proto.numerics,
            kv_layout: message(proto.kv_layout, "kv_layout")?,
            parallel: message(proto.parallel, "parallel")?,
            max_context_tokens: proto.max_context_tokens,
            eos_token_ids: proto.eos_token_ids,
            kv_endpoint: proto.kv_endpoint.map(Into::into),
            max_sequences: proto.max_sequences,
        };
        if description.max_sequences == 0 {
            return Err(InvalidMessage::new("max_sequences", "is 0"));
        }
        if description.max_context_tokens < 2 {
            let reason = format!(
                "is {}, at least 2 are needed: a prompt token and an output token",
                description.max_context_tokens
            );
            return Err(InvalidMessage::new("max_context_tokens", reason));
        }
        let vocab_size = description.fingerprint.vocab_size;
        if let Some(token) = description.eos_token_ids.iter().find(|token| **token >= vocab_size) {
            return Err(InvalidMessage::new(
                "eos_token_ids",
                format!("has {token}, the vocabulary has {vocab_size} tokens"),
            ));
        }
        if description.role == types::Role::Decode && description.kv_endpoint.is_none() {
            return Err(InvalidMessage::new("kv_endpoint", "is missing, a decode worker must have one"));
        }
        Ok(description)
    }
}

fn state_to_proto(state: WorkerState) -> i32 {
    match state {
        WorkerState::Loading => pb::WorkerState::Loading,
        WorkerState::Ready => pb::WorkerState::Ready,
        WorkerState::Draining => pb::WorkerState::Draining,
        WorkerState::Stuck => pb::WorkerState::Stuck,
    }
    .into()
}

fn state(value: i32) -> Result<WorkerState> {
    match pb::WorkerState::try_from(value) {
        Ok(pb::WorkerState::Loading) => Ok(WorkerState::Loading),
        Ok(pb::WorkerState::Ready) => Ok(WorkerState::Ready),
        Ok(pb::WorkerState::Draining) => Ok(WorkerState::Draining),
        Ok(pb::WorkerState::Stuck) => Ok(WorkerState::Stuck),
        Ok(pb::WorkerState::Unspecified) | Err(_) => Err(InvalidMessage::new("state", format!("is {value}, unknown"))),
    }
}

impl From<Load> for pb::Load {
    fn from(load: Load) -> Self {
        let Load { waiting, running, pending_prompt_tokens, pools, steps } = load;
        let pools = pools.into_iter().map(Into::into).collect();
        Self { waiting, running, pending_prompt_tokens, pools, steps }
    }
}

impl TryFrom<pb::Load> for Load {
    type Error = InvalidMessage;

    fn try_from(message: pb::Load) -> Result<Self> {
        let pb::Load { waiting, running, pending_prompt_tokens, pools, steps } = message;
        let pools = pools.into_iter().map(PagePoolLoad::try_from).collect::<Result<_>>();
        let pools = pools.map_err(|error| error.within("pools"))?;
        Ok(Self { waiting, running, pending_prompt_tokens, pools, steps })
    }
}

impl From<PagePoolLoad> for pb::PagePoolLoad {
    fn from(load: PagePoolLoad) -> Self {
        let PagePoolLoad { dp_group, group, total, free, reserved, landing, live, cached, quarantined } = load;
        let group = group.name().to_owned();
        Self { group, total, free, reserved, landing, live, cached, quarantined, dp_group: dp_group.0 }
    }
}

impl TryFrom<pb::PagePoolLoad> for PagePoolLoad {
    type Error = InvalidMessage;

    fn try_from(message: pb::PagePoolLoad) -> Result<Self> {
        let pb::PagePoolLoad { group, total, free, reserved, landing, live, cached, quarantined, dp_group } = message;
        let (dp_group, group) = (DpGroup(dp_group), page_group(&group)?);
        Ok(Self { dp_group, group, total, free, reserved, landing, live, cached, quarantined })
    }
}

impl From<WorkerReport> for pb::WorkerReport {
    fn from(report: WorkerReport) -> Self {
        Self {
            description: Some(report.description.into()),
            state: state_to_proto(report.state),
            load: Some(report.load.into()),
        }
    }
}

impl TryFrom<pb::WorkerReport> for WorkerReport {
    type Error = InvalidMessage;

    fn try_from(proto: pb::WorkerReport) -> Result<Self> {
        Ok(Self {
            description: message(proto.description, "description")?,
            state: state(proto.state)?,
            load: message(proto.load, "load")?,
        })
    }
}

impl From<Ticket> for pb::Ticket {
    fn from(ticket: Ticket) -> Self {
        Self {
            id: ticket.id.0.to_be_bytes().to_vec(),
            prefill: Some(ticket.prefill.into()),
            decode: Some(ticket.decode.into()),
            kv_endpoint: Some(ticket.kv_endpoint.into()),
            kv_layout: Some(ticket.kv_layout.into()),
            ttl_ms: u32::try_from(ticket.ttl.as_millis()).unwrap_or(u32::MAX),
            dp_group: ticket.dp_group.0,
        }
    }
}

impl TryFrom<pb::Ticket> for Ticket {
    type Error = InvalidMessage;

    fn try_from(proto: pb::Ticket) -> Result<Self> {
        Ok(Self {
            id: ticket_id(&proto.id).map_err(|error| InvalidMessage::new("id", error.reason))?,
            prefill: message(proto.prefill, "prefill")?,
            decode: message(proto.decode, "decode")?,
            kv_endpoint: super::required(proto.kv_endpoint, "kv_endpoint")?.into(),
            kv_layout: message(proto.kv_layout, "kv_layout")?,
            dp_group: DpGroup(proto.dp_group),
            ttl: Duration::from_millis(proto.ttl_ms.into()),
        })
    }
}
