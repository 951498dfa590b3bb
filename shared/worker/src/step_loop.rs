//! The loop that owns a scheduler and an engine: take in messages, compute a step, hand out what it yielded, again.
//!
//! What the loop does in one round is a synchronous [`Turn`] that gets its time as an argument. In a service it runs on a named OS thread
//! that parks while there is nothing to do. In a simulation the same turn runs as a task, under the simulation's clock.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use chassis::tasks::Tasks;
use tokio::sync::{mpsc, watch};

use crate::config::StepLoopConfig;
use crate::status::Status;

/// Where a turn gets the time from.
pub trait Clock: Send + Sync {
    /// Now.
    fn now(&self) -> Instant;
}

/// The time of the runtime, if there is one that is paused or simulated; else the machine's.
#[derive(Debug, Clone, Copy)]
pub struct RuntimeClock;

impl Clock for RuntimeClock {
    fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }
}

/// What to do after a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// There is more to compute: the next turn begins at once, whether or not messages have come.
    Again,
    /// Nothing to do before a message or a tick.
    Wait,
}

/// A role's state, and what it does in one round. A turn may block on its own engine; on nothing else.
pub trait Turn: Send + 'static {
    /// What others say to it.
    type Message: Send + 'static;

    /// Takes all of `inbox`, and computes at most one step.
    ///
    /// # Errors
    /// What makes going on pointless: the engine is broken. The loop ends.
    fn turn(&mut self, clock: &dyn Clock, inbox: &mut VecDeque<Self::Message>) -> Result<Next, StepLoopFailure>;
}

/// Why a step loop ended by itself.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StepLoopFailure {
    /// A rank failed or stopped.
    #[error("engine: {0}")]
    Engine(#[from] Arc<engine::EngineError>),
    /// The engine answered something else than it was asked.
    #[error("engine: {0}")]
    Mismatch(#[from] scheduler::StepMismatch),
    /// A bug.
    #[error("panicked: {0}")]
    Panicked(String),
    /// The operating system refused a thread.
    #[error("cannot start the thread: {0}")]
    Spawn(Arc<std::io::Error>),
}

impl From<engine::EngineError> for StepLoopFailure {
    fn from(error: engine::EngineError) -> Self {
        Self::Engine(Arc::new(error))
    }
}

/// How the loop runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Driver {
    /// An OS thread of its own.
    #[default]
    Thread,
    /// A task on the caller's runtime, for simulations: each step takes `step_time` of the runtime's clock, and `incarnation` is given,
    /// so that a run can be repeated.
    Simulated {
        /// How long a step seems to take.
        step_time: Duration,
        /// In place of a random one.
        incarnation: u64,
    },
}

enum Letter<M> {
    Message(M),
    /// Ends a wait: a stream was dropped, a tick is due, the loop is to stop.
    Wake,
}

/// The way into the loop.
pub struct Mailbox<M> {
    letters: mpsc::Sender<Letter<M>>,
}

impl<M> Clone for Mailbox<M> {
    fn clone(&self) -> Self {
        Self { letters: self.letters.clone() }
    }
}

/// The loop takes no messages any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the step loop has ended")]
pub struct LoopEnded;

impl<M> Mailbox<M> {
    /// Waits for room.
    ///
    /// # Errors
    /// [`LoopEnded`].
    pub async fn send(&self, message: M) -> Result<(), LoopEnded> {
        self.letters.send(Letter::Message(message)).await.map_err(|_| LoopEnded)
    }

    /// Waits for room, then returns it: what is put there is neither refused nor late.
    ///
    /// # Errors
    /// [`LoopEnded`].
    pub async fn slot(&self) -> Result<impl FnOnce(M) + Send + use<M>, LoopEnded>
    where
        M: Send + 'static,
    {
        let permit = self.letters.clone().reserve_owned().await.map_err(|_| LoopEnded)?;
        Ok(move |message| drop(permit.send(Letter::Message(message))))
    }

    /// Ends a wait of the loop. Never blocks: with a full inbox the loop is not waiting.
    pub fn wake(&self) {
        let _ = self.letters.try_send(Letter::Wake);
    }
}

