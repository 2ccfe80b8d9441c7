//! Compiles C for the tests, with the C compiler that Rust links with.

#![allow(dead_code, reason = "each test program uses a part")]

pub mod stub;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Directory of the tests.
pub const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");

/// Returns the path of a file in the directory for what tests build.
pub fn temporary(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Runs the C compiler with the header of this version of NCCL, and with warnings as errors.
pub fn cc(header: &str, arguments: &[&str]) -> Output {
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    Command::new(compiler)
        .args(["-std=c11", "-Werror", "-Wno-strict-prototypes"])
        .arg(format!("-I{TESTS}/headers/{header}"))
        .arg(format!("-I{TESTS}/cuda"))
        .args(arguments)
        .output()
        .expect("a C compiler runs")
}

/// Compiles a shared library named `name` from a C file, and returns its path.
pub fn shared_library(name: &str, header: &str, source: &Path, flags: &[&str]) -> PathBuf {
    let path = temporary(name);
    let mut arguments = vec!["-shared", "-fPIC", "-o"];
    arguments.push(path.to_str().expect("UTF-8"));
    arguments.push(source.to_str().expect("UTF-8"));
    arguments.extend(flags);
    let output = cc(header, &arguments);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    path
}
