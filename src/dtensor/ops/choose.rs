//! Which rows of a rule's table to take: the cheapest product over mesh dimensions.
//!
//! Pure: shapes and layouts in, layouts out. Every rank decides alike.

use burn::tensor::Shape;
use hashbrown::HashMap;
use itertools::Itertools;
use smallvec::SmallVec;

use super::rule::Strategy;
use crate::dtensor::redistribute::Route;
use crate::placement::{Layout, Placement, Placements, plan_cost};

/// Mesh dimensions, ascending.
pub(super) type Dims = SmallVec<[usize; 3]>;

/// An input as it comes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand<'a> {
    pub(super) layout: &'a Layout,
    pub(super) shape: &'a Shape,
    /// Bytes an element.
    pub(super) width: usize,
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

/// What a collective costs before its first byte, in bytes: some 6 us of a 90 GB/s link.
const CALL: u64 = 1 << 19;

/// Bytes sent (with [`CALL`] a collective), steps taken, placements changed.
type Cost = (u64, usize, usize);

/// The cheapest way to run an operator with the rows `strategies` on `operands`.
///
/// Tried are the products of one row a mesh dimension, with the cuts in the order of the mesh
/// dimensions or in an order that an operand comes in. `None` if no row fits.
pub(super) fn choose(
    mesh_shape: &[usize],
    operands: &[Operand<'_>],
    outputs: usize,
    strategies: &[Strategy],
) -> Option<Choice> {
    debug_assert!(
        strategies.iter().all(|row| row.inputs.len() == operands.len() && row.outputs.len() == outputs),
        "{strategies:?}"
    );
    let mut best: Option<(Cost, Choice)> = None;
    for turn in turns(mesh_shape.len(), operands) {
        let mut targets: Vec<_> = operands.iter().map(|&operand| Targets::new(operand, &turn)).collect();
        for rows in mesh_shape.iter().map(|_| strategies).multi_cartesian_product() {
            if !divides(mesh_shape, &rows) {
                continue;
            }
            let inputs = |at: usize| -> Placements { rows.iter().map(|row| row.inputs[at]).collect() };
            let mut moves = targets.iter_mut().enumerate().map(|(at, targets)| Some(targets.get(inputs(at))?.1));
            let Some(cost) = moves.fold_options((0, 0, 0), |a, b| (a.0 + b.0, a.1 + b.1, a.2 + b.2)) else { continue };
            if best.as_ref().is_some_and(|(known, _)| *known <= cost) {
                continue;
            }
            let output = |at: usize| {
                let placements: Placements = rows.iter().map(|row| row.outputs[at]).collect();
                Layout::in_turn(mesh_shape, &placements, &turn).ok()
            };
            let Some(outputs) = (0..outputs).map(output).collect() else { continue };
            let layouts = targets.iter_mut().enumerate().map(|(at, targets)| Some(targets.get(inputs(at))?.0.clone()));
            let inputs: Vec<Layout> = layouts.collect::<Option<_>>().expect("they have a cost");
            let varying = inputs.iter().map(|layout| varying(mesh_shape, layout, &rows)).collect();
            best = Some((cost, Choice { inputs, outputs, varying }));
            if cost == (0, 0, 0) {
                return best.map(|(_, choice)| choice);
            }
        }
    }
    best.map(|(_, choice)| choice)
}
/// Orders of the mesh dimensions in which cuts may be made: ascending, and as operands have them.
fn turns(mesh_dims: usize, operands: &[Operand<'_>]) -> Vec<Dims> {
    let of = |operand: &Operand<'_>| {
        let mut turn: Dims = (0..mesh_dims).collect();
        for (_, cuts) in operand.layout.orders() {
            // The positions these mesh dimensions have among all stay; only their order changes.
            let mut places: Dims = (0..mesh_dims).filter(|&at| cuts.contains(&turn[at])).collect();
            places.sort_unstable();
            for (place, &cut) in places.into_iter().zip(cuts) {
                turn[place] = cut;
            }
        }
        turn
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

/// Whether bringing `operand` to `target` would make what nobody asked for: a pending reduction,
/// which costs nothing to make and all the more to keep, or a cut of a dimension shorter than its
/// number of pieces.
fn unasked(operand: &Operand<'_>, target: &Layout) -> bool {
    let mut pairs = operand.layout.placements().iter().zip(target.placements());
    let reduction = pairs.any(|(from, to)| from != to && to.partial_op().is_some());
    let too_fine = |(dim, cuts): (usize, &[usize])| {
        let pieces: usize = cuts.iter().map(|&cut| target.mesh_shape()[cut]).product();
        operand.shape[dim] < pieces && operand.layout.order(dim) != cuts
    };
    reduction || target.orders().any(too_fine)
}

/// A value that is the same on all ranks of a mesh dimension varies where anything else on it is not.
fn varying(mesh_shape: &[usize], layout: &Layout, rows: &[&Strategy]) -> Dims {
    let same = |row: &Strategy| row.inputs.iter().chain(&row.outputs).all(|placement| placement.is_replicate());
    let varies = |&dim: &usize| mesh_shape[dim] > 1 && layout.placements()[dim].is_replicate() && !same(rows[dim]);
    (0..mesh_shape.len()).filter(varies).collect()
}

/// The layouts that an operand may be brought to with cuts in one order, and what that costs.
struct Targets<'a> {
    operand: Operand<'a>,
    turn: &'a [usize],
    known: HashMap<Placements, Option<(Layout, Cost)>>,
}

impl<'a> Targets<'a> {
    fn new(operand: Operand<'a>, turn: &'a [usize]) -> Self {
        Self { operand, turn, known: HashMap::new() }
    }

    /// The layout with these placements; `None` if there is none, or no way to it.
    fn get(&mut self, placements: Placements) -> Option<&(Layout, Cost)> {
        let Self { operand, turn, known } = self;
        let make = |placements: &Placements| {
            let layout = Layout::in_turn(operand.layout.mesh_shape(), placements, turn).ok()?;
            let cost = if unasked(operand, &layout) { None } else { move_cost(operand, &layout) };
            Some((layout, cost?))
        };
        known.entry(placements).or_insert_with_key(make).as_ref()
    }
}

fn move_cost(operand: &Operand<'_>, target: &Layout) -> Option<Cost> {
    if operand.layout == target {
        return Some((0, 0, 0));
    }
    let route = Route::between(operand.layout, target).ok()?;
    let (calls, bytes) = plan_cost(operand.layout, route.steps(), operand.shape.num_elements() * operand.width);
    let pairs = operand.layout.placements().iter().zip(target.placements());
    Some((bytes + calls * CALL, route.steps().len(), pairs.filter(|(from, to)| from != to).count()))
}