/// A running loop.
pub struct StepLoop<M> {
    mailbox: Mailbox<M>,
    stop: Arc<AtomicBool>,
    ended: watch::Receiver<Option<Result<(), StepLoopFailure>>>,
}

/// The far end of a loop's inbox, from before it runs: messages that come while the model loads wait here.
pub struct Inbox<M> {
    letters: mpsc::Receiver<Letter<M>>,
    capacity: usize,
}

/// Makes a mailbox and the inbox behind it.
#[must_use]
pub fn mailbox<M>(config: &StepLoopConfig) -> (Mailbox<M>, Inbox<M>) {
    let (sender, letters) = mpsc::channel(config.inbox_messages_max);
    (Mailbox { letters: sender }, Inbox { letters, capacity: config.inbox_messages_max })
}

impl<M: Send + 'static> StepLoop<M> {
    /// Starts the loop. It runs until [`StepLoop::stop`], or until a turn fails.
    pub fn start<T: Turn<Message = M>>(
        role: T,
        (mailbox, inbox): (Mailbox<M>, Inbox<M>),
        driver: Driver,
        config: &StepLoopConfig,
        status: Arc<Status>,
        tasks: &Tasks,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (outcome, ended) = watch::channel(None);
        let rounds = Rounds { role, letters: inbox.letters, most: inbox.capacity, stop: Arc::clone(&stop), status };
        match driver {
            Driver::Thread => {
                let run = {
                    let outcome = outcome.clone();
                    move || drop(outcome.send_replace(Some(rounds.run_on_thread())))
                };
                if let Err(error) = std::thread::Builder::new().name("step-loop".into()).spawn(run) {
                    outcome.send_replace(Some(Err(StepLoopFailure::Spawn(Arc::new(error)))));
                }
            }
            Driver::Simulated { step_time, .. } => tasks.spawn_background("step-loop", async move {
                outcome.send_replace(Some(rounds.run_on_task(step_time).await));
            }),
        }
        let (ticks, period) = (mailbox.clone(), Duration::from_millis(config.tick_ms));
        tasks.spawn_background("step-loop-tick", async move {
            loop {
                tokio::time::sleep(period).await;
                ticks.wake();
            }
        });
        Self { mailbox, stop, ended }
    }

    /// The way in.
    #[must_use]
    pub fn mailbox(&self) -> &Mailbox<M> {
        &self.mailbox
    }

    /// Waits until the loop has ended, and says how.
    pub fn ended(&self) -> impl Future<Output = Result<(), StepLoopFailure>> + Send + use<M> {
        let mut ended = self.ended.clone();
        async move {
            match ended.wait_for(Option::is_some).await {
                Ok(outcome) => outcome.clone().expect("waited for"),
                // A task that was dropped with its runtime.
                Err(_) => Ok(()),
            }
        }
    }

    /// Ends the loop after its present turn, and waits for that.
    ///
    /// # Errors
    /// How it ended before.
    pub async fn stop(self) -> Result<(), StepLoopFailure> {
        self.stop.store(true, Ordering::Release);
        self.mailbox.wake();
        self.ended().await
    }
}

/// The loop itself, without a driver.
struct Rounds<T: Turn> {
    role: T,
    letters: mpsc::Receiver<Letter<T::Message>>,
    most: usize,
    stop: Arc<AtomicBool>,
    status: Arc<Status>,
}

impl<T: Turn> Rounds<T> {
    fn run_on_thread(mut self) -> Result<(), StepLoopFailure> {
        let mut inbox = VecDeque::new();
        while !self.stop.load(Ordering::Acquire) {
            if self.round(&mut inbox)? == Next::Wait {
                match self.letters.blocking_recv() {
                    Some(Letter::Message(message)) => inbox.push_back(message),
                    Some(Letter::Wake) => {}
                    None => break,
                }
            }
        }
        Ok(())
    }

