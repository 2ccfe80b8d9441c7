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
/// comes with. Parts without elements stay only if the operator `takes_empty_parts`. `None` if no row fits.
pub(super) fn choose(
    mesh_shape: &[usize],
    operands: &[Incoming<'_>],
    outputs: &[Shape],
    strategies: &[Strategy],
    takes_empty_parts: bool,
) -> Option<Choice> {
    debug_assert!(
        strategies.iter().all(|row| row.inputs.len() == operands.len() && row.outputs.len() == outputs.len()),
        "{strategies:?}"
    );
    let asked: Vec<Vec<&Strategy>> = (0..mesh_shape.len()).map(|dim| asked_for(strategies, operands, dim)).collect();
    let mut best: Option<(Cost, Choice)> = None;
    let cuttings = turns(mesh_shape.len(), operands)
        .into_iter()
        .cartesian_product(ragged(operands.iter().map(|operand| operand.layout)));
    let shapes: SmallVec<[&Shape; 3]> = operands.iter().map(|operand| operand.shape).collect();
    for (turn, lengths) in cuttings {
        let cutting = Cutting { mesh_shape, turn: &turn, lengths: &lengths };
        let mut targets: Vec<_> =
            operands.iter().map(|&operand| Targets::new(operand, operands, cutting, takes_empty_parts)).collect();
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
                cutting.layout(&placements, &uneven)
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
fn turns(mesh_dims: usize, operands: &[Incoming<'_>]) -> Vec<Dims> {
    let of = |operand: &Incoming<'_>| {
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
        operand.layout.mesh_shape()[mesh_dim] > 1 && !from.is_replicate() && from != rows[mesh_dim].inputs[at]
    };
    (0..rows.len()).filter(ends).count()
}

/// The mesh dimensions on which a pending reduction would be scattered though nothing else is cut:
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

/// Whether `layout` leaves a rank without elements of a tensor that has some.
fn leaves_a_rank_empty(shape: &Shape, layout: &Layout) -> bool {
    shape.num_elements() > 0 && layout.shortest(shape).contains(&0)
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
    /// Whether parts without elements may stay, or other ranks have them: of an operand that comes with
    /// some. To one that comes without, none are made.
    empty_parts: bool,
    /// By placements, and the mesh dimensions that are ragged.
    known: HashMap<(Placements, Dims), Option<(Layout, Cost)>>,
}

impl<'a> Targets<'a> {
    fn new(operand: Incoming<'a>, operands: &[Incoming<'a>], cutting: Cutting<'a>, takes_empty_parts: bool) -> Self {
        let empty_parts = takes_empty_parts && leaves_a_rank_empty(operand.shape, operand.layout);
        Self { operand, size: nominal_size(&operand, operands), cutting, empty_parts, known: HashMap::new() }
    }

    /// The layout with these placements; `None` if there is none, or no way to it.
    fn get(&mut self, placements: Placements, uneven: &Dims) -> Option<&(Layout, Cost)> {
        let Self { operand, size, cutting, empty_parts, known } = self;
        let make = |(placements, uneven): &(Placements, Dims)| {
            let layout = cutting.layout(placements, uneven)?;
            let fits = *empty_parts || !leaves_a_rank_empty(operand.shape, &layout);
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
mod tests {
    use super::super::placements::{AVG, MAX, R, S, SUM};
    use super::super::strategy;
    use super::*;

    fn layout(mesh: &[usize], placements: &[Placement]) -> Layout {
        Layout::new(mesh, placements).unwrap()
    }

    /// Of floats, for one output.
    fn choice(mesh: &[usize], operands: &[(&[usize], Layout)], rows: &[Strategy]) -> Option<Choice> {
        let shapes: Vec<Shape> = operands.iter().map(|(shape, _)| Shape::from(shape.to_vec())).collect();
        let operands: Vec<_> = operands
            .iter()
            .zip(&shapes)
            .map(|((_, layout), shape)| Incoming { layout, shape, differentiable: true })
            .collect();
        choose(mesh, &operands, &[Shape::from([1])], rows, true)
    }

    fn placements(layouts: &[Layout]) -> Vec<Vec<Placement>> {
        layouts.iter().map(|layout| layout.placements().to_vec()).collect()
    }

    fn product() -> Vec<Strategy> {
        vec![
            strategy([R, R], [R]),
            strategy([S(0), R], [S(0)]),
            strategy([R, S(1)], [S(1)]),
            strategy([S(1), S(0)], [SUM]),
            strategy([SUM, R], [SUM]),
        ]
    }

    /// Five over four ranks are 2, 2, 1 and 0.
    #[test]
    fn a_rank_is_left_without_elements_only_where_the_operator_takes_that() {
        let (comes, shape) = (layout(&[4], &[S(0)]), Shape::from([5, 8]));
        let operand = Incoming { layout: &comes, shape: &shape, differentiable: true };
        let rows = [strategy([R], [R]), strategy([S(0)], [S(0)])];
        let placed = |takes| placements(&choose(&[4], &[operand], &[Shape::from([1])], &rows, takes).unwrap().inputs);
        assert_eq!(placed(true), [[S(0)]]);
        assert_eq!(placed(false), [[R]]);
    }

    #[test]
    fn what_fits_is_taken_as_it_comes() {
        let mesh = [2, 2];
        let rows_and_columns = [(&[4, 4][..], layout(&mesh, &[S(0), R])), (&[4, 4][..], layout(&mesh, &[R, S(1)]))];
        let found = choice(&mesh, &rows_and_columns, &product()).unwrap();
        assert_eq!(placements(&found.inputs), [[S(0), R], [R, S(1)]]);
        assert_eq!(placements(&found.outputs), [[S(0), S(1)]]);
        assert_eq!(found.varying, [Dims::from_slice(&[1]), Dims::from_slice(&[0])]);
    }

    #[test]
    fn nothing_varies_where_all_ranks_do_the_same_or_there_is_one_rank() {
        let mesh = [2, 1, 2];
        let operands = [(&[4, 4][..], layout(&mesh, &[S(0), S(0), R])), (&[4, 4][..], layout(&mesh, &[R, R, R]))];
        let found = choice(&mesh, &operands, &product()).unwrap();
        assert_eq!(placements(&found.outputs), [[S(0), S(0), R]]);
        assert_eq!(found.varying, [Dims::new(), Dims::from_slice(&[0])]);
    }

    #[test]
    fn what_is_only_repeated_moves_rather_than_what_it_is_added_to() {
        let rows = [strategy([R, R], [R]), strategy([S(0), R], [S(0)]), strategy([S(1), S(1)], [S(1)])];
        for batch in [2, 8, 1 << 20] {
            let operands = [(&[batch, 4][..], layout(&[2], &[S(0)])), (&[1, 4][..], layout(&[2], &[S(1)]))];
            assert_eq!(placements(&choice(&[2], &operands, &rows).unwrap().inputs), [[S(0)], [R]]);
        }
    }

    /// Of two that take one collective in forward: gathered indices have no gradient to scatter.
    #[test]
    fn collectives_in_backward_decide_where_those_in_forward_are_as_many() {
        let rows = [strategy([R, R], [R]), strategy([R, S(0)], [S(0)]), strategy([S(0), R], [SUM])];
        let (cut, shape) = (layout(&[2], &[S(0)]), Shape::from([8, 8]));
        let brought = |differentiable: [bool; 2]| {
            let operands =
                differentiable.map(|differentiable| Incoming { layout: &cut, shape: &shape, differentiable });
            placements(&choose(&[2], &operands, &[Shape::from([1])], &rows, true).unwrap().inputs)
        };
        assert_eq!(brought([true, false]), [[S(0)], [R]]);
        assert_eq!(brought([false, true]), [[R], [S(0)]]);
    }

    /// All pairs of layouts, of a product and of a sum: lengths that the ranks divide alike.
    #[test]
    fn layouts_do_not_depend_on_lengths() {
        let mesh = [2, 3];
        let all = [R, S(0), S(1), SUM];
        let layouts = all.iter().cartesian_product(&all).map(|(&a, &b)| layout(&mesh, &[a, b]));
        let layouts: Vec<Layout> = layouts.collect();
        let sum: Vec<Strategy> = [R, S(0), S(1), SUM].map(|one| strategy([one, one], [one])).to_vec();
        let lengths = [6, 6 << 16];
        for (a, b) in layouts.iter().cartesian_product(&layouts) {
            let chosen = |rows: &[Strategy], first: [usize; 2], second: [usize; 2]| {
                choice(&mesh, &[(&first[..], a.clone()), (&second[..], b.clone())], rows).unwrap()
            };
            let (of_product, of_sum) = (chosen(&product(), [6, 6], [6, 6]), chosen(&sum, [6, 6], [6, 6]));
            for (m, k) in lengths.into_iter().cartesian_product(lengths) {
                assert_eq!(chosen(&sum, [m, k], [m, k]), of_sum, "{a} {b} {m} {k}");
                for n in lengths {
                    assert_eq!(chosen(&product(), [m, k], [k, n]), of_product, "{a} {b} {m} {k} {n}");
                }
            }
        }
    }

    #[test]
    fn a_replicated_operand_is_sliced_for_free() {
        let operands = [(&[4, 8][..], layout(&[2], &[S(1)])), (&[8, 4][..], layout(&[2], &[R]))];
        let found = choice(&[2], &operands, &product()).unwrap();
        assert_eq!(
            (placements(&found.inputs), placements(&found.outputs)),
            (vec![vec![S(1)], vec![S(0)]], vec![vec![SUM]])
        );
    }

    #[test]
    fn cuts_keep_the_order_they_come_in() {
        let mesh = [2, 2];
        let turned = Layout::with_order(&mesh, &[S(0), S(0)], &[(0, &[1, 0])]).unwrap();
        let found = choice(&mesh, &[(&[8, 4], turned.clone()), (&[4, 4], layout(&mesh, &[R, R]))], &product()).unwrap();
        assert_eq!((&found.inputs[0], &found.outputs[0]), (&turned, &turned));
    }

    #[test]
    fn pending_reductions_are_never_made() {
        let rows = [strategy([R, R], [R]), strategy([SUM, SUM], [SUM])];
        let operands = [(&[4][..], layout(&[2], &[SUM])), (&[4][..], layout(&[2], &[R]))];
        assert_eq!(placements(&choice(&[2], &operands, &rows).unwrap().inputs), [[R], [R]]);
    }

    #[test]
    fn reductions_that_do_not_commute_are_never_left_pending() {
        let mesh = [2, 2];
        let rows = [strategy([R, R], [R]), strategy([SUM, R], [SUM]), strategy([R, MAX], [MAX])];
        let operands = [(&[4][..], layout(&mesh, &[SUM, R])), (&[4][..], layout(&mesh, &[R, MAX]))];
        let found = choice(&mesh, &operands, &rows).unwrap();
        assert_eq!(placements(&found.outputs), [[R, MAX]]);
    }

    #[test]
    fn a_dimension_shorter_than_the_mesh_is_cut_only_if_it_comes_so() {
        let rows = [strategy([S(0), S(0)], [S(0)]), strategy([R, R], [R])];
        let of = |first, second| {
            let operands = [(&[3, 9][..], layout(&[4], &[first])), (&[3, 9][..], layout(&[4], &[second]))];
            placements(&choice(&[4], &operands, &rows).unwrap().inputs)
        };
        assert_eq!(of(S(0), S(0)), [[S(0)], [S(0)]]);
        assert_eq!(of(R, S(0)), [[R], [R]]);
    }

    #[test]
    fn pieces_over_all_mesh_dimensions_divide_what_the_rows_ask_for() {
        let mesh = [2, 2];
        let of = |heads: usize| {
            let rows = [strategy([R], [R]), strategy([S(0)], [S(0)]).if_divides(heads)];
            placements(&choice(&mesh, &[(&[8, 8], layout(&mesh, &[S(0), S(0)]))], &rows).unwrap().inputs)
        };
        assert_eq!(of(8), [[S(0), S(0)]]);
        assert_eq!(of(6), [[S(0), R]]);
        assert_eq!(of(5), [[R, R]]);
    }

    #[test]
    fn no_row_that_can_be_reached_is_no_choice() {
        assert_eq!(choice(&[2], &[(&[4], layout(&[2], &[R]))], &[strategy([AVG], [AVG])]), None);
    }

    /// Against the definition: every product of rows, in the orders of cuts that are promised.
    #[test]
    fn nothing_is_cheaper() {
        let mesh = [2, 3];
        let all = [R, S(0), S(1), SUM, AVG];
        let layouts: Vec<Layout> = all
            .iter()
            .cartesian_product(&all)
            .flat_map(|(&a, &b)| [[0, 1], [1, 0]].map(|turn| Layout::in_turn(&mesh, &[a, b], &turn).unwrap()))
            .unique()
            .collect();
        let rows = product();
        let shape = Shape::from([12, 12]);
        // The gradient of a replicated value that ranks compute different things with is summed.
        let summed = |layout: &Layout, varies: &[bool]| {
            layout.placements().iter().zip(varies).filter(|(own, varies)| own.is_replicate() && **varies).count()
        };
        let cost = |from: &Layout, to: &Layout| {
            let steps = crate::placement::plan(from, to).ok()?;
            Some((steps.len(), plan_cost(from, &steps)))
        };
        for (a, b) in layouts.iter().cartesian_product(&layouts) {
            let operands = [a, b].map(|layout| Incoming { layout, shape: &shape, differentiable: true });
            let found = choose(&mesh, &operands, &[Shape::from([1])], &rows, true).unwrap();
            // A sum scattered where nothing is cut will have to be gathered.
            let gathers = |targets: [&Layout; 2]| {
                let alone = |&mesh_dim: &usize| {
                    let [from, to] =
                        [[a, b], targets].map(|layouts| layouts.map(|layout| layout.placements()[mesh_dim]));
                    let scatters = |at: usize| from[at].partial_op().is_some() && to[at].shard_dim().is_some();
                    (scatters(0) || scatters(1)) && from.iter().all(|placement| placement.shard_dim().is_none())
                };
                (0..mesh.len()).filter(alone).count()
            };
            let total = |targets: [&Layout; 2], varies: &[bool]| {
                let ((some, first), (more, second)) = (cost(a, targets[0])?, cost(b, targets[1])?);
                let backward = summed(targets[0], varies) + summed(targets[1], varies);
                let forward = first.forward + second.forward + gathers(targets);
                let backward = first.backward + second.backward + backward;
                Some((forward, first.traffic + second.traffic, backward, some + more))
            };
            let varies: Vec<bool> = (0..mesh.len())
                .map(|dim| {
                    let all = found.inputs.iter().chain(&found.outputs);
                    !all.map(|layout| layout.placements()[dim]).all(|own| own.is_replicate())
                })
                .collect();
            let found = total([&found.inputs[0], &found.inputs[1]], &varies).unwrap();
            for (first, second) in rows.iter().cartesian_product(&rows) {
                let turned = !a.has_default_order() || !b.has_default_order();
                for turn in [[0, 1], [1, 0]].into_iter().take(1 + usize::from(turned)) {
                    let input =
                        |at: usize| Layout::in_turn(&mesh, &[first.inputs[at], second.inputs[at]], &turn).unwrap();
                    let made = |at: usize| {
                        let (from, to) = ([a, b][at].placements(), input(at));
                        from.iter().zip(to.placements()).any(|(from, to)| from != to && to.partial_op().is_some())
                    };
                    if made(0) || made(1) {
                        continue;
                    }
                    let varies = [first, second].map(|row| *row != strategy([R, R], [R]));
                    let Some(other) = total([&input(0), &input(1)], &varies) else { continue };
                    assert!(found <= other, "{a} {b}: {} {} is cheaper", input(0), input(1));
                }
            }
        }
    }

    #[test]
    fn a_sum_is_scattered_where_something_is_cut_and_nowhere_else() {
        let rows = [strategy([R, R], [R]), strategy([S(0), S(0)], [S(0)])];
        let brought = |len: usize, other| {
            let operands: [(&[usize], Layout); 2] = [(&[len], layout(&[4], &[SUM])), (&[len], layout(&[4], &[other]))];
            placements(&choice(&[4], &operands, &rows).unwrap().inputs)[0].clone()
        };
        for len in [1 << 10, 1 << 30] {
            assert_eq!(brought(len, R), [R]);
            assert_eq!(brought(len, S(0)), [S(0)]);
        }
    }
}
