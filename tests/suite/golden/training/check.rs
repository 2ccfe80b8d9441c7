//! What the ranks of a run saw, held to what PyTorch has.

use std::collections::BTreeMap;

use super::file::{Golden, Run};
use super::train::Trained;
use crate::fsdp::support::furthest;

pub fn check(golden: &Golden, name: &str, run: &Run, trained: &[Trained]) {
    let baseline = golden.runs.get(&run.baseline());
    // A run that torch refuses is held to the one without sharding.
    let values = if run.rest.contains_key("torch_error") { baseline.expect("not left out") } else { run };
    // In half precision PyTorch and burn round at different places.
    let is_half = run.mp.is_some();
    let loss_bound = if is_half { 5e-3 } else { 2e-5 };
    let mut furthest_loss: f64 = 0.0;
    for (step, expected) in values.losses.iter().enumerate() {
        let loss = trained.iter().map(|rank| rank.losses[step]).sum::<f64>() / trained.len() as f64;
        assert!((loss - expected).abs() < loss_bound, "{name}: loss of step {step} is {loss}, torch has {expected}");
        furthest_loss = furthest_loss.max((loss - expected).abs());
    }
    println!("{name}: losses at most {furthest_loss:.1e} from torch's");
    for (step, expected) in values.grad_norms.iter().enumerate() {
        for rank in trained {
            let norm = rank.norms[step];
            assert!(
                (norm - expected).abs() < 1e-4 * expected,
                "{name}: norm of step {step} is {norm}, torch has {expected}"
            );
        }
    }
    for rank in trained {
        assert_eq!(rank.weights, trained[0].weights, "{name}: every rank gathers the same model");
    }
    for (path, [sum, squares]) in values.final_checksums.iter().filter(|_| !is_half) {
        // Torch's ranks have learned each a part of it.
        if run.is("sp") && path == "pos.weight" {
            continue;
        }
        let weights = &trained[0].weights[path];
        let got_sum: f64 = weights.iter().map(|x| *x as f64).sum();
        let got_squares: f64 = weights.iter().map(|x| (*x as f64).powi(2)).sum();
        let bound = 1e-5 * weights.len() as f64;
        assert!((got_sum - sum).abs() < bound, "{name}: sum of {path} is {got_sum}, torch has {sum}");
        assert!(
            (got_squares - squares).abs() < bound,
            "{name}: squares of {path} are {got_squares}, torch has {squares}"
        );
    }
    // Runs that only count collectives take fewer steps.
    let baseline = baseline.filter(|baseline| !is_half && values.losses.len() == baseline.losses.len());
    for (path, expected) in [Some(run), baseline].into_iter().flatten().flat_map(|run| &run.final_weights) {
        let expected = expected.floats().try_to_vec::<f32>().unwrap();
        let diff = furthest(&trained[0].weights[path], &expected);
        assert!(diff < 1e-4, "{name}: {path} differs from torch by {diff}");
    }
    let calls = |counts: &BTreeMap<String, u64>| counts.values().sum::<u64>();
    if run.is_tensor_parallel() {
        let (ours, theirs) = (&trained[0].counts, &run.comm_step1);
        println!("{name}: {} collectives a step: {ours:?}; torch {}: {theirs:?}", calls(ours), calls(theirs));
        assert!(theirs.is_empty() || calls(ours) <= calls(theirs), "{name}: {ours:?}, torch {theirs:?}");
    } else if !run.comm_step1.is_empty() {
        assert_eq!(trained[0].counts, run.comm_step1, "{name}: collectives of one step");
    }
    for (rank, shapes) in run.local_shapes.iter().enumerate() {
        assert_eq!(&trained[rank].local_shapes, shapes, "{name}: shards of rank {rank}");
    }
    for (rank, grads) in run.grad_local_step0.iter().flatten().enumerate() {
        for (path, expected) in grads {
            let diff = furthest(&trained[rank].first_grads[path], &expected.floats().try_to_vec::<f32>().unwrap());
            let bound = if is_half { 5e-4 } else { 1e-5 };
            assert!(diff < bound, "{name}: first gradient of {path} on rank {rank} differs by {diff}");
        }
    }
}
