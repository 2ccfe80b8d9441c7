//! Runs in half precision, held to PyTorch's.
//!
//! Both round to bf16, but not at the same places: values agree to no bound that is tighter than
//! what bf16 does to them. What bf16 does is therefore compared itself, as the deviation from the
//! same run in single precision: PyTorch's and this crate's have one size, and in the gradients one
//! direction, since the weights, the inputs and the gradients are rounded alike. A run that
//! computes in single precision deviates by nothing, or by what reducing in bf16 alone does.
//!
//! The bounds leave room on seven sets of values, which PyTorch made with other weights, batches
//! (scaled by 0.3 to 10) and widths, in 28 runs: losses deviated by 0.29 to 2.5 times what
//! PyTorch's did, gradients by 0.84 to 1.4 times with a cosine of at least 0.49, and no gradient
//! was further from PyTorch's than 4.6 roundings of its parameter's largest.

use super::check::mean_loss;
use super::file::Run;
use super::train::Trained;

/// Rounding to bf16, which has 8 significant bits, moves a value by at most this part of it.
const ROUNDING: f64 = 1.0 / 256.0;

/// What two deviations have in common.
struct Deviations {
    /// The size of the first by that of the second.
    size: f64,
    /// The cosine between them.
    direction: f64,
}

impl Deviations {
    fn new(ours: &[f64], theirs: &[f64], single: &[f64]) -> Self {
        let less = |values: &[f64]| {
            values
                .iter()
                .zip(single)
                .map(|(value, single)| value - single)
                .collect::<Vec<_>>()
        };
        let (ours, theirs) = (less(ours), less(theirs));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (own, other) = (dot(&ours, &ours).sqrt(), dot(&theirs, &theirs).sqrt());
        Self {
            size: own / other,
            direction: dot(&ours, &theirs) / (own * other),
        }
    }
}

/// Holds what the ranks of a run in half precision saw to PyTorch's, where `single` is the same run
/// without.
pub fn check_half(name: &str, run: &Run, trained: &[Trained], single: &[Trained]) {
    let losses = |trained: &[Trained]| {
        (0..run.losses.len())
            .map(|step| mean_loss(trained, step))
            .collect::<Vec<_>>()
    };
    let losses = Deviations::new(&losses(trained), &run.losses, &losses(single));
    println!(
        "{name}: losses deviate by {:.2} times what torch's do",
        losses.size
    );
    // A random walk of as many steps as training has.
    assert!(
        (0.125..8.0).contains(&losses.size),
        "{name}: losses deviate by {} times what torch's do",
        losses.size
    );

    let Some(recorded) = &run.grad_local_step0 else {
        return;
    };
    let (mut ours, mut theirs, mut without) = (vec![], vec![], vec![]);
    for (rank, grads) in recorded.iter().enumerate() {
        for (path, expected) in grads {
            let largest = run.largest_gradient(path);
            let scaled = |grads: &[f32]| {
                grads
                    .iter()
                    .map(|value| f64::from(*value) / largest)
                    .collect::<Vec<_>>()
            };
            let found = scaled(&trained[rank].first_grads[path]);
            let expected: Vec<_> = expected.data.iter().map(|value| value / largest).collect();
            let furthest = found
                .iter()
                .zip(&expected)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f64::max);
            // A gradient is rounded a few times in each layer that it passes, here and in torch.
            assert!(
                furthest < 16.0 * ROUNDING,
                "{name}: first gradient of {path} on rank {rank} differs by {:.1} roundings of its largest",
                furthest / ROUNDING
            );
            without.extend(scaled(&single[rank].first_grads[path]));
            ours.extend(found);
            theirs.extend(expected);
        }
    }
    let Deviations { size, direction } = Deviations::new(&ours, &theirs, &without);
    println!(
        "{name}: gradients deviate by {size:.2} times what torch's do, with a cosine of {direction:.2}"
    );
    assert!(
        (0.5..2.0).contains(&size),
        "{name}: gradients deviate by {size} times what torch's do"
    );
    assert!(
        direction > 0.25,
        "{name}: gradients deviate from torch's with a cosine of {direction}"
    );
}
