//! Resolves the sharding of an operator: finds the strategies that apply to the inputs, selects the
//! cheapest, and derives the layouts of inputs and outputs.

use std::cell::OnceCell;
use std::iter::repeat_n;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use smallvec::SmallVec;

use super::args::operand_error;
use super::cost_model::DecisionScope;
use super::operand::Arg;
use super::select_strategy::{SelectedStrategy, SelectionProblem, select_strategy};
use super::sharding_context::Dims;
use super::strategy_cost::OperandInfo;
use super::{ShardingRule, Strategy, strategy};
use crate::Result;
use crate::dtensor::redistribute_cache::RedistributeTarget;
use crate::dtensor::redistribute_plan::RedistributePlan;
use crate::dtensor::{DTensorError, DTensorSpec, RequiredPlacements};
use crate::placement::{Layout, Placement, Step};

/// Layouts chosen for an operator on inputs of given specs.
#[derive(Debug)]
pub(super) struct ResolvedSharding {
    pub(super) inputs: SmallVec<[RedistributeTarget; 3]>,
    pub(super) outputs: SmallVec<[ResolvedOutput; 1]>,
    /// Error under [`RedistributePolicy::Deny`](super::RedistributePolicy::Deny), if an input would
    /// be redistributed implicitly.
    pub(super) implicit: Option<Box<DTensorError>>,
    /// True if all outputs are empty and the local operator does not support empty tensors.
    pub(super) is_blank: bool,
    /// True if every input is used as it is.
    pub(super) is_direct: bool,
    /// True if this rank's local tensor of an input has no elements.
    pub(super) has_empty_part: bool,
}

/// Layout and shapes of one output.
#[derive(Debug)]
pub(super) struct ResolvedOutput {
    pub(super) layout: Layout,
    pub(super) shape: Shape,
    pub(super) local: Shape,
    pub(super) terms: Option<Arc<str>>,
    /// Set when the first local result reveals the element type.
    pub(super) spec: OnceCell<Arc<DTensorSpec>>,
}

