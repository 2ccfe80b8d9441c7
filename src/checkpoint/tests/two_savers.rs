//! Two jobs that save into one folder: one is stopped between each two of its calls of the file
//! system, and the other saves from its beginning to its end.

use std::fmt::{self, Debug, Formatter};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use itertools::Itertools;

use super::states::{RUN, is_saved, state};
use crate::checkpoint::fs::recorder::Recorder;
use crate::checkpoint::fs::{Entry, FileSystem, Links, ReadFile, WriteFile};
use crate::checkpoint::{CheckpointError, CheckpointManager};
use crate::mesh::DeviceMesh;
use crate::prelude::*;

/// A file system before one of whose calls another job saves.
#[derive(Clone)]
struct Stopped {
    fs: Recorder,
    /// Calls until then.
    left: Arc<AtomicUsize>,
    other: Arc<dyn Fn() + Send + Sync>,
}

impl Stopped {
    fn call(&self) -> &Recorder {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            (self.other)();
        }
        &self.fs
    }
}

impl Debug for Stopped {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "Stopped({:?})", self.left)
    }
}

impl FileSystem for Stopped {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        self.call().create_dir(dir)
    }

    fn is_dir(&self, path: &Path, links: Links) -> io::Result<bool> {
        self.call().is_dir(path, links)
    }

    fn create(&self, file: &Path) -> io::Result<Box<dyn WriteFile>> {
        Ok(Box::new(StoppedWriter {
            file: self.call().create(file)?,
            fs: self.clone(),
        }))
    }

    fn open(&self, file: &Path, links: Links) -> io::Result<Arc<dyn ReadFile>> {
        self.call().open(file, links)
    }

    fn identity(&self, dir: &Path) -> PathBuf {
        self.fs.identity(dir)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.call().list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call().rename(from, to)
    }

    fn remove_file(&self, file: &Path) -> io::Result<()> {
        self.call().remove_file(file)
    }

    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        self.call().remove_dir(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.call().sync_dir(dir)
    }
}

struct StoppedWriter {
    file: Box<dyn WriteFile>,
    fs: Stopped,
}

impl WriteFile for StoppedWriter {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.fs.call();
        self.file.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.fs.call();
        self.file.sync()
    }
}

/// Saves a step as a job of its own. Returns `None` if it is saved, or the error.
fn save(fs: Arc<dyn FileSystem>, step: u64, keep: usize) -> Option<CheckpointError> {
    let outcome = launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        let run = CheckpointManager::new_in(fs.clone(), RUN.into(), &mesh).with_keep(keep);
        match run.save(&state(&mesh, step, 0)?) {
            Ok(report) => {
                assert_eq!(report.not_removed, []);
                Ok(None)
            }
            Err(crate::Error::Checkpoint(error)) => Ok(Some(error)),
            Err(error) => Err(error),
        }
    });
    outcome.unwrap().remove(0).1
}

/// Checks that all complete checkpoints load, and returns their steps and that of the latest.
fn load(fs: &Recorder) -> (Vec<u64>, Option<u64>) {
    let loaded = launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        let run = CheckpointManager::new_in(Arc::new(fs.clone()), RUN.into(), &mesh);
        let steps = run.steps()?;
        for step in &steps {
            is_saved(&run.open(*step)?, &mesh, 1, *step).unwrap();
        }
        Ok((steps, run.latest()?.and_then(|latest| latest.step())))
    });
    loaded.unwrap().remove(0).1
}

#[test]
fn whenever_another_job_saves_what_returned_ok_loads_and_one_of_two_saves_of_a_step_is_ok() {
    let start = Recorder::new();
    assert_eq!(save(Arc::new(start.clone()), 1, usize::MAX), None);
    let mut stops = 0;
    let mut refused = 0;
    // The first job saves step 2.
    for (others_step, keep) in [2, 3].into_iter().cartesian_product([usize::MAX, 1]) {
        for call in 0.. {
            let fs = start.durable_copy();
            let others = Arc::new(parking_lot::Mutex::new(None));
            let other = {
                let (fs, others) = (fs.clone(), others.clone());
                move || {
                    let outcome = save(Arc::new(fs.clone()), others_step, keep);
                    *others.lock() = Some(outcome);
                }
            };
            let stopped = Stopped {
                fs: fs.clone(),
                left: Arc::new(AtomicUsize::new(call)),
                other: Arc::new(other),
            };
            let first = save(Arc::new(stopped), 2, keep);
            let Some(other) = others.lock().take() else {
                assert_eq!(first, None);
                break;
            };
            let context = format!(
                "step {others_step} and {keep} kept at call {call}: {first:?}, {other:?}; {fs:?}"
            );
            stops += 1;
            let exists = CheckpointError::Exists {
                path: Path::new(RUN).join("step-2"),
            };
            let later = CheckpointError::LaterStep {
                path: RUN.into(),
                step: 2,
                later: 3,
            };
            if others_step == 2 {
                assert!(
                    [&first, &other].into_iter().filter(|e| e.is_none()).count() == 1,
                    "{context}"
                );
                let lost = first.as_ref().or(other.as_ref());
                assert_eq!(lost, Some(&exists), "{context}");
            } else {
                assert_eq!(other, None, "{context}");
                assert!(first.is_none() || first == Some(later), "{context}");
            }
            refused += usize::from(first.is_some());
            let mut expected = vec![1];
            expected.extend((others_step == 2 || first.is_none()).then_some(2));
            expected.extend((others_step == 3).then_some(3));
            if keep == 1 {
                expected.drain(..expected.len() - 1);
            }
            for left in [fs.clone(), fs.lose_pending()] {
                let (steps, latest) = load(&left);
                assert_eq!(latest, expected.last().copied(), "{context}");
                // A job that was stopped while it removed may leave what the other then has.
                assert_eq!(steps, expected, "{context}");
            }
            let names = fs.list(Path::new(RUN)).unwrap();
            assert!(
                names.iter().all(|entry| !entry.name.contains('.')),
                "{context}"
            );
        }
    }
    assert!(
        stops > 100 && refused > 50,
        "{stops} stops, {refused} refused"
    );
    println!("{stops} stops, and {refused} saves refused");
}
