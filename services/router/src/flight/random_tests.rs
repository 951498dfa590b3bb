//! Random events in any order: whatever the workers do, the client's stream stays whole and nothing is left behind.

use proptest::prelude::*;
use types::TokenId;

use super::tests::{STOP, limits, pair, request, sampled, ticket};
use super::*;

const MAX_TOKENS: u32 = 12;

/// One move of the world; numbers are cut down to what makes sense at that moment, and beyond it.
#[derive(Debug, Clone)]
enum Move {
    Place,
    Reserved {
        wrong: bool,
    },
    FirstToken {
        offset: i8,
        stops: bool,
    },
    Committed,
    PrefillFinished {
        offset: i8,
    },
    Joined,
    Tokens {
        offset: i8,
        count: u8,
        stops: bool,
    },
    DecodeFinished {
        offset: i8,
    },
    Preempted,
    Closed(Role),
    Failed(Role, ErrorClass, bool),
    Gone(Role),
    Tick {
        ms: u16,
    },
    CaughtUp,
    ClientGone,
    /// The move that brings a well-behaved pair forward.
    Progress,
    /// The same event once more, from the attempt before.
    Late,
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode)]
}

fn class() -> impl Strategy<Value = ErrorClass> {
    prop_oneof![
        1 => Just(ErrorClass::Caller),
        4 => Just(ErrorClass::Overloaded),
        8 => Just(ErrorClass::Retryable),
        4 => Just(ErrorClass::Cancelled),
        4 => Just(ErrorClass::Fatal),
    ]
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        60 => Just(Move::Progress),
        4 => Just(Move::Place),
        3 => any::<bool>().prop_map(|wrong| Move::Reserved { wrong }),
        3 => (-2..3i8, any::<bool>()).prop_map(|(offset, stops)| Move::FirstToken { offset, stops }),
        3 => Just(Move::Committed),
        2 => (-1..2i8).prop_map(|offset| Move::PrefillFinished { offset }),
        3 => Just(Move::Joined),
        8 => (-3..2i8, 1..5u8, any::<bool>()).prop_map(|(offset, count, stops)| Move::Tokens { offset, count, stops }),
        2 => (-1..2i8).prop_map(|offset| Move::DecodeFinished { offset }),
        2 => Just(Move::Preempted),
        2 => role().prop_map(Move::Closed),
        4 => (role(), class(), any::<bool>()).prop_map(|(role, class, between)| Move::Failed(role, class, between)),
        2 => role().prop_map(Move::Gone),
        3 => (0..7_000u16).prop_map(|ms| Move::Tick { ms }),
        2 => Just(Move::CaughtUp),
        1 => Just(Move::ClientGone),
        4 => Just(Move::Late),
    ]
}

/// Sees every action and holds what a router would.
#[derive(Default)]
struct Witness {
    placing: bool,
    reserved: Option<(u32, TicketId)>,
    prefilling: Option<u32>,
    received: Vec<TokenId>,
    started: u32,
    finished: u32,
    ended: u32,
}

impl Witness {
    fn see(&mut self, action: &Action) {
        assert_eq!(self.ended, 0, "{action:?} after the end");
        match action {
            Action::Place { .. } => {
                assert!(
                    !self.placing && self.reserved.is_none() && self.prefilling.is_none(),
                    "workers are still held"
                );
                self.placing = true;
            }
            Action::Reserve { attempt, ticket, sequence, .. } => {
                assert!(std::mem::take(&mut self.placing));
                assert!(self.reserved.replace((*attempt, *ticket)).is_none(), "two reservations");
                assert_eq!(sequence.generated, self.received, "resumed from other tokens than were sent");
            }
            Action::Prefill { attempt, ticket, sequence } => {
                assert_eq!(self.reserved, Some((*attempt, ticket.id)), "prefill without its reservation");
                assert!(self.prefilling.replace(*attempt).is_none(), "two prefills");
                assert_eq!(sequence.generated, self.received);
            }
            Action::Release(Role::Prefill) => self.prefilling = None,
            Action::Release(Role::Decode) => {
                assert!(self.prefilling.is_none(), "decode released under a prefill that may still write");
                self.reserved = None;
            }
            Action::Full(_) | Action::Unlink | Action::Resume(_) => {}
            Action::Emit(GenerateEvent::Started { .. }) => self.started += 1,
            Action::Emit(GenerateEvent::Tokens(run)) => {
                assert_eq!(run.first_index as usize, self.received.len(), "gap or repetition");
                assert!(!run.tokens.is_empty());
                for (index, token) in (run.first_index..).zip(&run.tokens) {
                    assert!([index, STOP].contains(&token.token), "token {} at index {index}", token.token);
                }
                self.received.extend(run.tokens.iter().map(|token| token.token));
            }
            Action::Emit(GenerateEvent::Finished(finished)) => {
                self.finished += 1;
                assert_eq!(finished.usage.output_tokens as usize, self.received.len());
            }
            Action::End(outcome) => {
                assert_eq!(matches!(outcome, Outcome::Finished(_)), self.finished == 1);
                assert!(self.reserved.is_none() && self.prefilling.is_none(), "a worker is left behind");
                self.ended += 1;
            }
        }
        assert!(self.started == 1 && self.finished <= 1);
        assert!(self.received.len() <= MAX_TOKENS as usize, "more tokens than were asked for");
    }
}