    async fn run_on_task(mut self, step_time: Duration) -> Result<(), StepLoopFailure> {
        let mut inbox = VecDeque::new();
        while !self.stop.load(Ordering::Acquire) {
            match self.round(&mut inbox)? {
                Next::Again => tokio::time::sleep(step_time).await,
                Next::Wait => match self.letters.recv().await {
                    Some(Letter::Message(message)) => inbox.push_back(message),
                    Some(Letter::Wake) => {}
                    None => break,
                },
            }
        }
        Ok(())
    }

    fn round(&mut self, inbox: &mut VecDeque<T::Message>) -> Result<Next, StepLoopFailure> {
        while inbox.len() < self.most
            && let Ok(letter) = self.letters.try_recv()
        {
            if let Letter::Message(message) = letter {
                inbox.push_back(message);
            }
        }
        let role = &mut self.role;
        self.status.turn_begins();
        let next = catch_unwind(AssertUnwindSafe(|| role.turn(&RuntimeClock, inbox)));
        self.status.turn_ends();
        next.unwrap_or_else(|panic| Err(StepLoopFailure::Panicked(panic_message(&*panic))))
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use chassis::Shutdown;

    use super::*;

    /// Each message is so many steps; a turn takes one. Message 13 is a bug.
    struct Countdown {
        left: u32,
        log: Arc<Mutex<Vec<u32>>>,
    }

    impl Turn for Countdown {
        type Message = u32;

        fn turn(&mut self, _: &dyn Clock, inbox: &mut VecDeque<u32>) -> Result<Next, StepLoopFailure> {
            for steps in inbox.drain(..) {
                assert_ne!(steps, 13, "unlucky");
                self.left += steps;
            }
            if self.left == 0 {
                return Ok(Next::Wait);
            }
            self.left -= 1;
            self.log.lock().unwrap().push(self.left);
            Ok(Next::Again)
        }
    }

    fn start(driver: Driver) -> (StepLoop<u32>, Arc<Mutex<Vec<u32>>>) {
        let config = StepLoopConfig { inbox_messages_max: 4, ..StepLoopConfig::default() };
        let log = Arc::new(Mutex::new(Vec::new()));
        let countdown = Countdown { left: 0, log: Arc::clone(&log) };
        let tasks = Tasks::new(Shutdown::new());
        (StepLoop::start(countdown, mailbox(&config), driver, &config, Arc::default(), &tasks), log)
    }

    async fn run_two_batches(driver: Driver) -> Vec<u32> {
        let (step_loop, log) = start(driver);
        for (steps, logged) in [(3, 3), (2, 5)] {
            step_loop.mailbox().send(steps).await.unwrap();
            while log.lock().unwrap().len() < logged {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        step_loop.stop().await.unwrap();
        let log = log.lock().unwrap();
        log.clone()
    }

    const SIMULATED: Driver = Driver::Simulated { step_time: Duration::from_millis(10), incarnation: 1 };

    #[tokio::test]
    async fn a_parked_thread_is_woken_by_a_message() {
        assert_eq!(run_two_batches(Driver::Thread).await, [2, 1, 0, 1, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_simulated_loop_does_the_same_in_the_simulations_time() {
        let begun = tokio::time::Instant::now();
        assert_eq!(run_two_batches(SIMULATED).await, [2, 1, 0, 1, 0]);
        let elapsed = begun.elapsed();
        assert!(elapsed >= Duration::from_millis(50) && elapsed < Duration::from_millis(200), "{elapsed:?}");
    }

    #[tokio::test]
    async fn a_panic_ends_the_loop_and_is_told() {
        for driver in [Driver::Thread, SIMULATED] {
            let (step_loop, _) = start(driver);
            step_loop.mailbox().send(13).await.unwrap();
            let failure = step_loop.ended().await.unwrap_err();
            assert!(failure.to_string().contains("unlucky"), "{failure}");
            assert_eq!(step_loop.mailbox().send(1).await, Err(LoopEnded));
        }
    }

    #[tokio::test]
    async fn a_loop_at_rest_stops_at_once() {
        let (step_loop, _) = start(Driver::Thread);
        tokio::time::timeout(Duration::from_secs(5), step_loop.stop()).await.unwrap().unwrap();
    }
}
