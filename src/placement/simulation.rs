//! Executes plans on small integer matrices, one per rank, and checks the result of every rank.
//!
//! Nothing here uses the arithmetic of the module under test: shards are computed from lists of
//! indices, and each step is executed by its definition.

use itertools::Itertools;

use super::matrix::Matrix;
use super::{Layout, PartialOp, Placement, PlacementError, Step, plan};

/// Returns the `part`-th of `parts` chunks of a list, split like `torch.chunk`.
fn deal(list: &[usize], parts: usize, part: usize) -> Vec<usize> {
    let mut size = 0;
    while size * parts < list.len() {
        size += 1;
    }
    list.iter().copied().skip(part * size).take(size).collect()
}

/// Like [`deal`] for the ranks of `mesh_dim`, but with the uneven sizes of `layout`, if it has any.
fn dealt(list: &[usize], layout: &Layout, mesh_dim: usize, part: usize) -> Vec<usize> {
    let Some(lengths) = layout.uneven_sizes(mesh_dim) else {
        return deal(list, layout.mesh_shape()[mesh_dim], part);
    };
    let mut list = list.to_vec();
    let mut piles = lengths
        .iter()
        .map(|&len| list.drain(..len).collect_vec())
        .collect_vec();
    assert!(
        list.is_empty(),
        "the sizes of mesh dimension {mesh_dim} in {layout} do not cover {list:?}"
    );
    piles.swap_remove(part)
}

fn coordinates(mesh: &[usize]) -> Vec<Vec<usize>> {
    mesh.iter()
        .map(|&size| 0..size)
        .multi_cartesian_product()
        .collect()
}

/// Returns the shard of `global` that the rank at `coordinate` holds under `layout`.
fn shard(layout: &Layout, global: &Matrix, coordinate: &[usize]) -> Matrix {
    (0..2).fold(global.clone(), |local, dim| {
        layout.shard_order(dim).iter().fold(local, |local, &m| {
            let kept = dealt(
                &(0..local.shape[dim]).collect_vec(),
                layout,
                m,
                coordinate[m],
            );
            local.pick(dim, &kept)
        })
    })
}

/// Returns the groups of ranks that differ only along `mesh_dim`, each in order.
fn groups(mesh: &[usize], mesh_dim: usize) -> Vec<Vec<usize>> {
    let all = coordinates(mesh);
    let groups = all.iter().enumerate().into_group_map_by(|(_, coordinate)| {
        let mut others = (*coordinate).clone();
        others.remove(mesh_dim);
        others
    });
    groups
        .into_values()
        .map(|ranks| ranks.into_iter().map(|(rank, _)| rank).collect())
        .collect()
}

/// Returns every rank's local matrix after `step`, which leads to the layout `to_layout`.
fn execute(step: Step, to_layout: &Layout, locals: &[Matrix]) -> Vec<Matrix> {
    let mut after = locals.to_vec();
    for group in groups(to_layout.mesh_shape(), step.mesh_dim()) {
        let inputs = group.iter().map(|&rank| locals[rank].clone()).collect_vec();
        let part_of = |m: &Matrix, dim: usize, r: usize| {
            m.pick(
                dim,
                &dealt(
                    &(0..m.shape[dim]).collect_vec(),
                    to_layout,
                    step.mesh_dim(),
                    r,
                ),
            )
        };
        for (r, &rank) in group.iter().enumerate() {
            after[rank] = match step {
                Step::AllGather { dim, .. } => Matrix::concat(dim, &inputs),
                Step::Slice { dim, .. } => part_of(&inputs[r], dim, r),
                Step::AllReduce { op, .. } => Matrix::reduce(op, &inputs),
                Step::ReduceScatter { dim, op, .. } => {
                    part_of(&Matrix::reduce(op, &inputs), dim, r)
                }
                Step::AllToAll { from, to, .. } => Matrix::concat(
                    from,
                    &inputs
                        .iter()
                        .map(|input| part_of(input, to, r))
                        .collect_vec(),
                ),
                Step::ReplicateToPartial { .. } if r == 0 => inputs[r].clone(),
                Step::ReplicateToPartial { .. } => inputs[r].zeros_like(),
                Step::ShardToPartial { dim, .. } => {
                    let parts = inputs.iter().enumerate();
                    let parts = parts.map(|(other, input)| {
                        if other == r {
                            input.clone()
                        } else {
                            input.zeros_like()
                        }
                    });
                    Matrix::concat(dim, &parts.collect_vec())
                }
            };
        }
    }
    after
}

