//! Rule prover: compares operators on DTensors with the same operators on ordinary tensors.
//!
//! ```
//! use burn_dtensor::testing::prove::{case, prove};
//!
//! let report = prove(&[case!("matmul", (a: 2 = [3, 4], b: 2 = [4, 3]) => a.matmul(b))]);
//! assert_eq!(report.wrong(), 0, "{report}");
//! ```
//!
//! Each [`Case`] runs with its inputs in every combination of layouts on meshes of 2, 3 and 4 ranks
//! (with several inputs, in at most 128, 48 and 24). It also runs in [as many as the effort
//! allows](prove_with) on 1 x 2, 2 x 2, 2 x 3 and 2 x 2 x 2. Layouts contain Replicate, a sharding
//! of every dimension, and every partial placement, with different local values on each rank.
//! Uneven shard sizes, combined with chunks, replicas and partial sums, are tried on 2 and 2 x 2
//! ranks. The prover compares
//!
//! * the full value of every output, on every rank;
//! * the gradient of every float input that each rank holds, with the exact derivative with respect
//!   to the rank's local tensor (invariant 1 of [`dtensor`](crate::dtensor)). The loss has a
//!   different weight for every element of every output;
//! * the [depth](super::graph_depth) of every output in the autodiff graph, which must be the same
//!   on all ranks.
//!
//! The expected local tensors are computed from the unsharded result element by element, and the
//! unsharded operator is burn's. A missing gradient is an error even for an empty local tensor,
//! because the other ranks' collectives in backward would wait for that rank. A combination counts
//! as direct if the operator runs under
//! [`RedistributePolicy::Deny`](crate::dtensor::ops::RedistributePolicy), that is, without
//! redistribution.
//!
//! # Shapes
//! Whether shards are even, uneven or empty depends on the length of a dimension:
//!
//! | length | mesh 2 | mesh 3 | mesh 4 | mesh 2 x 2, both on it |
//! |---|---|---|---|---|
//! | 2 | 1 1 | 1 1 **0** | 1 1 **0 0** | 1 **0** 1 **0** |
//! | 3 | 2 1 | 1 1 1 | 1 1 1 **0** | 1 1 1 **0** |
//! | 4 | 2 2 | 2 2 **0** | 1 1 1 1 | 1 1 1 1 |
//! | 5 | 3 2 | 2 2 1 | 2 2 1 **0** | 2 1 1 1 |
//! | 6 | 3 3 | 2 2 2 | 2 2 2 **0** | 2 1 2 1 |
//!
//! A dimension of length 3 covers all three kinds at the lowest cost; 6 covers them too. On 2 x 3 a
//! dimension of 7 that both mesh dimensions shard has the shard sizes `2 2 0 1 1 1`, so a rank in
//! the middle is empty. Use different lengths for the dimensions of a case, so that the check
//! notices exchanged dimensions.

mod case;
mod layouts;
mod macros;
mod output;
mod report;
mod run;
mod truth;
mod values;

use std::time::Instant;

pub use crate::case;
use crate::comm::{Launch, launch};
pub use case::{Case, CaseInput, IntRange, PlainInput, ShardedInput};
pub use macros::{plain, sharded};
pub use output::{CaseOutputs, FullOutput};
pub use report::{Combination, Difference, DifferenceKind, LaidOut, OperatorReport, Report, Wrong};
use run::ProofPlan;
use truth::Truth;

/// Amount of combinations that the prover tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Effort {
    /// A few combinations of every case on each mesh: at most ten on two ranks, fewer on more. Use
    /// it for many operators at once.
    Brief,
    /// The default, which fits into the time of a test.
    #[default]
    Test,
    /// All combinations of every case on meshes of one dimension, and a thousand per case on each
    /// other mesh.
    Exhaustive,
}

/// No limit on the number of combinations.
const ALL: usize = usize::MAX;

