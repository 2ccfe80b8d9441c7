//! In `comm`, only the data planes of the backends and the file that picks one know for which
//! backends the crate is built.

use std::fs;
use std::path::{Path, PathBuf};

/// The features that enable backends.
const BACKENDS: [&str; 4] = ["flex", "cube", "wgpu", "cuda"];

/// Folders of the planes, the file that picks one, and those that use what a plane has.
const ALLOWED: [&str; 5] = [
    "data/host",
    "data/device",
    "data/mod.rs",
    "data/cuda_devices.rs",
    "data/nccl/rows.rs",
];

/// Returns the files of a folder and of those inside it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the folder exists");
    let paths = entries.map(|entry| entry.expect("a readable folder").path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => files(&path),
            false => vec![path],
        })
        .collect()
}

/// Returns the lines of `text` that depend on the feature of a backend.
fn lines_of_backends(text: &str) -> Vec<&str> {
    let names_one = |line: &&str| {
        let mut names = BACKENDS.iter();
        names.any(|name| line.contains(&format!("feature = \"{name}\"")))
    };
    text.lines().filter(names_one).collect()
}

#[test]
fn only_the_data_planes_know_the_backends() {
    let comm = crate::root().join("src/comm");
    let is_allowed = |path: &PathBuf| {
        let mut allowed = ALLOWED.iter();
        allowed.any(|place| path.starts_with(comm.join(place)))
    };
    let all = files(&comm);
    assert!(all.iter().any(is_allowed), "the planes exist");
    for path in all.iter().filter(|path| !is_allowed(path)) {
        let text = fs::read_to_string(path).expect("a text");
        let lines = lines_of_backends(&text);
        assert!(lines.is_empty(), "{}: {lines:?}", path.display());
    }
    // The test would find one.
    let text = "a\n    #[cfg(all(test, feature = \"cube\"))]\n#[cfg(feature = \"mpi\")]\n";
    assert_eq!(lines_of_backends(text).len(), 1);
}