/// Returns the local matrices of a tensor under `layout`, and the full tensor.
fn distribute(layout: &Layout, shape: [usize; 2]) -> (Vec<Matrix>, Matrix) {
    let mesh = layout.mesh_shape();
    // Partial value of each rank. It is equal on ranks that differ only along a replicated or
    // sharded mesh dimension.
    let full_tensors = coordinates(mesh).into_iter().map(|coordinate| {
        let mut seed = 7;
        for (c, placement) in coordinate.iter().zip(layout.placements()) {
            seed = seed * 5
                + if placement.partial_op().is_some() {
                    *c as i128
                } else {
                    0
                };
        }
        Matrix::from_fn(shape, |[i, j]| {
            let mixed = (i as i128 * 31 + j as i128 * 17 + seed * 13) % 23 - 11;
            mixed * mesh.iter().product::<usize>() as i128
        })
    });
    let full_tensors = full_tensors.collect_vec();
    let locals = full_tensors
        .iter()
        .zip(coordinates(mesh))
        .map(|(full, coordinate)| shard(layout, full, &coordinate));
    let locals = locals.collect();
    (locals, reduce_partials(layout, full_tensors).swap_remove(0))
}

/// Reduces every partial mesh dimension.
fn reduce_partials(layout: &Layout, locals: Vec<Matrix>) -> Vec<Matrix> {
    layout
        .placements()
        .iter()
        .enumerate()
        .fold(locals, |locals, (mesh_dim, placement)| {
            match placement.partial_op() {
                Some(op) => execute(Step::AllReduce { mesh_dim, op }, layout, &locals),
                None => locals,
            }
        })
}

/// Executes the plan from `from` to `to` and checks every rank.
fn check(from: &Layout, to: &Layout, shape: [usize; 2]) -> Vec<(Step, Layout)> {
    check_distributed(from, to, shape, distribute(from, shape))
}

/// Like [`check`], for a tensor that is already distributed as `from`.
fn check_distributed(
    from: &Layout,
    to: &Layout,
    shape: [usize; 2],
    (mut locals, full): (Vec<Matrix>, Matrix),
) -> Vec<(Step, Layout)> {
    let steps = plan(from, to).unwrap_or_else(|error| panic!("{from} -> {to}: {error}"));
    let mesh = from.mesh_shape();
    for (step, after) in &steps {
        let orders = after.orders().collect_vec();
        let rebuilt = Layout::with_shard_order(mesh, after.placements(), &orders).unwrap();
        let mut lengths = after.uneven_mesh_dims();
        let rebuilt = lengths.try_fold(rebuilt, |layout, (m, lengths)| {
            layout.with_uneven_sizes(m, lengths.clone())
        });
        assert_eq!(rebuilt.as_ref(), Ok(after), "{from} -> {to}");
        assert!(
            mesh[step.mesh_dim()] > 1,
            "{from} -> {to}: {step:?} on a mesh dimension of size 1"
        );
        locals = execute(*step, after, &locals);
        for (local, coordinate) in locals.iter().zip(coordinates(mesh)) {
            let promised = after.local_shape(&shape, &coordinate);
            assert_eq!(
                promised, local.shape,
                "{from} -> {to}, {shape:?}: {step:?} at {coordinate:?}"
            );
        }
    }
    assert_eq!(steps.last().map_or(to, |(_, last)| last), to);
    let settled = reduce_partials(to, locals);
    for (local, coordinate) in settled.iter().zip(coordinates(mesh)) {
        let target = shard(to, &full, &coordinate);
        assert_eq!(
            *local, target,
            "{from} -> {to} on {mesh:?}, {shape:?}: rank {coordinate:?}; steps {steps:?}"
        );
    }
    steps
}

