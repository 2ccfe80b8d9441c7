//! [`Folder`]: a temporary folder.

use std::path::PathBuf;
use std::{env, fs, process};

/// An empty folder of the operating system, removed on drop.
pub(in crate::checkpoint) struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("burn-dtensor-{name}-{}", process::id()));
        drop(fs::remove_dir_all(&path));
        fs::create_dir(&path).expect("a new folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}
