//! One communicator as NCCL holds it: its life, and waiting for it within bounds.

use std::ffi::{CString, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::ncclComm_t;

use super::abi::{Api, IN_PROGRESS, SUCCESS};
use super::ends::{self, CallUnderWay};
use super::error::{NcclError, Result};
use super::library::failure;

/// Background calls take some 50 µs of thread start and work: yield for that long, then sleep between looks.
const YIELD_FOR: Duration = Duration::from_micros(300);
const SLEEP: Duration = Duration::from_micros(100);
/// How long a call may keep its turn on the GPU: many times what a launch takes. Past that it waits for a peer to connect, which may take as long as the
/// peer pleases, and of which other communicators take no note.
const TURN: Duration = Duration::from_millis(2);

/// How an abort ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a stuck communicator means that the process must exit"]
pub enum Abort {
    /// The communicator is gone, its kernels have ended, and the device is free for other work.
    Returned {
        /// How long it took.
        took: Duration,
    },
    /// It has not returned within the bound, and may never: streams with its kernels may not finish, so exit the process.
    Stuck,
}

/// An abort, under way on a thread of its own.
#[derive(Debug)]
#[must_use = "an abort may get stuck, and then the process must exit"]
pub struct Aborting {
    started: Instant,
    /// `None` if there could be no thread.
    done: Option<mpsc::Receiver<()>>,
}

impl Aborting {
    /// Waits for it, no longer than `bound` from now.
    pub fn wait(self, bound: Duration) -> Abort {
        match self.done.map(|done| done.recv_timeout(bound)) {
            Some(Ok(())) => Abort::Returned { took: self.started.elapsed() },
            Some(Err(_)) | None => Abort::Stuck,
        }
    }
}

/// Whether NCCL still knows the communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Open,
    Ended,
}

/// The communicator and the lock under which NCCL is called with it.
pub(super) struct Handle {
    api: &'static Api,
    raw: ncclComm_t,
    life: Mutex<Life>,
    /// Set by whoever ends it, before waiting for the lock: calls that are being waited for give up.
    ending: AtomicBool,
    /// NCCL was given its address when the communicator was made.
    _name: CString,
}