/// Returns all layouts of matrices on `mesh` with these placements, with every shard order.
fn layouts(mesh: &[usize], placements: &[Placement]) -> Vec<Layout> {
    let choices = mesh
        .iter()
        .map(|_| placements.iter().copied())
        .multi_cartesian_product();
    let valid =
        choices.filter_map(|placements| Some((Layout::new(mesh, &placements).ok()?, placements)));
    let ordered = valid.flat_map(|(layout, placements)| {
        let orders = |dim| {
            layout
                .shard_order(dim)
                .iter()
                .copied()
                .permutations(layout.shard_order(dim).len())
                .collect_vec()
        };
        let both = orders(0)
            .into_iter()
            .cartesian_product(orders(1))
            .collect_vec();
        let mesh = mesh.to_vec();
        both.into_iter().map(move |(rows, columns)| {
            Layout::with_shard_order(&mesh, &placements, &[(0, &rows), (1, &columns)]).unwrap()
        })
    });
    ordered.collect()
}

/// Returns these layouts and, for each of `lengths` that fits a matrix of `shape`, the same layouts
/// with these uneven sizes.
fn with_uneven(
    layouts: Vec<Layout>,
    shape: [usize; 2],
    lengths: &[(usize, &[usize])],
) -> Vec<Layout> {
    lengths
        .iter()
        .fold(layouts, |mut layouts, &(mesh_dim, lengths)| {
            let free = layouts
                .iter()
                .filter(|layout| layout.uneven_sizes(mesh_dim).is_none());
            let uneven =
                free.filter_map(|layout| layout.clone().with_uneven_sizes(mesh_dim, lengths).ok());
            let uneven = uneven
                .filter(|layout| layout.check_shape(&shape).is_ok())
                .collect_vec();
            layouts.extend(uneven);
            layouts
        })
}

const SHARDS: [Placement; 3] = [
    Placement::Replicate,
    Placement::Shard(0),
    Placement::Shard(1),
];

fn alphabet(ops: &[PartialOp]) -> Vec<Placement> {
    SHARDS
        .into_iter()
        .chain(ops.iter().map(|&op| Placement::Partial(op)))
        .collect()
}

/// Returns true if [`plan`] must fail: `to` has a partial value that neither stays nor is a sum
/// created from Replicate or Shard.
fn refused(from: &Layout, to: &Layout) -> bool {
    from.placements()
        .iter()
        .zip(to.placements())
        .any(|(from, to)| match (from, to) {
            (_, Placement::Replicate | Placement::Shard(_)) => false,
            (Placement::Partial(before), Placement::Partial(after)) => before != after,
            (_, Placement::Partial(op)) => *op != PartialOp::Sum,
        })
}

/// Checks all pairs of layouts. Returns the number of pairs that have a plan.
fn all_pairs(mesh: &[usize], ops: &[PartialOp], shapes: &[[usize; 2]]) -> usize {
    all_pairs_of(&layouts(mesh, &alphabet(ops)), shapes)
}

fn all_pairs_of(layouts: &[Layout], shapes: &[[usize; 2]]) -> usize {
    let mut planned = 0;
    for from in layouts {
        let distributed = shapes
            .iter()
            .map(|&shape| (shape, distribute(from, shape)))
            .collect_vec();
        for to in layouts {
            if refused(from, to) {
                let error = plan(from, to).unwrap_err();
                assert!(
                    matches!(error, PlacementError::PartialTarget { .. }),
                    "{from} -> {to}: {error}"
                );
                continue;
            }
            for (shape, distributed) in &distributed {
                check_distributed(from, to, *shape, distributed.clone());
            }
            planned += 1;
        }
    }
    planned
}

use PartialOp::{Avg, Max, Min, Product, Sum};

#[test]
fn every_pair_on_one_mesh_dim() {
    let ops = [Sum, Avg, Min, Max, Product];
    for size in 1..=4 {
        // 3 x 3 shards and replicas; R, S, S -> P(sum); five partials -> R, S, S and themselves.
        let planned = all_pairs(&[size], &ops, &[[0, 3], [1, 1], [2, 5], [4, 4], [7, 3]]);
        assert_eq!(planned, 9 + 3 + 5 * 4);
    }
}

#[test]
fn every_pair_on_two_mesh_dims() {
    for mesh in [[2, 2], [2, 3], [3, 2], [4, 2], [1, 2], [2, 1]] {
        let planned = all_pairs(
            &mesh,
            &[Sum, Avg, Min, Max, Product],
            &[[1, 2], [5, 3], [4, 6], [9, 8]],
        );
        assert!(planned > 700, "{planned} pairs");
    }
}

