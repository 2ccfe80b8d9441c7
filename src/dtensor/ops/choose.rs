//! Which rows of a rule's table to take: the cheapest product over mesh dimensions.
//!
//! Pure: shapes and layouts in, layouts out. Every rank decides alike.
//!
//! A choice depends on how tensors are placed and on what divides what, not on how long they are: a
//! program's layouts are the same for every batch that is cut alike, for every dtype, with and without
//! gradients. Two lengths are others: one that leaves a rank without elements, which few operators
//! take, and 1, along which a tensor may be only repeated. And ragged cuts stay only where all that is cut
//! is as long as their lengths add up to. What counts is, in this order,
//!
//! 1. collectives in forward: between fewer and shorter the fewer are faster up to some megabytes,
//!    and a program that has longer ones to choose from says where it wants its tensors;
//! 2. what is sent in forward, where a tensor of more dimensions is taken for the larger;
//! 3. collectives in backward, of what can have gradients;
//! 4. steps, then placements that change.

use std::ops::Add;

use burn::tensor::Shape;
use hashbrown::HashMap;
use itertools::Itertools;
use smallvec::SmallVec;

use super::cutting::{Cutting, ragged};
use super::rule::Strategy;
use crate::dtensor::DTensorSpec;
use crate::dtensor::route::Route;
use crate::placement::{Layout, Placement, Placements, plan_cost};

/// Mesh dimensions, ascending.
pub(super) type Dims = SmallVec<[usize; 3]>;

/// An input as it comes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Incoming<'a> {
    pub(super) layout: &'a Layout,
    pub(super) shape: &'a Shape,
    /// Whether it can have a gradient.
    pub(super) differentiable: bool,
}

impl<'a> Incoming<'a> {
    pub(super) fn new(spec: &'a DTensorSpec) -> Self {
        Self { layout: spec.layout(), shape: spec.shape(), differentiable: spec.dtype().is_float() }
    }
}

/// Layouts to bring the inputs to, and what comes out.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) inputs: Vec<Layout>,
    pub(super) outputs: Vec<Layout>,
    /// Of each input, the mesh dimensions on which ranks compute different things with one
    /// replicated value.
    pub(super) varying: Vec<Dims>,
}

/// What a choice costs; the fields are compared in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    /// Collectives in forward, also those that have to follow.
    forward: usize,
    /// What a rank sends in forward, of tensors of a nominal size.
    sent: u128,
    /// Collectives in backward.
    backward: usize,
    steps: usize,
    /// Placements.
    changed: usize,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            forward: self.forward + other.forward,
            sent: self.sent + other.sent,
            backward: self.backward + other.backward,
            steps: self.steps + other.steps,
            changed: self.changed + other.changed,
        }
    }
}

