//! [`plan`]: finds the steps from one layout to another.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use smallvec::SmallVec;

use super::{Layout, PartialOp, Placement, PlacementError, Step};

/// Returns the steps that lead from `from` to `to`, each with the layout after it.
///
/// The last layout is `to`. Without steps, the local tensors of `from` are already those of `to`.
/// Mesh dimensions of size 1 take no steps, and intermediate layouts have `Replicate` there.
///
/// A plan has the minimal number of collectives that the table of transitions allows: one for each
/// mesh dimension that must leave its placement, or none where a shard becomes a partial sum. A
/// shard must leave if it, or an outer shard of the same tensor dimension, differs from `to` in
/// position or size.
///
/// Among the orders of these steps, the plan is the one that sends the fewest bytes, and among
/// those the one with the fewest steps. As a result, tensors are reduced before they are gathered,
/// and slices come as early as possible. A mesh dimension goes directly to its target (one
/// reduce-scatter or one all-to-all) where the shard order allows it. Data is never moved by adding
/// it to zeros.
///
/// # Errors
/// [`PartialTarget`](PlacementError::PartialTarget) for a partial placement in `to` that `from`
/// does not have, except `Partial(sum)` from `Replicate` or `Shard`;
/// [`MeshShape`](PlacementError::MeshShape) for layouts of different mesh shapes.
pub fn plan(from: &Layout, to: &Layout) -> Result<Vec<(Step, Layout)>, PlacementError> {
    if from == to {
        return Ok(Vec::new());
    }
    if from.mesh_shape() != to.mesh_shape() {
        return Err(PlacementError::MeshShape {
            from: from.mesh_shape().to_vec(),
            to: to.mesh_shape().to_vec(),
        });
    }
    for (mesh_dim, (&before, &after)) in from.placements().iter().zip(to.placements()).enumerate() {
        let made = before.partial_op().is_none() && after == Placement::Partial(PartialOp::Sum);
        if let Placement::Partial(op) = after
            && before != after
            && !made
        {
            return Err(PlacementError::PartialTarget {
                mesh_dim,
                from: before,
                op,
            });
        }
    }
    let mut steps = cheapest(from.without_trivial(), &to.without_trivial());
    if let Some((_, last)) = steps.last_mut() {
        *last = to.clone();
    }
    Ok(steps)
}

/// Returns the plan for an operator's input. Unlike [`plan`], it supports a partial target for an
/// input that is partial in another way: the input is reduced first.
///
/// # Errors
/// As [`plan`], for other partial targets.
pub(crate) fn plan_input(
    from: &Layout,
    to: &Layout,
) -> Result<Vec<(Step, Layout)>, PlacementError> {
    let becomes_term = |mesh_dim: usize, own: Placement| {
        let target = to.placements()[mesh_dim];
        own.partial_op().is_some() && target.partial_op().is_some() && own != target
    };
    let reduced = from.replaced(|dim, own| {
        if becomes_term(dim, own) {
            Placement::Replicate
        } else {
            own
        }
    })?;
    let mut steps = plan(from, &reduced)?;
    steps.extend(plan(&reduced, to)?);
    Ok(steps)
}

/// Amount sent, then number of steps.
type PlanCost = (u64, usize);

/// A layout that the search has reached, and the step that led to it.
struct Reached {
    layout: Layout,
    cost: PlanCost,
    by: Option<(usize, Step)>,
}

/// Searches the layouts with Dijkstra's algorithm, using the steps of [`moves`]. Each mesh
/// dimension moves at most twice, so a mesh of `n` dimensions has at most `3^n` layouts.
fn cheapest(from: Layout, to: &Layout) -> Vec<(Step, Layout)> {
    let mut best = HashMap::from([(from.clone(), (0, 0))]);
    let mut reached = vec![Reached {
        layout: from,
        cost: (0, 0),
        by: None,
    }];
    // Among equal costs, the layout that was reached first is taken, on every rank (invariant 5).
    let mut open = BinaryHeap::from([Reverse(((0, 0), 0))]);
    while let Some(Reverse((cost, at))) = open.pop() {
        if reached[at].layout == *to {
            return trace(reached, at);
        }
        if cost > best[&reached[at].layout] {
            continue;
        }
        for (step, layout) in moves(&reached[at].layout, to) {
            let cost = (cost.0 + step.traffic(&reached[at].layout), cost.1 + 1);
            if best.get(&layout).is_none_or(|known| cost < *known) {
                best.insert(layout.clone(), cost);
                open.push(Reverse((cost, reached.len())));
                reached.push(Reached {
                    layout,
                    cost,
                    by: Some((at, step)),
                });
            }
        }
    }
    unreachable!("every shard can be gathered and every target reached from Replicate")
}

/// Returns the steps from `layout` that can be part of a cheapest plan: directly to the target
/// where the shard order allows it, otherwise to `Replicate`. Any other step would need a further
/// collective to undo it.
fn moves(layout: &Layout, to: &Layout) -> SmallVec<[(Step, Layout); 4]> {
    let mut moves = SmallVec::new();
    for (mesh_dim, &target) in to.placements().iter().enumerate() {
        if settled(layout, to, mesh_dim) {
            continue;
        }
        let placement = layout.placements()[mesh_dim];
        for next in [target, Placement::Replicate] {
            let step = Step::between(mesh_dim, placement, next);
            let lengths = to.uneven_sizes(mesh_dim).filter(|_| next == target);
            let Some((step, moved)) = step.zip(layout.moved(mesh_dim, next, lengths)) else {
                continue;
            };
            if next != target || settled(&moved, to, mesh_dim) {
                moves.push((step, moved));
            }
            if target.is_replicate() {
                break;
            }
        }
    }
    moves
}

/// Returns true if `mesh_dim` has reached its state in `to`: the same placement and, for a shard,
/// the same position, outer shards and sizes.
fn settled(layout: &Layout, to: &Layout, mesh_dim: usize) -> bool {
    let placement = layout.placements()[mesh_dim];
    if placement != to.placements()[mesh_dim] {
        return false;
    }
    let Placement::Shard(dim) = placement else {
        return true;
    };
    let mut sharding_dims = layout.shard_order(dim).iter().zip(to.shard_order(dim));
    let found = sharding_dims.find_map(|(sharding_dim, wanted)| {
        let same = sharding_dim == wanted
            && layout.uneven_sizes(*sharding_dim) == to.uneven_sizes(*sharding_dim);
        (!same || *sharding_dim == mesh_dim).then_some(same)
    });
    found == Some(true)
}

fn trace(mut reached: Vec<Reached>, mut at: usize) -> Vec<(Step, Layout)> {
    let mut steps = Vec::with_capacity(reached[at].cost.1);
    while let Some((previous, step)) = reached[at].by {
        reached.truncate(at + 1);
        steps.extend(reached.pop().map(|last| (step, last.layout)));
        at = previous;
    }
    steps.reverse();
    steps
}
