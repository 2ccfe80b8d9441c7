//! Names and paths by which NCCL is looked for.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Environment variable that contains the path of the library. If it is set, no other library is
/// tried.
pub const LIBRARY_VARIABLE: &str = "BURN_DTENSOR_NCCL";

/// Path in a directory of Python packages at which pip installs NCCL.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// Returns the names and paths of the library in the order in which they are tried, where
/// `variable` returns the value of an environment variable:
///
/// 1. the value of [`BURN_DTENSOR_NCCL`](LIBRARY_VARIABLE), and then nothing else;
/// 2. `libnccl.so.2`, the name that installations for running programs have, and `libnccl.so`,
///    which those for developing have in addition: the system's loader searches for them;
/// 3. `nvidia/nccl/lib/libnccl.so.2` in the Python packages of `VIRTUAL_ENV` and `CONDA_PREFIX`,
///    and in the directories of `PYTHONPATH`.
pub fn candidates(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    if let Some(library) = value(&variable, LIBRARY_VARIABLE) {
        return vec![library.into()];
    }
    let mut candidates = vec!["libnccl.so.2".into(), "libnccl.so".into()];
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(prefix) = value(&variable, name) {
            let pythons = python_directories(&Path::new(&prefix).join("lib"));
            candidates.extend(
                pythons
                    .iter()
                    .map(|python| python.join("site-packages").join(IN_SITE_PACKAGES)),
            );
        }
    }
    if let Some(directories) = value(&variable, "PYTHONPATH") {
        candidates.extend(
            env::split_paths(&directories)
                .filter(|directory| !directory.as_os_str().is_empty())
                .map(|directory| directory.join(IN_SITE_PACKAGES)),
        );
    }
    candidates
}

/// Returns the value of a variable that is set and not empty.
fn value(variable: impl Fn(&str) -> Option<OsString>, name: &str) -> Option<OsString> {
    variable(name).filter(|value| !value.is_empty())
}

/// Returns the directories of Python's versions, such as `lib/python3.12`, in a fixed order.
fn python_directories(lib: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    // A prefix without the directory has no packages, which is not an error.
    for entry in fs::read_dir(lib).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("python") {
            found.push(entry.path());
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates_in(variables: &[(&str, OsString)]) -> Vec<PathBuf> {
        candidates(|name| {
            let (_, value) = variables.iter().find(|(variable, _)| *variable == name)?;
            Some(value.clone())
        })
    }

    #[test]
    fn the_variable_excludes_other_candidates() {
        let variables = [
            (LIBRARY_VARIABLE, "/opt/libnccl.so.2".into()),
            ("PYTHONPATH", "/packages".into()),
        ];
        assert_eq!(candidates_in(&variables), [Path::new("/opt/libnccl.so.2")]);
    }

    #[test]
    fn without_variables_only_the_systems_loader_searches() {
        let names = ["libnccl.so.2", "libnccl.so"].map(PathBuf::from);
        assert_eq!(candidates_in(&[]), names);
        assert_eq!(candidates_in(&[(LIBRARY_VARIABLE, "".into())]), names);
        let missing = [("VIRTUAL_ENV", "/no/such/directory".into())];
        assert_eq!(candidates_in(&missing), names);
    }

    #[test]
    fn python_packages_follow() {
        let root = env::temp_dir().join(format!("burn-dtensor-nccl-search-{}", std::process::id()));
        for python in [
            "venv/lib/python3.13",
            "venv/lib/python3.12",
            "conda/lib/python3.11",
        ] {
            fs::create_dir_all(root.join(python)).unwrap();
        }
        fs::create_dir_all(root.join("venv/lib/pkgconfig")).unwrap();
        let python_path = env::join_paths([Path::new("/a"), Path::new(""), Path::new("/b")]);
        let variables = [
            ("VIRTUAL_ENV", root.join("venv").into()),
            ("CONDA_PREFIX", root.join("conda").into()),
            ("PYTHONPATH", python_path.unwrap()),
        ];
        let found = candidates_in(&variables);
        fs::remove_dir_all(&root).unwrap();
        let expected = [
            root.join("venv/lib/python3.12/site-packages"),
            root.join("venv/lib/python3.13/site-packages"),
            root.join("conda/lib/python3.11/site-packages"),
            "/a".into(),
            "/b".into(),
        ];
        assert_eq!(
            found[2..],
            expected.map(|packages| packages.join("nvidia/nccl/lib/libnccl.so.2"))
        );
    }
}
