//! [`AsyncCheckpointer`]: saves behind training.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::fragments::{FragmentBytes, LiveFragments};
use super::manager::InFlight;
use super::open_save::{Committed, OpenSave};
use super::region::Region;
use super::save_plan::{SavePlan, WrittenFile};
use super::{CheckpointError, CheckpointManager, SaveReport, State};
use crate::Result;
use crate::comm::agree_on_first;

/// Saves checkpoints on a thread of each rank while training continues.
///
/// [`save`](Self::save) copies what this rank writes to host memory and returns. The memory is as
/// large as the rank's part of the checkpoint, and is used again for the next one. At most one
/// checkpoint is being written.
///
/// The threads write files and do not communicate. [`poll`](Self::poll), the next `save` and
/// [`finish`](Self::finish) agree with the other ranks that all files are written: only then is the
/// checkpoint complete. Call `poll` after each step, or after some.
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
///     for step in 1..=30 {
///         // .. a training step ..
///         checkpointer.poll()?;
///         if step % 10 == 0 {
///             checkpointer.save(&State::new(&mesh).with_step(step).with_model("model", &model)?)?;
///         }
///     }
///     checkpointer.finish()?;
///     assert_eq!(checkpointer.manager().steps()?, [10, 20, 30]);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Dropping it waits for its thread. A checkpoint that is not complete by then is lost, about which
/// it warns.
#[derive(Debug)]
pub struct AsyncCheckpointer {
    manager: CheckpointManager,
    staging: Staging,
    writing: Option<Writing>,
}

/// A checkpoint that is being written.
struct Writing {
    save: Arc<OpenSave>,
    step: u64,
    stage: Stage,
    in_flight: InFlight,
}

enum Stage {
    /// Each rank writes its file.
    Files(Background<(Staging, Result<WrittenFile, CheckpointError>)>),
    /// Group rank 0 writes the manifest. Other ranks have no thread.
    Manifest(Option<Background<Result<Committed, CheckpointError>>>),
}

/// Report of [`AsyncCheckpointer::save`].
#[derive(Debug, Clone, PartialEq)]
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
        let Self {
            waited,
            copied,
            bytes,
            ..
        } = self;
        write!(f, "{bytes} bytes copied in {copied:.1?}")?;
        match waited.is_zero() {
            true => Ok(()),
            false => write!(
                f,
                ", after {waited:.1?} of waiting for the previous checkpoint"
            ),
        }
    }
}

impl AsyncCheckpointer {
    /// Creates a checkpointer that saves into the manager's folder. While it writes, no other
    /// checkpointer or manager of these ranks saves into the folder
    /// ([`CheckpointError::InFlight`]).
    ///
    /// Local: no communication.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember) outside the mesh.
    pub fn new(manager: CheckpointManager) -> Result<Self> {
        manager.mesh().member("save a checkpoint")?;
        Ok(Self {
            manager,
            staging: Staging::default(),
            writing: None,
        })
    }

    /// Returns the manager.
    pub fn manager(&self) -> &CheckpointManager {
        &self.manager
    }

    /// Starts to save a checkpoint as [`CheckpointManager::save`] does, and returns once this
    /// rank's part is copied. If the previous one is still being written, it waits.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    ///
    /// # Errors
    /// The error of the previous checkpoint, on all ranks; then nothing is saved, and the next call
    /// starts from scratch. Those of [`CheckpointManager::save`] that are found before anything is
    /// written.
    pub fn save(&mut self, state: &State) -> Result<AsyncSaveReport> {
        let started = Instant::now();
        let is_behind = self.is_writing();
        let previous = self.finish()?;
        let waited = if is_behind {
            started.elapsed()
        } else {
            Duration::ZERO
        };
        let (plan, step) = self.manager.plan(state)?;
        let fs = self.manager.fs().clone();
        let run = self.manager.step(step);
        let save = Arc::new(OpenSave::begin(
            &*fs,
            &self.manager.folder(step),
            plan,
            Some(&run),
        )?);
        let copying = Instant::now();
        let mut staging = std::mem::take(&mut self.staging);
        staging.fill(save.plan(), &mut LiveFragments::new(state));
        let copied = copying.elapsed();
        let bytes = staging.bytes.len() as u64;
        let write = {
            let save = save.clone();
            move || {
                let written = save.write_fragments(&*fs, &mut staging);
                (staging, written)
            }
        };
        let stage = Stage::Files(Background::spawn(step, write));
        let in_flight = self.manager.start(step);
        self.writing = Some(Writing {
            save,
            step,
            stage,
            in_flight,
        });
        Ok(AsyncSaveReport {
            waited,
            copied,
            bytes,
            previous,
        })
    }

    /// Returns true if a checkpoint is being written, as far as this rank knows. Local: no
    /// communication.
    pub fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    /// Completes the checkpoint that is being written if all files are, without waiting for a disk.
    /// Returns its report once it is complete; `None` before that, and if there is none.
    ///
    /// # Collective
    /// Every rank of the mesh. It communicates only while a checkpoint is being written.
    ///
    /// # Errors
    /// Those of [`save`](super::save), on all ranks.
    pub fn poll(&mut self) -> Result<Option<SaveReport>> {
        self.advance(false)
    }

