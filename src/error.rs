//! Error type of the crate: one typed value for set-up, communication and I/O.
//!
//! Each module defines the errors that it returns, and [`Error`] wraps them. Tensor operations
//! panic, as burn's own do. If such a panic carries an [`Error`], as after a failed collective
//! inside a backward pass, [`launch`](crate::comm::launch) turns it back into the typed value.

use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::store::RecordError;

use crate::checkpoint::CheckpointError;
use crate::comm::flight::FlightError;
use crate::comm::{CommError, LaunchError, StartError};
use crate::data::DataError;
use crate::dtensor::DTensorError;
use crate::fsdp::FsdpError;
use crate::mesh::MeshError;
use crate::optim::OptimError;
use crate::parallel::ParallelError;
use crate::param::ParamError;
use crate::placement::PlacementError;
#[cfg(feature = "store")]
use crate::pretrained::PretrainedError;
use crate::replicate::JoinError;
#[cfg(feature = "train")]
use crate::train::TrainError;

/// Result with the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Any error of this crate. The message names the rank at fault and the remedy.
///
/// The `Debug` form is the message, so that a `main` that returns the error prints the report.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed: a rank panicked, returned early, made a different call or was late.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The processes started by a launcher could not be connected.
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
    /// A dataset cannot be divided among ranks and batches.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A parameter could not be distributed, or was read in a way that does not fit how it is
    /// distributed.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// A module could not be sharded or gathered, or a training step on it failed.
    #[error(transparent)]
    Fsdp(#[from] FsdpError),
    /// A model could not be parallelized.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// Ranks with different numbers of batches could not be joined.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// An optimizer could not step a parameter, or its state could not be saved or loaded.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A checkpoint was not saved or loaded.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Weights in the format of another framework were not loaded or written.
    #[cfg(feature = "store")]
    #[error(transparent)]
    Pretrained(#[from] PretrainedError),
    /// A training on several ranks failed.
    #[cfg(feature = "train")]
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A [`launch`](crate::comm::launch) nested in the program failed.
    #[error(transparent)]
    Launch(Box<LaunchError>),
    /// An error of the program itself, passed through [`launch`](crate::comm::launch). It keeps its
    /// message and its sources, and `downcast_ref` returns it as its original type.
    #[error(transparent)]
    Other(Arc<dyn std::error::Error + Send + Sync>),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Launch(error) => fmt::Debug::fmt(error, f),
            _ => fmt::Display::fmt(self, f),
        }
    }
}

impl Error {
    /// Wraps an error of another type, or a text.
    ///
    /// Inside `launch`, `?` converts texts, boxed errors, I/O errors, parse errors, burn's record
    /// and tensor data errors and, with the feature `anyhow`, `anyhow::Error`. Convert all other
    /// errors with `.map_err(Error::other)?`.
    ///
    /// ```
    /// use burn_dtensor::prelude::*;
    ///
    /// fn steps(text: &str) -> Result<usize> {
    ///     match text.parse::<usize>()? {
    ///         0 => Err(Error::other("train for at least one step")),
    ///         steps => Ok(steps),
    ///     }
    /// }
    ///
    /// assert_eq!(steps("100")?, 100);
    /// assert_eq!(steps("0").unwrap_err().to_string(), "train for at least one step");
    /// assert_eq!(steps("ten").unwrap_err().to_string(), "invalid digit found in string");
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Other(error.into().into())
    }

    /// Returns true if another process prints this error, so that this process should not.
    ///
    /// If the ranks of a [`launch`](crate::comm::launch) run in several processes, a failure is
    /// returned in every process, with the same report of all ranks. Process 0 should print it.
    /// [`StartError::Uneven`] is treated in the same way.
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
    ///     launch(Launch::from_env(2)?, |world| world.barrier("start"))?;
    ///     Ok(())
    /// }
    /// ```
    pub fn is_reported_by_other_process(&self) -> bool {
        match self {
            Self::Launch(error) => error.is_reported_by_other_process,
            // The processes are already connected, so a process that exits waits for process 0,
            // which has the same error.
            Self::Start(StartError::Uneven { here, .. }) => *here > 0,
            _ => false,
        }
    }

    /// Runs `program` and returns its result, or the error with which it [unwound](Self::unwind). A
    /// rank uses it to continue after a collective failed in its forward or backward pass (see
    /// [`World::shrink`](crate::comm::World::shrink)). Any other panic keeps unwinding.
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
    /// The error that `program` returns or unwinds with.
    pub fn catch<T>(program: impl FnOnce() -> Result<T>) -> Result<T> {
        match catch_unwind(AssertUnwindSafe(program)) {
            Ok(result) => result,
            Err(payload) => {
                let error =
                    crate::comm::error_behind(&*payload).unwrap_or_else(|| resume_unwind(payload));
                crate::comm::forget_panic();
                Err(error)
            }
        }
    }

    /// Unwinds the calling rank with this error, without running the panic hook.
    ///
    /// It is for code that cannot return a `Result`, such as the value of a parameter or a step of
    /// backward. [`launch`](crate::comm::launch) catches the error and reports it as a typed value,
    /// with the line that called [`unwind`](Self::unwind) or an operator. On a thread that does not
    /// run a rank's program the error would not be caught: it becomes a panic with the error's
    /// text.
    #[track_caller]
    pub fn unwind(self) -> ! {
        if crate::comm::is_rank() {
            let own_files = file!().trim_end_matches("error.rs");
            // A line of this crate, as in a step of backward, means nothing to the author of the
            // program.
            crate::comm::note_unwinding(
                Some(Location::caller()).filter(|at| !at.file().starts_with(own_files)),
            );
            resume_unwind(Box::new(self));
        }
        panic!("{self}")
    }
}

