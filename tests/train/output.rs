//! Lines that are printed: by one rank, of the full model.

use std::env;
use std::process::Command;

use burn_dtensor::prelude::*;

use super::support::{BATCH, Folder, loader, part, rows, train_on};

const PRINTS: &str = "BURN_DTENSOR_TRAIN_PRINTS";

#[test]
fn one_renderer_draws_and_the_summary_has_the_full_sizes() {
    if env::var_os(PRINTS).is_some() {
        let rows = rows(100, 2 * BATCH, 0.2);
        let folder = Folder::new("prints");
        launch(Launch::threads(4), |world| {
            let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?.slice("dp")?;
            // Ranks along `tp` have the same rows.
            let own = || loader(part(&rows, world.rank() / 2, 2), BATCH / 2);
            train_on(&mesh, &folder, own(), own(), |training| {
                training.num_epochs(2).summary()
            })
            .map(drop)
        })
        .unwrap();
        return;
    }
    let name = "output::one_renderer_draws_and_the_summary_has_the_full_sizes";
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command
        .args([name, "--exact", "--nocapture"])
        .env(PRINTS, "1")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let count = |part: &str| text.matches(part).count();
    assert_eq!(count("Starting training for 2 epochs"), 1, "{text}");
    // Each row once, in each split of each epoch.
    assert_eq!(count("with 24 items"), 4, "{text}");
    assert_eq!(count("items_processed: 24"), 4, "{text}");
    assert_eq!(count("Learner Summary"), 1, "{text}");
    for size in [
        "d_input: 4, d_output: 7",
        "d_input: 7, d_output: 3",
        "params: 59",
    ] {
        assert_eq!(count(size), 1, "{size} in {text}");
    }
}