    /// Waits until the checkpoint that is being written is complete, and returns its report; `None`
    /// if there is none.
    ///
    /// # Collective
    /// Every rank of the mesh. A rank waits for the files of the others at most for the launch's
    /// deadline.
    ///
    /// # Errors
    /// Those of [`save`](super::save), on all ranks.
    pub fn finish(&mut self) -> Result<Option<SaveReport>> {
        self.advance(true)
    }

    fn advance(&mut self, wait: bool) -> Result<Option<SaveReport>> {
        let Some(Writing {
            save,
            step,
            stage,
            in_flight,
        }) = self.writing.take()
        else {
            return Ok(None);
        };
        let comm = save.comm();
        let fs = self.manager.fs().clone();
        let manifest = match stage {
            Stage::Files(thread) => {
                let is_ready =
                    wait || !comm.any("checkpoint_files".into(), !thread.is_finished())?;
                if !is_ready {
                    self.writing = Some(Writing {
                        save,
                        step,
                        stage: Stage::Files(thread),
                        in_flight,
                    });
                    return Ok(None);
                }
                let (staging, own) = thread.join();
                self.staging = staging;
                let written = save.gather(&*fs, own)?;
                let commit = {
                    let save = save.clone();
                    let run = self.manager.step(step);
                    move || save.commit(&*fs, written, Some(&run))
                };
                (comm.group().rank() == 0).then(|| Background::spawn(step, commit))
            }
            Stage::Manifest(thread) => thread,
        };
        let is_busy = manifest
            .as_ref()
            .is_some_and(|thread| !thread.is_finished());
        if !wait && comm.any("checkpoint_manifest".into(), is_busy)? {
            self.writing = Some(Writing {
                save,
                step,
                stage: Stage::Manifest(manifest),
                in_flight,
            });
            return Ok(None);
        }
        let done = agree_on_first(comm, "checkpoint_commit", || {
            manifest.expect("group rank 0 has it").join()
        })?;
        Ok(Some(save.report(done)))
    }
}

impl Drop for AsyncCheckpointer {
    fn drop(&mut self) {
        let Some(Writing { step, .. }) = &self.writing else {
            return;
        };
        log::warn!(
            "the checkpoint of step {step} may not be complete: call `AsyncCheckpointer::finish` at the end of the training"
        );
    }
}

impl fmt::Debug for Writing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Writing(step {})", self.step)
    }
}

/// Work on a thread of its own, or done where the system gave no thread: other ranks count on it.
enum Background<T> {
    Thread(OwnThread<T>),
    Done(T),
}

/// A thread that has ended when this is dropped, also by an error of another rank: it writes into a
/// folder that the next save may replace.
struct OwnThread<T>(Option<JoinHandle<T>>);

impl<T> Drop for OwnThread<T> {
    fn drop(&mut self) {
        self.0
            .take()
            .into_iter()
            .for_each(|thread| drop(thread.join()));
    }
}

impl<T: Send + 'static> Background<T> {
    fn spawn(step: u64, run: impl FnOnce() -> T + Send + 'static) -> Self {
        Self::spawn_by(
            thread::Builder::new().name(format!("checkpoint {step}")),
            run,
        )
    }

    fn spawn_by(thread: thread::Builder, run: impl FnOnce() -> T + Send + 'static) -> Self {
        let run = Arc::new(Mutex::new(Some(run)));
        let take = |run: &Mutex<Option<_>>| run.lock().take().expect("it runs once");
        let shared = run.clone();
        match thread.spawn(move || take(&shared)()) {
            Ok(thread) => Self::Thread(OwnThread(Some(thread))),
            Err(_) => Self::Done(take(&run)()),
        }
    }

    fn is_finished(&self) -> bool {
        match self {
            Self::Thread(OwnThread(thread)) => thread.as_ref().is_none_or(JoinHandle::is_finished),
            Self::Done(_) => true,
        }
    }

    fn join(self) -> T {
        match self {
            Self::Thread(mut own) => {
                let thread = own.0.take().expect("it is joined once");
                thread.join().unwrap_or_else(|panic| resume_unwind(panic))
            }
            Self::Done(done) => done,
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
    fn fill(&mut self, plan: &SavePlan, live: &mut LiveFragments<'_>) {
        self.bytes.clear();
        self.places.clear();
        let rank = plan.comm.group().rank();
        self.bytes.reserve_exact(plan.bytes_of(rank));
        for (key, region) in plan.fragments_of(rank) {
            let begin = self.bytes.len();
            self.bytes.extend_from_slice(&live.bytes(key, region));
            self.places
                .insert((key.into(), region.clone()), begin..self.bytes.len());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_whose_thread_does_not_start_is_done_at_once() {
        // A stack that no system has memory for.
        let work = Background::spawn_by(thread::Builder::new().stack_size(1 << 60), || {
            thread::current().id()
        });
        assert!(work.is_finished());
        assert_eq!(work.join(), thread::current().id());
        let work = Background::spawn(3, || thread::current().name().map(str::to_owned));
        assert_eq!(work.join().as_deref(), Some("checkpoint 3"));
    }
}
