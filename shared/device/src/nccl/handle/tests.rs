//! Against a fake NCCL: what a communicator does when calls are slow, fail or never return.

#![allow(clippy::unwrap_used)] // helpers of tests fail as tests do

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32};

use cudarc::nccl::sys::{cudaStream_t, ncclConfig_t, ncclUniqueId};

use super::*;

const SOON: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_secs(20);
const REMOTE_ERROR: c_int = 6;

/// What the fake library does with a communicator, which is the address of this.
#[derive(Default)]
struct Fake {
    state: AtomicI32,
    hangs: AtomicBool,
    finalized: AtomicU32,
    destroyed: AtomicU32,
    aborted: AtomicU32,
}

fn fake(comm: ncclComm_t) -> &'static Fake {
    // SAFETY: `Fake::open` leaked it.
    unsafe { &*comm.cast::<Fake>() }
}

impl Fake {
    fn open() -> (&'static Self, Arc<Handle>) {
        let fake: &'static Self = Box::leak(Box::default());
        let raw = std::ptr::from_ref(fake).cast_mut().cast();
        (fake, Arc::new(Handle::new(api(), raw, CString::default())))
    }

    fn set(&self, state: c_int) {
        self.state.store(state, Ordering::Release);
    }
}

fn no_turn() -> Result<()> {
    Ok(())
}

unsafe extern "C" fn async_error(comm: ncclComm_t, state: *mut c_int) -> c_int {
    // SAFETY: the caller's out-pointer.
    unsafe { *state = fake(comm).state.load(Ordering::Acquire) };
    SUCCESS
}

unsafe extern "C" fn finalize(comm: ncclComm_t) -> c_int {
    fake(comm).finalized.fetch_add(1, Ordering::AcqRel);
    IN_PROGRESS
}

unsafe extern "C" fn destroy(comm: ncclComm_t) -> c_int {
    fake(comm).destroyed.fetch_add(1, Ordering::AcqRel);
    SUCCESS
}

unsafe extern "C" fn abort(comm: ncclComm_t) -> c_int {
    while fake(comm).hangs.load(Ordering::Acquire) {
        thread::sleep(Duration::from_millis(1));
    }
    fake(comm).aborted.fetch_add(1, Ordering::AcqRel);
    SUCCESS
}

unsafe extern "C" fn words(code: c_int) -> *const c_char {
    if code == REMOTE_ERROR { c"remote process exited".as_ptr() } else { c"another".as_ptr() }
}

unsafe extern "C" fn last(_: ncclComm_t) -> *const c_char {
    c"last words\n".as_ptr()
}

unsafe extern "C" fn out(_: *mut c_int) -> c_int {
    SUCCESS
}

unsafe extern "C" fn id(_: *mut ncclUniqueId) -> c_int {
    SUCCESS
}

unsafe extern "C" fn init(_: *mut ncclComm_t, _: c_int, _: ncclUniqueId, _: c_int, _: *mut ncclConfig_t) -> c_int {
    SUCCESS
}

unsafe extern "C" fn group() -> c_int {
    SUCCESS
}

unsafe extern "C" fn send(_: *const c_void, _: usize, _: c_int, _: c_int, _: ncclComm_t, _: cudaStream_t) -> c_int {
    SUCCESS
}

unsafe extern "C" fn recv(_: *mut c_void, _: usize, _: c_int, _: c_int, _: ncclComm_t, _: cudaStream_t) -> c_int {
    SUCCESS
}

unsafe extern "C" fn gather(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: c_int,
    _: ncclComm_t,
    _: cudaStream_t,
) -> c_int {
    SUCCESS
}

unsafe extern "C" fn reduce(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: c_int,
    _: c_int,
    _: ncclComm_t,
    _: cudaStream_t,
) -> c_int {
    SUCCESS
}

fn api() -> &'static Api {
    static API: OnceLock<Api> = OnceLock::new();
    API.get_or_init(|| Api {
        get_version: out,
        get_error_string: words,
        get_last_error: last,
        get_unique_id: id,
        comm_init_rank_config: init,
        comm_get_async_error: async_error,
        comm_finalize: finalize,
        comm_destroy: destroy,
        comm_abort: abort,
        group_start: group,
        group_end: group,
        send,
        recv,
        all_reduce: reduce,
        all_gather: gather,
        reduce_scatter: reduce,
        broadcast: reduce,
    })
}

#[test]
fn a_call_in_the_background_is_waited_for() {
    let (fake, handle) = Fake::open();
    fake.set(IN_PROGRESS);
    let finisher = thread::spawn(|| {
        thread::sleep(SOON);
        fake.set(SUCCESS);
    });
    assert_eq!(handle.call("ncclSend", LONG, no_turn, |_, _| IN_PROGRESS), Ok(()));
    finisher.join().unwrap();
    assert_eq!(handle.check(), Ok(()));
}

#[test]
fn a_call_that_does_not_finish_times_out() {
    let (fake, handle) = Fake::open();
    fake.set(IN_PROGRESS);
    let outcome = handle.call("ncclRecv", SOON, no_turn, |_, _| IN_PROGRESS);
    assert!(matches!(outcome, Err(NcclError::Timeout { call: "ncclRecv", waited }) if waited >= SOON), "{outcome:?}");
}

