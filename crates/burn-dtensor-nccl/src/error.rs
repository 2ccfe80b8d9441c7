//! Errors of loading NCCL, and of its calls.

use std::path::PathBuf;

use crate::search::LIBRARY_VARIABLE;
use crate::types::ResultCode;
use crate::version::{MINIMUM_VERSION, Version};

/// NCCL could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No candidate could be loaded.
    #[error(
        "no NCCL library could be loaded: {}. Install NCCL {MINIMUM_VERSION} or later, for example the Python package `nvidia-nccl-cu13`, or set the environment variable {LIBRARY_VARIABLE} to the path of `libnccl.so.2`",
        list(tried)
    )]
    NotFound {
        /// All candidates, in the order in which they were tried.
        tried: Vec<FailedCandidate>,
    },
    /// The library has no function of this name.
    #[error(
        "{} {} has no function `{name}`, which NCCL has since {since}. Set the environment variable {LIBRARY_VARIABLE} to the path of a complete NCCL {MINIMUM_VERSION} or later",
        path.display(),
        found.map_or("(version unknown)".to_owned(), |found| format!("(version {found})"))
    )]
    MissingSymbol {
        /// Name or path by which the library was loaded.
        path: PathBuf,
        /// Name of the function.
        name: &'static str,
        /// First version of NCCL that has the function.
        since: Version,
        /// Version of the library. `None` if the function that returns it is missing.
        found: Option<Version>,
    },
    /// The library is too old.
    #[error(
        "{} is NCCL {found}, but {needed} or later is needed. Install a later version, or set the environment variable {LIBRARY_VARIABLE} to its path",
        path.display()
    )]
    TooOld {
        /// Name or path by which the library was loaded.
        path: PathBuf,
        /// Version of the library.
        found: Version,
        /// Oldest version that is accepted.
        needed: Version,
    },
    /// The library did not return its version.
    #[error(
        "`ncclGetVersion` of {} failed with {code}. Set the environment variable {LIBRARY_VARIABLE} to the path of another NCCL library",
        path.display()
    )]
    VersionFailed {
        /// Name or path by which the library was loaded.
        path: PathBuf,
        /// Value that the function returned.
        code: ResultCode,
    },
}

/// A library that could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedCandidate {
    /// Name or path of the library.
    pub path: PathBuf,
    /// Reason, in the words of the system's loader.
    pub message: String,
}

/// A call of NCCL failed. The code [`ResultCode::IN_PROGRESS`] is not an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The function returned an error.
    #[error("`{function}` failed with {code}: {last_error}. {DEBUG_REMEDY}")]
    Failed {
        /// Name of the function.
        function: &'static str,
        /// Value that the function returned.
        code: ResultCode,
        /// Text of the last error in this process (`ncclGetLastError`). If NCCL has recorded none,
        /// its description of the code.
        last_error: String,
    },
    /// An operation of the communicator failed in the background, after the call that started it.
    #[error("the communicator failed with {code}: {last_error}. {DEBUG_REMEDY}")]
    Asynchronous {
        /// State of the communicator (`ncclCommGetAsyncError`).
        code: ResultCode,
        /// Text of the last error, as in [`NcclError::Failed`].
        last_error: String,
    },
    /// The library lacks an optional function.
    #[error(
        "`{function}` is missing in {} (version {found}). Use NCCL {since} or later",
        path.display()
    )]
    Unavailable {
        /// Name of the function.
        function: &'static str,
        /// First version of NCCL that has the function.
        since: Version,
        /// Version of the library.
        found: Version,
        /// Name or path by which the library was loaded.
        path: PathBuf,
    },
}

/// Remedy for errors of which only NCCL knows the cause.
const DEBUG_REMEDY: &str =
    "Set the environment variable NCCL_DEBUG to WARN to see NCCL's own messages";

fn list(tried: &[FailedCandidate]) -> String {
    let mut text = String::new();
    for FailedCandidate { path, message } in tried {
        if !text.is_empty() {
            text.push_str("; ");
        }
        text.push_str(&format!("{} ({message})", path.display()));
    }
    text
}
