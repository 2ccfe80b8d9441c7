//! [`Folder`]: where a test saves its checkpoints.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::{env, fs, process};

/// A new folder for checkpoints, removed when the test is over.
pub struct Folder {
    path: PathBuf,
    is_ours: bool,
}

impl Folder {
    /// Creates a folder of this process.
    pub fn new(name: &str) -> Self {
        let path =
            env::temp_dir().join(format!("burn-dtensor-checkpoint-{}-{name}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Self {
            path,
            is_ours: true,
        }
    }

    /// Returns the folder of all processes of a test, whose temporary files are in a folder that
    /// the test removes.
    #[cfg(feature = "mpi")]
    pub fn of_all(name: &str) -> Self {
        Self {
            path: env::temp_dir().join(name),
            is_ours: false,
        }
    }

    /// Returns every file below by its path in the folder, with its contents.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        files(&self.path)
            .into_iter()
            .map(|file| (file.clone(), fs::read(file).unwrap()))
            .collect()
    }
}

fn files(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .flat_map(|entry| {
            if entry.is_dir() {
                files(&entry)
            } else {
                vec![entry]
            }
        })
        .collect()
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.is_ours {
            drop(fs::remove_dir_all(&self.path));
        }
    }
}
