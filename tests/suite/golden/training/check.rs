//! What the ranks of a run saw, held to what PyTorch has.

use std::collections::BTreeMap;

use super::file::{Golden, Run};
use super::train::Trained;
use crate::fsdp::support::furthest;

pub fn check(golden: &Golden, name: &str, run: &Run, trained: &[Trained]) {
    let baseline = golden.runs.get(&run.baseline());
    // A run that torch refuses is held to the one without sharding.
    let values = if run.rest.contains_key("torch_error") {
        baseline.expect("not left out")
    } else {
        run
    };
    // In half precision PyTorch and burn round at different places: `half` compares these.
    let is_half = run.mp.is_some();
    let mut furthest_loss: f64 = 0.0;
    for (step, expected) in values.losses.iter().enumerate().filter(|_| !is_half) {
        let loss = mean_loss(trained, step);
        let diff = (loss - expected).abs() / expected.abs().max(1.0);
        assert!(
            diff < 2e-5,
            "{name}: loss of step {step} is {loss}, torch has {expected}"
        );
        furthest_loss = furthest_loss.max(diff);
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
        assert_eq!(
            rank.weights, trained[0].weights,
            "{name}: every rank gathers the same model"
        );
    }
    for (path, [sum, squares]) in values.final_checksums.iter().filter(|_| !is_half) {
        // Torch's ranks have learned each a part of it.
        if run.is("sp") && path == "pos.weight" {
            continue;
        }
        let weights = &trained[0].weights[path];
        let got_sum: f64 = weights.iter().map(|x| *x as f64).sum();
        let got_squares: f64 = weights.iter().map(|x| (*x as f64).powi(2)).sum();
        let bound = 1e-3 * golden.optimizer.lr * weights.len() as f64;
        assert!(
            (got_sum - sum).abs() < bound,
            "{name}: sum of {path} is {got_sum}, torch has {sum}"
        );
        assert!(
            (got_squares - squares).abs() < bound,
            "{name}: squares of {path} are {got_squares}, torch has {squares}"
        );
    }
    // Runs that only count collectives take fewer steps.
    let baseline =
        baseline.filter(|baseline| !is_half && values.losses.len() == baseline.losses.len());
    for (path, expected) in [Some(run), baseline]
        .into_iter()
        .flatten()
        .flat_map(|run| &run.final_weights)
    {
        let expected = expected.floats().try_to_vec::<f32>().unwrap();
        // AdamW moves a weight by about the learning rate a step, however small its gradient is: a
        // few weights, whose gradients are little more than rounding, may be further away.
        let (most, mean_square) = apart(&trained[0].weights[path], &expected);
        let lr = golden.optimizer.lr;
        assert!(
            most < lr && mean_square < 1e-2 * lr,
            "{name}: {path} differs from torch by {most}, {mean_square}"
        );
    }
    let calls = |counts: &BTreeMap<String, u64>| counts.values().sum::<u64>();
    if run.is_tensor_parallel() {
        let (ours, theirs) = (&trained[0].counts, &run.comm_step1);
        println!(
            "{name}: {} collectives a step: {ours:?}; torch {}: {theirs:?}",
            calls(ours),
            calls(theirs)
        );
        assert!(
            theirs.is_empty() || calls(ours) <= calls(theirs),
            "{name}: {ours:?}, torch {theirs:?}"
        );
    } else if !run.comm_step1.is_empty() {
        assert_eq!(
            trained[0].counts, run.comm_step1,
            "{name}: collectives of one step"
        );
    }
    for (rank, shapes) in run.local_shapes.iter().enumerate() {
        assert_eq!(
            &trained[rank].local_shapes, shapes,
            "{name}: shards of rank {rank}"
        );
    }
    for (rank, grads) in run
        .grad_local_step0
        .iter()
        .flatten()
        .enumerate()
        .filter(|_| !is_half)
    {
        for (path, expected) in grads {
            let diff = furthest(
                &trained[rank].first_grads[path],
                &expected.floats().try_to_vec::<f32>().unwrap(),
            );
            let bound = 1e-5 * run.largest_gradient(path);
            assert!(
                diff <= bound,
                "{name}: first gradient of {path} on rank {rank} differs by {diff}, bound {bound}"
            );
        }
    }
}

/// Returns the largest difference of elements, and the root of the mean square of all.
fn apart(a: &[f32], b: &[f32]) -> (f64, f64) {
    assert_eq!(a.len(), b.len());
    let squares: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (furthest(a, b), (squares / a.len() as f64).sqrt())
}

/// Returns the loss of one step, of which every rank has its part.
pub fn mean_loss(trained: &[Trained], step: usize) -> f64 {
    trained.iter().map(|rank| rank.losses[step]).sum::<f64>() / trained.len() as f64
}