/// A mesh on which cases are tried, with limits on the number of combinations.
struct ProofExtent {
    mesh: &'static [usize],
    /// Maximum number of combinations of a case with one input, and with several inputs. There are
    /// thousands of the latter on a mesh of several dimensions.
    caps: [usize; 2],
    /// Maximum number of combinations in a brief proof. Two ranks cover the placements. Larger
    /// meshes, on which a combination takes longer, add only shard sizes and orders that two ranks
    /// do not have.
    brief: usize,
}

const fn on(mesh: &'static [usize], caps: [usize; 2], brief: usize) -> ProofExtent {
    ProofExtent { mesh, caps, brief }
}

/// Meshes on which cases are tried with even and uneven chunks.
const MESHES: [ProofExtent; 7] = [
    on(&[2], [ALL, 128], 10),
    on(&[3], [ALL, 48], 3),
    on(&[4], [ALL, 24], 2),
    on(&[1, 2], [4, 4], 1),
    on(&[2, 2], [ALL, 24], 4),
    on(&[2, 3], [12, 8], 2),
    on(&[2, 2, 2], [6, 4], 1),
];

/// Meshes on which cases are tried with uneven shard sizes. On two ranks, 3 elements are sharded as
/// 1 and 2, which chunks never are.
const UNEVEN_MESHES: [ProofExtent; 2] = [on(&[2], [ALL, 24], 4), on(&[2, 2], [8, 8], 2)];

/// Number of combinations of a case in an exhaustive proof on a mesh of several dimensions. On
/// other meshes all are tried.
const EXHAUSTIVE: usize = 1000;

/// Proves the cases with [`Effort::Test`]; see [`prove_with`].
///
/// # Panics
/// Like [`prove_with`].
pub fn prove(cases: &[Case]) -> Report {
    prove_with(cases, Effort::Test)
}

/// Tries every case in combinations of layouts, as [the module](self) describes.
///
/// With [`Effort::Test`] and layouts in chunks, all combinations are tried for one input on meshes
/// of one dimension and on 2 x 2, and for two inputs on 2 ranks. Otherwise some are tried: up to
/// half of them have no partial placements, and the rest is spread evenly over all. The report
/// contains the number of combinations tried and possible. [`Effort::Exhaustive`] tries more.
///
/// A combination in which a rank panics or does not arrive in time counts as wrong and ends the
/// launch. The remaining combinations run in a new launch. After ten such failures the rest of a
/// case is skipped on that mesh.
///
/// # Panics
/// If the unsharded operator of a case fails, or ranks cannot be launched.
pub fn prove_with(cases: &[Case], effort: Effort) -> Report {
    let start = Instant::now();
    let truths = launch(Launch::threads(1), |world| {
        let device = world.device().clone().autodiff();
        cases
            .iter()
            .map(|case| Truth::of(case, &device))
            .collect::<crate::Result<Vec<_>>>()
    });
    let truths = truths
        .unwrap_or_else(|error| panic!("an unsharded operator failed: {error}"))
        .remove(0)
        .1;
    let mut possible = vec![0; cases.len()];
    let mut tried = Vec::new();
    let chunks = MESHES.map(|extent| (extent, ProofPlan::new as fn(_, _, _, _) -> _));
    let uneven_plan =
        UNEVEN_MESHES.map(|extent| (extent, ProofPlan::uneven as fn(_, _, _, _) -> _));
    for (ProofExtent { mesh, caps, brief }, plan) in chunks.into_iter().chain(uneven_plan) {
        let caps = match effort {
            Effort::Brief => caps.map(|cap| cap.min(brief)),
            Effort::Test => caps,
            Effort::Exhaustive if mesh.len() == 1 => [ALL, ALL],
            Effort::Exhaustive => caps.map(|cap| cap.max(EXHAUSTIVE)),
        };
        let plan: ProofPlan = plan(mesh, cases, &truths[..], caps);
        possible
            .iter_mut()
            .zip(&plan.possible)
            .for_each(|(sum, one)| *sum += one);
        tried.extend(plan.run());
    }
    Report::new(cases, &possible, tried, start.elapsed())
}
