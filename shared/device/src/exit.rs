//! The end of a process that gave up work inside the driver.
//!
//! A thread may be in the driver for minutes, loading a model or waiting for a peer, while the process is told to end. Nobody can call it back, and
//! at exit the driver and NCCL take themselves down in handlers of the C library: the thread would bring the process down by a signal, whatever
//! exit code it had. So whoever waits for such work says when it stops waiting, and `main` leaves past the handlers.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

static WAS_GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// Held by whoever waits for another thread's work inside the driver. Dropped before [`Self::joined`], the work has been given up.
#[derive(Debug)]
#[must_use = "dropping it says that the work was given up"]
pub struct DriverWork(());

impl DriverWork {
    /// To be called before the thread is started.
    pub const fn begin() -> Self {
        Self(())
    }

    /// The thread was joined, or never started.
    pub const fn joined(self) {
        std::mem::forget(self);
    }
}

impl Drop for DriverWork {
    fn drop(&mut self) {
        WAS_GIVEN_UP.store(true, Ordering::Release);
    }
}

/// Whether work inside the driver was given up in this process. Then `main` ends by [`leave`], once logs and traces are where they belong.
#[must_use]
pub fn was_work_given_up() -> bool {
    WAS_GIVEN_UP.load(Ordering::Acquire)
}

/// Ends the process with `code`, without the handlers that take the driver down. Only standard output is flushed: nothing else that is buffered, no
/// destructor of a static.
pub fn leave(code: u8) -> ! {
    let _ = std::io::stdout().flush(); // a reader that is gone wants nothing
    // SAFETY: ends the process; what its threads were doing does not matter any more.
    unsafe { libc::_exit(code.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BY_HANDLERS: i32 = 3;

    extern "C" fn handler() {
        // SAFETY: as in `leave`.
        unsafe { libc::_exit(BY_HANDLERS) }
    }

    /// The end of `main`, in a process whose handlers must not run while work is under way.
    fn end() -> ! {
        // SAFETY: the handler takes nothing and never unwinds.
        assert_eq!(unsafe { libc::atexit(handler) }, 0);
        if was_work_given_up() {
            leave(0);
        }
        std::process::exit(0);
    }

    #[test]
    #[ignore = "the child half of another test"]
    fn ends_with_work_given_up() {
        drop(DriverWork::begin());
        end();
    }

    #[test]
    #[ignore = "the child half of another test"]
    fn ends_with_work_joined() {
        DriverWork::begin().joined();
        end();
    }

    #[test]
    fn the_handlers_are_left_out_only_where_work_was_given_up() {
        for (child, code) in [("ends_with_work_given_up", 0), ("ends_with_work_joined", BY_HANDLERS)] {
            let status = std::process::Command::new(std::env::current_exe().expect("a running test"))
                .args([&format!("exit::tests::{child}"), "--exact", "--ignored"])
                .stdout(std::process::Stdio::null())
                .status()
                .expect("a child");
            assert_eq!(status.code(), Some(code), "{child}: {status}");
        }
    }
}
