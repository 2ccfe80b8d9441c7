//! [`AsyncCheckpointer`]: saves behind training.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::panic::resume_unwind;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::region::Region;
use super::save::{FragmentBytes, Live, SavePlan};
use super::{CheckpointError, CheckpointManager, SaveReport, State};
use crate::Result;
use crate::comm::Communicator;

/// Saves checkpoints on a thread of each rank while training continues.
///
/// [`save`](Self::save) copies what this rank writes to host memory and returns. The memory is as large as the rank's part
/// of the checkpoint, and is used again for the next one. At most one checkpoint is being written.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::prelude::*;
/// use burn_dtensor::checkpoint::{AsyncCheckpointer, CheckpointManager, State};
///
/// # let folder = std::env::temp_dir().join(format!("checkpoint-async-{}", std::process::id()));
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let model = fully_shard(LinearConfig::new(4, 3).init(world.device()), &mesh, FullyShard::new())?;
///     let mut checkpointer = AsyncCheckpointer::new(CheckpointManager::new(&folder, &mesh))?;
///     for step in 1..=3 {
///         // .. a training step ..
///         checkpointer.save(&State::new(&mesh).with_step(step).with_model("model", &model)?)?;
///     }
///     checkpointer.finish()?;
///     assert_eq!(checkpointer.manager().steps()?, [1, 2, 3]);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Dropping it waits for the checkpoint that is being written, and logs its error as a warning.
#[derive(Debug)]
pub struct AsyncCheckpointer {
    manager: CheckpointManager,
    /// Calls of the writing threads have a sequence of their own.
    comm: Communicator,
    staging: Staging,
    writing: Option<JoinHandle<(Staging, Result<SaveReport>)>>,
}

/// What [`AsyncCheckpointer::save`] did before it returned.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AsyncSaveReport {
    /// Time for which it waited until the previous checkpoint was written.
    pub waited: Duration,
    /// Time in which it copied this rank's part.
    pub copied: Duration,
    /// Bytes of this rank's part.
    pub bytes: u64,
    /// The previous checkpoint, if it was written since the last call.
    pub previous: Option<SaveReport>,
}

impl fmt::Display for AsyncSaveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { waited, copied, bytes, .. } = self;
        write!(f, "{bytes} bytes copied in {copied:.1?}")?;
        match waited.is_zero() {
            true => Ok(()),
            false => write!(f, ", after {waited:.1?} of waiting for the previous checkpoint"),
        }
    }
}

impl AsyncCheckpointer {
    /// Creates a checkpointer that saves into the manager's folder. Create at most one for a mesh: the threads of a mesh
    /// share one sequence of calls. While it writes, save and remove checkpoints of its folder only through it.
    ///
    /// Local: no communication.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember) outside the mesh.
    pub fn new(manager: CheckpointManager) -> Result<Self> {
        manager.mesh().member("save a checkpoint")?;
        let comm = manager.mesh().all()?.duplicate("checkpoint");
        Ok(Self { manager, comm, staging: Staging::default(), writing: None })
    }

    /// Returns the manager.
    pub fn manager(&self) -> &CheckpointManager {
        &self.manager
    }

    /// Starts to save a checkpoint as [`CheckpointManager::save`] does, and returns once this rank's part is copied. If
    /// the previous one is still being written, it waits.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    ///
    /// # Errors
    /// The error of the previous checkpoint, on all ranks; then nothing is saved, and the next call starts from scratch. Those of
    /// [`save`](super::save) that are found before anything is written.
    pub fn save(&mut self, state: &State) -> Result<AsyncSaveReport> {
        let started = Instant::now();
        let is_behind = self.is_writing();
        let previous = self.finish()?;
        let waited = if is_behind { started.elapsed() } else { Duration::ZERO };
        let mut plan = SavePlan::new(state)?;
        // All ranks have this step, or none.
        let step = state.step().ok_or(CheckpointError::NoStep)?;
        let copying = Instant::now();
        let mut staging = std::mem::take(&mut self.staging);
        staging.fill(&plan, &mut Live::new(state));
        let (copied, bytes) = (copying.elapsed(), staging.bytes.len() as u64);
        plan.comm = self.comm.clone();
        let manager = self.manager.clone();
        let run = move || {
            let report = manager.write(&plan, &mut staging, step);
            (staging, report)
        };
        let thread = thread::Builder::new().name(format!("checkpoint {step}"));
        self.writing = Some(thread.spawn(run).map_err(crate::Error::other)?);
        Ok(AsyncSaveReport { waited, copied, bytes, previous })
    }

    /// Returns true while this rank's thread is writing. Local: no communication.
    pub fn is_writing(&self) -> bool {
        self.writing.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Waits until the last checkpoint is written, and returns its report; `None` if there is none since the last call.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// Those of [`save`](super::save).
    pub fn finish(&mut self) -> Result<Option<SaveReport>> {
        let Some(thread) = self.writing.take() else { return Ok(None) };
        let (staging, report) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        self.staging = staging;
        report.map(Some)
    }
}

impl Drop for AsyncCheckpointer {
    fn drop(&mut self) {
        if let Some(Ok((_, Err(error)))) = self.writing.take().map(JoinHandle::join) {
            log::warn!("the last checkpoint was not saved: {error}");
        }
    }
}

/// Copies of the fragments that a rank writes.
#[derive(Default)]
struct Staging {
    bytes: Vec<u8>,
    places: HashMap<(String, Region), Range<usize>>,
}

impl Staging {
    fn fill(&mut self, plan: &SavePlan, live: &mut Live<'_>) {
        self.bytes.clear();
        self.places.clear();
        for (key, region) in plan.fragments_of(plan.comm.group().rank()) {
            let begin = self.bytes.len();
            self.bytes.extend_from_slice(&live.bytes(key, region));
            self.places.insert((key.into(), region.clone()), begin..self.bytes.len());
        }
    }
}

impl FragmentBytes for Staging {
    fn bytes(&mut self, key: &str, region: &Region) -> Cow<'_, [u8]> {
        let place = &self.places[&(key.to_owned(), region.clone())];
        Cow::Borrowed(&self.bytes[place.clone()])
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staging({} bytes)", self.bytes.len())
    }
}