#[test]
fn every_pair_on_three_mesh_dims() {
    // Each mesh is tested with tensors of one of the shapes, or of both if `LONG_TESTS` is set.
    let is_long = std::env::var_os("LONG_TESTS").is_some();
    let shapes = [[5, 3], [9, 2]];
    for (mesh, shape) in [[2, 2, 2], [2, 1, 3]].into_iter().zip(&shapes) {
        let planned = all_pairs(
            &mesh,
            &[Sum],
            if is_long {
                &shapes
            } else {
                std::slice::from_ref(shape)
            },
        );
        assert!(planned > 5000, "{planned} pairs");
    }
    all_pairs(&[2, 2, 2], &[Max], &[[5, 9]]);
}

#[test]
fn every_pair_with_uneven_shards() {
    // 5 rows and 3 columns, with three sets of uneven sizes for the rows; two of them leave a rank
    // empty.
    let one = with_uneven(
        layouts(&[3], &alphabet(&[Sum, Max])),
        [5, 3],
        &[(0, &[0, 4, 1]), (0, &[3, 0, 2]), (0, &[1, 2, 0])],
    );
    // R, S, S, P, P, and three uneven layouts. P(max) has no plan to P(sum), and nothing but itself
    // has one to P(max).
    assert_eq!(one.len(), 5 + 3);
    assert_eq!(all_pairs_of(&one, &[[5, 3]]), 8 * 8 - 1 - 7);
    // Uneven sizes as outermost shards of either mesh dimension, with chunks or other sizes inside
    // where all intervals have 3 rows.
    let lengths: [(usize, &[usize]); 5] = [
        (0, &[1, 5]),
        (0, &[3, 3]),
        (1, &[4, 0, 2]),
        (1, &[0, 2, 1]),
        (1, &[0, 0, 4]),
    ];
    let two = with_uneven(layouts(&[2, 3], &alphabet(&[Sum])), [6, 4], &lengths);
    let nested =
        |layout: &&Layout| layout.uneven_sizes(0).is_some() && layout.shard_order(0) == [0, 1];
    assert_eq!(
        two.iter()
            .filter(nested)
            .filter(|layout| layout.uneven_sizes(1).is_some())
            .count(),
        1
    );
    assert!(
        all_pairs_of(&two, &[[6, 4]]) > 1000,
        "{} layouts",
        two.len()
    );
    let three = with_uneven(
        layouts(&[2, 1, 2], &SHARDS),
        [5, 2],
        &[(0, &[5, 0]), (1, &[5]), (2, &[1, 1])],
    );
    assert!(
        all_pairs_of(&three, &[[5, 2]]) > 1000,
        "{} layouts",
        three.len()
    );
}

/// Returns the number of elements that a rank sends in `step` if it holds `held` elements, by the
/// table of transitions.
fn sent(step: Step, held: usize, ranks: usize) -> usize {
    match step {
        Step::AllGather { .. } => held * (ranks - 1),
        Step::AllToAll { .. } | Step::ReduceScatter { .. } => held * (ranks - 1) / ranks,
        Step::AllReduce { .. } => 2 * held * (ranks - 1) / ranks,
        Step::Slice { .. } | Step::ReplicateToPartial { .. } | Step::ShardToPartial { .. } => 0,
    }
}

/// Returns the number of collectives and of elements sent, for a tensor that all mesh dimensions
/// divide evenly.
fn cost(step: Step, before: &Layout) -> (usize, usize) {
    let origin = vec![0; before.mesh_shape().len()];
    let held = before.local_shape(&[144, 144], &origin).iter().product();
    (
        usize::from(step.is_collective()),
        sent(step, held, before.mesh_shape()[step.mesh_dim()]),
    )
}

#[test]
fn no_sequence_of_steps_is_cheaper_than_the_plan() {
    for mesh in [&[2, 3][..], &[4, 2], &[2, 2, 2]] {
        let layouts = layouts(mesh, &alphabet(&[Sum]));
        // These sizes are as large as chunks, but they make the layouts different.
        let layouts = match mesh {
            [2, 3] => with_uneven(layouts, [144, 144], &[(0, &[72, 72]), (1, &[48, 48, 48])]),
            _ => layouts,
        };
        for from in layouts.iter().step_by(if mesh.len() == 3 { 7 } else { 1 }) {
            for (to, cheapest) in layouts.iter().zip(cheapest(from, &layouts)) {
                let Ok(steps) = plan(from, to) else { continue };
                let befores = [from]
                    .into_iter()
                    .chain(steps.iter().map(|(_, after)| after));
                let costs = steps
                    .iter()
                    .zip(befores)
                    .map(|((step, _), before)| cost(*step, before));
                let total = costs.fold((0, 0), |sum, cost| (sum.0 + cost.0, sum.1 + cost.1));
                assert_eq!(total, cheapest, "{from} -> {to} on {mesh:?}: {steps:?}");
            }
        }
    }
}