/// Returns the value of a `Result`, or unwinds the calling rank with its error.
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

/// Implements the conversion by `?` from error types of other crates.
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
    String,
    Box<dyn std::error::Error + Send + Sync>,
    std::io::Error,
    std::num::ParseIntError,
    std::num::ParseFloatError,
    burn::tensor::DataError,
    burn::tensor::TensorReadError,
);
#[cfg(feature = "anyhow")]
entering!(anyhow::Error);

/// If a model and a record disagree in the way that a sharded model and a full one do, the text
/// says how to save or load instead.
impl From<RecordError> for Error {
    fn from(error: RecordError) -> Self {
        Self::other(match error {
            RecordError::Validation(text) => RecordError::Validation(match record_remedy(&text) {
                Some(remedy) => format!("{text}. {remedy}"),
                None => text,
            }),
            error => error,
        })
    }
}

const FULL_RECORD: &str = "If this model is sharded: load a record of the full model before `fully_shard` and \
                           `parallelize`, which then distribute its values. A record of shards loads only on a rank \
                           with the same shards";
const RECORD_OF_SHARDS: &str = "If the record was taken from a sharded model, it has the shards of one rank. Save the \
                                full model instead: `full_model(&model)?.into_record()`";

/// Returns the remedy for an error of loading a record with this text, which is burn's, if one of
/// model and record seems to be sharded and the other full. Such a pair differs in the lengths of a
/// dimension, all in the same direction, or in the markers of the shards.
pub(crate) fn record_remedy(text: &str) -> Option<&'static str> {
    if text.contains(".distributed.part [") {
        return [("Missing", FULL_RECORD), ("Unused", RECORD_OF_SHARDS)]
            .into_iter()
            .find_map(|(what, remedy)| text.contains(what).then_some(remedy));
    }
    let (_, mismatch) = text.split_once("hape mismatch")?;
    let mut shapes = mismatch.split('[').skip(1).map_while(|rest| {
        let lengths = rest
            .split_once(']')?
            .0
            .split(',')
            .map(|length| length.trim().parse::<usize>());
        lengths.collect::<std::result::Result<Vec<_>, _>>().ok()
    });
    let model = shapes.next()?;
    let record = shapes.next()?;
    let is_within = |inner: &[usize], outer: &[usize]| {
        inner.iter().zip(outer).all(|(inner, outer)| inner <= outer)
    };
    match model.len() == record.len() && model != record {
        true if is_within(&model, &record) => Some(FULL_RECORD),
        true if is_within(&record, &model) => Some(RECORD_OF_SHARDS),
        _ => None,
    }
}
