//! `2_redistribute.json`, the part that needs no tensors: which redistributions there are, and
//! how many collectives they take.

use std::collections::HashMap;

use burn_dtensor::placement::{PlacementError, plan};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
struct Case {
    mesh: Vec<usize>,
    src: Vec<String>,
    dst: Vec<String>,
    /// Torch's collectives by kind; absent where torch refuses.
    comm: Option<HashMap<String, usize>>,
}

/// A plan never takes more collectives than torch's, and is refused only where torch refuses.
#[test]
fn golden_plans_are_no_dearer() {
    let cases: Vec<Case> = super::cases("2_redistribute.json");
    let (mut planned, mut cheaper, mut more, mut refused) = (0, 0, 0, 0);
    for case in &cases {
        let (src, dst) = (
            super::layout(&case.mesh, &case.src),
            super::layout(&case.mesh, &case.dst),
        );
        match (src.and_then(|src| plan(&src, &dst?)), &case.comm) {
            (Ok(steps), Some(theirs)) => {
                let collectives = steps
                    .iter()
                    .filter(|(step, _)| step.is_collective())
                    .count();
                let theirs = theirs.values().sum();
                assert!(collectives <= theirs, "{case:?}: {steps:?}");
                cheaper += usize::from(collectives < theirs);
                planned += 1;
            }
            (Ok(_), None) => more += 1,
            (
                Err(PlacementError::PartialTarget { .. } | PlacementError::MixedPartial { .. }),
                None,
            ) => refused += 1,
            (Err(PlacementError::Strided { .. }), _) => refused += 1,
            (Err(error), _) => panic!("{case:?}: {error}"),
        }
    }
    println!(
        "{planned} plans, {cheaper} cheaper than torch's; {more} that torch refuses; {refused} refused"
    );
    assert_eq!(planned + more + refused, cases.len());
}
