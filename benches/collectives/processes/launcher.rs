//! Starts the bench's own binary in several processes.

use std::process::Stdio;
use std::{env, str};

use anyhow::{Context, Result, ensure};
use burn_dtensor::testing::mpirun;

/// What `count` processes write that are started with these arguments, once all have ended.
/// `mpirun` is taken from the path, or from the environment variable `MPIRUN`.
pub fn start(count: usize, arguments: &[&str]) -> Result<String> {
    let count = count.to_string();
    let mut command = mpirun();
    let launcher = command.get_program().to_string_lossy().into_owned();
    command
        .args(["-n", &count])
        .arg(env::current_exe()?)
        .args(["--processes", &count])
        .args(arguments);
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output();
    let output = output.with_context(|| {
        format!("`{launcher}` does not run: install an MPI library, or set MPIRUN")
    })?;
    let text = str::from_utf8(&output.stdout)?;
    ensure!(
        output.status.success(),
        "`{launcher}` has ended with {}:\n{text}",
        output.status
    );
    Ok(text.into())
}
