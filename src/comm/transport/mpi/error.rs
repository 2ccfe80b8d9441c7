//! [`MpiError`]: failure of an MPI function.

use std::ffi::{CStr, c_char, c_int};

use mpi::ffi::{MPI_Error_string, MPI_MAX_ERROR_STRING};

use crate::comm::launcher::StartError;

/// Failure of an MPI function, with MPI's description of it.
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

/// Converts the error code that `call` returned to a result.
pub(super) fn check(call: &'static str, code: c_int) -> Result<(), MpiError> {
    if code == 0 {
        return Ok(());
    }
    let mut text = [0 as c_char; MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    // SAFETY: the buffer has capacity for the longest text. MPI leaves the rest zero, which
    // terminates the string.
    let text = unsafe {
        MPI_Error_string(code, text.as_mut_ptr(), &mut length);
        *text.last_mut().expect("the buffer is not empty") = 0;
        CStr::from_ptr(text.as_ptr())
    };
    let text = text.to_string_lossy().into_owned();
    Err(MpiError {
        call,
        text: if text.is_empty() {
            format!("code {code}")
        } else {
            text
        },
    })
}
