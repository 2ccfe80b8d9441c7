//! The table of functions. A row is the version of NCCL that introduced a function, and its
//! signature; the rest is derived from it.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use cudarc::nccl::sys::{
    cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclScalarResidence_t, ncclUniqueId,
    ncclWindow_t,
};
use libloading::Library;

use crate::error::LoadError;
use crate::types::{RedOp, ResultCode};
use crate::version::Version;

/// A function of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionSignature {
    /// Name of the symbol.
    pub name: &'static str,
    /// First public release of NCCL whose `nccl.h` declares the function. 2.3.5 also stands for the
    /// releases before it.
    pub since: Version,
    /// True if a library without the function is not loaded. If it is false, only calls of the
    /// function fail, with [`NcclError::Unavailable`](crate::NcclError::Unavailable).
    pub is_required: bool,
    /// Rust types of the parameters.
    pub parameters: &'static [&'static str],
    /// Rust type of the result.
    pub result: &'static str,
}

/// Defines [`FUNCTIONS`] and [`Functions`]. Each row begins with the version that introduced the
/// function. The function that returns the version is called before the others are looked up, so
/// it has only a type.
macro_rules! functions {
    (
        $version_function:ident {
            ($($version_since:literal),+) $version_name:ident($($version_parameter:ident: $version_type:ty),*) -> $version_result:ty;
        }
        required {
            $(($($since:literal),+) $name:ident($($parameter:ident: $type:ty),* $(,)?) -> $result:ty;)*
        }
        optional {
            $(($($opt_since:literal),+) $opt_name:ident($($opt_parameter:ident: $opt_type:ty),* $(,)?) -> $opt_result:ty;)*
        }
    ) => {
        /// Functions of NCCL that are used.
        pub const FUNCTIONS: &[FunctionSignature] = &[
            signature!(true, ($($version_since),+) $version_name($($version_type),*) -> $version_result),
            $(signature!(true, ($($since),+) $name($($type),*) -> $result),)*
            $(signature!(false, ($($opt_since),+) $opt_name($($opt_type),*) -> $opt_result),)*
        ];

        /// Type of the function that returns the library's version.
        pub(crate) type $version_function =
            unsafe extern "C" fn($($version_parameter: $version_type),*) -> $version_result;

        /// Pointers to the other functions of a loaded library. Optional functions are `None` if
        /// the library lacks them.
        #[expect(non_snake_case, reason = "names of NCCL")]
        pub(crate) struct Functions {
            $(pub $name: unsafe extern "C" fn($($parameter: $type),*) -> $result,)*
            $(pub $opt_name: Option<unsafe extern "C" fn($($opt_parameter: $opt_type),*) -> $opt_result>,)*
        }

        impl Functions {
            /// Looks the functions up in a library of the version `found`.
            ///
            /// # Safety
            /// The library must be NCCL, or have functions of the same types, and must not be
            /// unloaded while a function is called.
            pub unsafe fn look_up(
                library: &Library,
                path: &Path,
                found: Version,
            ) -> Result<Self, LoadError> {
                // SAFETY: guaranteed by the caller; the types are those of the fields.
                unsafe {
                    Ok(Self {
                        $($name: symbol(library, path, stringify!($name), Some(found))?,)*
                        $($opt_name: symbol(library, path, stringify!($opt_name), Some(found)).ok(),)*
                    })
                }
            }
        }
    };
}

/// A row of [`FUNCTIONS`].
macro_rules! signature {
    ($is_required:literal, ($($since:literal),+) $name:ident($($type:ty),*) -> $result:ty) => {
        FunctionSignature {
            name: stringify!($name),
            since: Version::new($($since),+),
            is_required: $is_required,
            parameters: &[$(stringify!($type)),*],
            result: stringify!($result),
        }
    };
}

