//! Who follows the grammars of constrained sequences: named OS threads beside the step loop.
//!
//! The step loop gives orders and never waits for an answer: a mask is awaited by the engine, just before it samples, when
//! its forward pass is behind it. All orders of one sequence go to one thread, in order; what one thread does with them is the
//! synchronous [`Desk::take`].

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use constraint::{Compiler, Matcher, STACK_BYTES};
use prometheus_client::metrics::histogram::Histogram;
use scheduler::{MaskFailure, MaskPromise, SequenceSpec};
use types::{Constraint, TicketId, TokenId};

/// Orders that wait for one thread: two a sequence and step. The step loop waits for room when there are more.
const ORDERS_MAX: usize = 1_024;

enum Order {
    Open { ticket: TicketId, opening: Opening },
    Consume { ticket: TicketId, token: TokenId },
    Mask { ticket: TicketId, index: u32, promise: MaskPromise },
    Close { ticket: TicketId },
}

/// What a sequence's grammar starts from.
#[derive(Debug, Clone)]
pub struct Opening {
    /// The grammar.
    pub constraint: Constraint,
    /// Tokens that end the sequence where the grammar may end.
    pub stop_token_ids: Arc<[TokenId]>,
    /// Output of earlier attempts, which the grammar has to follow first.
    pub generated: Vec<TokenId>,
}

impl Opening {
    /// That of a sequence that has a constraint.
    #[must_use]
    pub fn of(sequence: &SequenceSpec) -> Option<Self> {
        let SequenceSpec { constraint, stop_token_ids, generated, .. } = sequence;
        let (stop_token_ids, generated) = (Arc::clone(stop_token_ids), generated.clone());
        constraint.clone().map(|constraint| Self { constraint, stop_token_ids, generated })
    }
}

/// The way to the threads.
pub struct MaskThreads {
    orders: Vec<SyncSender<Order>>,
    threads: Vec<JoinHandle<()>>,
}

impl MaskThreads {
    /// Starts `count` threads, at least one.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub fn start(compiler: &Arc<Compiler>, count: u32, mask_seconds: &Histogram) -> io::Result<Self> {
        let mut started = Self { orders: Vec::new(), threads: Vec::new() };
        for idx in 0..count.max(1) {
            let (sender, orders) = sync_channel(ORDERS_MAX);
            let desk = Desk { compiler: Arc::clone(compiler), sequences: HashMap::new() };
            let mask_seconds = mask_seconds.clone();
            let thread = std::thread::Builder::new().name(format!("masks-{idx}")).stack_size(STACK_BYTES);
            started.threads.push(thread.spawn(move || serve(desk, &orders, &mask_seconds))?);
            started.orders.push(sender);
        }
        Ok(started)
    }

    /// A constrained sequence begins. Its grammar is compiled at once, on its thread.
    pub fn open(&self, ticket: TicketId, opening: Opening) {
        self.order(ticket, Order::Open { ticket, opening });
    }

    /// The next output token of a sequence is known. Without effect on sequences that are not open.
    pub fn consume(&self, ticket: TicketId, token: TokenId) {
        self.order(ticket, Order::Consume { ticket, token });
    }

    /// Has the promise settled with the mask for output token `index`, once all before it are known.
    pub fn mask(&self, ticket: TicketId, index: u32, promise: MaskPromise) {
        self.order(ticket, Order::Mask { ticket, index, promise });
    }

    /// A sequence has ended: its promises are abandoned.
    pub fn close(&self, ticket: TicketId) {
        self.order(ticket, Order::Close { ticket });
    }

    fn order(&self, ticket: TicketId, order: Order) {
        let thread = (ticket.0 % self.orders.len() as u128) as usize;
        // A thread that is gone had a bug that its grammar library did not catch; promises in the order are then abandoned by its drop.
        let _ = self.orders[thread].send(order);
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        self.orders.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // its panic was reported when it happened
        }
    }
}

fn serve(mut desk: Desk, orders: &Receiver<Order>, mask_seconds: &Histogram) {
    while let Ok(order) = orders.recv() {
        let begun = Instant::now();
        for _ in 0..desk.take(order) {
            mask_seconds.observe(begun.elapsed().as_secs_f64());
        }
    }
}

/// The sequences of one thread.
struct Desk {
    compiler: Arc<Compiler>,
    sequences: HashMap<TicketId, Sequence>,
}

struct Sequence {
    /// Once broken it stays so, and every mask fails for that reason.
    matcher: Result<Matcher, String>,
    /// Output index of the next token to come.
    next_index: u32,
    /// Masks promised for tokens further on, in order.
    promised: VecDeque<(u32, MaskPromise)>,
}

impl Desk {
    /// Carries out one order; returns how many masks it settled.
    fn take(&mut self, order: Order) -> usize {
        match order {
            Order::Open { ticket, opening } => {
                let sequence = Sequence::open(&self.compiler, &opening);
                self.sequences.insert(ticket, sequence);
                0
            }
            Order::Close { ticket } => {
                self.sequences.remove(&ticket);
                0
            }
            Order::Consume { ticket, token } => self.sequences.get_mut(&ticket).map_or(0, |sequence| {
                sequence.consume(token);
                sequence.settle_due()
            }),
            Order::Mask { ticket, index, promise } => self.sequences.get_mut(&ticket).map_or(0, |sequence| {
                sequence.promised.push_back((index, promise));
                sequence.settle_due()
            }),
        }
    }
}

