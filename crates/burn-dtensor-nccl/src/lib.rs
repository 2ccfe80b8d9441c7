//! NCCL, loaded at run time: the functions that the NCCL data plane of
//! [burn-dtensor](https://docs.rs/burn-dtensor) calls. Neither CUDA nor NCCL is needed to build a
//! program with it.
//!
//! [`NcclLibrary::load`] looks for the library, checks its version, and returns a table of
//! functions. Its methods are NCCL's functions with the same arguments, but they return errors.
//!
//! ```no_run
//! use std::ptr;
//!
//! use burn_dtensor_nccl::{NcclLibrary, Progress, RedOp, nonblocking_config, sys::ncclDataType_t};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Fails with the names and paths that were tried where NCCL is not installed.
//! let nccl = NcclLibrary::load()?;
//! println!("NCCL {} from {}", nccl.version(), nccl.path().display());
//!
//! // The sum over a communicator of one rank, on the current CUDA device.
//! let id = nccl.unique_id()?;
//! let bytes = 1024 * size_of::<f32>();
//! let memory = nccl.mem_alloc(bytes)?;
//! let mut comm = ptr::null_mut();
//! // SAFETY: the communicator and its memory are freed only when no call uses them. The memory has
//! // room for the elements, and all calls are made by this thread.
//! unsafe {
//!     let mut progress =
//!         nccl.comm_init_rank_config(&mut comm, 1, id, 0, &mut nonblocking_config())?;
//!     while progress == Progress::InProgress {
//!         progress = nccl.comm_async_error(comm)?;
//!     }
//!     let float = ncclDataType_t::ncclFloat32;
//!     progress = nccl.all_reduce(memory, memory, 1024, float, RedOp::SUM, comm, ptr::null_mut())?;
//!     while progress == Progress::InProgress {
//!         progress = nccl.comm_async_error(comm)?;
//!     }
//!     // .. wait for the stream ..
//!     nccl.comm_destroy(comm)?;
//!     nccl.mem_free(memory)?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The types are those of [`sys`], cudarc's bindings. cudarc's own functions are not used: they do
//! not find `libnccl.so.2`, the name under which NCCL is installed for running programs, and panic
//! if a function is missing. [`ResultCode`] and [`RedOp`] replace the enums `ncclResult_t` and
//! `ncclRedOp_t`, which cannot hold all values that a library returns.
//!
//! | file | content |
//! |---|---|
//! | `search` | names and paths of the library |
//! | `library` | loading, and the check of the version |
//! | `functions` | the table: names, signatures, and the versions that introduced them |
//! | `calls` | a method for each function |
//! | `types`, `version`, `error` | arguments, results and errors |
#![warn(missing_docs)]

mod calls;
mod error;
mod functions;
mod library;
mod search;
mod types;
mod version;

#[doc(no_inline)]
pub use cudarc::nccl::sys;

pub use error::{FailedCandidate, LoadError, NcclError};
pub use functions::{FUNCTIONS, FunctionSignature};
pub use library::NcclLibrary;
pub use search::{LIBRARY_VARIABLE, candidates};
pub use types::{
    NCCL_SHRINK_ABORT, NCCL_SHRINK_DEFAULT, NCCL_SPLIT_NOCOLOR, NCCL_WIN_COLL_SYMMETRIC,
    NCCL_WIN_DEFAULT, Progress, RedOp, ResultCode, nonblocking_config,
};
pub use version::{MINIMUM_VERSION, Version};
