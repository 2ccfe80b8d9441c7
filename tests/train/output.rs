//! What is printed: by one rank, of the full model.

use std::env;
use std::process::Command;

use super::support::{BATCH, Folder, Row, loader, on_ranks, part, rows, train_on};

const PRINTS: &str = "BURN_DTENSOR_TRAIN_PRINTS";

#[test]
fn one_renderer_draws_and_the_summary_has_the_full_sizes() {
    if env::var_os(PRINTS).is_some() {
        let rows = rows(100, 2 * BATCH, 0.2);
        let folder = Folder::new("prints");
        on_ranks(3, |mesh| {
            let own = |rows: &[Row]| loader(part(rows, mesh.rank(), 3), BATCH / 3);
            train_on(mesh, &folder, own(&rows), own(&rows), |training| training.num_epochs(2).summary()).map(drop)
        })
        .unwrap();
        return;
    }
    let name = "output::one_renderer_draws_and_the_summary_has_the_full_sizes";
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args([name, "--exact", "--nocapture"]).env(PRINTS, "1").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let count = |part: &str| text.matches(part).count();
    assert_eq!(count("Starting training for 2 epochs"), 1, "{text}");
    // Rows of all ranks, in each split of each epoch.
    assert_eq!(count("with 24 items"), 4, "{text}");
    assert_eq!(count("items_processed: 24"), 4, "{text}");
    assert_eq!(count("Learner Summary"), 1, "{text}");
    for size in ["d_input: 4, d_output: 7", "d_input: 7, d_output: 3", "params: 59"] {
        assert_eq!(count(size), 1, "{size} in {text}");
    }
}
