//! Which rows of a rule's table to take: the cheapest product over mesh dimensions.
//!
//! Pure: shapes and layouts in, layouts out. Every rank decides alike.
//!
//! A choice depends on how tensors are placed and on what divides what, not on how long they are: a
//! program's layouts are the same for every batch that is cut alike, for every dtype, with and without
//! gradients. Two lengths are others: one that leaves a rank without elements, which few operators
//! take, and 1, along which a tensor may be only repeated. And ragged cuts stay only where all that is cut
//! is as long as their lengths add up to. What fits is taken as it comes; else counts, in this order,
//!
//! 1. collectives in forward: between fewer and shorter the fewer are faster up to some megabytes,
//!    and a program that has longer ones to choose from says where it wants its tensors, or how long
//!    collectives take;
//! 2. what is sent in forward, where a tensor of more dimensions is taken for the larger;
//! 3. collectives in backward, of what can have gradients;
//! 4. what is sent in backward;
//! 5. steps, then placements that change.
//!
//! Steps of one kind over several mesh dimensions that travel as one collective are counted as one; the halo of a
//! window over a cut dimension, a few rows, counts nothing.
//!
//! Backward comes after forward since what is sent in forward is sent also where no gradients are taken, and
//! no operand is asked whether one is taken of it. Under a [`CostModel`](super::CostModel) the time of both comes
//! first, of tensors as long as they are.

use burn::tensor::Shape;
use itertools::Itertools;
use smallvec::SmallVec;

use super::cost_model::Times;
use super::rule::Strategy;
use super::sharding_context::{Dims, ShardingContext, uneven_sizes};
use super::strategy_cost::{Infeasible, OperandInfo, StrategyCost, TargetCosts, TransferScale, summary_cost};
use crate::placement::{Layout, Placement, Placements};

/// Layouts to bring the inputs to, and what comes out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SelectedStrategy {
    pub(super) inputs: Vec<Layout>,
    pub(super) outputs: Vec<Layout>,
    /// Of each input, the mesh dimensions on which ranks compute different things with one
    /// replicated value.
    pub(super) varying: Vec<Dims>,
}

/// What a choice is made from.
#[derive(Clone, Copy)]
pub(super) struct SelectionProblem<'a> {
    pub(super) mesh_shape: &'a [usize],
    pub(super) operands: &'a [OperandInfo<'a>],
    /// Shapes.
    pub(super) outputs: &'a [Shape],
    /// The rule's table.
    pub(super) strategies: &'a [Strategy],
    /// Whether the operator takes parts of an input that are empty along a dimension.
    pub(super) takes_empty_parts: &'a dyn Fn(usize, usize) -> bool,
    /// The times of collectives; without them counts decide.
    pub(super) times: Option<&'a Times>,
}

/// A product of rows, one per mesh dimension, that was weighed.
pub(super) struct Weighed<'a> {
    pub(super) rows: Vec<&'a Strategy>,
    pub(super) found: Result<(StrategyCost, SelectedStrategy), Infeasible>,
}

/// The cheapest way to run an operator; `None` if no row fits.
///
/// Tried are the products of one row per mesh dimension, with the cuts in the order of the mesh
/// dimensions or in an order that an operand comes in, and into chunks or the lengths that an operand
/// comes with. Parts without elements stay only if the operator takes them.
pub(super) fn select_strategy(given: SelectionProblem<'_>) -> Option<SelectedStrategy> {
    let mut best: Option<(StrategyCost, SelectedStrategy)> = None;
    search(given, |rows, weigh| {
        // Planning is what takes time: not where it must cost more.
        let least = || given.operands.iter().enumerate().map(|(at, operand)| calls(operand, rows, at)).sum();
        let known = best.as_ref().map(|(known, _)| *known);
        if given.times.is_none() && known.is_some_and(|known| known.forward < least()) {
            return true;
        }
        let Ok((cost, choice)) = weigh(known) else { return true };
        best = Some((cost, choice));
        cost.time > 0 || cost.forward > 0 || cost.changed > 0
    });
    best.map(|(_, choice)| choice)
}

