//! Libraries that stand in for NCCL, compiled from `tests/stub.c`.

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};

use burn_dtensor_nccl::NcclLibrary;
use libloading::Library;

use super::{TESTS, shared_library};

/// Compiles a stub library named `name`, with macros of `tests/stub.c`, and returns its path. Each
/// test has a library of another name, since a library has one memory for all that load it.
pub fn stub(name: &str, macros: &[&str]) -> PathBuf {
    let source = Path::new(TESTS).join("stub.c");
    shared_library(name, "2.30.7", &source, macros)
}

/// A stub library, loaded as NCCL and by the test.
pub struct LoadedStub {
    pub nccl: NcclLibrary,
    library: Library,
}

impl LoadedStub {
    /// Compiles and loads a stub library.
    pub fn new(name: &str, macros: &[&str]) -> Self {
        let path = stub(name, macros);
        // SAFETY: the stub has the functions of NCCL, as the compiler has checked.
        unsafe {
            Self {
                nccl: NcclLibrary::load_from(std::slice::from_ref(&path)).expect("loaded"),
                library: Library::new(path).expect("loaded"),
            }
        }
    }

    /// Returns the calls since the last one of this function: names and arguments.
    pub fn take_calls(&self) -> Vec<String> {
        // SAFETY: the variable has this type, and no other thread uses it.
        unsafe {
            let calls: *mut c_char = *self.library.get(b"stub_calls").expect("a variable");
            let text = CStr::from_ptr(calls).to_str().expect("ASCII").to_owned();
            *calls = 0;
            text.lines().map(str::to_owned).collect()
        }
    }

    /// Sets what all functions return.
    pub fn set_answer(&self, code: c_int) {
        self.set("stub_answer", code);
    }

    /// Sets the state of all communicators.
    pub fn set_state(&self, code: c_int) {
        self.set("stub_state", code);
    }

    /// Sets the text of the last error.
    pub fn set_last_error(&self, text: &CStr) {
        let bytes = text.to_bytes_with_nul();
        assert!(bytes.len() <= 64);
        // SAFETY: the variable has 64 bytes, and no other thread uses it.
        unsafe {
            let variable: *mut u8 = *self.library.get(b"stub_last_error").expect("a variable");
            variable.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    fn set(&self, name: &str, value: c_int) {
        // SAFETY: the variables have this type, and no other thread uses them.
        unsafe {
            let variable: *mut c_int = *self.library.get(name.as_bytes()).expect("a variable");
            *variable = value;
        }
    }
}
