//! Loading: which library is loaded, and each error.
#![cfg(unix)]

mod support;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn_dtensor_nccl::{
    LIBRARY_VARIABLE, LoadError, MINIMUM_VERSION, NcclError, NcclLibrary, ResultCode, Version,
    candidates,
};
use support::stub::stub;
use support::temporary;

fn load(candidates: &[PathBuf]) -> Result<NcclLibrary, LoadError> {
    // SAFETY: the candidates are stubs, of which the functions have the types of NCCL's.
    unsafe { NcclLibrary::load_from(candidates) }
}

fn load_stub(name: &str, macros: &[&str]) -> (PathBuf, Result<NcclLibrary, LoadError>) {
    let path = stub(name, macros);
    let loaded = load(std::slice::from_ref(&path));
    (path, loaded)
}

#[test]
fn the_first_candidate_that_loads_is_used() {
    let found = stub("first.so", &[]);
    let later = stub("later.so", &["-DSTUB_VERSION=23203"]);
    let nccl = load(&["libnccl-missing.so.2".into(), found.clone(), later]).unwrap();
    assert_eq!(nccl.path(), found);
    assert_eq!(nccl.version(), Version::new(2, 30, 7));
    assert!(format!("{nccl:?}").contains("first.so"), "{nccl:?}");
}

#[test]
fn the_oldest_and_later_versions_are_loaded() {
    let (_, oldest) = load_stub("oldest.so", &["-DSTUB_VERSION=22800"]);
    assert_eq!(oldest.unwrap().version(), MINIMUM_VERSION);
    let (_, later) = load_stub("next.so", &["-DSTUB_VERSION=30102"]);
    assert_eq!(later.unwrap().version(), Version::new(3, 1, 2));
}

#[test]
fn no_library() {
    let text = temporary("text.so");
    fs::write(
        &text,
        "not a library, but long enough to be one that is read",
    )
    .unwrap();
    let error = load(&["libnccl-missing.so.2".into(), text.clone()]).unwrap_err();
    let LoadError::NotFound { tried } = &error else {
        panic!("{error:?}");
    };
    let paths: Vec<&Path> = tried.iter().map(|failed| &*failed.path).collect();
    assert_eq!(paths, [Path::new("libnccl-missing.so.2"), &text]);
    let message = error.to_string();
    for failed in tried {
        assert!(!failed.message.is_empty());
        let text = format!("{} ({})", failed.path.display(), failed.message);
        assert!(message.contains(&text), "{message}");
    }
    assert!(message.starts_with("no NCCL library could be loaded: libnccl-missing.so.2 ("));
    assert!(
        message.ends_with(
            "or set the environment variable BURN_DTENSOR_NCCL to the path of `libnccl.so.2`"
        ),
        "{message}"
    );
}

#[test]
fn a_missing_function() {
    let (path, loaded) = load_stub("without_split.so", &["-DSTUB_WITHOUT_SPLIT"]);
    let error = loaded.unwrap_err();
    assert_eq!(
        error,
        LoadError::MissingSymbol {
            path: path.clone(),
            name: "ncclCommSplit",
            since: Version::new(2, 18, 1),
            found: Some(Version::new(2, 30, 7)),
        }
    );
    let expected = format!(
        "{} (version 2.30.7) has no function `ncclCommSplit`, which NCCL has since 2.18.1. Set the environment variable BURN_DTENSOR_NCCL to the path of a complete NCCL 2.28.0 or later",
        path.display()
    );
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_library_that_is_not_nccl() {
    let (path, loaded) = load_stub("without_version.so", &["-DSTUB_WITHOUT_VERSION"]);
    let error = loaded.unwrap_err();
    assert_eq!(
        error,
        LoadError::MissingSymbol {
            path,
            name: "ncclGetVersion",
            since: Version::new(2, 3, 5),
            found: None,
        }
    );
    assert!(
        error
            .to_string()
            .contains("(version unknown) has no function")
    );
}

#[test]
fn an_optional_function_is_missing_when_it_is_called() {
    let (path, loaded) = load_stub("without_optional.so", &["-DSTUB_WITHOUT_OPTIONAL"]);
    let nccl = loaded.unwrap();
    // SAFETY: the function is not called.
    let error = unsafe { nccl.comm_revoke(std::ptr::null_mut()) }.unwrap_err();
    assert_eq!(
        error,
        NcclError::Unavailable {
            function: "ncclCommRevoke",
            since: Version::new(2, 28, 7),
            found: Version::new(2, 30, 7),
            path: path.clone(),
        }
    );
    assert_eq!(
        error.to_string(),
        format!(
            "`ncclCommRevoke` is missing in {} (version 2.30.7). Use NCCL 2.28.7 or later",
            path.display()
        )
    );
}

#[test]
fn an_old_library() {
    // It lacks functions as well; the version is checked first.
    let macros = ["-DSTUB_VERSION=22707", "-DSTUB_WITHOUT_SPLIT"];
    let (path, loaded) = load_stub("old.so", &macros);
    let error = loaded.unwrap_err();
    assert_eq!(
        error,
        LoadError::TooOld {
            path: path.clone(),
            found: Version::new(2, 27, 7),
            needed: MINIMUM_VERSION,
        }
    );
    let expected = format!(
        "{} is NCCL 2.27.7, but 2.28.0 or later is needed. Install a later version, or set the environment variable BURN_DTENSOR_NCCL to its path",
        path.display()
    );
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_library_without_a_version() {
    let macros = ["-DSTUB_VERSION_RESULT=ncclSystemError"];
    let (path, loaded) = load_stub("failing.so", &macros);
    let error = loaded.unwrap_err();
    assert_eq!(
        error,
        LoadError::VersionFailed {
            path,
            code: ResultCode(2),
        }
    );
    let message = error.to_string();
    assert!(
        message.contains("failed with ncclSystemError. Set "),
        "{message}"
    );
}

#[test]
fn a_library_of_a_python_environment() {
    let root = temporary("venv");
    let lib = root.join("lib/python3.12/site-packages/nvidia/nccl/lib");
    fs::create_dir_all(&lib).unwrap();
    let path = lib.join("libnccl.so.2");
    fs::copy(stub("python.so", &[]), &path).unwrap();
    let found = candidates(|name| (name == "VIRTUAL_ENV").then(|| root.clone().into()));
    // Before it come the names by which this machine's own library would be found.
    assert_eq!(load(&found[2..]).unwrap().path(), path);
}

/// Runs itself in a process that has the variable.
#[test]
fn the_variable_of_the_process_is_read() {
    const CHILD: &str = "BURN_DTENSOR_NCCL_TEST_CHILD";
    if env::var_os(CHILD).is_some() {
        let path = env::var_os(LIBRARY_VARIABLE).unwrap();
        assert_eq!(NcclLibrary::load().unwrap().path(), Path::new(&path));
        return;
    }
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "the_variable_of_the_process_is_read"])
        .env(LIBRARY_VARIABLE, stub("variable.so", &[]))
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}
