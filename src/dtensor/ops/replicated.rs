//! [`replicated`]: operators that have no rule.

use burn::tensor::{Shape, Tensor};
use smallvec::SmallVec;

use super::apply::Boundary;
use super::{Inputs, Operator, Outputs, ShardingRule, Strategy};
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, Kind};
use crate::error::OrUnwind;

/// Runs `local`, an operator `name` that has no rule, on whole tensors: every rank gathers all `inputs`, computes
/// all of the results, and these are Replicate.
///
/// It is right for whatever computes the same on all ranks, with results of any number and shape, also one that
/// depends on the values, and it is differentiable. It saves neither memory nor work: where it matters,
/// [write a rule](super#adding-an-operator). Inputs and results are as [`apply`](super::apply) takes them.
///
/// What it gathers stands in the ledger as any other redistribution, and
/// [`RedistributePolicy::Deny`](super::RedistributePolicy::Deny) refuses it by `name`.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_dtensor::comm::Op;
/// use burn_dtensor::dtensor::DTensor;
/// use burn_dtensor::dtensor::ops::replicated;
/// use burn_dtensor::placement::Placement::{Replicate, Shard};
///
/// # use burn_dtensor::prelude::*;
/// # launch(Launch::threads(2), |world| {
/// let mesh = DeviceMesh::new(world, [2], ["tp"])?;
/// let x = DTensor::<2>::ones([4, 6], &mesh, &[Shard(0)], world.device())?;
/// // All rows but the last, and how far each is from the next.
/// let (rows, steps) = replicated("differences", x, |x: Tensor<2>| {
///     let (rows, next) = (x.clone().slice(0..3), x.slice(1..4));
///     (rows.clone(), next - rows)
/// });
/// assert_eq!((rows.dims(), steps.placements()), ([3, 6], &[Replicate][..]));
/// assert_eq!(world.ledger().calls(Op::AllGather), 1);
/// # Ok::<_, burn_dtensor::Error>(())
/// # })?;
/// # Ok::<_, burn_dtensor::comm::LaunchError>(())
/// ```
///
/// # Collective
/// Every rank of the mesh, in forward and in backward, if an input is not Replicate.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error), as [all operators](super#panics).
#[track_caller]
pub fn replicated<I: Inputs, O: Outputs>(
    name: &'static str,
    inputs: I,
    local: impl FnOnce(I::Local) -> O,
) -> O::Global {
    let operator = {
        let mut args = SmallVec::new();
        inputs.args(&mut args);
        Operator::resolve(&ReplicatedRule(name), &args).or_unwind()
    };
    let everywhere = Everywhere(&operator);
    let inputs = if operator.is_direct() { inputs.into_local() } else { inputs.localize(&everywhere, &mut 0) };
    local(inputs).globalize(&everywhere, &mut 0)
}

/// Inputs as the operator wants them, whole; and outputs that every rank has whole.
struct Everywhere<'a>(&'a Operator);

impl Boundary for Everywhere<'_> {
    #[track_caller]
    fn localize<const D: usize, K: Kind>(&self, at: usize, tensor: DTensor<D, K>) -> Tensor<D, K> {
        self.0.localize(at, tensor)
    }

    fn globalize<const D: usize, K: Kind>(&self, _: usize, local: Tensor<D, K>) -> DTensor<D, K> {
        let full = self.0.input_spec(0);
        let spec = DTensorSpec::decided(full.mesh(), full.layout().clone(), local.shape(), local.dtype());
        DTensor::from_parts(local, spec.shared())
    }
}

/// The rule of an operator of which nothing is known but its name: the all-Replicate row, and results that
/// only it can say.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ReplicatedRule(&'static str);

impl ShardingRule for ReplicatedRule {
    fn name(&self) -> &'static str {
        self.0
    }

    fn outputs(&self, _: &[Shape]) -> Result<Vec<Shape>> {
        Ok(Vec::new())
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        Vec::new()
    }

    fn supports_empty_shards(&self) -> bool {
        true
    }
}
