//! Kind 4: training runs, sharded, against PyTorch's losses, checksums and collective counts.

mod check;
mod file;
mod sharding;
mod task;
mod tied;
mod train;
mod values;

use std::collections::BTreeMap;

use burn_dtensor::comm::{Launch, launch};
use serde_json::Value;

use crate::launched;
use crate::models::{Gpt, Mlp};
use check::check;
use file::{Golden, Run, TIED};
pub use sharding::reshard;
use train::train;

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

fn run_all(wanted: impl Fn(&str, &Run) -> bool) -> Totals {
    run_these(&Golden::read(), wanted)
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
        let trained = launch(Launch::threads(run.ws), |world| match run.model.as_str() {
            "gpt" => train::<Gpt>(golden, run, world),
            "mlp" => train::<Mlp>(golden, run, world),
            other => panic!("unknown model {other}"),
        });
        check(golden, name, run, &trained.map(launched::values).unwrap_or_else(|error| panic!("{name}: {error}")));
        passed += 1;
    }
    (passed, left)
}

#[test]
fn golden_training_unsharded() {
    let (passed, _) = run_all(|_, run| run.par == "none");
    assert!(passed > 0);
}

#[test]
fn golden_training_fully_shard() {
    let (passed, left) = run_all(|name, run| {
        let has_its_own_test = run.is_tensor_parallel() || run.clip.is_some() || run.mp.is_some();
        run.par != "none" && !has_its_own_test && !name.contains("/comm_")
    });
    println!("{passed} runs; left out: {left:#?}");
    assert!(passed > 0);
}

#[test]
fn golden_training_tensor_parallel() {
    let (passed, left) = run_all(|_, run| run.is_tensor_parallel() && run.clip.is_none() && run.mp.is_none());
    println!("{passed} runs; left out: {left:#?}");
    assert!(passed > 0);
}

/// Torch has no tied run that is tensor parallel: they are held to the tied run without sharding.
#[test]
fn golden_training_tensor_parallel_tied() {
    let mut golden = Golden::read();
    let recorded = golden.runs.iter().filter(|(_, run)| run.is_tensor_parallel() && left_out(&golden, run).is_none());
    let tie = |(name, run): (&String, &Run)| {
        let recorded = ["torch_error", "tied"].map(|key| (key.to_string(), Value::Bool(true)));
        let rest =
            run.rest.iter().filter(|(key, _)| *key != "baseline").map(|(key, value)| (key.clone(), value.clone()));
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
    let tied: Vec<_> = recorded.filter(|(_, run)| run.clip.is_none() && run.mp.is_none()).map(tie).collect();
    let names: Vec<_> = tied.iter().map(|(name, _)| name.clone()).collect();
    golden.runs.extend(tied);
    let (passed, left) = run_these(&golden, |name, _| names.iter().any(|tied| tied == name));
    println!("{passed} runs; left out: {left:#?}");
    assert_eq!(passed, if golden.init.contains_key(TIED) { names.len() } else { 0 });
}

#[test]
fn golden_training_clip_grad_norm() {
    let (passed, left) = run_all(|_, run| run.clip.is_some());
    println!("{passed} runs; left out: {left:#?}");
    assert!(passed > 0);
}

#[test]
fn golden_training_mixed_precision() {
    let (passed, left) = run_all(|_, run| run.mp.is_some());
    println!("{passed} runs; left out: {left:#?}");
    assert!(passed > 0);
}

#[test]
fn golden_training_collective_counts() {
    let (passed, _) = run_all(|name, _| name.contains("/comm_"));
    println!("{passed} runs");
    assert!(passed > 0);
}