functions! {
    GetVersion {
        (2, 3, 5) ncclGetVersion(version: *mut c_int) -> ResultCode;
    }
    required {
        (2, 3, 5) ncclGetUniqueId(id: *mut ncclUniqueId) -> ResultCode;
        (2, 14, 3) ncclCommInitRankConfig(
            comm: *mut ncclComm_t,
            ranks: c_int,
            id: ncclUniqueId,
            rank: c_int,
            config: *mut ncclConfig_t,
        ) -> ResultCode;
        (2, 18, 1) ncclCommSplit(
            comm: ncclComm_t,
            color: c_int,
            key: c_int,
            new: *mut ncclComm_t,
            config: *mut ncclConfig_t,
        ) -> ResultCode;
        (2, 14, 3) ncclCommFinalize(comm: ncclComm_t) -> ResultCode;
        (2, 3, 5) ncclCommDestroy(comm: ncclComm_t) -> ResultCode;
        (2, 4, 2) ncclCommAbort(comm: ncclComm_t) -> ResultCode;
        (2, 4, 2) ncclCommGetAsyncError(comm: ncclComm_t, state: *mut ResultCode) -> ResultCode;
        (2, 3, 5) ncclGetErrorString(code: ResultCode) -> *const c_char;
        (2, 13, 4) ncclGetLastError(comm: ncclComm_t) -> *const c_char;
        (2, 19, 1) ncclMemAlloc(memory: *mut *mut c_void, bytes: usize) -> ResultCode;
        (2, 19, 1) ncclMemFree(memory: *mut c_void) -> ResultCode;
        (2, 19, 1) ncclCommRegister(
            comm: ncclComm_t,
            buffer: *mut c_void,
            bytes: usize,
            handle: *mut *mut c_void,
        ) -> ResultCode;
        (2, 19, 1) ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ResultCode;
        (2, 3, 5) ncclGroupStart() -> ResultCode;
        (2, 3, 5) ncclGroupEnd() -> ResultCode;
        (2, 3, 5) ncclAllReduce(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            datatype: ncclDataType_t,
            op: RedOp,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ResultCode;
        (2, 3, 5) ncclReduceScatter(
            send: *const c_void,
            recv: *mut c_void,
            recv_count: usize,
            datatype: ncclDataType_t,
            op: RedOp,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ResultCode;
        (2, 3, 5) ncclAllGather(
            send: *const c_void,
            recv: *mut c_void,
            send_count: usize,
            datatype: ncclDataType_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ResultCode;
        (2, 3, 5) ncclBroadcast(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ResultCode;
        (2, 7, 3) ncclSend(
            send: *const c_void,
            count: usize,
            datatype: ncclDataType_t,
            peer: c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ResultCode;
        (2, 7, 3) ncclRecv(
            recv: *mut c_void,
            count: usize,
            datatype: ncclDataType_t,
            peer: c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ResultCode;
        (2, 11, 4) ncclRedOpCreatePreMulSum(
            op: *mut RedOp,
            scalar: *mut c_void,
            datatype: ncclDataType_t,
            residence: ncclScalarResidence_t,
            comm: ncclComm_t,
        ) -> ResultCode;
        (2, 11, 4) ncclRedOpDestroy(op: RedOp, comm: ncclComm_t) -> ResultCode;
    }
    optional {
        (2, 27, 3) ncclCommShrink(
            comm: ncclComm_t,
            excluded: *mut c_int,
            excluded_count: c_int,
            new: *mut ncclComm_t,
            config: *mut ncclConfig_t,
            flags: c_int,
        ) -> ResultCode;
        (2, 28, 7) ncclCommRevoke(comm: ncclComm_t, flags: c_int) -> ResultCode;
        (2, 27, 3) ncclCommWindowRegister(
            comm: ncclComm_t,
            buffer: *mut c_void,
            bytes: usize,
            window: *mut ncclWindow_t,
            flags: c_int,
        ) -> ResultCode;
        (2, 27, 3) ncclCommWindowDeregister(comm: ncclComm_t, window: ncclWindow_t) -> ResultCode;
    }
}

/// Looks up a function of [`FUNCTIONS`]. `found` is the version of the library, if it is known yet.
///
/// # Safety
/// The function must have the type `F`, and the library must not be unloaded while it is called.
pub(crate) unsafe fn symbol<F: Copy>(
    library: &Library,
    path: &Path,
    name: &'static str,
    found: Option<Version>,
) -> Result<F, LoadError> {
    // SAFETY: guaranteed by the caller.
    match unsafe { library.get::<F>(name.as_bytes()) } {
        Ok(symbol) => Ok(*symbol),
        Err(_) => Err(LoadError::MissingSymbol {
            path: path.to_owned(),
            name,
            since: since(name),
            found,
        }),
    }
}

/// Returns the version that introduced a function of [`FUNCTIONS`].
pub(crate) fn since(name: &str) -> Version {
    let function = FUNCTIONS.iter().find(|function| function.name == name);
    function.expect("the table has all functions").since
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::version::MINIMUM_VERSION;

    #[test]
    fn every_accepted_version_has_the_required_functions() {
        for function in FUNCTIONS.iter().filter(|function| function.is_required) {
            assert!(function.since <= MINIMUM_VERSION, "{}", function.name);
        }
    }
}
