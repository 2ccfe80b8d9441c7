//! Files of flight recorders, one per rank and launch, for example `launch-0-rank-3.flight`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::identity::Identity;
use super::layout::WORDS;
use super::words::{WORD, Words};
use crate::comm::StartError;

/// Returns the path of a rank's file.
pub(super) fn path(folder: &Path, launch: u64, rank: usize) -> PathBuf {
    folder.join(format!("launch-{launch}-rank-{rank}.flight"))
}

/// Returns true if a file has the extension of flight files.
pub(super) fn is_flight(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "flight")
}

/// Creates the file of a rank, and its folder if necessary, and maps the file.
pub(super) fn create(folder: &Path, identity: &Identity) -> Result<Words, StartError> {
    let path = path(folder, identity.launch, identity.rank);
    let made = fs::create_dir_all(folder).and_then(|()| zeros(&path)).and_then(|file| Words::in_file(&file, WORDS));
    made.map_err(|error| StartError::Flight { rank: identity.rank, path, problem: error.to_string() })
}

/// Creates a file of zeros. An existing file of this name is only unlinked, because the process of another run may
/// still write it.
fn zeros(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    // The zeros are written, instead of only setting the size, so that a full disk causes an error here and not a
    // signal later.
    file.write_all(&vec![0; WORDS * WORD])?;
    Ok(file)
}
