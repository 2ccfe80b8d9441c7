//! What all ranks made of a case, held to the unsharded values.

use burn_dtensor::Result;
use burn_dtensor::comm::CallTotals;
use burn_dtensor::placement::{PartialOp, Placement};

use super::file::{Case, Operator, Values};
use super::run::Outcome;

/// What an operator without sharding gives: torch's values, or the local operator's where torch
/// has none.
pub struct Truth {
    pub outs: Vec<Values>,
    /// Empty if nothing is differentiable.
    pub grads: Vec<Option<Values>>,
    /// Whether torch has no outputs, and no gradients, in any case.
    pub no_outs: bool,
    pub no_grads: bool,
}

/// How a case ended.
#[derive(Default)]
pub struct Verdict {
    /// Outputs placed as torch places them, with its local values.
    pub locals: usize,
    /// Outputs pending the same reduction as torch's, of other terms.
    pub terms_differ: usize,
    /// Whether there were gradients to compare.
    pub gradients: bool,
    /// Whether the outputs, and the gradients, were held to the local operator.
    pub local_outs: bool,
    pub local_gradients: bool,
    /// Our collectives in forward, where torch's are known.
    pub sent: Option<CallTotals>,
}

/// Holds a case to the truth.
pub fn judge(
    operator: &Operator,
    case: &Case,
    truth: &Truth,
    ranks: &[&Result<Outcome>],
) -> Result<Verdict, String> {
    let mut verdict = Verdict::default();
    let coordinates = super::super::coordinates(&case.mesh);
    let (mut same_placements, mut terms_differ) = (0, false);
    for (rank, outcome) in ranks.iter().enumerate() {
        let outcome = outcome
            .as_ref()
            .map_err(|error| format!("rank {rank}: {error}"))?;
        if outcome.outs.len() != truth.outs.len() {
            return Err(format!(
                "{} outputs, expected {}",
                outcome.outs.len(),
                truth.outs.len()
            ));
        }
        for (k, (out, expected)) in outcome.outs.iter().zip(&truth.outs).enumerate() {
            close(expected, &out.full, FORWARD)
                .map_err(|why| format!("rank {rank}: output {k}: {why}"))?;
            let theirs = case.outs.get(k).filter(|_| !case.torch_fails_forward());
            if let Some(theirs) =
                theirs.filter(|theirs| theirs.layout(&case.mesh).as_ref() == Some(&out.layout))
            {
                let local = theirs.local(rank).unwrap_or_else(|| {
                    let full = (theirs.gshape.clone(), expected.1.clone());
                    super::super::part(&full, &out.layout.local_slices(&full.0, &coordinates[rank]))
                });
                // The terms of a partial value are a choice: a bias is a term of its own, or
                // a share of each.
                match close(&local, &out.local, FORWARD) {
                    Err(_) if out.layout.has_partial() => terms_differ = true,
                    result => {
                        result.map_err(|why| format!("rank {rank}: local output {k}: {why}"))?
                    }
                }
                same_placements += usize::from(rank == 0);
            }
        }
        if truth.grads.is_empty() {
            continue;
        }
        for (at, expected) in truth.grads.iter().enumerate() {
            // A loss that depends on no input is not recorded, and has no gradients.
            match (expected, outcome.grads.get(at).unwrap_or(&None)) {
                (Some((_, expected)), None) if expected.iter().all(|value| *value == 0.0) => {}
                (Some(expected), Some(found)) => {
                    let expected = local_gradient(expected, operator, case, at, &coordinates[rank]);
                    close(&expected, found, BACKWARD)
                        .map_err(|why| format!("rank {rank}: gradient {at}: {why}"))?;
                }
                (None, Some((_, found))) if found.iter().all(|value| *value == 0.0) => {}
                (None, None) => {}
                (expected, found) => {
                    return Err(format!("gradient {at} is {found:?}, expected {expected:?}"));
                }
            }
        }
        verdict.gradients = true;
    }
    verdict.local_outs = truth.no_outs;
    verdict.local_gradients = verdict.gradients && truth.no_grads;
    if terms_differ {
        verdict.terms_differ = same_placements;
    } else {
        verdict.locals = same_placements;
    }
    verdict.sent = ranks[0]
        .as_ref()
        .ok()
        .map(|outcome| outcome.sent)
        .filter(|_| !case.torch_fails_forward());
    Ok(verdict)
}

/// The derivative of the loss by the local value of input `at`, of its derivative by the full
/// value: a term of a sum has it in full, one of an average an n-th, and of a maximum only the
/// last rank's value matters, which is the largest.
fn local_gradient(
    full: &Values,
    operator: &Operator,
    case: &Case,
    at: usize,
    coordinate: &[usize],
) -> Values {
    let layout = super::super::layout(&case.mesh, &case.in_pl[at]).expect("the case has run");
    let factor = |(mesh_dim, placement): (usize, &Placement)| match placement {
        Placement::Partial(PartialOp::Avg) => 1.0 / case.mesh[mesh_dim] as f64,
        Placement::Partial(PartialOp::Max) => {
            f64::from(coordinate[mesh_dim] + 1 == case.mesh[mesh_dim])
        }
        _ => 1.0,
    };
    let factor: f64 = layout.placements().iter().enumerate().map(factor).product();
    let (shape, mut values) = super::super::part(
        full,
        &layout.local_slices(&operator.inputs[at].shape, coordinate),
    );
    values.iter_mut().for_each(|value| *value *= factor);
    (shape, values)
}

/// Relative and absolute tolerance.
const FORWARD: (f64, f64) = (5e-5, 5e-6);
const BACKWARD: (f64, f64) = (2e-4, 2e-5);

/// A scalar of torch, with no dimensions, has one of length 1 here.
fn close(
    expected: &Values,
    found: &Values,
    (relative, absolute): (f64, f64),
) -> Result<(), String> {
    let same_shape = expected.0 == found.0 || (expected.0.is_empty() && found.0 == [1]);
    let near = |(a, b): (&f64, &f64)| {
        a == b || (a - b).abs() <= absolute + relative * a.abs() || a.is_nan() && b.is_nan()
    };
    if same_shape && expected.1.len() == found.1.len() && expected.1.iter().zip(&found.1).all(near)
    {
        return Ok(());
    }
    Err(format!("{found:?}, expected {expected:?}"))
}
