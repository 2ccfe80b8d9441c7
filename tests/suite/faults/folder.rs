//! [`Folder`]: where flight files lie until a test has looked at them.

use std::path::{Path, PathBuf};
use std::{env, fs, process};

/// A folder of flight files.
pub struct Folder {
    path: PathBuf,
    /// Whether it is gone when this is.
    is_ours: bool,
}

impl Folder {
    /// Of this process.
    pub fn here(name: &str) -> Self {
        Self {
            path: env::temp_dir().join(format!("burn-dtensor-faults-{}-{name}", process::id())),
            is_ours: true,
        }
    }

    /// Of all processes of a test, which removes it: there temporary files lie in a folder of the
    /// test's own.
    #[cfg(feature = "mpi")]
    pub fn of_all(name: &str) -> Self {
        Self {
            path: env::temp_dir().join(name),
            is_ours: false,
        }
    }

    pub fn path(&self) -> &Path {
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