/// Returns the cost of the cheapest path to every layout, by relaxing all steps from all layouts
/// until nothing changes. Adding to zeros is only used to create partial sums of the target: such a
/// sum stays, and a replica becomes one directly, without a slice.
fn cheapest(from: &Layout, layouts: &[Layout]) -> Vec<(usize, usize)> {
    let mut cheapest = layouts
        .iter()
        .map(|layout| {
            if layout == from {
                (0, 0)
            } else {
                (usize::MAX, 0)
            }
        })
        .collect_vec();
    let given = layouts.iter().flat_map(|layout| {
        layout
            .uneven_mesh_dims()
            .map(|(m, lengths)| (m, lengths.clone()))
    });
    let shards = given
        .unique()
        .cartesian_product([0, 1].map(Placement::Shard));
    let uneven = shards.map(|((mesh_dim, lengths), shard)| (mesh_dim, shard, Some(lengths)));
    let plain = (0..from.mesh_shape().len()).cartesian_product(alphabet(&[Sum]));
    let ways = plain
        .map(|(mesh_dim, placement)| (mesh_dim, placement, None))
        .chain(uneven)
        .collect_vec();
    loop {
        let before = cheapest.clone();
        for (at, layout) in layouts
            .iter()
            .enumerate()
            .filter(|(at, _)| before[*at].0 < usize::MAX)
        {
            for (mesh_dim, placement, lengths) in &ways {
                let mesh_dim = *mesh_dim;
                let placement = *placement;
                let current = layout.placements()[mesh_dim];
                let source = from.placements()[mesh_dim];
                let step = Step::between(mesh_dim, current, placement);
                let step = step.filter(|step| match step {
                    Step::ShardToPartial { .. } => !source.is_replicate(),
                    _ => current.partial_op().is_none() || current == source,
                });
                let Some((step, moved)) =
                    step.zip(layout.moved(mesh_dim, placement, lengths.as_ref()))
                else {
                    continue;
                };
                // Sizes that do not fit do not form a layout.
                let Some(next) = layouts.iter().position(|layout| *layout == moved) else {
                    continue;
                };
                let (collectives, sent) = cost(step, layout);
                cheapest[next] =
                    cheapest[next].min((cheapest[at].0 + collectives, cheapest[at].1 + sent));
            }
        }
        if cheapest == before {
            return cheapest;
        }
    }
}

/// Returns the plan from one pair of layouts to another, as text.
fn plan_text(mesh: &[usize], from: &[&str], to: &[&str]) -> String {
    let layout = |texts: &[&str]| {
        let placements = texts.iter().map(|text| text.parse().unwrap()).collect_vec();
        Layout::new(mesh, &placements).unwrap()
    };
    let from = layout(from);
    let to = layout(to);
    check(&from, &to, [5, 6])
        .iter()
        .map(|(_, after)| after.to_string())
        .join(" ")
}

#[test]
fn direct_ways_are_taken() {
    // One step each, whatever the number of mesh dimensions that stay.
    assert_eq!(plan_text(&[2], &["S(0)"], &["S(1)"]), "[S(1)]");
    assert_eq!(
        plan_text(&[2, 2], &["P(sum)", "R"], &["S(0)", "R"]),
        "[S(0), R]"
    );
    assert_eq!(
        plan_text(&[2, 2], &["S(0)", "S(1)"], &["S(0)", "S(0)"]),
        "[S(0), S(0)]"
    );
    // Mesh dimension 0 is not innermost: gather, all-to-all, slice.
    assert_eq!(
        plan_text(&[2, 2], &["S(0)", "S(0)"], &["S(1)", "S(1)"]),
        "[S(0), R] [S(1), R] [S(1), S(1)]"
    );
    // Slices come before reductions, and reductions before gathers.
    assert_eq!(
        plan_text(&[2, 2], &["P(sum)", "R"], &["R", "S(0)"]),
        "[P(sum), S(0)] [R, S(0)]"
    );
    assert_eq!(
        plan_text(&[2, 2], &["S(0)", "P(max)"], &["R", "R"]),
        "[S(0), R] [R, R]"
    );
    // This sends as many bytes as reducing first, in fewer steps.
    assert_eq!(
        plan_text(&[2, 2], &["P(sum)", "S(0)"], &["S(0)", "R"]),
        "[P(sum), R] [S(0), R]"
    );
    // A partial max is reduced before a partial sum is created.
    assert_eq!(
        plan_text(&[2, 2], &["P(max)", "S(1)"], &["R", "P(sum)"]),
        "[R, S(1)] [R, P(sum)]"
    );
}

