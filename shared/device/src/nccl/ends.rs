//! The ends of communicators, which are under way on threads of their own, and the exit of the process, which waits for them.
//!
//! At exit NCCL and the driver take themselves down in handlers of the C library. A thread that is at work inside them then brings the process down
//! by a signal, whatever exit code it had.

use std::io::Write;
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// With this code the process exits when a communicator cannot be ended: kernels of it hold the GPU for ever.
pub const STUCK_EXIT_CODE: i32 = 75;

/// How long the exit of the process waits. An abort takes half a second, a close two of its caller's bounds.
const EXIT_BOUND: Duration = Duration::from_secs(10);

/// Exits at once with [`STUCK_EXIT_CODE`], without the handlers of the driver, which might wait for the kernels that are stuck.
pub fn exit_stuck() -> ! {
    // SAFETY: ends the process; what its threads were doing does not matter any more.
    unsafe { libc::_exit(STUCK_EXIT_CODE) }
}

struct Ends {
    under_way: Mutex<usize>,
    all_over: Condvar,
}

static ENDS: Ends = Ends { under_way: Mutex::new(0), all_over: Condvar::new() };

impl Ends {
    fn under_way(&self) -> MutexGuard<'_, usize> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether none is under way, or none is any more before `bound` has passed.
    fn are_over_within(&self, bound: Duration) -> bool {
        let waited = self.all_over.wait_timeout_while(self.under_way(), bound, |under_way| *under_way > 0);
        let (under_way, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *under_way == 0
    }
}

/// One end, under way until this is dropped.
pub(super) struct UnderWay(());

impl UnderWay {
    pub(super) fn begin() -> Self {
        static AT_EXIT: Once = Once::new();
        // Handlers run the last registered first. There is a communicator by now, so those of the libraries are registered and come after.
        AT_EXIT.call_once(|| {
            // SAFETY: the handler takes nothing and never unwinds.
            if unsafe { libc::atexit(wait_at_exit) } != 0 {
                tracing::warn!("the exit of this process will not wait for communicators that are being ended");
            }
        });
        *ENDS.under_way() += 1;
        Self(())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        *ENDS.under_way() -= 1;
        ENDS.all_over.notify_all();
    }
}

extern "C" fn wait_at_exit() {
    if !ENDS.are_over_within(EXIT_BOUND) {
        // Logging may have been taken down already, and nobody is left to be told that this cannot be written.
        let _ =
            writeln!(std::io::stderr(), "a nccl communicator was not ended within {EXIT_BOUND:?}, exiting without it");
        exit_stuck();
    }
}