/// One communicator's peer does not come: the calls of others for the same GPU are not kept from it for as long as that is waited for.
#[test]
fn a_call_that_waits_for_its_peer_gives_up_its_turn() {
    static GPU: Mutex<()> = Mutex::new(());
    let (fake, waiting) = Fake::open();
    fake.set(IN_PROGRESS);
    let (issued, at) = mpsc::channel();
    let (caller, other) = (waiting.clone(), Fake::open().1);
    let caller = thread::spawn(move || {
        caller.call(
            "ncclRecv",
            LONG,
            || Ok(GPU.lock().unwrap()),
            |_, _| {
                issued.send(()).unwrap();
                IN_PROGRESS
            },
        )
    });
    at.recv().unwrap();
    let started = Instant::now();
    assert_eq!(other.call("ncclSend", LONG, || Ok(GPU.lock().unwrap()), |_, _| SUCCESS), Ok(()));
    assert!(started.elapsed() < LONG / 10, "the turn came after {:?}", started.elapsed());
    assert!(!caller.is_finished(), "which goes on waiting");
    fake.set(SUCCESS);
    assert_eq!(caller.join().unwrap(), Ok(()));
}

/// A launch goes on in the background when the call has returned: until it is over, no other call for the GPU begins.
#[test]
fn a_call_keeps_its_turn_until_nccl_is_done() {
    static GPU: Mutex<()> = Mutex::new(());
    let (fake, handle) = Fake::open();
    fake.set(IN_PROGRESS);
    let (issued, at) = mpsc::channel();
    let finisher = thread::spawn(move || {
        at.recv().unwrap();
        thread::sleep(TURN / 4);
        let was_kept = GPU.try_lock().is_err();
        fake.set(SUCCESS);
        was_kept
    });
    let started = Instant::now();
    let issue = |_: &Api, _| {
        issued.send(()).unwrap();
        IN_PROGRESS
    };
    assert_eq!(handle.call("ncclSend", LONG, || Ok(GPU.lock().unwrap()), issue), Ok(()));
    // On a machine so busy that all this took longer, the turn may have been given up.
    assert!(finisher.join().unwrap() || started.elapsed() >= TURN);
    assert!(GPU.try_lock().is_ok());
}

#[test]
fn a_failure_names_the_call_and_gives_the_words_of_nccl() {
    let (fake, handle) = Fake::open();
    let detail = "last words".to_owned();
    let code = "remote process exited".to_owned();
    let error = NcclError::Call { call: "ncclSend", code: code.clone(), detail: detail.clone() };
    assert_eq!(handle.call("ncclSend", LONG, no_turn, |_, _| REMOTE_ERROR), Err(error));
    assert_eq!(handle.check(), Ok(()));
    fake.set(REMOTE_ERROR);
    assert_eq!(handle.check(), Err(NcclError::Call { call: "ncclCommGetAsyncError", code, detail }));
}

#[test]
fn an_abort_frees_a_thread_that_waits_in_a_call() {
    let (fake, handle) = Fake::open();
    fake.set(IN_PROGRESS);
    let waiting = handle.clone();
    let (issued, at) = mpsc::channel();
    let caller = thread::spawn(move || {
        waiting.call("ncclRecv", LONG, no_turn, |_, _| {
            issued.send(()).unwrap();
            IN_PROGRESS
        })
    });
    at.recv().unwrap();
    assert_eq!(handle.check(), Ok(()), "a check does not wait for the call");
    assert!(matches!(handle.begin_abort(|| ()).wait(LONG), Abort::Returned { took } if took < LONG));
    assert_eq!(caller.join().unwrap(), Err(NcclError::Ended));
    assert_eq!(handle.call("ncclSend", LONG, no_turn, |_, _| SUCCESS), Err(NcclError::Ended));
    assert_eq!(handle.check(), Err(NcclError::Ended));
    assert!(matches!(handle.begin_abort(|| ()).wait(LONG), Abort::Returned { .. }), "a second abort finds it done");
    assert!(!handle.abandon(|| ()), "nothing is left to abort");
    assert_eq!(fake.aborted.load(Ordering::Acquire), 1);
}

#[test]
fn an_abort_that_does_not_return_is_reported_and_not_waited_for() {
    let (fake, handle) = Fake::open();
    fake.hangs.store(true, Ordering::Release);
    let started = Instant::now();
    assert_eq!(handle.begin_abort(|| ()).wait(SOON), Abort::Stuck);
    assert_eq!(handle.call("ncclSend", LONG, no_turn, |_, _| SUCCESS), Err(NcclError::Ended));

    assert!(started.elapsed() < LONG);
    fake.hangs.store(false, Ordering::Release);
    assert!(
        matches!(handle.begin_abort(|| ()).wait(LONG), Abort::Returned { .. }),
        "a later abort sees that it has returned"
    );
    assert_eq!(fake.aborted.load(Ordering::Acquire), 1);
}

