//! Kind 4: training runs, sharded, against PyTorch's losses, checksums and collective counts.

mod check;
mod file;
mod half;
mod sharding;
mod task;
mod tied;
mod train;
mod values;

use std::collections::{BTreeMap, BTreeSet};

use burn_dtensor::comm::{Launch, launch};
use serde_json::Value;

use crate::launched;
use crate::models::{Gpt, Mlp};
use check::check;
use file::{Golden, Run, TIED};
use half::check_half;
pub use sharding::reshard;
use train::{Trained, train};

/// What a run needs that this suite does not cover, if anything.
fn left_out(golden: &Golden, run: &Run) -> Option<&'static str> {
    let has = |key: &str| run.rest.get(key).is_some_and(|value| !value.is_null());
    if run.is_tied() && !golden.init.contains_key(TIED) {
        return Some("tied weights: the initial values are not recorded");
    }
    if has("torch_error") && !golden.runs.contains_key(&run.baseline()) {
        return Some("torch has no values");
    }
    None
}

/// Number of runs that passed, and those left out by reason.
type Totals = (usize, BTreeMap<&'static str, Vec<String>>);

/// The tests of runs, each of which has those of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    CollectiveCounts,
    ClipGradNorm,
    MixedPrecision,
    Unsharded,
    TensorParallel,
    FullyShard,
}

impl Kind {
    fn of(name: &str, run: &Run) -> Self {
        match run {
            _ if name.contains("/comm_") => Self::CollectiveCounts,
            run if run.clip.is_some() => Self::ClipGradNorm,
            run if run.mp.is_some() => Self::MixedPrecision,
            run if run.par == "none" => Self::Unsharded,
            run if run.is_tensor_parallel() => Self::TensorParallel,
            _ => Self::FullyShard,
        }
    }

    /// Runs all of this kind. Every run whose losses the file records must pass; one may be left
    /// out only where the file has no values for it.
    fn run(self) {
        let golden = Golden::read();
        let (passed, left) = run_these(&golden, |name, run| Self::of(name, run) == self);
        println!("{passed} runs; left out: {left:#?}");
        let recorded = golden
            .runs
            .iter()
            .filter(|(name, run)| Self::of(name, run) == self && !run.losses.is_empty());
        let recorded: BTreeSet<_> = recorded.map(|(name, _)| name).collect();
        assert!(!recorded.is_empty(), "the file has no run of {self:?}");
        let lacking: Vec<_> = left
            .values()
            .flatten()
            .filter(|name| recorded.contains(name))
            .collect();
        assert_eq!(lacking, [""; 0], "{self:?}: recorded, but left out");
        assert!(
            passed >= recorded.len(),
            "{self:?}: {passed} of {} runs",
            recorded.len()
        );
    }
}

fn run_these(golden: &Golden, wanted: impl Fn(&str, &Run) -> bool) -> Totals {
    let mut passed = 0;
    let mut left = BTreeMap::<_, Vec<_>>::new();
    for (name, run) in &golden.runs {
        if !wanted(name, run) {
            continue;
        }
        if let Some(reason) = left_out(golden, run) {
            left.entry(reason).or_default().push(name.clone());
            continue;
        }
        let ranks = trained(golden, name, run);
        check(golden, name, run, &ranks);
        if run.mp.is_some() {
            check_half(
                name,
                run,
                &ranks,
                &trained(
                    golden,
                    name,
                    &Run {
                        mp: None,
                        ..run.clone()
                    },
                ),
            );
        }
        passed += 1;
    }
    (passed, left)
}

/// Returns what every rank saw of a run.
fn trained(golden: &Golden, name: &str, run: &Run) -> Vec<Trained> {
    let trained = launch(Launch::threads(run.ws), |world| match run.model.as_str() {
        "gpt" => train::<Gpt>(golden, run, world),
        "mlp" => train::<Mlp>(golden, run, world),
        other => panic!("unknown model {other}"),
    });
    trained
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn golden_training_unsharded() {
    Kind::Unsharded.run();
}

#[test]
fn golden_training_fully_shard() {
    Kind::FullyShard.run();
}

#[test]
fn golden_training_tensor_parallel() {
    Kind::TensorParallel.run();
}

/// Torch has no tied run that is tensor parallel: they are held to the tied run without sharding.
#[test]
fn golden_training_tensor_parallel_tied() {
    let mut golden = Golden::read();
    let recorded = golden
        .runs
        .iter()
        .filter(|(_, run)| run.is_tensor_parallel() && left_out(&golden, run).is_none());
    let tie = |(name, run): (&String, &Run)| {
        let recorded = ["torch_error", "tied"].map(|key| (key.to_string(), Value::Bool(true)));
        let rest = run
            .rest
            .iter()
            .filter(|(key, _)| *key != "baseline")
            .map(|(key, value)| (key.clone(), value.clone()));
        let run = Run {
            losses: vec![],
            grad_norms: vec![],
            final_checksums: BTreeMap::new(),
            comm_step1: BTreeMap::new(),
            local_shapes: vec![],
            clip: None,
            rest: rest.chain(recorded).collect(),
            ..run.clone()
        };
        (format!("{name}, tied"), run)
    };
    let tied: Vec<_> = recorded
        .filter(|(_, run)| run.clip.is_none() && run.mp.is_none())
        .map(tie)
        .collect();
    let names: Vec<_> = tied.iter().map(|(name, _)| name.clone()).collect();
    golden.runs.extend(tied);
    let (passed, left) = run_these(&golden, |name, _| names.iter().any(|tied| tied == name));
    println!("{passed} runs; left out: {left:#?}");
    assert_eq!(
        passed,
        if golden.init.contains_key(TIED) {
            names.len()
        } else {
            0
        }
    );
}

#[test]
fn golden_training_clip_grad_norm() {
    Kind::ClipGradNorm.run();
}

#[test]
fn golden_training_mixed_precision() {
    Kind::MixedPrecision.run();
}

#[test]
fn golden_training_collective_counts() {
    Kind::CollectiveCounts.run();
}
