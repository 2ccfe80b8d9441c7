//! The rule prover: holds operators on DTensors to the same operators on ordinary tensors.
//!
//! ```
//! use burn_dtensor::testing::prove::{case, prove};
//!
//! let report = prove(&[case!("matmul", (a: 2 = [3, 4], b: 2 = [4, 3]) => a.matmul(b))]);
//! assert_eq!(report.wrong(), 0, "{report}");
//! ```
//!
//! Each [`Case`] is run with its inputs in every combination of layouts on meshes of 2, 3 and 4 ranks (of
//! several inputs in 128, 48 and 24 at most), and in [as many as time allows](prove_with) on 1 x 2, 2 x 2,
//! 2 x 3 and 2 x 2 x 2: Replicate, a shard of every dimension, and every partial placement, its parts
//! different from rank to rank. Then with ragged cuts, beside chunks, replicas and partial sums, on 2 and 2 x 2 ranks.
//! Compared are
//!
//! * the full value of every output, on every rank;
//! * of every float input the gradient that each rank holds, against the true derivative by what
//!   the rank holds (invariant 1 of [`dtensor`](crate::dtensor)), where the loss weighs every
//!   element of every output differently;
//! * of every output how [deep](super::graph_depth) in the autodiff graph its part lies: equally
//!   deep on all ranks.
//!
//! Expected parts are cut and weighed from the unsharded result number by number, and the
//! unsharded operator is burn's. A gradient that one rank has lost is wrong even of a part without
//! elements: the other ranks' collectives in backward would wait for it. A combination counts as
//! served without redistribution if the operator runs under
//! [`RedistributePolicy::Deny`](crate::dtensor::ops::RedistributePolicy).
//!
//! # Shapes
//! Whether shards are even, uneven or empty depends on a dimension's length:
//!
//! | length | mesh 2 | mesh 3 | mesh 4 | mesh 2 x 2, both on it |
//! |---|---|---|---|---|
//! | 2 | 1 1 | 1 1 **0** | 1 1 **0 0** | 1 **0** 1 **0** |
//! | 3 | 2 1 | 1 1 1 | 1 1 1 **0** | 1 1 1 **0** |
//! | 4 | 2 2 | 2 2 **0** | 1 1 1 1 | 1 1 1 1 |
//! | 5 | 3 2 | 2 2 1 | 2 2 1 **0** | 2 1 1 1 |
//! | 6 | 3 3 | 2 2 2 | 2 2 2 **0** | 2 1 2 1 |
//!
//! A dimension of 3 meets all three kinds, and is the cheapest that does; 6 does too. On 2 x 3 a
//! dimension of 7, cut by both, is `2 2 0 1 1 1`: a rank in the middle has nothing. A case of equal
//! lengths tells dimensions apart badly: use different ones.

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

/// How much is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Effort {
    /// A few combinations of every case on each mesh, ten at most on two ranks, fewer on more: for many operators at once.
    Brief,
    /// What a test has time for.
    #[default]
    Test,
    /// All combinations of every case on meshes of one dimension, and a thousand on others.
    Exhaustive,
}

/// All combinations there are.
const ALL: usize = usize::MAX;

/// A mesh that cases are tried on.
struct ProofExtent {
    mesh: &'static [usize],
    /// The number of combinations of a case at most, of one input and of several, of which there are thousands on a mesh of
    /// several dimensions.
    caps: [usize; 2],
    /// The same in a brief proof. Two ranks have the placements; on more, whose combinations take longer, are the lengths
    /// and orders that two do not have.
    brief: usize,
}

const fn on(mesh: &'static [usize], caps: [usize; 2], brief: usize) -> ProofExtent {
    ProofExtent { mesh, caps, brief }
}

/// The meshes that cases are tried on with even and uneven chunks.
const MESHES: [ProofExtent; 7] = [
    on(&[2], [ALL, 128], 10),
    on(&[3], [ALL, 48], 3),
    on(&[4], [ALL, 24], 2),
    on(&[1, 2], [4, 4], 1),
    on(&[2, 2], [ALL, 24], 4),
    on(&[2, 3], [12, 8], 2),
    on(&[2, 2, 2], [6, 4], 1),
];

/// The same for ragged cuts: between two ranks 3 elements are 1 and 2, which no chunks are.
const UNEVEN_MESHES: [ProofExtent; 2] = [on(&[2], [ALL, 24], 4), on(&[2, 2], [8, 8], 2)];

/// Combinations of a case and mesh of several dimensions of the exhaustive proof; on others, all.
const EXHAUSTIVE: usize = 1000;

/// [`prove_with`] the effort of a test.
///
/// # Panics
/// As [`prove_with`].
pub fn prove(cases: &[Case]) -> Report {
    prove_with(cases, Effort::Test)
}

/// Tries every case in combinations of layouts; [the module](self) says how.
///
/// Of chunks these are all combinations there are of one input on meshes of one dimension and on 2 x 2, and of two
/// inputs on 2 ranks. Else some are tried, up to half of them without partial placements, the rest spread evenly over
/// all. The report says of how many; [`Effort::Exhaustive`] tries more.
///
/// A combination in which a rank panics or does not come is wrong, and ends the launch; the others
/// go on in a new one. After ten such failures the rest of a case is not tried on that mesh.
///
/// # Panics
/// If the unsharded operator of a case fails, or ranks cannot be launched.
pub fn prove_with(cases: &[Case], effort: Effort) -> Report {
    let start = Instant::now();
    let truths = launch(Launch::threads(1), |world| {
        let device = world.device().clone().autodiff();
        cases.iter().map(|case| Truth::of(case, &device)).collect::<crate::Result<Vec<_>>>()
    });
    let truths = truths.unwrap_or_else(|error| panic!("an unsharded operator failed: {error}")).remove(0).1;
    let (mut possible, mut tried) = (vec![0; cases.len()], Vec::new());
    let chunks = MESHES.map(|extent| (extent, ProofPlan::new as fn(_, _, _, _) -> _));
    let uneven_plan = UNEVEN_MESHES.map(|extent| (extent, ProofPlan::uneven as fn(_, _, _, _) -> _));
    for (ProofExtent { mesh, caps, brief }, plan) in chunks.into_iter().chain(uneven_plan) {
        let caps = match effort {
            Effort::Brief => caps.map(|cap| cap.min(brief)),
            Effort::Test => caps,
            Effort::Exhaustive if mesh.len() == 1 => [ALL, ALL],
            Effort::Exhaustive => caps.map(|cap| cap.max(EXHAUSTIVE)),
        };
        let plan: ProofPlan = plan(mesh, cases, &truths[..], caps);
        possible.iter_mut().zip(&plan.possible).for_each(|(sum, one)| *sum += one);
        tried.extend(plan.run());
    }
    Report::new(cases, &possible, tried, start.elapsed())
}
