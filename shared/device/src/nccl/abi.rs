//! NCCL's functions as they are called here, found by name in the opened library.
//!
//! The types are those of `cudarc::nccl::sys`. Its functions are not used: they panic without a library and do not know the
//! name `libnccl.so.2`. Codes are plain integers, since a newer library may return ones that the bindings do not list.

use std::ffi::{c_char, c_int, c_void};

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclUniqueId};

/// `ncclSuccess`.
pub(super) const SUCCESS: c_int = 0;
/// `ncclInProgress`: a non-blocking call goes on in the background.
pub(super) const IN_PROGRESS: c_int = 7;
/// `ncclSum`.
pub(super) const SUM: c_int = 0;

/// Declares the table and how it is filled, so that names and types stand in one place.
macro_rules! functions {
    ($($field:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// One function pointer for each NCCL function in use.
        pub(super) struct Api {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Api {
            /// Finds all functions in `library`, which must never be unloaded afterwards.
            ///
            /// # Errors
            /// The loader's message for the first that is missing.
            pub(super) fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are those of nccl.h, which keeps them stable within major version 2.
                    $($field: unsafe { *library.get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol)? },)*
                })
            }
        }
    };
}

functions! {
    get_version: b"ncclGetVersion\0" (*mut c_int) -> c_int;
    get_error_string: b"ncclGetErrorString\0" (c_int) -> *const c_char;
    get_last_error: b"ncclGetLastError\0" (ncclComm_t) -> *const c_char;
    get_unique_id: b"ncclGetUniqueId\0" (*mut ncclUniqueId) -> c_int;
    comm_init_rank_config: b"ncclCommInitRankConfig\0" (*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> c_int;
    comm_get_async_error: b"ncclCommGetAsyncError\0" (ncclComm_t, *mut c_int) -> c_int;
    comm_finalize: b"ncclCommFinalize\0" (ncclComm_t) -> c_int;
    comm_destroy: b"ncclCommDestroy\0" (ncclComm_t) -> c_int;
    comm_abort: b"ncclCommAbort\0" (ncclComm_t) -> c_int;
    group_start: b"ncclGroupStart\0" () -> c_int;
    group_end: b"ncclGroupEnd\0" () -> c_int;
    send: b"ncclSend\0" (*const c_void, usize, c_int, c_int, ncclComm_t, cudaStream_t) -> c_int;
    recv: b"ncclRecv\0" (*mut c_void, usize, c_int, c_int, ncclComm_t, cudaStream_t) -> c_int;
    all_reduce: b"ncclAllReduce\0" (*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, cudaStream_t) -> c_int;
    all_gather: b"ncclAllGather\0" (*const c_void, *mut c_void, usize, c_int, ncclComm_t, cudaStream_t) -> c_int;
    reduce_scatter: b"ncclReduceScatter\0" (*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, cudaStream_t) -> c_int;
    broadcast: b"ncclBroadcast\0" (*const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, cudaStream_t) -> c_int;
}
