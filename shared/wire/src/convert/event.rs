//! What streams back.

use types::{
    DecodeEvent, FinishReason, Finished, GenerateEvent, PrefillEvent, RequestId, SampledToken, TokenLogprob, TokenRun,
    Usage,
};

use super::{InvalidMessage, Result, message, required};
use crate::pb;

impl From<SampledToken> for pb::Token {
    fn from(token: SampledToken) -> Self {
        let top_logprobs =
            token.top.into_iter().map(|top| pb::TokenLogprob { token: top.token, logprob: top.logprob }).collect();
        Self { id: token.token, logprob: token.logprob, top_logprobs }
    }
}

impl From<pb::Token> for SampledToken {
    fn from(message: pb::Token) -> Self {
        let top = message.top_logprobs.into_iter();
        let top = top.map(|top| TokenLogprob { token: top.token, logprob: top.logprob }).collect();
        Self { token: message.id, logprob: message.logprob, top }
    }
}

impl From<TokenRun> for pb::Tokens {
    fn from(run: TokenRun) -> Self {
        Self { first_index: run.first_index, tokens: run.tokens.into_iter().map(Into::into).collect() }
    }
}

impl TryFrom<pb::Tokens> for TokenRun {
    type Error = InvalidMessage;

    fn try_from(message: pb::Tokens) -> Result<Self> {
        if message.tokens.is_empty() {
            return Err(InvalidMessage::new("tokens", "is empty"));
        }
        let end = u32::try_from(message.tokens.len()).ok().and_then(|count| message.first_index.checked_add(count));
        if end.is_none() {
            let (first, count) = (message.first_index, message.tokens.len());
            return Err(InvalidMessage::new(
                "first_index",
                format!("is {first}: {count} more tokens cannot be numbered"),
            ));
        }
        Ok(Self { first_index: message.first_index, tokens: message.tokens.into_iter().map(Into::into).collect() })
    }
}

impl From<Finished> for pb::Finished {
    fn from(finished: Finished) -> Self {
        let reason = match finished.reason {
            FinishReason::Stop => pb::FinishReason::Stop,
            FinishReason::Length => pb::FinishReason::Length,
        };
        Self { reason: reason.into(), usage: Some(finished.usage.into()) }
    }
}

impl TryFrom<pb::Finished> for Finished {
    type Error = InvalidMessage;

    fn try_from(message: pb::Finished) -> Result<Self> {
        let reason = match pb::FinishReason::try_from(message.reason) {
            Ok(pb::FinishReason::Stop) => FinishReason::Stop,
            Ok(pb::FinishReason::Length) => FinishReason::Length,
            Ok(pb::FinishReason::Unspecified) | Err(_) => {
                return Err(InvalidMessage::new("reason", format!("is {}, unknown", message.reason)));
            }
        };
        Ok(Self { reason, usage: required(message.usage, "usage")?.into() })
    }
}

impl From<Usage> for pb::Usage {
    fn from(usage: Usage) -> Self {
        let Usage { prompt_tokens, cached_tokens, output_tokens, resumptions } = usage;
        Self { prompt_tokens, cached_tokens, output_tokens, resumptions }
    }
}

impl From<pb::Usage> for Usage {
    fn from(message: pb::Usage) -> Self {
        let pb::Usage { prompt_tokens, cached_tokens, output_tokens, resumptions } = message;
        Self { prompt_tokens, cached_tokens, output_tokens, resumptions }
    }
}

impl From<GenerateEvent> for pb::GenerateResponse {
    fn from(event: GenerateEvent) -> Self {
        use pb::generate_response::Event;
        let event = match event {
            GenerateEvent::Started { request_id, seed } => {
                Event::Started(pb::Started { request_id: request_id.as_str().to_owned(), seed })
            }
            GenerateEvent::Tokens(run) => Event::Tokens(run.into()),
            GenerateEvent::Finished(finished) => Event::Finished(finished.into()),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<pb::GenerateResponse> for GenerateEvent {
    type Error = InvalidMessage;

    fn try_from(proto: pb::GenerateResponse) -> Result<Self> {
        use pb::generate_response::Event;
        Ok(match required(proto.event, "event")? {
            Event::Started(started) => Self::Started {
                request_id: RequestId::new(&started.request_id)
                    .map_err(|reason| InvalidMessage::new("started.request_id", reason))?,
                seed: started.seed,
            },
            Event::Tokens(run) => Self::Tokens(message(Some(run), "tokens")?),
            Event::Finished(finished) => Self::Finished(message(Some(finished), "finished")?),
        })
    }
}

impl From<DecodeEvent> for pb::DecodeEvent {
    fn from(event: DecodeEvent) -> Self {
        use pb::decode_event::Event;
        let event = match event {
            DecodeEvent::Reserved(ticket) => Event::Reserved(ticket.into()),
            DecodeEvent::Joined { kv_bytes, landing_us } => Event::Joined(pb::Joined { kv_bytes, landing_us }),
            DecodeEvent::Tokens(run) => Event::Tokens(run.into()),
            DecodeEvent::Finished(finished) => Event::Finished(finished.into()),
            DecodeEvent::Preempted => Event::Preempted(pb::Preempted {}),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<pb::DecodeEvent> for DecodeEvent {
    type Error = InvalidMessage;

    fn try_from(proto: pb::DecodeEvent) -> Result<Self> {
        use pb::decode_event::Event;
        Ok(match required(proto.event, "event")? {
            Event::Reserved(ticket) => Self::Reserved(message(Some(ticket), "reserved")?),
            Event::Joined(pb::Joined { kv_bytes, landing_us }) => Self::Joined { kv_bytes, landing_us },
            Event::Tokens(run) => Self::Tokens(message(Some(run), "tokens")?),
            Event::Finished(finished) => Self::Finished(message(Some(finished), "finished")?),
            Event::Preempted(pb::Preempted {}) => Self::Preempted,
        })
    }
}

impl From<PrefillEvent> for pb::PrefillEvent {
    fn from(event: PrefillEvent) -> Self {
        use pb::prefill_event::Event;
        let event = match event {
            PrefillEvent::FirstToken { index, token, cached_tokens, queue_us, compute_us } => {
                let token = Some(token.into());
                Event::FirstToken(pb::FirstToken { index, token, queue_us, compute_us, cached_tokens })
            }
            PrefillEvent::Committed { kv_bytes, transfer_us, tail_us } => {
                Event::Committed(pb::Committed { kv_bytes, transfer_us, tail_us })
            }
            PrefillEvent::Finished(finished) => Event::Finished(finished.into()),
        };
        Self { event: Some(event) }
    }
}

impl TryFrom<pb::PrefillEvent> for PrefillEvent {
    type Error = InvalidMessage;

    fn try_from(proto: pb::PrefillEvent) -> Result<Self> {
        use pb::prefill_event::Event;
        Ok(match required(proto.event, "event")? {
            Event::FirstToken(first) => Self::FirstToken {
                index: first.index,
                token: required(first.token, "first_token.token")?.into(),
                cached_tokens: first.cached_tokens,
                queue_us: first.queue_us,
                compute_us: first.compute_us,
            },
            Event::Committed(pb::Committed { kv_bytes, transfer_us, tail_us }) => {
                Self::Committed { kv_bytes, transfer_us, tail_us }
            }
            Event::Finished(finished) => Self::Finished(message(Some(finished), "finished")?),
        })
    }
}
