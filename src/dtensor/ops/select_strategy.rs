//! Selects strategies from a rule's table: the cheapest combination of one strategy for each mesh
//! dimension.
//!
//! These are pure functions from shapes and layouts to layouts. Every rank selects the same.
//!
//! The selection depends on placements and divisibility, not on lengths. A program's layouts are
//! therefore the same for every batch with the same sharding, for every dtype, and with or without
//! gradients. There are two exceptions: lengths that leave a rank without elements, which few
//! operators support, and length 1, along which a tensor may only be broadcast. Uneven shard sizes
//! are kept only if all dimensions sharded by them have the length that they add up to. Inputs that
//! fit a strategy are not moved. Otherwise the criteria are, in this order:
//!
//! 1. The number of collectives in forward. Up to some megabytes, fewer collectives are faster than
//!    shorter ones. A program with longer tensors can constrain their placements, or set the cost
//!    of collectives.
//! 2. The volume sent in forward, where a tensor of more dimensions counts as larger.
//! 3. The number of collectives in backward, for inputs that can have gradients.
//! 4. The volume sent in backward.
//! 5. The number of steps, then of placements that change.
//!
//! Steps of one kind over several mesh dimensions count once if they are sent as one collective.
//! The halo of a window over a sharded dimension is a few rows and does not count.
//!
//! Backward comes after forward because the forward volume is sent also without gradients, and the
//! selection does not ask whether a gradient is needed. Under a [`CostModel`](super::CostModel),
//! the time of forward and backward comes first, computed from actual lengths.

use burn::tensor::Shape;
use itertools::Itertools;
use smallvec::SmallVec;

use super::cost_model::Times;
use super::rule::Strategy;
use super::sharding_context::{Dims, ShardingContext, uneven_sizes};
use super::strategy_cost::{
    Infeasible, OperandInfo, StrategyCost, TargetCosts, TransferScale, summary_cost,
};
use crate::placement::{Layout, Placement, Placements};

/// Target layouts of the inputs, and layouts of the outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SelectedStrategy {
    pub(super) inputs: Vec<Layout>,
    pub(super) outputs: Vec<Layout>,
    /// For each input, the mesh dimensions on which it is replicated but used in different
    /// computations.
    pub(super) varying: Vec<Dims>,
}

/// Input of [`select_strategy`].
#[derive(Clone, Copy)]
pub(super) struct SelectionProblem<'a> {
    pub(super) mesh_shape: &'a [usize],
    pub(super) operands: &'a [OperandInfo<'a>],
    /// Global shapes of the outputs.
    pub(super) outputs: &'a [Shape],
    /// The strategies of the rule.
    pub(super) strategies: &'a [Strategy],
    /// Returns true if the operator supports shards of an input that are empty along a dimension.
    pub(super) takes_empty_parts: &'a dyn Fn(usize, usize) -> bool,
    /// The times of collectives; without them, counts decide.
    pub(super) times: Option<&'a Times>,
}

/// A combination of strategies, one for each mesh dimension, with its cost.
pub(super) struct Weighed<'a> {
    pub(super) rows: Vec<&'a Strategy>,
    pub(super) found: Result<(StrategyCost, SelectedStrategy), Infeasible>,
}

/// Returns the cheapest way to run an operator, or `None` if no strategy fits.
///
/// It tries all combinations of one strategy for each mesh dimension. Mesh dimensions shard in
/// ascending order or in the order of an operand; shards are chunks or have the sizes of an
/// operand. Empty shards are kept only if the operator supports them.
pub(super) fn select_strategy(given: SelectionProblem<'_>) -> Option<SelectedStrategy> {
    let mut best: Option<(StrategyCost, SelectedStrategy)> = None;
    search(given, |rows, weigh| {
        // Planning redistributions is what takes time, so combinations that must cost more are
        // skipped.
        let least = || {
            given
                .operands
                .iter()
                .enumerate()
                .map(|(at, operand)| calls(operand, rows, at))
                .sum()
        };
        let known = best.as_ref().map(|(known, _)| *known);
        if given.times.is_none() && known.is_some_and(|known| known.forward < least()) {
            return true;
        }
        let Ok((cost, choice)) = weigh(known) else {
            return true;
        };
        best = Some((cost, choice));
        cost.time > 0 || cost.forward > 0 || cost.changed > 0
    });
    best.map(|(_, choice)| choice)
}

