//! What is under way inside NCCL: the ends of communicators, on threads of their own, and calls that are being waited for; and the exit of the
//! process, which waits for both.
//!
//! At exit NCCL and the driver take themselves down in handlers of the C library. A thread that is at work inside them then brings the process down
//! by a signal, whatever exit code it had.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// With this code the process exits when a communicator cannot be ended: kernels of it hold the GPU for ever.
pub const STUCK_EXIT_CODE: i32 = 75;

/// How long the exit of the process waits. An abort takes half a second, a close two of its caller's bounds; a call gives up when the exit begins.
const EXIT_BOUND: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(1);

/// Exits at once with [`STUCK_EXIT_CODE`], without the handlers of the driver, which might wait for the kernels that are stuck.
pub fn exit_stuck() -> ! {
    // SAFETY: ends the process; what its threads were doing does not matter any more.
    unsafe { libc::_exit(STUCK_EXIT_CODE) }
}

/// Communicators that have not ended. Their kernels may still be on the device, and their threads inside NCCL.
#[must_use]
pub fn num_communicators() -> usize {
    STATE.communicators.load(Ordering::Acquire)
}

struct State {
    /// Threads that end a communicator, and have not been joined.
    ends: Mutex<Vec<JoinHandle<()>>>,
    calls: AtomicUsize,
    communicators: AtomicUsize,
    is_exiting: AtomicBool,
}

static STATE: State = State {
    ends: Mutex::new(Vec::new()),
    calls: AtomicUsize::new(0),
    communicators: AtomicUsize::new(0),
    is_exiting: AtomicBool::new(false),
};

impl State {
    fn ends(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the threads that are done. They are in destructors of thread locals at most, the driver's among them, which is why a count that they
    /// take back themselves would not do.
    fn join_finished(&self) {
        let finished: Vec<_> = self.ends().extract_if(.., |end| end.is_finished()).collect();
        for end in finished {
            let _ = end.join(); // one that panicked is over as well
        }
    }

    /// Whether nothing is under way, or nothing is any more before `bound` has passed.
    fn is_over_within(&self, bound: Duration) -> bool {
        let started = Instant::now();
        loop {
            self.join_finished();
            if self.calls.load(Ordering::Acquire) == 0 && self.ends().is_empty() {
                return true;
            }
            if started.elapsed() >= bound {
                return false;
            }
            thread::sleep(POLL);
        }
    }
}

/// Runs the end of a communicator on a thread of its own; `false` if there can be none.
pub(super) fn on_thread(name: &str, end: impl FnOnce() + Send + 'static) -> bool {
    STATE.join_finished();
    let mut ends = STATE.ends();
    let thread = thread::Builder::new().name(name.into()).spawn(end);
    thread.map(|thread| ends.push(thread)).is_ok()
}

/// Whether the process is exiting: nobody waits for the peer any more.
pub(super) fn is_exiting() -> bool {
    STATE.is_exiting.load(Ordering::Acquire)
}

/// A call to NCCL that is made and waited for, until this is dropped.
pub(super) struct CallUnderWay(());

impl CallUnderWay {
    pub(super) fn begin() -> Self {
        STATE.calls.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for CallUnderWay {
    fn drop(&mut self) {
        STATE.calls.fetch_sub(1, Ordering::AcqRel);
    }
}

/// NCCL knows one communicator more.
pub(super) fn communicator_begun() {
    have_the_exit_wait();
    STATE.communicators.fetch_add(1, Ordering::AcqRel);
}

/// NCCL has forgotten one.
pub(super) fn communicator_ended() {
    STATE.communicators.fetch_sub(1, Ordering::AcqRel);
}

/// To be called once there is a communicator, and not before. Handlers run the last registered first: those of the libraries then come after ours.
fn have_the_exit_wait() {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: the handler takes nothing and never unwinds.
        if unsafe { libc::atexit(wait_at_exit) } != 0 {
            tracing::warn!("the exit of this process will not wait for communicators that are being ended");
        }
    });
}

extern "C" fn wait_at_exit() {
    STATE.is_exiting.store(true, Ordering::Release);
    if !STATE.is_over_within(EXIT_BOUND) {
        // Logging may have been taken down already, and nobody is left to be told that this cannot be written.
        let _ =
            writeln!(std::io::stderr(), "a nccl communicator was not ended within {EXIT_BOUND:?}, exiting without it");
        exit_stuck();
    }
}