// SAFETY: NCCL lets any thread call it with a communicator, one at a time, which `life` ensures.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    pub(super) fn new(api: &'static Api, raw: ncclComm_t, name: CString) -> Self {
        ends::communicator_begun();
        Self { api, raw, life: Mutex::new(Life::Open), ending: AtomicBool::new(false), _name: name }
    }

    /// Makes one call, and waits until NCCL is done with it or `bound` has passed. `turn` keeps other calls for the GPU away: during the call and until
    /// it is done, or for [`TURN`] if it waits for a peer.
    pub(super) fn call<T>(
        &self,
        name: &'static str,
        bound: Duration,
        turn: impl FnOnce() -> Result<T>,
        issue: impl FnOnce(&Api, ncclComm_t) -> c_int,
    ) -> Result<()> {
        let _under_way = CallUnderWay::begin();
        let _life = self.open()?;
        // Last of all, so that no turn is spent waiting for the communicator.
        let mut turn = Some(turn()?);
        let code = issue(self.api, self.raw);
        self.wait_for(name, code, bound, |waited| {
            if waited >= TURN {
                drop(turn.take());
            }
            self.ending.load(Ordering::Acquire) || ends::is_exiting()
        })
    }

    /// The error that NCCL has noticed by itself, if any. Says nothing of a peer that died on the same node.
    pub(super) fn check(&self) -> Result<()> {
        let life = match self.life.try_lock() {
            Ok(life) => life,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // A call is under way, which will report it.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        if *life == Life::Ended || self.ending.load(Ordering::Acquire) {
            return Err(NcclError::Ended);
        }
        match self.asynchronous() {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(failure(self.api, "ncclCommGetAsyncError", code)),
        }
    }

    /// Aborts on a thread of its own after `prepare`. Doing so again waits for the first.
    pub(super) fn begin_abort<T>(self: &Arc<Self>, prepare: impl FnOnce() -> T + Send + 'static) -> Aborting {
        Aborting { started: Instant::now(), done: self.end("nccl-abort", prepare, Self::abort_now) }
    }

    /// Waits for what is under way and takes the communicator down together with its peers; past `bound`, aborts it.
    pub(super) fn close<T>(
        self: &Arc<Self>,
        bound: Duration,
        prepare: impl FnOnce() -> T + Send + 'static,
    ) -> Result<()> {
        let (outcome, received) = mpsc::channel();
        // A second bound for what the thread does after the first: the abort.
        let closing = move |handle: &Self| drop(outcome.send(handle.close_now(bound)));
        let stuck = NcclError::Stuck { call: "ncclCommDestroy", waited: bound * 2 };
        if self.end("nccl-close", prepare, closing).is_none() {
            return Err(stuck);
        }
        received.recv_timeout(bound * 2).unwrap_or(Err(stuck))
    }

    /// Aborts without anybody waiting: for a communicator that was dropped. Whether it was open.
    pub(super) fn abandon<T>(self: &Arc<Self>, prepare: impl FnOnce() -> T + Send + 'static) -> bool {
        let ended = matches!(self.life.try_lock(), Ok(life) if *life == Life::Ended);
        if ended || self.ending.load(Ordering::Acquire) {
            return false;
        }
        self.end("nccl-abort", prepare, Self::abort_now);
        true
    }

    /// Runs `prepare` and then `work` on a new thread, which keeps what `prepare` gives until `work` is over; nothing if there can be no
    /// thread.
    fn end<T>(
        self: &Arc<Self>,
        name: &str,
        prepare: impl FnOnce() -> T + Send + 'static,
        work: impl FnOnce(&Self) + Send + 'static,
    ) -> Option<mpsc::Receiver<()>> {
        self.ending.store(true, Ordering::Release);
        let (done, received) = mpsc::channel();
        let handle = self.clone();
        let run = move || {
            let kept = prepare();
            work(&handle);
            drop(kept);
            let _ = done.send(());
        };
        ends::on_thread(name, run).then_some(received)
    }

    fn abort_now(&self) {
        let mut life = self.life();
        if *life == Life::Open {
            // SAFETY: open, and no other call is under way. Its code tells nothing: the communicator is gone either way.
            unsafe { (self.api.comm_abort)(self.raw) };
            Self::has_ended(&mut life);
        }
    }

    fn close_now(&self, bound: Duration) -> Result<()> {
        let mut life = self.life();
        if *life == Life::Ended {
            return Ok(());
        }
        // SAFETY: open, and no other call is under way.
        let code = unsafe { (self.api.comm_finalize)(self.raw) };
        let finalized = self.wait_for("ncclCommFinalize", code, bound, |_| false);
        // SAFETY: as above. Destroying is for finalized ones; whatever else happened, aborting is allowed.
        let code = unsafe {
            match finalized {
                Ok(()) => (self.api.comm_destroy)(self.raw),
                Err(_) => (self.api.comm_abort)(self.raw),
            }
        };
        Self::has_ended(&mut life);
        finalized?;
        if code == SUCCESS { Ok(()) } else { Err(failure(self.api, "ncclCommDestroy", code)) }
    }

    fn has_ended(life: &mut Life) {
        *life = Life::Ended;
        ends::communicator_ended();
    }

    /// Polls until the call that returned `code` is over. `give_up` is asked again and again, with the time since.
    fn wait_for(
        &self,
        name: &'static str,
        code: c_int,
        bound: Duration,
        mut give_up: impl FnMut(Duration) -> bool,
    ) -> Result<()> {
        let started = Instant::now();
        let mut code = code;
        while code == IN_PROGRESS {
            code = self.asynchronous();
            let waited = started.elapsed();
            if code != IN_PROGRESS {
                break;
            } else if give_up(waited) {
                return Err(NcclError::Ended);
            } else if waited >= bound {
                return Err(NcclError::Timeout { call: name, waited });
            } else if waited < YIELD_FOR {
                thread::yield_now();
            } else {
                thread::sleep(SLEEP);
            }
        }
        if code == SUCCESS { Ok(()) } else { Err(failure(self.api, name, code)) }
    }

    /// The state of the communicator: success, in progress, or what went wrong. The caller holds `life` and found it open.
    fn asynchronous(&self) -> c_int {
        let mut state = SUCCESS;
        // SAFETY: the communicator is open, and the other argument is a plain out-pointer.
        match unsafe { (self.api.comm_get_async_error)(self.raw, &raw mut state) } {
            SUCCESS => state,
            code => code,
        }
    }

    /// The lock, unless the communicator has ended or is being ended: whoever ends it may keep the lock for ever.
    fn open(&self) -> Result<MutexGuard<'_, Life>> {
        loop {
            let life = match self.life.try_lock() {
                Ok(life) => Some(life),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            match life {
                _ if self.ending.load(Ordering::Acquire) => return Err(NcclError::Ended),
                Some(life) if *life == Life::Open => return Ok(life),
                Some(_) => return Err(NcclError::Ended),
                None => thread::sleep(SLEEP),
            }
        }
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