#[test]
fn closing_finalizes_and_destroys() {
    let (fake, handle) = Fake::open();
    assert_eq!(handle.close(LONG, || ()), Ok(()));
    let counts = [&fake.finalized, &fake.destroyed, &fake.aborted].map(|count| count.load(Ordering::Acquire));
    assert_eq!(counts, [1, 1, 0]);
    assert_eq!(handle.check(), Err(NcclError::Ended));
}

#[test]
fn closing_without_the_peers_ends_in_an_abort() {
    let (fake, handle) = Fake::open();
    fake.set(IN_PROGRESS);
    let outcome = handle.close(SOON, || ());
    assert!(matches!(outcome, Err(NcclError::Timeout { call: "ncclCommFinalize", .. })), "{outcome:?}");
    let counts = [&fake.finalized, &fake.destroyed, &fake.aborted].map(|count| count.load(Ordering::Acquire));
    assert_eq!(counts, [1, 0, 1]);
}

#[test]
fn closing_that_cannot_even_abort_is_stuck() {
    let (fake, handle) = Fake::open();
    fake.set(IN_PROGRESS);
    fake.hangs.store(true, Ordering::Release);
    assert!(matches!(handle.close(SOON, || ()), Err(NcclError::Stuck { .. })));
    fake.hangs.store(false, Ordering::Release);
}

#[test]
fn an_open_one_that_is_dropped_is_aborted_in_the_background() {
    let (fake, handle) = Fake::open();
    assert!(handle.abandon(|| ()));
    let started = Instant::now();
    while fake.aborted.load(Ordering::Acquire) == 0 && started.elapsed() < LONG {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(fake.aborted.load(Ordering::Acquire), 1);
}

/// Tells whether what `prepare` gave is still there.
struct Kept(&'static AtomicBool);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[test]
fn what_was_prepared_is_kept_until_the_abort_has_returned() {
    static IS_KEPT: AtomicBool = AtomicBool::new(true);
    let (fake, handle) = Fake::open();
    fake.hangs.store(true, Ordering::Release);
    let aborting = handle.begin_abort(|| Kept(&IS_KEPT));
    thread::sleep(SOON);
    assert!(IS_KEPT.load(Ordering::Acquire), "the abort has not returned");
    fake.hangs.store(false, Ordering::Release);
    assert!(matches!(aborting.wait(LONG), Abort::Returned { .. }));
    assert!(!IS_KEPT.load(Ordering::Acquire));
}

/// Prints when the thread is torn down, which takes a while.
struct TornDown;

impl Drop for TornDown {
    fn drop(&mut self) {
        thread::sleep(10 * SOON);
        println!("torn down");
    }
}

/// What the child does in [`the_exit_of_the_process_waits_for_what_is_under_way`]: exits while an abort is under way, on a thread that has locals as the
/// driver has.
#[test]
#[ignore = "the child half of another test"]
fn exits_during_an_abort() {
    thread_local!(static LOCAL: TornDown = const { TornDown });
    let (_, handle) = Fake::open();
    let _aborting = handle.begin_abort(|| {
        LOCAL.with(|_| ());
        thread::sleep(10 * SOON);
        println!("aborted");
    });
    std::process::exit(0);
}

/// The same, while a call waits for a peer that never comes.
#[test]
#[ignore = "the child half of another test"]
fn exits_during_a_call() {
    let (fake, handle) = Fake::open();
    fake.set(IN_PROGRESS);
    let (issued, at) = mpsc::channel();
    thread::spawn(move || {
        handle.call("ncclSend", 10 * LONG, no_turn, |_, _| {
            issued.send(()).unwrap();
            thread::sleep(10 * SOON);
            println!("issued");
            IN_PROGRESS
        })
    });
    at.recv().unwrap();
    std::process::exit(0);
}

/// In a process of its own, since all communicators of a process are counted.
#[test]
#[ignore = "the child half of another test"]
fn counts_communicators() {
    let (fake, handle) = Fake::open();
    let (_, closed) = Fake::open();
    assert_eq!(ends::num_communicators(), 2);
    assert_eq!(closed.close(LONG, || ()), Ok(()));
    fake.hangs.store(true, Ordering::Release);
    let aborting = handle.begin_abort(|| ());
    assert_eq!(ends::num_communicators(), 1, "its end is under way");
    fake.hangs.store(false, Ordering::Release);
    assert!(matches!(aborting.wait(LONG), Abort::Returned { .. }));
    assert_eq!(ends::num_communicators(), 0);
    println!("counted");
}

#[test]
fn communicators_are_counted_until_they_have_ended() {
    let output = child("counts_communicators");
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("counted\n"), "{output:?}");
}

#[test]
fn the_exit_of_the_process_waits_for_what_is_under_way() {
    for (child, printed) in [("exits_during_an_abort", "aborted\ntorn down\n"), ("exits_during_a_call", "issued\n")] {
        let output = self::child(child);
        let found = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && found.contains(printed), "{child}: {output:?}");
    }
}

fn child(test: &str) -> std::process::Output {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args([&format!("nccl::handle::tests::{test}"), "--exact", "--ignored", "--nocapture"])
        .output()
        .unwrap()
}
