//! [`NcclLibrary`]: the loaded library.

use std::env;
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{FailedCandidate, LoadError};
use crate::functions::{Functions, GetVersion, symbol};
use crate::search::candidates;
use crate::types::ResultCode;
use crate::version::{MINIMUM_VERSION, Version};

/// NCCL, loaded into this process. It is not unloaded when this value is dropped, because threads
/// of NCCL may still run its code.
///
/// # Threads
/// Several threads may share the value, but NCCL does not allow all of them to call it: at any time
/// at most one thread may use the communicators of a device, and the calls between
/// [`group_start`](Self::group_start) and [`group_end`](Self::group_end) must come from one thread.
///
/// # Safety
/// Methods that take pointers are unsafe. The caller guarantees for each call that
///
/// - communicators, windows, registrations and operators come from this library, and have not been
///   freed;
/// - until the stream has executed an operation, its `send` and `recv` are memory of the
///   communicator's device, of the size that the count implies, and no other code writes `send` or
///   accesses `recv`;
/// - `stream` is a stream of that device, or null for the default stream;
/// - the strings of a configuration remain valid as long as its communicator, which keeps the
///   pointer `commName`;
/// - the rule about threads is kept.
pub struct NcclLibrary {
    pub(crate) functions: Functions,
    path: PathBuf,
    version: Version,
}

impl NcclLibrary {
    /// Loads the first of the [`candidates`] for the environment of this process
    /// that can be loaded.
    ///
    /// # Errors
    /// Fails if there is none, or if the first one is older than [`MINIMUM_VERSION`] or lacks a
    /// required function. Candidates after that one are not tried.
    pub fn load() -> Result<Self, LoadError> {
        // SAFETY: the names are those of NCCL, and the variable is documented to name it.
        unsafe { Self::load_from(&candidates(|name| env::var_os(name))) }
    }

    /// Loads the first of `candidates` that can be loaded.
    ///
    /// # Errors
    /// Like [`load`](Self::load).
    ///
    /// # Safety
    /// The candidates must be NCCL, or have functions of the same types and contracts.
    pub unsafe fn load_from(candidates: &[PathBuf]) -> Result<Self, LoadError> {
        let mut tried = Vec::new();
        for path in candidates {
            // SAFETY: guaranteed by the caller.
            match unsafe { Library::new(path) } {
                // SAFETY: guaranteed by the caller.
                Ok(library) => return unsafe { Self::of_library(library, path) },
                Err(error) => tried.push(FailedCandidate {
                    path: path.clone(),
                    message: error.to_string(),
                }),
            }
        }
        Err(LoadError::NotFound { tried })
    }

    /// Asks for the version first: the types of the other functions are known for later versions
    /// only.
    ///
    /// # Safety
    /// As for [`load_from`](Self::load_from).
    unsafe fn of_library(library: Library, path: &Path) -> Result<Self, LoadError> {
        let library = ManuallyDrop::new(library);
        let mut code = 0;
        // SAFETY: guaranteed by the caller; all versions have the function, with the same type.
        let result = unsafe {
            let get_version: GetVersion = symbol(&library, path, "ncclGetVersion", None)?;
            get_version(&mut code)
        };
        if result != ResultCode::SUCCESS {
            return Err(LoadError::VersionFailed {
                path: path.to_owned(),
                code: result,
            });
        }
        let version = Version::from_code(code);
        if version < MINIMUM_VERSION {
            return Err(LoadError::TooOld {
                path: path.to_owned(),
                found: version,
                needed: MINIMUM_VERSION,
            });
        }
        Ok(Self {
            // SAFETY: guaranteed by the caller; the library is never unloaded.
            functions: unsafe { Functions::look_up(&library, path, version)? },
            path: path.to_owned(),
            version,
        })
    }

    /// Returns the name or path by which the library was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the library's version.
    pub fn version(&self) -> Version {
        self.version
    }
}

impl fmt::Debug for NcclLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclLibrary")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
