//! [`compare`]: runs one batch through a sharded model and through the full one, and reports differences.
//!
//! ```text
//!   rows of all ranks, joined ──> full model on every rank ──> outputs, gradients ─┐ this rank's rows
//!                                                                                      │ and shards
//!   this rank's rows ───────────> sharded model ─────────────────> outputs, gradients ─┴──> differences
//! ```
//!
//! Both models are copies. The full one is sharded over a group of one rank, so that its units have
//! the same paths and cast in the same way, without any communication over data-parallel ranks.
//!
//! # Invariants
//! 1. All ranks make the same decision, because each follows from values that all of them have
//!    gathered.
//! 2. The full model runs first. It makes no data-parallel collective, so a panic in it leaves no
//!    data-parallel rank waiting; a tensor-parallel one gets the error of the deadlock.
//! 3. The program's model, its units, its accumulated gradients and its buffers stay as they are.

mod copies;
mod measure;
mod ranks;
mod replicas;
mod report;
mod run;

use std::collections::HashMap;

use burn::module::Module;
use burn::tensor::Tensor;

use super::FsdpError;
use crate::Result;
use crate::param::unshared;
use crate::tensor_tree::TensorTree;

use measure::{Measured, Verdict};
use ranks::Ranks;
pub use report::{Cause, Comparison, Finding, Side};
use run::{Pass, run};