#[test]
fn other_lengths_are_gathered_and_sliced() {
    let rows = |mesh: &[usize], order: &[usize], lengths: &[(usize, &[usize])]| {
        let placements = mesh.iter().map(|_| Placement::Shard(0)).collect_vec();
        let layout = Layout::with_shard_order(mesh, &placements, &[(0, order)]).unwrap();
        lengths.iter().fold(layout, |layout, &(m, lengths)| {
            layout.with_uneven_sizes(m, lengths).unwrap()
        })
    };
    let text = |from: &Layout, to: &Layout| {
        check(from, to, [6, 2])
            .iter()
            .map(|(_, after)| after.to_string())
            .join(" ")
    };
    let chunks = rows(&[2], &[0], &[]);
    let uneven = rows(&[2], &[0], &[(0, &[1, 5])]);
    assert_eq!(text(&chunks, &uneven), "[R] [S(0); mesh dim 0 sizes 1 + 5]");
    assert_eq!(text(&uneven, &chunks), "[R] [S(0)]");
    let columns = Layout::new(&[2], &[Placement::Shard(1)]).unwrap();
    assert_eq!(text(&uneven, &columns), "[S(1)]");
    // Shards inside an uneven one are gathered before it changes, and created a second time
    // afterwards.
    let chunks = rows(&[2, 2], &[0, 1], &[]);
    let uneven = rows(&[2, 2], &[0, 1], &[(0, &[4, 2])]);
    assert_eq!(
        check(&chunks, &uneven, [6, 2])
            .iter()
            .filter(|(step, _)| step.is_collective())
            .count(),
        2
    );
    // Shards outside it stay.
    let inner = rows(&[2, 2], &[0, 1], &[(1, &[3, 0])]);
    let other = rows(&[2, 2], &[0, 1], &[(1, &[1, 2])]);
    assert_eq!(
        text(&inner, &other),
        "[S(0), R] [S(0), S(0); mesh dim 1 sizes 1 + 2]"
    );
}

#[test]
fn the_table_has_no_other_rows() {
    let placements = alphabet(&[Sum, Avg, Min, Max, Product]);
    let rows = placements.iter().cartesian_product(&placements);
    let rows = rows.filter(|(from, to)| Step::between(0, **from, **to).is_some());
    // Between R and two shards in both directions; S and R -> P(sum); five partials -> R and two
    // shards.
    assert_eq!(rows.count(), 6 + 3 + 15);
    assert!(
        placements
            .iter()
            .all(|stays| Step::between(0, *stays, *stays).is_none())
    );
}

#[test]
fn layouts_of_other_meshes_are_refused() {
    let layout = |mesh: &[usize]| Layout::replicate(mesh).unwrap();
    let error = plan(&layout(&[4]), &layout(&[2, 2])).unwrap_err();
    assert_eq!(
        error,
        PlacementError::MeshShape {
            from: vec![4],
            to: vec![2, 2]
        }
    );
    assert!(error.to_string().contains("Gather to Replicate"), "{error}");
}

#[test]
fn a_partial_target_names_its_remedy() {
    let layout = |placement| Layout::new(&[2], &[placement]).unwrap();
    let error = plan(
        &layout(Placement::Shard(0)),
        &layout(Placement::Partial(Max)),
    )
    .unwrap_err();
    assert_eq!(
        error,
        PlacementError::PartialTarget {
            mesh_dim: 0,
            from: Placement::Shard(0),
            op: Max
        }
    );
    assert!(
        error
            .to_string()
            .starts_with("cannot redistribute S(0) to P(max) on mesh dimension 0"),
        "{error}"
    );
    assert!(error.to_string().contains("only P(sum)"), "{error}");
}
