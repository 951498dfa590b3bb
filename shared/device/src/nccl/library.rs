//! Opening the library, its version, and the ids by which ranks find each other.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclUniqueId};

use super::abi::{Api, SUCCESS};
use super::error::{NcclError, Result};

/// Names under which NCCL is installed, in the order tried; the loader adds `LD_LIBRARY_PATH`, its cache and its defaults.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// Oldest version with everything that communicators here are configured with, as `ncclGetVersion` counts.
const MIN_VERSION: u32 = 22_800;

const MULTICAST_SWITCH: &str = "NCCL_NVLS_ENABLE";

/// The opened library. There is one for each process, and it is never unloaded.
pub struct Nccl {
    pub(super) api: Api,
    version: u32,
    path: PathBuf,
}

impl Nccl {
    /// Opens NCCL, once for all; later calls give the same answer. Switches multicast off if that has not been done.
    ///
    /// # Errors
    /// `LibraryMissing`, or `LibraryUnusable` if it is too old or lacks a function.
    pub fn load() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Result<Nccl>> = OnceLock::new();
        let library = LIBRARY.get_or_init(|| {
            if multicast_switch().as_deref() != Some("0") {
                // SAFETY: the standard library orders its own access to the environment. Readers in C are the name resolver and
                // the driver as it initialises. The services call `forbid_multicast` while they have one thread, so this line
                // is reached by tests and tools only, before their first use of NCCL and apart from both.
                unsafe { std::env::set_var(MULTICAST_SWITCH, "0") };
            }
            Self::open(&NAMES)
        });
        library.as_ref().map_err(Clone::clone)
    }

    fn open(names: &[&str]) -> Result<Self> {
        let mut answers = Vec::new();
        for name in names {
            // SAFETY: NCCL's initialisers have no precondition.
            match unsafe { libloading::Library::new(*name) } {
                Ok(library) => return Self::examine(library, name),
                Err(error) => answers.push(words_of(&error)),
            }
        }
        Err(NcclError::LibraryMissing { reason: answers.join("; ") })
    }

    fn examine(library: libloading::Library, name: &str) -> Result<Self> {
        let unusable = |path: &Path, reason| NcclError::LibraryUnusable { path: path.display().to_string(), reason };
        let api = Api::find(&library).map_err(|error| unusable(Path::new(name), words_of(&error)))?;
        // The functions found are called for the rest of the process's life.
        std::mem::forget(library);
        let path = mapped_file(api.get_version as usize).unwrap_or_else(|| name.into());
        let mut version: c_int = 0;
        // SAFETY: a plain out-pointer.
        let code = unsafe { (api.get_version)(&raw mut version) };
        let version = u32::try_from(version).unwrap_or(0);
        if code != SUCCESS || version < MIN_VERSION {
            let reason = format!("its version is {}, {} is needed", Version(version), Version(MIN_VERSION));
            return Err(unusable(&path, reason));
        }
        Ok(Self { api, version, path })
    }

    /// The version as NCCL counts it: 2.28.9 is 22809.
    #[must_use]
    pub const fn version(&self) -> u32 {
        self.version
    }

    /// The version as it is written, for example `2.28.9`.
    #[must_use]
    pub fn version_text(&self) -> String {
        Version(self.version).to_string()
    }

    /// The file that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Turns a code other than success into an error that names the call.
    pub(super) fn failure(&self, call: &'static str, code: c_int) -> NcclError {
        failure(&self.api, call, code)
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("version", &self.version).field("path", &self.path).finish()
    }
}

/// As [`Nccl::failure`].
pub(super) fn failure(api: &Api, call: &'static str, code: c_int) -> NcclError {
    // SAFETY: both return static strings of NCCL's or null; the argument of the second is documented as unused.
    let (name, last) =
        unsafe { ((api.get_error_string)(code), (api.get_last_error)(std::ptr::null_mut() as ncclComm_t)) };
    let text = |pointer: *const std::ffi::c_char| {
        // SAFETY: as above; the strings are terminated.
        if pointer.is_null() {
            String::new()
        } else {
            unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned()
        }
    };
    NcclError::Call { call, code: text(name), detail: text(last) }
}

/// What the loader said, which it keeps in the error's source.
fn words_of(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Switches NVLink multicast off for this process, and so for its children. To be called first thing in `main`.
///
/// # Errors
/// `Multicast` if the process already has several threads and the variable is not set: changing it then is not sound.
pub fn forbid_multicast() -> Result<()> {
    if multicast_switch().as_deref() == Some("0") {
        return Ok(());
    }
    if std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count) != 1 {
        return multicast_is_off();
    }
    // SAFETY: this is the only thread, so nobody reads the environment meanwhile.
    unsafe { std::env::set_var(MULTICAST_SWITCH, "0") };
    Ok(())
}