/// Runs one batch through a sharded model and through the full one, forward and backward, and
/// compares what units return and the gradients of all parameters.
///
/// `input` holds this rank's rows: dimension 0 of each of its tensors. The full model computes with
/// the rows of all ranks, in the precision of the units' [policies](super::MixedPrecisionPolicy).
/// `forward` returns the loss, a mean over rows. Tensors without rows, such as a mask of `[seq,
/// seq]`, are captured by `forward`. Tensor-parallel ranks pass the same rows.
///
/// ```
/// use burn::module::{Module, Param};
/// use burn::tensor::{Distribution, Tensor};
/// use burn_dtensor::prelude::*;
/// use burn_dtensor::fsdp::compare;
///
/// #[derive(Module, Debug)]
/// struct Scaled {
///     weight: Param<Tensor<2>>,
/// }
///
/// impl Scaled {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         let [d_in, _] = self.weight.dims(); // of the shard: `self.weight.val().dims()` would be right
///         unit(self, x, |layer, x| x.matmul(layer.weight.val()) / (d_in as f32).sqrt())
///     }
/// }
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let layer = Scaled { weight: Param::from_tensor(Tensor::random([4, 4], Distribution::Default, &device)) };
///     let layer = fully_shard(layer, &mesh, FullyShard::new())?;
///     let x = Tensor::<2>::random([8, 4], Distribution::Default, &device);
///     let comparison = compare(&layer, x, |layer, x| layer.forward(x).square().mean())?;
///     assert!(!comparison.agrees());
///     println!("{comparison}"); // unit `root` returns other values .., and the likely cause
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// The result is the same on all ranks. It contains, in this order, and ends with the first kind
/// that it finds:
///
/// 1. values that must be identical on several ranks and are not ([`Finding::Replica`]);
/// 2. a panic in the full model ([`Finding::Panic`]);
/// 3. a forward that returns other values when it runs a second time, as with `Dropout`
///    ([`Finding::Nondeterministic`]): then nothing can be compared;
/// 4. a panic in the sharded model;
/// 5. the first unit whose output differs ([`Finding::Output`]), and each parameter whose gradient
///    does ([`Finding::Gradient`]).
///
/// A sum over all rows rounds differently from a sum of the ranks' sums, so nothing is compared to
/// the bit. Values agree if half of their digits do, in the coarsest dtype that takes part: their
/// difference is at most the square root of its machine epsilon, 3.5e-4 for `f32` and 0.088 for
/// `bf16`, times their magnitude, both as root mean square. Values that nearly cancel are measured
/// against the output before them, gradients against the largest of their unit. In `f32` smaller
/// differences are found than in `bf16`.
///
/// A unit's output is compared by rows if one of its dimensions grows with the number of rows. An
/// output without such a dimension, as the loss, is averaged over the ranks. Units that only a read
/// opens have no known output. Gradients of parameters that `fully_shard` ignores are not compared,
/// because nothing reduces them. If the loss is not tracked, as that of a model in validation, only
/// the forward is compared.
///
/// Call it between two steps: `model` stays unchanged, also in the middle of gradient accumulation.
/// Options set by [`FsdpModule`](super::FsdpModule) do not apply. Random draws of `forward` advance
/// the random streams. Every rank needs memory for the full model, its gradients, and what units
/// return for all rows.
///
/// # Collective
/// Every rank of the model's meshes must call it, between the same steps.
///
/// # Errors
/// [`ParamError::NotSharded`](super::ParamError::NotSharded) for a model that `fully_shard` did not
/// shard; [`FsdpError::UnevenRows`] if ranks have inputs of different shapes;
/// [`FsdpError::NotComparable`] for experts, whose ranks hold different parameters along a
/// data-parallel dimension; [`ParamError::Replaced`](super::ParamError::Replaced) if a parameter
/// was replaced after `fully_shard`; [`Error::Comm`](crate::Error::Comm) if another rank fails. A
/// panic of a single rank in the sharded model is [`FsdpError::Differs`] there, and ends the other
/// ranks with the error of a collective.
pub fn compare<M, I>(
    model: &M,
    input: I,
    forward: impl Fn(&M, I) -> Tensor<1>,
) -> Result<Comparison>
where
    M: Module,
    I: TensorTree + Clone,
{
    let ranks = Ranks::of(model)?;
    if let Some(replica) = replicas::differing(model, &ranks)? {
        return Ok(ranks.ended_by(replica));
    }
    let joined = ranks.join(input.clone())?;
    let sharded = copies::sharded(model)?;
    let full = copies::full(&sharded)?;
    let shards = ranks.shards();
    let none = HashMap::new();

    let reference = run(
        &unshared(full.clone())?,
        joined.clone(),
        &forward,
        Pass::Backward,
        &shards,
    )?;
    let reference = match ranks.all_passed(Side::Full, reference)? {
        Ok(reference) => reference,
        Err(panic) => return Ok(ranks.ended_by(panic)),
    };
    let again = run(
        &unshared(full.clone())?,
        joined,
        &forward,
        Pass::Forward,
        &none,
    )?;
    let again = match ranks.all_passed(Side::Full, again)? {
        Ok(again) => again,
        Err(panic) => return Ok(ranks.ended_by(panic)),
    };
    let random = measure::first_difference(&again, &reference, ranks.epsilon);
    if let Some(at) = ranks
        .gather("compare, random", &random)?
        .into_iter()
        .flatten()
        .min()
    {
        return Ok(ranks.ended_by(Finding::Nondeterministic {
            unit: reference.unit(at),
        }));
    }

    let own = run(&sharded, input.clone(), &forward, Pass::Backward, &none)?;
    let own = match ranks.all_passed(Side::Sharded, own)? {
        Ok(own) => own,
        Err(panic) => return Ok(ranks.ended_by(panic)),
    };
    let measured = ranks.gather("compare, values", &Measured::of(&own, &reference, &ranks))?;
    let verdict = Verdict::of(&measured, &ranks);
    let Some(at) = verdict.first else {
        return Ok(verdict.comparison);
    };
    // The rows of one rank alone tell whether the shards or the rows of other ranks make the
    // difference.
    let alone = run(&unshared(full)?, input, &forward, Pass::Forward, &none)?;
    let same = alone.is_ok_and(|alone| measure::agrees_at(&own, &alone, at, ranks.epsilon));
    let is_same = ranks
        .gather("compare, cause", &same)?
        .into_iter()
        .all(|same| same);
    Ok(verdict.caused_by(if is_same { Cause::Rows } else { Cause::Shards }))
}

impl Comparison {
    /// Returns an error with the report, unless the models agree. Local: the report is the same on
    /// all ranks.
    ///
    /// # Errors
    /// [`FsdpError::Differs`].
    pub fn into_result(self) -> Result<()> {
        if self.agrees() {
            Ok(())
        } else {
            Err(FsdpError::Differs(Box::new(self)).into())
        }
    }
}
