//! [`MpiError`]: a function of MPI failed.

use std::ffi::{CStr, c_char, c_int};

use mpi::ffi::{MPI_Error_string, MPI_MAX_ERROR_STRING};

use crate::comm::launcher::StartError;

/// A function of MPI failed.
#[derive(Debug, thiserror::Error)]
#[error("{call} failed: {text}")]
pub(super) struct MpiError {
    call: &'static str,
    text: String,
}

impl From<MpiError> for StartError {
    fn from(MpiError { call, text }: MpiError) -> Self {
        Self::Mpi { call, text }
    }
}

/// What the `code` of a call says.
pub(super) fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == 0 {
        return Ok(());
    }
    let mut text = [0 as c_char; MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: there is room for the longest text; what MPI leaves of it is zeros, which end it.
    let text = unsafe {
        MPI_Error_string(code, text.as_mut_ptr(), &mut length);
        *text.last_mut().expect("it has room") = 0;
        CStr::from_ptr(text.as_ptr())
    };
    let text = text.to_string_lossy().into_owned();
    Err(MpiError { call, text: if text.is_empty() { format!("code {code}") } else { text } })
}
