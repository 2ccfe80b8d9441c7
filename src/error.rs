//! The crate's error: one typed value for set-up, communication and I/O.
//!
//! Each room owns the variants it raises; [`Error`] only gathers them. Tensor operations panic
//! like burn's own do; where such a panic carries an [`Error`] (a collective failing inside a
//! backward pass), [`launch`](crate::comm::launch) turns it back into the typed value.

use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::comm::flight::FlightError;
use crate::comm::{CommError, LaunchError, StartError};
use crate::dtensor::DTensorError;
use crate::fsdp::FsdpError;
use crate::mesh::MeshError;
use crate::optim::OptimError;
use crate::parallel::ParallelError;
use crate::param::ParamError;
use crate::placement::PlacementError;

/// Shorthand for results carrying the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, on every rank, with the culprit and the remedy in the message.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed: a rank panicked, left early, disagreed or was late.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// Processes that a launcher has started could not be connected.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Flight files could not be read.
    #[error(transparent)]
    Flight(#[from] FlightError),
    /// A mesh could not be built or sliced.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A placement does not fit its tensor or mesh.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// A distributed tensor was built or redistributed wrongly.
    #[error(transparent)]
    DTensor(#[from] DTensorError),
    /// A parameter could not be distributed, or read as what it is not.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// A module could not be sharded, gathered or stepped.
    #[error(transparent)]
    Fsdp(#[from] FsdpError),
    /// A model could not be parallelized.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// An optimizer could not step a parameter, or its state not be taken or loaded.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A [`launch`](crate::comm::launch) inside the program failed.
    #[error(transparent)]
    Launch(Box<LaunchError>),
    /// The program's own error, carried through [`launch`](crate::comm::launch): with its text and
    /// its sources, and for `downcast_ref` as what it was.
    #[error(transparent)]
    Other(Arc<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Wraps any error of the program's own, or a text.
    ///
    /// Inside `launch`, `?` does so by itself for boxed errors, I/O, parsing, burn's records and tensor
    /// data, and, with the feature `anyhow`, for `anyhow::Error`; all others enter by
    /// `.map_err(Error::other)?`.
    ///
    /// ```
    /// use burn_dtensor::prelude::*;
    ///
    /// fn steps(text: &str) -> Result<usize> {
    ///     match text.parse::<usize>()? {
    ///         0 => Err(Error::other("train for a step at least")),
    ///         steps => Ok(steps),
    ///     }
    /// }
    ///
    /// assert_eq!(steps("100")?, 100);
    /// assert_eq!(steps("0").unwrap_err().to_string(), "train for a step at least");
    /// assert_eq!(steps("ten").unwrap_err().to_string(), "invalid digit found in string");
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(error.into().into())
    }

    /// Whether another process prints this error: where ranks are in several processes, a [`launch`](crate::comm::launch)
    /// that fails does so in each, with one report of all ranks, and process 0 is the one to print it. The same goes for
    /// [`StartError::Uneven`].
    ///
    /// ```
    /// use std::process::ExitCode;
    ///
    /// use burn_dtensor::prelude::*;
    ///
    /// fn main() -> ExitCode {
    ///     match train() {
    ///         Ok(()) => ExitCode::SUCCESS,
    ///         Err(error) => {
    ///             if !error.is_reported_by_other_process() {
    ///                 eprintln!("error: {error}");
    ///             }
    ///             ExitCode::FAILURE
    ///         }
    ///     }
    /// }
    ///
    /// fn train() -> Result<()> {
    ///     launch(Launch::from_env(2)?, |world| world.barrier("all are here"))?;
    ///     Ok(())
    /// }
    /// ```
    pub fn is_reported_by_other_process(&self) -> bool {
        match self {
            Self::Launch(error) => error.is_told_elsewhere,
            // The processes are connected: one that ends waits for process 0, which has the same.
            Self::Start(StartError::Uneven { here, .. }) => *here > 0,
            _ => false,
        }
    }

    /// What `program` returns, or [unwinds](Self::unwind) with: for a rank that is to go on after a failed collective in its
    /// forward or backward ([`World::shrink`](crate::comm::World::shrink)). A panic of another kind goes on unwinding.
    ///
    /// ```
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(1), |_| {
    ///     let caught = Error::catch(|| -> Result<()> { Error::other("in a backward step").unwind() });
    ///     assert_eq!(caught.unwrap_err().to_string(), "in a backward step");
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// What `program` returns or unwinds with.
    pub fn catch<T>(program: impl FnOnce() -> Result<T>) -> Result<T> {
        match catch_unwind(AssertUnwindSafe(program)) {
            Ok(result) => result,
            Err(payload) => Err(crate::comm::error_behind(&*payload).unwrap_or_else(|| resume_unwind(payload))),
        }
    }

    /// Unwinds the calling rank with this error, without running the panic hook.
    ///
    /// For places that cannot return a `Result` (a parameter's value, a backward step).
    /// [`launch`](crate::comm::launch) catches it and reports it as a typed value, with the line that
    /// [`unwind`](Self::unwind) or an operator was called in. On any other thread than
    /// that of a rank's program nobody would: there it is a panic with the error's text.
    #[track_caller]
    pub fn unwind(self) -> ! {
        if crate::comm::is_rank() {
            let own_files = file!().trim_end_matches("error.rs");
            // A line of this crate's, in a backward step, says nothing to the program's author.
            crate::comm::note_unwinding(Some(Location::caller()).filter(|at| !at.file().starts_with(own_files)));
            resume_unwind(Box::new(self));
        }
        panic!("{self}")
    }
}

/// The value, or the error unwound from where the caller is.
pub(crate) trait OrUnwind<T> {
    #[track_caller]
    fn or_unwind(self) -> T;
}

impl<T, E: Into<Error>> OrUnwind<T> for std::result::Result<T, E> {
    #[track_caller]
    fn or_unwind(self) -> T {
        match self {
            Ok(value) => value,
            Err(error) => error.into().unwind(),
        }
    }
}

impl From<LaunchError> for Error {
    fn from(error: LaunchError) -> Self {
        Self::Launch(Box::new(error))
    }
}

/// Errors that programs meet beside this crate's: they enter by `?`.
macro_rules! entering {
    ($($foreign:ty),+ $(,)?) => {$(
        impl From<$foreign> for Error {
            fn from(error: $foreign) -> Self {
                Self::other(error)
            }
        }
    )+};
}

entering!(
    Box<dyn std::error::Error + Send + Sync>,
    std::io::Error,
    std::num::ParseIntError,
    std::num::ParseFloatError,
    burn::store::RecordError,
    burn::tensor::DataError,
    burn::tensor::TensorReadError,
);
#[cfg(feature = "anyhow")]
entering!(anyhow::Error);
