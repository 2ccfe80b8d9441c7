//! Tests that have a process to themselves. Of backwards that unwound, burn keeps graphs, and looks
//! at them all in every later one: tests of many backwards are slow beside them, and those that
//! leave such graphs make others slow.

use std::env;
use std::process::Command;

/// Says which test the process is for.
const OWN: &str = "BURN_DTENSOR_OWN_PROCESS";

/// Runs `test`, whose name is given, in a process of its own, and prints what it printed.
pub fn own_process(name: &str, test: impl FnOnce()) {
    if env::var_os(OWN).is_some_and(|own| own == name) {
        return test();
    }
    let program = env::current_exe().unwrap();
    let output = Command::new(program)
        .args([name, "--exact", "--nocapture"])
        .env(OWN, name)
        .output()
        .unwrap();
    let [text, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{errors}"
    );
    println!("{text}");
}