/// The cheapest way to run an operator with the rows `strategies` on `operands`.
///
/// Tried are the products of one row per mesh dimension, with the cuts in the order of the mesh
/// dimensions or in an order that an operand comes in, and into chunks or the lengths that an operand
/// comes with. Parts without elements stay only where the operator takes such parts of an input, which are empty
/// along a dimension. `None` if no row fits.
pub(super) fn choose(
    mesh_shape: &[usize],
    operands: &[Incoming<'_>],
    outputs: &[Shape],
    strategies: &[Strategy],
    takes_empty_parts: impl Fn(usize, usize) -> bool,
) -> Option<Choice> {
    debug_assert!(
        strategies.iter().all(|row| row.inputs.len() == operands.len() && row.outputs.len() == outputs.len()),
        "{strategies:?}"
    );
    let asked: Vec<Vec<&Strategy>> = (0..mesh_shape.len()).map(|dim| asked_for(strategies, operands, dim)).collect();
    let mut best: Option<(Cost, Choice)> = None;
    let cuttings = mesh_orders(mesh_shape.len(), operands)
        .into_iter()
        .cartesian_product(ragged(operands.iter().map(|operand| operand.layout)));
    let shapes: SmallVec<[&Shape; 3]> = operands.iter().map(|operand| operand.shape).collect();
    for (mesh_order, lengths) in cuttings {
        let cutting = Cutting { mesh_shape, mesh_order: &mesh_order, lengths: &lengths };
        let mut targets: Vec<_> = operands
            .iter()
            .enumerate()
            .map(|(at, &operand)| Targets::new(operand, operands, cutting, |dim| takes_empty_parts(at, dim)))
            .collect();
        for rows in asked.iter().map(|rows| rows.iter().copied()).multi_cartesian_product() {
            // Planning is what takes time: not where it must cost more.
            let least: usize = operands.iter().enumerate().map(|(at, operand)| calls(operand, &rows, at)).sum();
            if best.as_ref().is_some_and(|(known, _)| known.forward < least) || !divides(mesh_shape, &rows) {
                continue;
            }
            let inputs = |at: usize| -> Placements { rows.iter().map(|row| row.inputs[at]).collect() };
            let uneven = cutting.kept(&rows, &shapes, outputs);
            let mut moves = targets.iter_mut().enumerate().map(|(at, targets)| {
                let (layout, cost) = targets.get(inputs(at), &uneven)?;
                let summed = if operands[at].differentiable { varying(mesh_shape, layout, &rows).len() } else { 0 };
                Some(Cost { backward: cost.backward + summed, ..*cost })
            });
            let to_come = Cost { forward: scattered(operands, &rows), ..Cost::default() };
            let Some(cost) = moves.fold_options(to_come, Add::add) else { continue };
            if best.as_ref().is_some_and(|(known, _)| *known <= cost) {
                continue;
            }
            let output = |at: usize| {
                let placements: Placements = rows.iter().map(|row| row.outputs[at]).collect();
                cutting.output(&placements, &uneven, &rows, (&shapes, &outputs[at]))
            };
            let Some(outputs) = (0..outputs.len()).map(output).collect() else { continue };
            let layouts = targets.iter_mut().enumerate();
            let layouts = layouts.map(|(at, targets)| Some(targets.get(inputs(at), &uneven)?.0.clone()));
            let inputs: Vec<Layout> = layouts.collect::<Option<_>>().expect("they have a cost");
            let varying = inputs.iter().map(|layout| varying(mesh_shape, layout, &rows)).collect();
            best = Some((cost, Choice { inputs, outputs, varying }));
            if cost.forward == 0 && cost.changed == 0 {
                return best.map(|(_, choice)| choice);
            }
        }
    }
    best.map(|(_, choice)| choice)
}

/// Orders of the mesh dimensions in which cuts may be made: ascending, and as operands have them.
fn mesh_orders(mesh_dims: usize, operands: &[Incoming<'_>]) -> Vec<Dims> {
    let of = |operand: &Incoming<'_>| {
        let mut mesh_order: Dims = (0..mesh_dims).collect();
        for (_, cuts) in operand.layout.orders() {
            // The positions these mesh dimensions have among all stay; only their order changes.
            let mut places: Dims = (0..mesh_dims).filter(|&at| cuts.contains(&mesh_order[at])).collect();
            places.sort_unstable();
            for (place, &cut) in places.into_iter().zip(cuts) {
                mesh_order[place] = cut;
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
        let cuts = rows.iter().zip(mesh_shape).filter(|(row, _)| row.outputs[0] == Placement::Shard(*dim));
        len % cuts.map(|(_, &size)| size).product::<usize>() == 0
    })
}

/// The rows to try on `mesh_dim`: those whose partial inputs are there already. One costs nothing to make
/// and all the more to keep, so none is made, but for a term of a sum that is kept anyhow.
fn asked_for<'a>(strategies: &'a [Strategy], operands: &[Incoming<'_>], mesh_dim: usize) -> Vec<&'a Strategy> {
    let made = |row: &Strategy, at: usize| {
        let placement = row.inputs[at];
        placement.partial_op().is_some() && operands[at].layout.placements()[mesh_dim] != placement
    };
    let asked = |row: &&Strategy| (0..operands.len()).all(|at| row.makes_term(at) || !made(row, at));
    strategies.iter().filter(asked).collect()
}

/// The collectives that bringing `operand`, input `at` of these rows, needs at least: one for each
/// mesh dimension on which its placement ends.
fn calls(operand: &Incoming<'_>, rows: &[&Strategy], at: usize) -> usize {
    let ends = |&mesh_dim: &usize| {
        let from = operand.layout.placements()[mesh_dim];
        let becomes_term = from.shard_dim().is_some() && rows[mesh_dim].makes_term(at);
        let stays = from.is_replicate() || from == rows[mesh_dim].inputs[at] || becomes_term;
        operand.layout.mesh_shape()[mesh_dim] > 1 && !stays
    };
    (0..rows.len()).filter(ends).count()
}

/// The mesh dimensions on which a partial input would be scattered though nothing else is cut:
/// whatever meets it next is whole there, so that it will have to be gathered, one collective more.
fn scattered(operands: &[Incoming<'_>], rows: &[&Strategy]) -> usize {
    let alone = |&mesh_dim: &usize| {
        let comes = |operand: &Incoming<'_>| operand.layout.placements()[mesh_dim];
        let mut inputs = operands.iter().zip(&rows[mesh_dim].inputs);
        inputs.any(|(operand, input)| comes(operand).partial_op().is_some() && input.shard_dim().is_some())
            && operands.iter().all(|operand| comes(operand).shard_dim().is_none())
    };
    (0..rows.len()).filter(alone).count()
}

/// The dimensions along which `layout` leaves a rank without elements of a tensor that has some.
fn left_empty(shape: &Shape, layout: &Layout) -> Dims {
    if shape.num_elements() == 0 {
        return Dims::new();
    }
    layout.shortest(shape).iter().positions(|&len| len == 0).collect()
}

/// A value that is the same on all ranks of a mesh dimension varies where anything else on it is not.
fn varying(mesh_shape: &[usize], layout: &Layout, rows: &[&Strategy]) -> Dims {
    let same = |row: &Strategy| row.inputs.iter().chain(&row.outputs).all(|placement| placement.is_replicate());
    let varies = |&dim: &usize| mesh_shape[dim] > 1 && layout.placements()[dim].is_replicate() && !same(rows[dim]);
    (0..mesh_shape.len()).filter(varies).collect()
}

/// How large `operand` is taken to be beside the others: every dimension makes it 256 times as
/// large, but for those along which it is only repeated.
fn nominal_size(operand: &Incoming<'_>, operands: &[Incoming<'_>]) -> u128 {
    let dims = operand.shape.num_dims();
    let longer = |dim: usize| operands.iter().any(|other| other.shape.num_dims() == dims && other.shape[dim] > 1);
    let own = (0..dims).filter(|&dim| operand.shape[dim] > 1 || !longer(dim)).count();
    1 << (8 * own.min(10))
}

/// The layouts that an operand may be brought to with cuts in one order, and what that costs.
struct Targets<'a> {
    operand: Incoming<'a>,
    size: u128,
    cutting: Cutting<'a>,
    /// The dimensions along which parts without elements may stay, or other ranks have them: of an operand
    /// that comes with some. To one that comes without, none are made.
    may_be_empty: Dims,
    /// By placements, and the mesh dimensions that are ragged.
    known: HashMap<(Placements, Dims), Option<(Layout, Cost)>>,
}

impl<'a> Targets<'a> {
    fn new(
        operand: Incoming<'a>,
        operands: &[Incoming<'a>],
        cutting: Cutting<'a>,
        takes_empty_parts: impl Fn(usize) -> bool,
    ) -> Self {
        let comes_so = !left_empty(operand.shape, operand.layout).is_empty();
        let may_be_empty = (0..operand.shape.num_dims()).filter(|&dim| comes_so && takes_empty_parts(dim)).collect();
        Self { operand, size: nominal_size(&operand, operands), cutting, may_be_empty, known: HashMap::new() }
    }

    /// The layout with these placements; `None` if there is none, or no way to it.
    fn get(&mut self, placements: Placements, uneven: &Dims) -> Option<&(Layout, Cost)> {
        let Self { operand, size, cutting, may_be_empty, known } = self;
        let make = |(placements, uneven): &(Placements, Dims)| {
            let layout = cutting.layout(placements, uneven)?;
            let fits = left_empty(operand.shape, &layout).iter().all(|dim| may_be_empty.contains(dim));
            let cost = fits.then(|| move_cost(operand, *size, &layout))??;
            Some((layout, cost))
        };
        known.entry((placements, uneven.clone())).or_insert_with_key(make).as_ref()
    }
}

fn move_cost(operand: &Incoming<'_>, size: u128, target: &Layout) -> Option<Cost> {
    if operand.layout == target {
        return Some(Cost::default());
    }
    let route = Route::of_input(operand.layout, target).ok()?;
    let plan = plan_cost(operand.layout, route.steps());
    let pairs = operand.layout.placements().iter().zip(target.placements());
    Some(Cost {
        forward: plan.forward,
        sent: u128::from(plan.traffic) * size,
        backward: if operand.differentiable { plan.backward } else { 0 },
        steps: route.steps().len(),
        changed: pairs.filter(|(from, to)| from != to).count(),
    })
}

#[cfg(test)]
mod tests;
