//! [`replicated`]: runs operators that have no rule.

use burn::tensor::{Shape, Tensor};
use smallvec::SmallVec;

use super::apply::Boundary;
use super::{Inputs, Operator, Outputs, ShardingRule, Strategy};
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, Kind};
use crate::error::OrUnwind;

/// Runs `local`, an operator `name` that has no rule, on full tensors. Every rank gathers all
/// `inputs` and computes all results, which are Replicate.
///
/// It is correct for any computation that is the same on all ranks, and it is differentiable.
/// Number and shapes of the results may depend on the values. It saves neither memory nor work:
/// where that matters, [write a rule](super#adding-an-operator). Inputs and results are of the
/// types that [`apply`](super::apply) accepts.
///
/// The ledger records the gathers as for any other redistribution, and
/// [`RedistributePolicy::Deny`](super::RedistributePolicy::Deny) refuses them, naming the operator
/// `name`.
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
/// // All rows except the last, and their differences to the next row.
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
/// Unwinds with a typed [`Error`](crate::Error), as [all operators](super#panics) do.
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
    let inputs = if operator.is_direct() {
        inputs.into_local()
    } else {
        inputs.localize(&everywhere, &mut 0)
    };
    local(inputs).globalize(&everywhere, &mut 0)
}

/// Conversion of the inputs to full tensors, and of results that every rank has in full to
/// DTensors.
struct Everywhere<'a>(&'a Operator);

impl Boundary for Everywhere<'_> {
    #[track_caller]
    fn localize<const D: usize, K: Kind>(&self, at: usize, tensor: DTensor<D, K>) -> Tensor<D, K> {
        self.0.localize(at, tensor)
    }

    fn globalize<const D: usize, K: Kind>(&self, _: usize, local: Tensor<D, K>) -> DTensor<D, K> {
        let full = self.0.input_spec(0);
        let spec = DTensorSpec::decided(
            full.mesh(),
            full.layout().clone(),
            local.shape(),
            local.dtype(),
        );
        DTensor::from_parts(local, spec.shared())
    }
}

/// Rule of an operator of which only the name is known: the all-`Replicate` strategy. The operator
/// itself determines its results.
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