/// # Errors
/// `Multicast` unless it is switched off.
pub(super) fn multicast_is_off() -> Result<()> {
    match multicast_switch() {
        Some(value) if value == "0" => Ok(()),
        value => Err(NcclError::Multicast { value: value.unwrap_or_else(|| "not set".into()) }),
    }
}

fn multicast_switch() -> Option<String> {
    std::env::var_os(MULTICAST_SWITCH).map(|value| value.to_string_lossy().into_owned())
}

/// The file that is mapped at `address`.
fn mapped_file(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        let path = line.get(line.find('/')?..)?;
        range.contains(&address).then(|| path.into())
    })
}

struct Version(u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// Names a communicator to be. Rank 0 makes it, all ranks pass it to [`Communicator::init`](super::Communicator::init); one id
/// makes one communicator. It holds an address of its maker, who must live until all ranks have joined.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; Self::BYTES]);

impl UniqueId {
    /// Its size.
    pub const BYTES: usize = 128;

    /// A new one, with a listener in this process where the ranks meet.
    ///
    /// # Errors
    /// Those of [`Nccl::load`], or `Call` if NCCL finds no network interface to listen on.
    pub fn new() -> Result<Self> {
        let nccl = Nccl::load()?;
        let mut id = ncclUniqueId { internal: [0; Self::BYTES] };
        // SAFETY: a plain out-pointer.
        match unsafe { (nccl.api.get_unique_id)(&raw mut id) } {
            SUCCESS => Ok(Self(id.internal.map(|byte| byte as u8))),
            code => Err(nccl.failure("ncclGetUniqueId", code)),
        }
    }

    /// From the bytes that another rank sent.
    ///
    /// # Errors
    /// `UniqueIdLength` unless there are 128.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        bytes.try_into().map(Self).map_err(|_| NcclError::UniqueIdLength { found: bytes.len() })
    }

    /// The bytes, to be sent to the other ranks.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    pub(super) fn raw(&self) -> ncclUniqueId {
        ncclUniqueId { internal: self.0.map(|byte| byte as std::ffi::c_char) }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An address and a random number: the first bytes tell ids apart.
        write!(f, "UniqueId(")?;
        self.0[..12].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let Err(NcclError::LibraryMissing { reason }) = Nccl::open(&["libnccl-absent.so.2", "libnccl-absent.so"])
        else {
            panic!("opened a library that does not exist");
        };
        assert!(reason.contains("libnccl-absent.so.2") && reason.contains("; libnccl-absent.so"), "{reason}");
    }

    #[test]
    fn another_library_is_an_error_that_names_the_function() {
        let Err(NcclError::LibraryUnusable { path, reason }) = Nccl::open(&["libc.so.6"]) else {
            panic!("took the C library for NCCL");
        };
        assert_eq!(path, "libc.so.6");
        assert!(reason.contains("ncclGetVersion"), "{reason}");
    }

    #[test]
    fn loading_answers_and_leaves_multicast_off() {
        match Nccl::load() {
            Ok(nccl) => assert!(nccl.version() >= MIN_VERSION && nccl.path().is_absolute(), "{nccl:?}"),
            Err(error) => assert!(
                matches!(error, NcclError::LibraryMissing { .. } | NcclError::LibraryUnusable { .. }),
                "{error}"
            ),
        }
        assert_eq!(multicast_is_off(), Ok(()));
        assert_eq!(forbid_multicast(), Ok(()));
    }

    #[test]
    fn an_id_survives_its_bytes() {
        let bytes: Vec<u8> = (0..128).map(|byte| byte * 2).collect();
        let id = UniqueId::from_bytes(&bytes).expect("128 bytes");
        assert_eq!(id.as_bytes()[..], bytes[..]);
        assert_eq!(UniqueId::from_bytes(id.as_bytes()), Ok(id));
        assert_eq!(id.raw().internal[127] as u8, 254);
        assert_eq!(UniqueId::from_bytes(&bytes[1..]), Err(NcclError::UniqueIdLength { found: 127 }));
        assert_eq!(format!("{id:?}"), "UniqueId(00020406080a0c0e10121416..)");
    }

    #[test]
    fn the_file_behind_a_function_is_found() {
        let path = mapped_file(mapped_file as *const () as usize).expect("this test's own file");
        assert_eq!(path, std::env::current_exe().expect("a running test"));
    }

    #[test]
    fn versions_are_written_as_nccl_does() {
        assert_eq!(Version(22_809).to_string(), "2.28.9");
        assert_eq!(Version(23_007).to_string(), "2.30.7");
    }
}