/// Strategies that apply to inputs of given specs.
pub(super) struct CandidateStrategies {
    pub(super) outputs: Vec<Shape>,
    pub(super) rows: Vec<Strategy>,
    /// Placements that callers require, for each input and mesh dimension.
    pub(super) wanted: Vec<RequiredPlacements>,
    /// Excluded strategies, with the reason: a constraint of an input, or the element types of
    /// partial inputs.
    pub(super) out: Vec<(Strategy, &'static str)>,
}

impl CandidateStrategies {
    pub(super) fn new<R: ShardingRule>(rule: &R, inputs: &[Arg<'_>]) -> Result<Self> {
        let Some(Arg { spec: first, .. }) = inputs.first() else {
            return Err(operand_error(
                rule.name(),
                &[],
                "there is no input. Pass at least one",
            ));
        };
        for other in &inputs[1..] {
            first.check_same_mesh(other.spec)?;
        }
        let shapes: Vec<Shape> = inputs
            .iter()
            .map(|input| input.spec.shape().clone())
            .collect();
        let outputs = rule.outputs(&shapes)?;
        let dtypes: Vec<DType> = inputs.iter().map(|input| input.spec.dtype()).collect();
        let wanted: Vec<RequiredPlacements> = inputs
            .iter()
            .map(|input| wanted(rule, input, &shapes))
            .collect::<Result<_>>()?;
        let incoming = incoming(inputs, &wanted);
        let mesh_dims = 0..first.mesh().ndim();
        let mut out = Vec::new();
        let mut rows = rows(rule, &shapes, &outputs);
        rows.retain(|row| {
            let takes = |mesh_dim| {
                incoming
                    .iter()
                    .zip(&row.inputs)
                    .all(|(input, &to)| input.takes(mesh_dim, to))
            };
            let why = match row {
                row if !row.takes(&dtypes) => "not for these element types",
                _ if !mesh_dims.clone().any(takes) => {
                    "an input is constrained to another placement"
                }
                _ => return true,
            };
            out.push((row.clone(), why));
            false
        });
        Ok(Self {
            outputs,
            rows,
            wanted,
            out,
        })
    }
}

/// Returns the inputs as they arrive, with the placements that callers require.
pub(super) fn incoming<'a>(
    inputs: &[Arg<'a>],
    wanted: &'a [RequiredPlacements],
) -> Vec<OperandInfo<'a>> {
    inputs
        .iter()
        .zip(wanted)
        .map(|(input, wanted)| OperandInfo::new(input.spec, wanted))
        .collect()
}

/// Resolves the sharding without consulting the cache.
pub(super) fn resolve_sharding<R: ShardingRule>(
    rule: &R,
    inputs: &[Arg<'_>],
    scope: DecisionScope,
) -> Result<ResolvedSharding> {
    let CandidateStrategies {
        outputs: output_shapes,
        rows,
        wanted,
        ..
    } = CandidateStrategies::new(rule, inputs)?;
    let first = inputs[0].spec;
    let incoming = incoming(inputs, &wanted);
    let choice = select_strategy(SelectionProblem {
        mesh_shape: first.mesh().shape(),
        operands: &incoming,
        outputs: &output_shapes,
        strategies: &rows,
        takes_empty_parts: &|input, dim| rule.supports_empty_shards_along(input, dim),
        times: scope.times(first.mesh()).as_ref(),
    });
    let SelectedStrategy {
        inputs: targets,
        outputs,
        varying,
    } = choice.ok_or_else(|| DTensorError::NoStrategy {
        operator: rule.name(),
        inputs: inputs
            .iter()
            .map(|input| input.spec.layout().to_string())
            .collect(),
    })?;
    let destinations = inputs
        .iter()
        .zip(targets)
        .zip(varying)
        .map(|((input, target), varying)| {
            let (spec, plan) = (
                input.spec,
                RedistributePlan::of_input(input.spec.layout(), &target)?,
            );
            let spec = if *spec.layout() == target {
                spec.clone()
            } else {
                spec.with_layout(target)?.shared()
            };
            // Only floats have gradients.
            let varying = if spec.dtype().is_float() {
                varying
            } else {
                Dims::new()
            };
            Ok(RedistributeTarget {
                spec,
                plan,
                varying,
                operator: rule.name(),
            })
        });
    let destinations: SmallVec<[RedistributeTarget; 3]> = destinations.collect::<Result<_>>()?;
    let terms = outputs
        .iter()
        .any(Layout::has_partial)
        .then(|| terms(inputs));
    let outputs = output_shapes
        .into_iter()
        .zip(outputs)
        .map(|(shape, layout)| {
            let local = Shape::from(layout.local_shape(&shape, first.coordinate()));
            ResolvedOutput {
                layout,
                shape,
                local,
                terms: terms.clone(),
                spec: OnceCell::new(),
            }
        });
    let outputs: SmallVec<[ResolvedOutput; 1]> = outputs.collect();
    let implicit = implicit(rule, inputs, &destinations).map(Box::new);
    // Uses the global shapes, so that the result is the same on every rank.
    let has_nothing = outputs
        .iter()
        .all(|output| output.shape.num_elements() == 0);
    let is_blank = has_nothing && !rule.supports_empty_shards();
    let is_direct = destinations.iter().all(RedistributeTarget::is_here);
    let has_empty_part = destinations
        .iter()
        .any(|input| input.spec.local_shape().num_elements() == 0);
    Ok(ResolvedSharding {
        inputs: destinations,
        outputs,
        implicit,
        is_blank,
        is_direct,
        has_empty_part,
    })
}

/// Returns the strategies of the rule, after the all-`Replicate` strategy.
fn rows<R: ShardingRule>(rule: &R, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
    let replicate = |n| repeat_n(Placement::Replicate, n);
    let mut rows = vec![strategy(replicate(inputs.len()), replicate(outputs.len()))];
    rows.extend(rule.strategies(inputs, outputs));
    rows
}

/// Returns the placements that the caller requires of `input`. `Replicate` replaces a shard of
/// which a rank would have no elements.
fn wanted<R: ShardingRule>(
    rule: &R,
    input: &Arg<'_>,
    shapes: &[Shape],
) -> Result<RequiredPlacements> {
    let Some(pin) = input.pin else {
        return Ok(RequiredPlacements::new());
    };
    let wanted = pin.on(input.spec.mesh().ndim());
    let ndim = input.spec.shape().num_dims();
    let lacking = wanted
        .iter()
        .flatten()
        .find(|placement| placement.shard_dim().is_some_and(|dim| dim >= ndim));
    if let Some(placement) = lacking {
        let why = format!(
            "a style or `constrained_to` requires {placement} of an input that does not have this dimension"
        );
        return Err(operand_error(rule.name(), shapes, why));
    }
    Ok(input.spec.with_elements(wanted))
}

/// Returns an error for the first input that is redistributed without a request of the caller.
/// Conversions to partial sums do not count, because they need no communication.
fn implicit<R: ShardingRule>(
    rule: &R,
    inputs: &[Arg<'_>],
    destinations: &[RedistributeTarget],
) -> Option<DTensorError> {
    let is_term = |step: &Step| {
        matches!(
            step,
            Step::ReplicateToPartial { .. } | Step::ShardToPartial { .. }
        )
    };
    let mut moved = inputs
        .iter()
        .zip(destinations)
        .enumerate()
        .filter(|(_, (input, _))| input.pin.is_none());
    moved.find_map(|(at, (input, to))| {
        let (_, to) = to.plan.steps().iter().rfind(|(step, _)| !is_term(step))?;
        Some(DTensorError::implicit(
            rule.name(),
            at,
            input.spec.layout(),
            to,
        ))
    })
}

/// Returns a description of the operands from which a partial output is computed: the one that a
/// partial input already has, or else the shapes of the inputs.
///
/// If several inputs have one, the smallest is used, so that the description of a sum that
/// accumulates over steps does not grow.
fn terms(inputs: &[Arg<'_>]) -> Arc<str> {
    if let Some(terms) = inputs.iter().filter_map(|input| input.spec.terms()).min() {
        return terms.clone();
    }
    let shape = |spec: &DTensorSpec| format!("{:?}", &spec.shape()[..]);
    inputs
        .iter()
        .map(|input| shape(input.spec))
        .collect::<Vec<_>>()
        .join(" and ")
        .into()
}