impl Sequence {
    fn open(compiler: &Compiler, opening: &Opening) -> Self {
        let Opening { constraint, stop_token_ids, generated } = opening;
        let compiled = compiler.compile(constraint, stop_token_ids);
        let matcher =
            compiled.map_err(|error| format!("the grammar cannot be used: {error}")).and_then(|mut matcher| {
                let replayed = matcher.consume(generated);
                replayed.map(|()| matcher).map_err(|error| error.to_string())
            });
        Self { matcher, next_index: generated.len() as u32, promised: VecDeque::new() }
    }

    fn consume(&mut self, token: TokenId) {
        self.next_index += 1;
        let _ = self.follow(|matcher| matcher.consume(&[token])); // the next mask says it
    }

    fn settle_due(&mut self) -> usize {
        let mut settled = 0;
        while let Some((_, promise)) = self.promised.pop_front_if(|(index, _)| *index <= self.next_index) {
            let mask = self.follow(Matcher::mask);
            promise.settle(mask.map_err(MaskFailure::Grammar));
            settled += 1;
        }
        settled
    }

    fn follow<T, E: std::fmt::Display>(
        &mut self,
        step: impl FnOnce(&mut Matcher) -> Result<T, E>,
    ) -> Result<T, String> {
        let matcher = self.matcher.as_mut().map_err(|reason| reason.clone())?;
        step(matcher).map_err(|error| {
            let reason = error.to_string();
            tracing::warn!(%reason, "a grammar cannot be followed any further");
            self.matcher = Err(reason.clone());
            reason
        })
    }
}

#[cfg(test)]
mod tests {
    use types::{TokenId, TokenMask};
    use vocabulary::Vocabulary;

    use super::*;

    const TICKET: TicketId = TicketId(7);

    fn nano() -> Arc<Vocabulary> {
        let json = include_bytes!("../../model/gpt-oss-nano/tokenizer.json");
        Arc::new(Vocabulary::from_tokenizer_json(json).unwrap())
    }

    fn opening(vocabulary: &Vocabulary, lark: &str, generated: &str) -> Opening {
        Opening {
            constraint: Constraint { lark: lark.into() },
            stop_token_ids: [vocabulary.special("<|return|>").unwrap()].into(),
            generated: vocabulary.encode(generated),
        }
    }

    fn token(vocabulary: &Vocabulary, text: &str) -> TokenId {
        let tokens = vocabulary.encode(text);
        assert_eq!(tokens.len(), 1, "{text:?} is one token");
        tokens[0]
    }

    #[test]
    fn a_mask_waits_for_the_tokens_before_it() {
        let vocabulary = nano();
        let mut desk = Desk { compiler: Arc::new(Compiler::new(nano())), sequences: HashMap::new() };
        desk.take(Order::Open { ticket: TICKET, opening: opening(&vocabulary, r#"start: "1" "2" "3""#, "") });
        let promises = [0, 1].map(|index| (index, MaskPromise::new()));
        let pending = promises.clone().map(|(_, promise)| Arc::clone(promise.pending()));
        let orders = promises.map(|(index, promise)| Order::Mask { ticket: TICKET, index, promise });
        let settled: Vec<usize> = orders.into_iter().map(|order| desk.take(order)).collect();
        assert_eq!(settled, [1, 0], "the second one depends on a token that has not come");
        assert!(pending[0].wait().unwrap().allows(token(&vocabulary, "1")));
        assert_eq!(desk.take(Order::Consume { ticket: TICKET, token: token(&vocabulary, "1") }), 1);
        let mask: &TokenMask = pending[1].wait().unwrap();
        assert!(mask.allows(token(&vocabulary, "2")) && !mask.allows(token(&vocabulary, "1")));
    }

    #[test]
    fn an_interrupted_sequence_goes_on_where_it_was() {
        let vocabulary = nano();
        let compiler = Arc::new(Compiler::new(nano()));
        let threads = MaskThreads::start(&compiler, 2, &Histogram::new([1.0])).unwrap();
        threads.open(TICKET, opening(&vocabulary, r#"start: "1" "2" "3""#, "12"));
        let index = vocabulary.encode("12").len() as u32;
        let mask = |index| {
            let promise = MaskPromise::new();
            let pending = Arc::clone(promise.pending());
            threads.mask(TICKET, index, promise);
            pending
        };
        assert!(mask(index).wait().unwrap().allows(token(&vocabulary, "3")));
        threads.consume(TICKET, token(&vocabulary, "3"));
        let end = mask(index + 1);
        assert!(end.wait().unwrap().allows(vocabulary.special("<|return|>").unwrap()));
        let never = mask(index + 5);
        threads.close(TICKET);
        assert_eq!(never.wait(), Err(&MaskFailure::Abandoned));
        assert_eq!(mask(0).wait(), Err(&MaskFailure::Abandoned), "it is closed");
    }

    #[test]
    fn what_the_grammar_forbids_breaks_it_for_good() {
        let vocabulary = nano();
        let mut desk = Desk { compiler: Arc::new(Compiler::new(nano())), sequences: HashMap::new() };
        for (lark, generated, reason) in
            [("start: nothing", "", "cannot be used"), (r#"start: "1""#, "2", "not what the grammar allows")]
        {
            desk.take(Order::Open { ticket: TICKET, opening: opening(&vocabulary, lark, generated) });
            for _ in 0..2 {
                let promise = MaskPromise::new();
                let pending = Arc::clone(promise.pending());
                desk.take(Order::Mask { ticket: TICKET, index: 0, promise });
                let failure = pending.wait().unwrap_err().to_string();
                assert!(failure.contains(reason), "{failure}");
            }
        }
    }
}