fn index(next: u32, offset: i8) -> u32 {
    next.saturating_add_signed(offset.into())
}

fn token(index: u32, stops: bool) -> SampledToken {
    sampled(if stops { STOP } else { index })
}

fn run(first_index: u32, count: u8, stops: bool) -> TokenRun {
    let last = first_index + u32::from(count) - 1;
    let tokens = (first_index..=last).map(|index| token(index, stops && index == last)).collect();
    TokenRun { first_index, tokens }
}

fn finished(output_tokens: u32) -> Finished {
    Finished { reason: FinishReason::Length, usage: Usage { output_tokens, ..Usage::default() } }
}

fn progress(flight: &Flight, next: u32) -> Move {
    match &flight.phase {
        Phase::Queued => Move::Place,
        Phase::Reserving { .. } => Move::Reserved { wrong: false },
        Phase::Prefilling { .. } => Move::FirstToken { offset: 0, stops: false },
        Phase::Transferring { .. } if !flight.prefill_is_done => Move::Committed,
        Phase::Transferring { .. } => Move::Joined,
        Phase::Decoding { .. } if next >= MAX_TOKENS => Move::DecodeFinished { offset: 0 },
        Phase::Decoding { .. } | Phase::Ended => Move::Tokens { offset: 0, count: 1, stops: false },
    }
}

fn event_of(step: Move, flight: &Flight, placed: &mut u32, now: &mut Instant, late: &Event) -> Event {
    let (attempt, next) = (flight.attempt, flight.request.next_index());
    let prefill = |event| Event::Prefill { attempt, event };
    let decode = |event| Event::Decode { attempt, event };
    match step {
        Move::Progress => event_of(progress(flight, next), flight, placed, now, late),
        Move::Place => {
            *placed += 1;
            Event::Placed { pair: pair(*placed % 3), ticket: TicketId((*placed).into()) }
        }
        Move::Reserved { wrong } => {
            let id = u128::from(*placed) + u128::from(wrong);
            decode(DecodeEvent::Reserved(ticket(id, &pair(*placed % 3))))
        }
        Move::FirstToken { offset, stops } => {
            let index = index(next, offset);
            let token = token(index, stops);
            prefill(PrefillEvent::FirstToken { index, token, cached_tokens: 0, queue_us: 0, compute_us: 0 })
        }
        Move::Committed => prefill(PrefillEvent::Committed { kv_bytes: 0, transfer_us: 0, tail_us: 0 }),
        Move::PrefillFinished { offset } => prefill(PrefillEvent::Finished(finished(index(next, offset)))),
        Move::Joined => decode(DecodeEvent::Joined { kv_bytes: 0, landing_us: 0 }),
        Move::Tokens { offset, count, stops } => decode(DecodeEvent::Tokens(run(index(next, offset), count, stops))),
        Move::DecodeFinished { offset } => decode(DecodeEvent::Finished(finished(index(next, offset)))),
        Move::Preempted => decode(DecodeEvent::Preempted),
        Move::Closed(role) => Event::LegClosed { attempt, role },
        Move::Failed(role, class, between) => {
            let failure = LegFailure { class, between, reason: String::new() };
            Event::LegFailed { attempt, role, failure }
        }
        Move::Gone(role) => Event::WorkerGone { attempt, role },
        Move::Tick { ms } => {
            *now += Duration::from_millis(ms.into());
            Event::Tick { has_pair: true }
        }
        Move::CaughtUp => Event::ClientCaughtUp,
        Move::ClientGone => Event::ClientGone,
        Move::Late => late.clone(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_stream_is_whole_and_nothing_is_left_behind(steps in prop::collection::vec(moves(), 0..120)) {
        let mut now = Instant::now();
        let (mut out, mut witness) = (Vec::new(), Witness::default());
        let timeout = Duration::from_secs(60);
        let mut flight = Flight::new(now, request(MAX_TOKENS), timeout, limits(5), &mut out);
        let (mut placed, mut late) = (0, Event::ClientCaughtUp);
        for step in steps {
            out.drain(..).for_each(|action| witness.see(&action));
            let event = event_of(step, &flight, &mut placed, &mut now, &late);
            if !matches!(event, Event::ClientGone | Event::Tick { .. } | Event::Placed { .. }) {
                late = event.clone();
            }
            flight.on_event(now, event, &mut out);
        }
        out.drain(..).for_each(|action| witness.see(&action));
        prop_assert_eq!(flight.has_ended(), witness.ended == 1);
        // Whatever state it is left in, the request's own deadline ends it.
        if !flight.has_ended() {
            flight.on_event(flight.request_deadline(), Event::Tick { has_pair: false }, &mut out);
            out.drain(..).for_each(|action| witness.see(&action));
            prop_assert_eq!(witness.ended, 1);
        }
    }
}