/// Returns all combinations that [`select_strategy`] has to choose from.
pub(super) fn weighed(given: SelectionProblem<'_>) -> Vec<Weighed<'_>> {
    let mut all = Vec::new();
    search(given, |rows, weigh| {
        all.push(Weighed {
            rows: rows.to_vec(),
            found: weigh(None),
        });
        true
    });
    all
}

/// Visits every combination of strategies until `visit` returns false. `visit` may have the
/// combination weighed. If it passes a known cost, a combination that costs at least as much is
/// rejected without computing its layouts.
fn search<'a>(
    given: SelectionProblem<'a>,
    mut visit: impl FnMut(
        &[&'a Strategy],
        &mut dyn FnMut(Option<StrategyCost>) -> Result<(StrategyCost, SelectedStrategy), Infeasible>,
    ) -> bool,
) {
    let SelectionProblem {
        mesh_shape,
        operands,
        outputs,
        strategies,
        takes_empty_parts,
        times,
    } = given;
    debug_assert!(
        strategies
            .iter()
            .all(|row| row.inputs.len() == operands.len() && row.outputs.len() == outputs.len()),
        "{strategies:?}"
    );
    let asked: Vec<Vec<&Strategy>> = (0..mesh_shape.len())
        .map(|dim| asked_for(strategies, operands, dim))
        .collect();
    let scales: SmallVec<[TransferScale<'_>; 3]> = operands
        .iter()
        .map(|operand| TransferScale::new(operand, operands, times))
        .collect();
    let shapes: SmallVec<[&Shape; 3]> = operands.iter().map(|operand| operand.shape).collect();
    let cuttings = mesh_orders(mesh_shape.len(), operands)
        .into_iter()
        .cartesian_product(uneven_sizes(operands.iter().map(|operand| operand.layout)));
    for (mesh_order, lengths) in cuttings {
        let cutting = ShardingContext {
            mesh_shape,
            mesh_order: &mesh_order,
            lengths: &lengths,
        };
        let targets = operands.iter().zip(&scales);
        let mut targets: Vec<_> = targets
            .enumerate()
            .map(|(at, (operand, scale))| {
                TargetCosts::new(*operand, *scale, cutting, |dim| takes_empty_parts(at, dim))
            })
            .collect();
        for rows in asked
            .iter()
            .map(|rows| rows.iter().copied())
            .multi_cartesian_product()
        {
            let mut weigh = |known: Option<StrategyCost>| {
                if !divides(mesh_shape, &rows) {
                    return Err(Infeasible::Divides);
                }
                let uneven = cutting.kept(&rows, &shapes, outputs);
                let mut cost = StrategyCost {
                    forward: scattered(operands, &rows),
                    ..StrategyCost::default()
                };
                for (at, (targets, operand)) in targets.iter_mut().zip(operands).enumerate() {
                    let placements: Placements = rows.iter().map(|row| row.inputs[at]).collect();
                    let varying = varying(mesh_shape, &placements, &rows);
                    let (layout, moved) = targets.get(placements, &uneven, varying)?;
                    cost = cost + *moved;
                    if at == 0 {
                        cost = cost + summary_cost(operand, scales[0], layout, &rows);
                    }
                }
                if known.is_some_and(|known| known <= cost) {
                    return Err(Infeasible::Dearer);
                }
                let output = |at: usize| {
                    let placements: Placements = rows.iter().map(|row| row.outputs[at]).collect();
                    cutting
                        .output(&placements, &uneven, &rows, (&shapes, &outputs[at]))
                        .ok_or(Infeasible::NoWay)
                };
                let outputs = (0..outputs.len()).map(output).collect::<Result<_, _>>()?;
                let input = |(at, targets): (usize, &mut TargetCosts<'_>)| {
                    let placements: Placements = rows.iter().map(|row| row.inputs[at]).collect();
                    let varying = varying(mesh_shape, &placements, &rows);
                    targets
                        .get(placements, &uneven, varying.clone())
                        .map(|(layout, _)| (layout.clone(), varying))
                };
                let inputs = targets
                    .iter_mut()
                    .enumerate()
                    .map(input)
                    .collect::<Result<Vec<_>, _>>()?;
                let (inputs, varying) = inputs.into_iter().unzip();
                Ok((
                    cost,
                    SelectedStrategy {
                        inputs,
                        outputs,
                        varying,
                    },
                ))
            };
            if !visit(&rows, &mut weigh) {
                return;
            }
        }
    }
}

/// Returns the orders of the mesh dimensions to try: ascending, and those of the operands.
fn mesh_orders(mesh_dims: usize, operands: &[OperandInfo<'_>]) -> Vec<Dims> {
    let of = |operand: &OperandInfo<'_>| {
        let mut mesh_order: Dims = (0..mesh_dims).collect();
        for (_, sharding_dims) in operand.layout.orders() {
            // The set of positions of these mesh dimensions stays the same; only their order within
            // it changes.
            let mut places: Dims = (0..mesh_dims)
                .filter(|&at| sharding_dims.contains(&mesh_order[at]))
                .collect();
            places.sort_unstable();
            for (place, &sizes) in places.into_iter().zip(sharding_dims) {
                mesh_order[place] = sizes;
            }
        }
        mesh_order
    };
    std::iter::once((0..mesh_dims).collect())
        .chain(operands.iter().map(of))
        .unique()
        .collect()
}

/// Returns true if, for every output dimension, the number of shards divides what the strategies
/// that shard it require.
fn divides(mesh_shape: &[usize], rows: &[&Strategy]) -> bool {
    rows.iter().all(|row| {
        let (Some(len), Some(Placement::Shard(dim))) = (row.divides, row.outputs.first()) else {
            return true;
        };
        let sharding_dims = rows
            .iter()
            .zip(mesh_shape)
            .filter(|(row, _)| row.outputs[0] == Placement::Shard(*dim));
        len % sharding_dims.map(|(_, &size)| size).product::<usize>() == 0
    })
}

/// Returns the strategies to try on `mesh_dim`: those that satisfy the callers' constraints and
/// whose partial inputs are already partial. Making an input partial costs nothing, but reducing it
/// later does. The only exception is an operand that is converted to a partial sum because the
/// result is one anyway.
pub(super) fn asked_for<'a>(
    strategies: &'a [Strategy],
    operands: &[OperandInfo<'_>],
    mesh_dim: usize,
) -> Vec<&'a Strategy> {
    let made = |row: &Strategy, at: usize| {
        let placement = row.inputs[at];
        placement.partial_op().is_some() && operands[at].layout.placements()[mesh_dim] != placement
    };
    let asked = |row: &&Strategy| {
        let mut inputs = operands.iter().zip(&row.inputs).enumerate();
        inputs.all(|(at, (operand, &placement))| {
            operand.takes(mesh_dim, placement) && (row.makes_partial(at) || !made(row, at))
        })
    };
    strategies.iter().filter(asked).collect()
}

/// Returns a lower bound of the collectives that redistribute `operand`, input `at` of these
/// strategies: one for each mesh dimension on which its placement changes or, if steps can be
/// fused, one for each kind of placement that changes.
fn calls(operand: &OperandInfo<'_>, rows: &[&Strategy], at: usize) -> usize {
    let ends = |&mesh_dim: &usize| {
        let from = operand.layout.placements()[mesh_dim];
        let becomes_term = from.shard_dim().is_some() && rows[mesh_dim].makes_partial(at);
        let stays = from.is_replicate() || from == rows[mesh_dim].inputs[at] || becomes_term;
        operand.layout.mesh_shape()[mesh_dim] > 1 && !stays
    };
    let ended = (0..rows.len())
        .filter(ends)
        .map(|mesh_dim| operand.layout.placements()[mesh_dim]);
    if operand.joins {
        ended.unique().count()
    } else {
        ended.count()
    }
}

/// Returns the number of mesh dimensions on which a partial input would be reduce-scattered
/// although no input is sharded. The next operand is replicated there, so the result will have to
/// be gathered by one more collective.
fn scattered(operands: &[OperandInfo<'_>], rows: &[&Strategy]) -> usize {
    let alone = |&mesh_dim: &usize| {
        let comes = |operand: &OperandInfo<'_>| operand.layout.placements()[mesh_dim];
        let mut inputs = operands.iter().zip(&rows[mesh_dim].inputs);
        inputs.any(|(operand, input)| {
            comes(operand).partial_op().is_some() && input.shard_dim().is_some()
        }) && operands
            .iter()
            .all(|operand| comes(operand).shard_dim().is_none())
    };
    (0..rows.len()).filter(alone).count()
}

/// Returns the mesh dimensions on which a replicated input varies: any other input or output is not
/// replicated there.
fn varying(mesh_shape: &[usize], placements: &[Placement], rows: &[&Strategy]) -> Dims {
    let same = |row: &Strategy| {
        row.inputs
            .iter()
            .chain(&row.outputs)
            .all(|placement| placement.is_replicate())
    };
    (0..mesh_shape.len())
        .filter(|&dim| mesh_shape[dim] > 1 && placements[dim].is_replicate() && !same(rows[dim]))
        .collect()
}

#[cfg(test)]
mod tests;
