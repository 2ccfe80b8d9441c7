//! Starts the bench's own binary in several processes.

use std::process::{Command, Stdio};
use std::{env, str};

use anyhow::{Context, Result, ensure};

/// Settings of Open MPI 4 and 5, which others do not read: as root too, more processes than cores, and none of them
/// kept to one.
const SETTINGS: [(&str, &str); 6] = [
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
    ("PRTE_MCA_hwloc_default_binding_policy", "none"),
];

/// What `count` processes write that are started with these arguments, once all have ended. `mpirun` is taken from the
/// path, or from the environment variable `MPIRUN`.
pub fn start(count: usize, arguments: &[&str]) -> Result<String> {
    let launcher = env::var("MPIRUN").unwrap_or("mpirun".into());
    let count = count.to_string();
    let mut command = Command::new(&launcher);
    command.args(["-n", &count]).arg(env::current_exe()?).args(["--processes", &count]).args(arguments).envs(SETTINGS);
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("`{launcher}` does not run: install an MPI library, or set MPIRUN"))?;
    let text = str::from_utf8(&output.stdout)?;
    ensure!(output.status.success(), "`{launcher}` has ended with {}:\n{text}", output.status);
    Ok(text.into())
}
