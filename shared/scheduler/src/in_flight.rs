//! Steps that were planned and have not been reported complete, and resources that must outlive them.

use std::collections::VecDeque;

use types::{Classify, ErrorClass, SlotId, TicketId};

use crate::plan::{RowOutput, StepOutput, StepPlan};

/// The engine answered something else than it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepMismatch {
    /// No such step is due.
    #[error("step {got} was reported, {expected:?} is due")]
    Step {
        /// The step reported.
        got: u64,
        /// The oldest step in flight.
        expected: Option<u64>,
    },
    /// The rows are not the plan's.
    #[error("step {step} yielded rows of slots {got:?}, planned were {expected:?}")]
    Rows {
        /// The step.
        step: u64,
        /// Slots of the rows reported.
        got: Vec<u32>,
        /// Slots of the rows planned.
        expected: Vec<u32>,
    },
    /// A row that was to be sampled has no token.
    #[error("step {step} yielded no token for slot {slot}")]
    NoToken {
        /// The step.
        step: u64,
        /// The slot.
        slot: u32,
    },
    /// No row has logits that are numbers.
    #[error(
        "step {step}: {sequences} sequences in succession have logits that are not numbers; the weights are damaged"
    )]
    NotNumbers {
        /// The last step of them.
        step: u64,
        /// Sequences ended for that, none sound between them.
        sequences: u32,
    },
}

impl Classify for StepMismatch {
    fn class(&self) -> ErrorClass {
        ErrorClass::Fatal
    }
}

/// A planned step: its number, and whose row is where.
type PlannedStep = (u64, Vec<(SlotId, TicketId)>);

/// The steps in flight, oldest first. A slot may have a new owner by the time a step completes, so rows are remembered by ticket.
#[derive(Debug)]
pub(crate) struct StepsInFlight {
    most: usize,
    next_step: u64,
    steps: VecDeque<PlannedStep>,
}

impl StepsInFlight {
    /// At most `most` steps are planned and not complete.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, next_step: 0, steps: VecDeque::new() }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.steps.len() >= self.most
    }

    /// Number of the step that is planned next.
    pub(crate) fn next_step(&self) -> u64 {
        self.next_step
    }

    /// Steps completed so far.
    pub(crate) fn completed(&self) -> u64 {
        self.next_step - self.steps.len() as u64
    }

    /// Whether a step is planned and not complete.
    pub(crate) fn contains(&self, step: u64) -> bool {
        (self.completed()..self.next_step).contains(&step)
    }

    pub(crate) fn push(&mut self, plan: &StepPlan, rows: Vec<(SlotId, TicketId)>) {
        self.steps.push_back((plan.step, rows));
        self.next_step += 1;
    }

    /// Takes the oldest step, paired with what it yielded.
    pub(crate) fn pop(&mut self, output: StepOutput) -> Result<Vec<(TicketId, RowOutput)>, StepMismatch> {
        let step = output.step;
        let due = self.steps.front().filter(|(due, _)| *due == step);
        let Some((_, rows)) = due else {
            return Err(StepMismatch::Step { got: step, expected: self.steps.front().map(|(due, _)| *due) });
        };
        let got: Vec<u32> = output.rows.iter().map(|row| row.slot.0).collect();
        let expected: Vec<u32> = rows.iter().map(|(slot, _)| slot.0).collect();
        if got != expected {
            return Err(StepMismatch::Rows { step, got, expected });
        }
        let (_, rows) = self.steps.pop_front().expect("the front was just looked at");
        Ok(rows.into_iter().zip(output.rows).map(|((_, ticket), output)| (ticket, output)).collect())
    }
}

/// Resources of sequences that have ended while a step in flight still touches them; dropped once that step is complete.
#[derive(Debug)]
pub(crate) struct Retired<R> {
    items: Vec<(u64, R)>,
}

impl<R> Retired<R> {
    pub(crate) fn new() -> Self {
        Self { items: Vec::new() }
    }

    pub(crate) fn hold_until(&mut self, step: u64, resource: R) {
        self.items.push((step, resource));
    }

    pub(crate) fn step_completed(&mut self, step: u64) {
        self.items.retain(|(last_step, _)| *last_step > step);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}