/// All products of rows that [`select_strategy`] has to choose from.
pub(super) fn weighed(given: SelectionProblem<'_>) -> Vec<Weighed<'_>> {
    let mut all = Vec::new();
    search(given, |rows, weigh| {
        all.push(Weighed { rows: rows.to_vec(), found: weigh(None) });
        true
    });
    all
}

/// Visits every product of rows as long as `visit` says so; `visit` may have it weighed: against a known cost,
/// where it is of no interest what costs as much.
fn search<'a>(
    given: SelectionProblem<'a>,
    mut visit: impl FnMut(
        &[&'a Strategy],
        &mut dyn FnMut(Option<StrategyCost>) -> Result<(StrategyCost, SelectedStrategy), Infeasible>,
    ) -> bool,
) {
    let SelectionProblem { mesh_shape, operands, outputs, strategies, takes_empty_parts, times } = given;
    debug_assert!(
        strategies.iter().all(|row| row.inputs.len() == operands.len() && row.outputs.len() == outputs.len()),
        "{strategies:?}"
    );
    let asked: Vec<Vec<&Strategy>> = (0..mesh_shape.len()).map(|dim| asked_for(strategies, operands, dim)).collect();
    let scales: SmallVec<[TransferScale<'_>; 3]> =
        operands.iter().map(|operand| TransferScale::new(operand, operands, times)).collect();
    let shapes: SmallVec<[&Shape; 3]> = operands.iter().map(|operand| operand.shape).collect();
    let cuttings = mesh_orders(mesh_shape.len(), operands)
        .into_iter()
        .cartesian_product(uneven_sizes(operands.iter().map(|operand| operand.layout)));
    for (mesh_order, lengths) in cuttings {
        let cutting = ShardingContext { mesh_shape, mesh_order: &mesh_order, lengths: &lengths };
        let targets = operands.iter().zip(&scales);
        let mut targets: Vec<_> = targets
            .enumerate()
            .map(|(at, (operand, scale))| TargetCosts::new(*operand, *scale, cutting, |dim| takes_empty_parts(at, dim)))
            .collect();
        for rows in asked.iter().map(|rows| rows.iter().copied()).multi_cartesian_product() {
            let mut weigh = |known: Option<StrategyCost>| {
                if !divides(mesh_shape, &rows) {
                    return Err(Infeasible::Divides);
                }
                let uneven = cutting.kept(&rows, &shapes, outputs);
                let mut cost = StrategyCost { forward: scattered(operands, &rows), ..StrategyCost::default() };
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
                    cutting.output(&placements, &uneven, &rows, (&shapes, &outputs[at])).ok_or(Infeasible::NoWay)
                };
                let outputs = (0..outputs.len()).map(output).collect::<Result<_, _>>()?;
                let input = |(at, targets): (usize, &mut TargetCosts<'_>)| {
                    let placements: Placements = rows.iter().map(|row| row.inputs[at]).collect();
                    let varying = varying(mesh_shape, &placements, &rows);
                    targets.get(placements, &uneven, varying.clone()).map(|(layout, _)| (layout.clone(), varying))
                };
                let inputs = targets.iter_mut().enumerate().map(input).collect::<Result<Vec<_>, _>>()?;
                let (inputs, varying) = inputs.into_iter().unzip();
                Ok((cost, SelectedStrategy { inputs, outputs, varying }))
            };
            if !visit(&rows, &mut weigh) {
                return;
            }
        }
    }
}

/// Orders of the mesh dimensions in which cuts may be made: ascending, and as operands have them.
fn mesh_orders(mesh_dims: usize, operands: &[OperandInfo<'_>]) -> Vec<Dims> {
    let of = |operand: &OperandInfo<'_>| {
        let mut mesh_order: Dims = (0..mesh_dims).collect();
        for (_, sharding_dims) in operand.layout.orders() {
            // The positions these mesh dimensions have among all stay; only their order changes.
            let mut places: Dims = (0..mesh_dims).filter(|&at| sharding_dims.contains(&mesh_order[at])).collect();
            places.sort_unstable();
            for (place, &sizes) in places.into_iter().zip(sharding_dims) {
                mesh_order[place] = sizes;
            }
        }
        mesh_order
    };
    std::iter::once((0..mesh_dims).collect()).chain(operands.iter().map(of)).unique().collect()
}

/// Whether the pieces of every output dimension divide what the rows that cut it ask for.
fn divides(mesh_shape: &[usize], rows: &[&Strategy]) -> bool {
    rows.iter().all(|row| {
        let (Some(len), Some(Placement::Shard(dim))) = (row.divides, row.outputs.first()) else { return true };
        let sharding_dims = rows.iter().zip(mesh_shape).filter(|(row, _)| row.outputs[0] == Placement::Shard(*dim));
        len % sharding_dims.map(|(_, &size)| size).product::<usize>() == 0
    })
}

/// The rows to try on `mesh_dim`: those that have inputs where callers want them, and whose partial inputs are
/// there already. One costs nothing to make and all the more to keep, so none is made, but for a term of a sum that
/// is kept anyhow.
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
            operand.takes(mesh_dim, placement) && (row.makes_term(at) || !made(row, at))
        })
    };
    strategies.iter().filter(asked).collect()
}

/// The collectives that bringing `operand`, input `at` of these rows, needs at least: one for each mesh dimension on
/// which its placement ends, or, where steps join, for all that end one placement.
fn calls(operand: &OperandInfo<'_>, rows: &[&Strategy], at: usize) -> usize {
    let ends = |&mesh_dim: &usize| {
        let from = operand.layout.placements()[mesh_dim];
        let becomes_term = from.shard_dim().is_some() && rows[mesh_dim].makes_term(at);
        let stays = from.is_replicate() || from == rows[mesh_dim].inputs[at] || becomes_term;
        operand.layout.mesh_shape()[mesh_dim] > 1 && !stays
    };
    let ended = (0..rows.len()).filter(ends).map(|mesh_dim| operand.layout.placements()[mesh_dim]);
    if operand.joins { ended.unique().count() } else { ended.count() }
}

/// The mesh dimensions on which a partial input would be scattered though nothing else is cut:
/// whatever meets it next is whole there, so that it will have to be gathered, one collective more.
fn scattered(operands: &[OperandInfo<'_>], rows: &[&Strategy]) -> usize {
    let alone = |&mesh_dim: &usize| {
        let comes = |operand: &OperandInfo<'_>| operand.layout.placements()[mesh_dim];
        let mut inputs = operands.iter().zip(&rows[mesh_dim].inputs);
        inputs.any(|(operand, input)| comes(operand).partial_op().is_some() && input.shard_dim().is_some())
            && operands.iter().all(|operand| comes(operand).shard_dim().is_none())
    };
    (0..rows.len()).filter(alone).count()
}

/// A value that is the same on all ranks of a mesh dimension varies where anything else on it is not.
fn varying(mesh_shape: &[usize], placements: &[Placement], rows: &[&Strategy]) -> Dims {
    let same = |row: &Strategy| row.inputs.iter().chain(&row.outputs).all(|placement| placement.is_replicate());
    let varies = |&dim: &usize| mesh_shape[dim] > 1 && placements[dim].is_replicate() && !same(rows[dim]);
    (0..mesh_shape.len()).filter(varies).collect()
}

#[cfg(test)]
mod tests;
