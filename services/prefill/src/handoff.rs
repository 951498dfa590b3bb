//! The transfer of one prompt's KV: shared by the step loop, which decides, the ranks, which hand over parts, and a task, which waits.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use kv::PageMap;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use transfer::{AbortReason, FirstToken, Lanes, Receipt, SendTicket, TransferError};
use types::Ticket;
use worker::{Clock, Mailbox, step_loop::RuntimeClock};

use crate::error::PrefillError;
use crate::state::Message;

/// What the step loop asks of the task. One at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Command {
    /// Wait for room; answered by [`Message::Room`].
    Reserve(usize),
    /// All parts are handed over.
    Commit(FirstToken),
}

/// What a COMMIT waits for.
#[derive(Debug, Default)]
struct Ending {
    /// Every rank has handed over all that it has.
    is_handed_over: bool,
    first: Option<FirstToken>,
}

/// One transfer.
pub(crate) struct Handoff {
    pub(crate) ticket: Ticket,
    /// The slices that the decode worker expects.
    pub(crate) map: PageMap,
    sender: OnceLock<Box<dyn SendTicket>>,
    first_part_at: OnceLock<Instant>,
    /// Of the rank that came last.
    last_layer_at: Mutex<Option<Instant>>,
    failure: OnceLock<PrefillError>,
    ending: Mutex<Ending>,
    cancel: CancellationToken,
    commands: mpsc::Sender<Command>,
}

impl Handoff {
    /// A transfer that [`Handoff::run`] will carry out, with the commands that it then hears.
    pub(crate) fn new(ticket: Ticket, map: PageMap) -> (Arc<Self>, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel(2);
        let handoff = Self {
            ticket,
            map,
            sender: OnceLock::new(),
            first_part_at: OnceLock::new(),
            last_layer_at: Mutex::default(),
            failure: OnceLock::new(),
            ending: Mutex::default(),
            cancel: CancellationToken::new(),
            commands,
        };
        (Arc::new(handoff), receiver)
    }

    /// The open ticket.
    pub(crate) fn sender(&self) -> Result<&dyn SendTicket, PrefillError> {
        let sender = self.sender.get().ok_or_else(|| PrefillError::Export("the ticket is not open".into()))?;
        Ok(&**sender)
    }

    /// Sets room aside without waiting; `false` when the task was asked to wait for it.
    pub(crate) fn take_room(&self, bytes: usize) -> Result<bool, PrefillError> {
        match self.sender.get() {
            Some(sender) if sender.try_reserve(bytes)? => Ok(true),
            _ => {
                self.command(Command::Reserve(bytes));
                Ok(false)
            }
        }
    }

    /// Orders the COMMIT. The token may be there before every rank has handed over its last layer: the order then waits for that.
    pub(crate) fn commit(&self, first: FirstToken) {
        self.end(|ending| ending.first = Some(first));
    }

    /// Every rank has handed over the whole context, or has failed to.
    pub(crate) fn handed_over(&self) {
        self.end(|ending| ending.is_handed_over = true);
    }

    fn end(&self, note: impl FnOnce(&mut Ending)) {
        let mut ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        note(&mut ending);
        // A context that was not handed over whole is not committed: the step loop finds the failure in its next turn.
        if ending.is_handed_over
            && self.failure.get().is_none()
            && let Some(first) = ending.first.take()
        {
            self.command(Command::Commit(first));
        }
    }

    fn command(&self, command: Command) {
        // Never full: the loop waits for the answer to one before it gives the next. A task that has ended has said so.
        let _ = self.commands.try_send(command);
    }

    /// Gives the transfer up. Idempotent.
    pub(crate) fn give_up(&self) {
        self.cancel.cancel();
    }

    /// Records why parts could not be handed over; the step loop sees it behind the step.
    pub(crate) fn fail(&self, error: PrefillError) {
        let _ = self.failure.set(error); // the first one counts
    }

    /// What went wrong so far, here or at the other side.
    pub(crate) fn failure(&self) -> Option<PrefillError> {
        let ended = self.sender.get().and_then(|sender| sender.ended()).map(PrefillError::from);
        // What the other side says comes first: a part that could not be handed over is its consequence.
        ended.or_else(|| self.failure.get().cloned())
    }

    pub(crate) fn part_leaves(&self) {
        self.first_part_at.get_or_init(|| RuntimeClock.now());
    }

    pub(crate) fn first_part_at(&self) -> Option<Instant> {
        self.first_part_at.get().copied()
    }

    /// A rank has computed the last layer of the context.
    pub(crate) fn last_layer_computed(&self) {
        *self.last_layer_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(RuntimeClock.now());
    }

    pub(crate) fn last_layer_at(&self) -> Option<Instant> {
        *self.last_layer_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The task: opens the ticket while the prompt waits and computes, then does what the step loop orders. Ends with one
    /// [`Message::TransferEnded`], whatever happens.
    pub(crate) async fn run(
        self: Arc<Self>,
        lanes: Arc<Lanes>,
        commands: mpsc::Receiver<Command>,
        mailbox: Mailbox<Message>,
    ) {
        let outcome = self.transfer(&lanes, commands, &mailbox).await;
        let message = Message::TransferEnded { ticket: self.ticket.id, outcome };
        // A step loop that has ended needs no answer.
        let _ = mailbox.send(message).await;
    }

    async fn transfer(
        &self,
        lanes: &Lanes,
        mut commands: mpsc::Receiver<Command>,
        mailbox: &Mailbox<Message>,
    ) -> Result<Receipt, TransferError> {
        let given_up = TransferError::GivenUp { ticket: self.ticket.id };
        let opened = tokio::select! {
            biased;
            () = self.cancel.cancelled() => return Err(given_up),
            opened = self.open(lanes) => opened?,
        };
        let sender = &**self.sender.get_or_init(|| opened);
        loop {
            let command = tokio::select! {
                biased;
                () = self.cancel.cancelled() => None,
                command = commands.recv() => command,
            };
            match command {
                Some(Command::Reserve(bytes)) => {
                    let room = tokio::select! {
                        biased;
                        () = self.cancel.cancelled() => Err(given_up.clone()),
                        room = sender.reserve(bytes) => room,
                    };
                    if mailbox.send(Message::Room { ticket: self.ticket.id, room }).await.is_err() {
                        return Err(given_up);
                    }
                }
                Some(Command::Commit(first)) => {
                    tokio::select! {
                        biased;
                        receipt = sender.commit(first) => return receipt,
                        () = self.cancel.cancelled() => {}
                    }
                }
                None => {
                    // Bounded, and the pages are ours again either way: the transport has its own copies.
                    let _ = sender.abort(AbortReason::Cancelled).await;
                    return Err(given_up);
                }
            }
        }
    }

    async fn open(&self, lanes: &Lanes) -> Result<Box<dyn SendTicket>, TransferError> {
        let lane = lanes.lane(&self.ticket.kv_endpoint.address, &self.ticket.decode).await?;
        lane.begin(self.ticket.id, self.ticket.dp_group).await
    }
}
