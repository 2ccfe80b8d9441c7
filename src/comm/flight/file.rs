//! Files of flight recorders: one for each rank of each launch, such as `launch-0-rank-3.flight`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::identity::Identity;
use super::layout::WORDS;
use super::words::{WORD, Words};
use crate::comm::StartError;

/// The path of a rank's file.
pub(super) fn path(folder: &Path, launch: u64, rank: usize) -> PathBuf {
    folder.join(format!("launch-{launch}-rank-{rank}.flight"))
}

/// Whether a file is called as these are.
pub(super) fn is_flight(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "flight")
}

/// Makes the file of a rank, and its folder.
pub(super) fn create(folder: &Path, identity: &Identity) -> Result<Words, StartError> {
    let path = path(folder, identity.launch, identity.rank);
    let made = fs::create_dir_all(folder).and_then(|()| zeros(&path)).and_then(|file| Words::in_file(&file, WORDS));
    made.map_err(|error| StartError::Flight { rank: identity.rank, path, problem: error.to_string() })
}

/// A new file of zeros. A file of that name is another run's, which may still write it: that keeps its own.
fn zeros(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    // Written, and not only sized: a full disk is an error now, and no signal later.
    file.write_all(&vec![0; WORDS * WORD])?;
    Ok(file)
}
