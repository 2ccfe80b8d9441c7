//! Runs plans on small integer tensors, one per rank, and checks what every rank ends with.
//!
//! Nothing here uses the room's arithmetic: shards are cut by walking over lists of indices, and
//! each step is carried out from its definition alone.

use itertools::Itertools;

use super::{Layout, PartialOp, Placement, PlacementError, Step, plan};

/// A matrix; values are exact (averages stay whole by the choice of the inputs).
#[derive(Debug, Clone, PartialEq)]
struct Matrix {
    shape: [usize; 2],
    values: Vec<i128>,
}

impl Matrix {
    fn from_fn(shape: [usize; 2], value: impl Fn([usize; 2]) -> i128) -> Self {
        let at = (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |column| [row, column]));
        Self { shape, values: at.map(value).collect() }
    }

    fn get(&self, at: [usize; 2]) -> i128 {
        self.values[at[0] * self.shape[1] + at[1]]
    }

    /// The elements with these indices along `dim`.
    fn pick(&self, dim: usize, indices: &[usize]) -> Self {
        let mut shape = self.shape;
        shape[dim] = indices.len();
        Self::from_fn(shape, |mut at| {
            at[dim] = indices[at[dim]];
            self.get(at)
        })
    }

    fn concat(dim: usize, parts: &[Self]) -> Self {
        let owners =
            parts.iter().enumerate().flat_map(|(part, m)| (0..m.shape[dim]).map(move |i| (part, i))).collect_vec();
        let mut shape = parts[0].shape;
        assert!(parts.iter().all(|part| part.shape[1 - dim] == shape[1 - dim]), "ragged {parts:?}");
        shape[dim] = owners.len();
        Self::from_fn(shape, |mut at| {
            let (part, index) = owners[at[dim]];
            at[dim] = index;
            parts[part].get(at)
        })
    }

    fn reduce(op: PartialOp, parts: &[Self]) -> Self {
        assert!(parts.iter().all(|part| part.shape == parts[0].shape), "unequal {parts:?}");
        Self::from_fn(parts[0].shape, |at| {
            let values = parts.iter().map(|part| part.get(at));
            match op {
                PartialOp::Sum => values.sum(),
                PartialOp::Avg => {
                    let sum: i128 = values.sum();
                    assert_eq!(sum % parts.len() as i128, 0, "the inputs are too small for exact averages");
                    sum / parts.len() as i128
                }
                PartialOp::Min => values.min().unwrap(),
                PartialOp::Max => values.max().unwrap(),
                PartialOp::Product => values.product(),
            }
        })
    }

    fn zeros_like(&self) -> Self {
        Self::from_fn(self.shape, |_| 0)
    }
}

/// The `part`-th of `parts` of a list, as `torch.chunk` deals it out.
fn deal(list: &[usize], parts: usize, part: usize) -> Vec<usize> {
    let mut size = 0;
    while size * parts < list.len() {
        size += 1;
    }
    list.iter().copied().skip(part * size).take(size).collect()
}

fn coordinates(mesh: &[usize]) -> Vec<Vec<usize>> {
    mesh.iter().map(|&size| 0..size).multi_cartesian_product().collect()
}

/// What the rank at `coordinate` holds of `global` under `layout`'s shards.
fn shard(layout: &Layout, global: &Matrix, coordinate: &[usize]) -> Matrix {
    (0..2).fold(global.clone(), |local, dim| {
        layout.order(dim).iter().fold(local, |local, &m| {
            let kept = deal(&(0..local.shape[dim]).collect_vec(), layout.mesh_shape()[m], coordinate[m]);
            local.pick(dim, &kept)
        })
    })
}

/// Groups ranks that differ only along `mesh_dim`, each group in order.
fn groups(mesh: &[usize], mesh_dim: usize) -> Vec<Vec<usize>> {
    let all = coordinates(mesh);
    let groups = all.iter().enumerate().into_group_map_by(|(_, coordinate)| {
        let mut others = (*coordinate).clone();
        others.remove(mesh_dim);
        others
    });
    groups.into_values().map(|ranks| ranks.into_iter().map(|(rank, _)| rank).collect()).collect()
}

/// Every rank's local matrix after `step`.
fn execute(step: Step, mesh: &[usize], locals: &[Matrix]) -> Vec<Matrix> {
    let mut after = locals.to_vec();
    for group in groups(mesh, step.mesh_dim()) {
        let inputs = group.iter().map(|&rank| locals[rank].clone()).collect_vec();
        let chunk_of =
            |m: &Matrix, dim: usize, r: usize| m.pick(dim, &deal(&(0..m.shape[dim]).collect_vec(), group.len(), r));
        for (r, &rank) in group.iter().enumerate() {
            after[rank] = match step {
                Step::AllGather { dim, .. } => Matrix::concat(dim, &inputs),
                Step::Slice { dim, .. } => chunk_of(&inputs[r], dim, r),
                Step::AllReduce { op, .. } => Matrix::reduce(op, &inputs),
                Step::ReduceScatter { dim, op, .. } => chunk_of(&Matrix::reduce(op, &inputs), dim, r),
                Step::AllToAll { from, to, .. } => {
                    Matrix::concat(from, &inputs.iter().map(|input| chunk_of(input, to, r)).collect_vec())
                }
                Step::ZeroOthers { .. } if r == 0 => inputs[r].clone(),
                Step::ZeroOthers { .. } => inputs[r].zeros_like(),
                Step::ZeroPad { dim, .. } => {
                    let parts = inputs.iter().enumerate();
                    let parts = parts.map(|(other, input)| if other == r { input.clone() } else { input.zeros_like() });
                    Matrix::concat(dim, &parts.collect_vec())
                }
            };
        }
    }
    after
}

/// Local matrices of a tensor under `layout`, and its full value.
fn distribute(layout: &Layout, shape: [usize; 2]) -> (Vec<Matrix>, Matrix) {
    let mesh = layout.mesh_shape();
    // Each rank's summand: equal on ranks that differ along a replicated or sharded mesh dim only.
    let wholes = coordinates(mesh).into_iter().map(|coordinate| {
        let mut seed = 7;
        for (c, placement) in coordinate.iter().zip(layout.placements()) {
            seed = seed * 5 + if placement.partial_op().is_some() { *c as i128 } else { 0 };
        }
        Matrix::from_fn(shape, |[i, j]| {
            let mixed = (i as i128 * 31 + j as i128 * 17 + seed * 13) % 23 - 11;
            mixed * mesh.iter().product::<usize>() as i128
        })
    });
    let wholes = wholes.collect_vec();
    let locals = wholes.iter().zip(coordinates(mesh)).map(|(whole, coordinate)| shard(layout, whole, &coordinate));
    let locals = locals.collect();
    (locals, reduce_partials(layout, wholes).swap_remove(0))
}

/// Reduces every partial mesh dimension.
fn reduce_partials(layout: &Layout, locals: Vec<Matrix>) -> Vec<Matrix> {
    layout.placements().iter().enumerate().fold(locals, |locals, (mesh_dim, placement)| match placement.partial_op() {
        Some(op) => execute(Step::AllReduce { mesh_dim, op }, layout.mesh_shape(), &locals),
        None => locals,
    })
}

/// Carries out the plan from `from` to `to` and checks every rank.
fn check(from: &Layout, to: &Layout, shape: [usize; 2]) -> Vec<(Step, Layout)> {
    let steps = plan(from, to).unwrap_or_else(|error| panic!("{from} -> {to}: {error}"));
    let mesh = from.mesh_shape();
    let (mut locals, whole) = distribute(from, shape);
    for (step, after) in &steps {
        let orders = after.orders().collect_vec();
        assert_eq!(Layout::with_order(mesh, after.placements(), &orders).as_ref(), Ok(after), "{from} -> {to}");
        assert!(mesh[step.mesh_dim()] > 1, "{from} -> {to}: {step:?} on a mesh dim of size 1");
        locals = execute(*step, mesh, &locals);
        for (local, coordinate) in locals.iter().zip(coordinates(mesh)) {
            let promised = after.local_shape(&shape, &coordinate);
            assert_eq!(promised, local.shape, "{from} -> {to}, {shape:?}: {step:?} at {coordinate:?}");
        }
    }
    assert_eq!(steps.last().map_or(to, |(_, last)| last), to);
    let settled = reduce_partials(to, locals);
    for (local, coordinate) in settled.iter().zip(coordinates(mesh)) {
        let target = shard(to, &whole, &coordinate);
        assert_eq!(*local, target, "{from} -> {to} on {mesh:?}, {shape:?}: rank {coordinate:?}; steps {steps:?}");
    }
    steps
}

/// All layouts of matrices on `mesh` with these placements, in every order of cuts.
fn layouts(mesh: &[usize], placements: &[Placement]) -> Vec<Layout> {
    let choices = mesh.iter().map(|_| placements.iter().copied()).multi_cartesian_product();
    let valid = choices.filter_map(|placements| Some((Layout::new(mesh, &placements).ok()?, placements)));
    let ordered = valid.flat_map(|(layout, placements)| {
        let orders = |dim| layout.order(dim).iter().copied().permutations(layout.order(dim).len()).collect_vec();
        let both = orders(0).into_iter().cartesian_product(orders(1)).collect_vec();
        let mesh = mesh.to_vec();
        both.into_iter()
            .map(move |(rows, columns)| Layout::with_order(&mesh, &placements, &[(0, &rows), (1, &columns)]).unwrap())
    });
    ordered.collect()
}

const SHARDS: [Placement; 3] = [Placement::Replicate, Placement::Shard(0), Placement::Shard(1)];

fn alphabet(ops: &[PartialOp]) -> Vec<Placement> {
    SHARDS.into_iter().chain(ops.iter().map(|&op| Placement::Partial(op))).collect()
}

/// Whether [`plan`] must refuse: `to` holds a partial value that is neither kept nor a sum made
/// from Replicate or Shard.
fn refused(from: &Layout, to: &Layout) -> bool {
    from.placements().iter().zip(to.placements()).any(|(from, to)| match (from, to) {
        (_, Placement::Replicate | Placement::Shard(_)) => false,
        (Placement::Partial(before), Placement::Partial(after)) => before != after,
        (_, Placement::Partial(op)) => *op != PartialOp::Sum,
    })
}

/// Checks all pairs of layouts; returns how many had a plan.
fn all_pairs(mesh: &[usize], ops: &[PartialOp], shapes: &[[usize; 2]]) -> usize {
    let layouts = layouts(mesh, &alphabet(ops));
    let mut planned = 0;
    for (from, to) in layouts.iter().cartesian_product(&layouts) {
        if refused(from, to) {
            let error = plan(from, to).unwrap_err();
            assert!(matches!(error, PlacementError::PartialTarget { .. }), "{from} -> {to}: {error}");
            continue;
        }
        for &shape in shapes {
            check(from, to, shape);
        }
        planned += 1;
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
        let planned = all_pairs(&mesh, &[Sum, Avg, Min, Max, Product], &[[1, 2], [5, 3], [4, 6], [9, 8]]);
        assert!(planned > 700, "{planned} pairs");
    }
}

#[test]
fn every_pair_on_three_mesh_dims() {
    for mesh in [[2, 2, 2], [2, 1, 3]] {
        let planned = all_pairs(&mesh, &[Sum], &[[5, 3], [9, 2]]);
        assert!(planned > 5000, "{planned} pairs");
    }
    all_pairs(&[2, 2, 2], &[Max], &[[5, 9]]);
}

/// What a rank sends in `step` when it holds `held` elements, by the table of transitions.
fn sent(step: Step, held: usize, ranks: usize) -> usize {
    match step {
        Step::AllGather { .. } => held * (ranks - 1),
        Step::AllToAll { .. } | Step::ReduceScatter { .. } => held * (ranks - 1) / ranks,
        Step::AllReduce { .. } => 2 * held * (ranks - 1) / ranks,
        Step::Slice { .. } | Step::ZeroOthers { .. } | Step::ZeroPad { .. } => 0,
    }
}

/// Collectives and elements sent, on a tensor that every cut divides.
fn cost(step: Step, before: &Layout) -> (usize, usize) {
    let origin = vec![0; before.mesh_shape().len()];
    let held = before.local_shape(&[144, 144], &origin).iter().product();
    (usize::from(step.is_collective()), sent(step, held, before.mesh_shape()[step.mesh_dim()]))
}

#[test]
fn no_sequence_of_steps_is_cheaper_than_the_plan() {
    for mesh in [&[2, 3][..], &[4, 2], &[2, 2, 2]] {
        let layouts = layouts(mesh, &alphabet(&[Sum]));
        for from in layouts.iter().step_by(if mesh.len() == 3 { 7 } else { 1 }) {
            for (to, cheapest) in layouts.iter().zip(cheapest(from, &layouts)) {
                let Ok(steps) = plan(from, to) else { continue };
                let befores = [from].into_iter().chain(steps.iter().map(|(_, after)| after));
                let costs = steps.iter().zip(befores).map(|((step, _), before)| cost(*step, before));
                let total = costs.fold((0, 0), |sum, cost| (sum.0 + cost.0, sum.1 + cost.1));
                assert_eq!(total, cheapest, "{from} -> {to} on {mesh:?}: {steps:?}");
            }
        }
    }
}

/// The cost of the cheapest way to every layout: relaxes all steps from all layouts until nothing
/// changes. Zeros only make the sums of the target: a sum that was made stays, and a replica
/// becomes one at once, not by way of a slice.
fn cheapest(from: &Layout, layouts: &[Layout]) -> Vec<(usize, usize)> {
    let start = |layout| if layout == from { (0, 0) } else { (usize::MAX, 0) };
    let mut cheapest = layouts.iter().map(start).collect_vec();
    loop {
        let before = cheapest.clone();
        for (at, layout) in layouts.iter().enumerate().filter(|(at, _)| before[*at].0 < usize::MAX) {
            for (mesh_dim, placement) in (0..from.mesh_shape().len()).cartesian_product(alphabet(&[Sum])) {
                let current = layout.placements()[mesh_dim];
                let source = from.placements()[mesh_dim];
                let step = Step::between(mesh_dim, current, placement);
                let step = step.filter(|step| match step {
                    Step::ZeroPad { .. } => !source.is_replicate(),
                    _ => current.partial_op().is_none() || current == source,
                });
                let Some((step, moved)) = step.zip(layout.moved(mesh_dim, placement)) else { continue };
                let next = layouts.iter().position(|layout| *layout == moved).unwrap();
                let (collectives, sent) = cost(step, layout);
                cheapest[next] = cheapest[next].min((cheapest[at].0 + collectives, cheapest[at].1 + sent));
            }
        }
        if cheapest == before {
            return cheapest;
        }
    }
}

/// The plan from one pair of layouts to another, as text.
fn plan_text(mesh: &[usize], from: &[&str], to: &[&str]) -> String {
    let layout = |texts: &[&str]| {
        let placements = texts.iter().map(|text| text.parse().unwrap()).collect_vec();
        Layout::new(mesh, &placements).unwrap()
    };
    let (from, to) = (layout(from), layout(to));
    check(&from, &to, [5, 6]).iter().map(|(_, after)| after.to_string()).join(" ")
}

#[test]
fn direct_ways_are_taken() {
    // One step each, however many mesh dimensions stay as they are.
    assert_eq!(plan_text(&[2], &["S(0)"], &["S(1)"]), "[S(1)]");
    assert_eq!(plan_text(&[2, 2], &["P(sum)", "R"], &["S(0)", "R"]), "[S(0), R]");
    assert_eq!(plan_text(&[2, 2], &["S(0)", "S(1)"], &["S(0)", "S(0)"]), "[S(0), S(0)]");
    // Mesh dim 0 is not the innermost cut: gather, exchange, slice.
    assert_eq!(plan_text(&[2, 2], &["S(0)", "S(0)"], &["S(1)", "S(1)"]), "[S(0), R] [S(1), R] [S(1), S(1)]");
    // Slice before the reduction, reduce before the gathering.
    assert_eq!(plan_text(&[2, 2], &["P(sum)", "R"], &["R", "S(0)"]), "[P(sum), S(0)] [R, S(0)]");
    assert_eq!(plan_text(&[2, 2], &["S(0)", "P(max)"], &["R", "R"]), "[S(0), R] [R, R]");
    // As many bytes as reducing first, in fewer steps.
    assert_eq!(plan_text(&[2, 2], &["P(sum)", "S(0)"], &["S(0)", "R"]), "[P(sum), R] [S(0), R]");
    // A partial max is reduced before a partial sum appears beside it.
    assert_eq!(plan_text(&[2, 2], &["P(max)", "S(1)"], &["R", "P(sum)"]), "[R, S(1)] [R, P(sum)]");
}

#[test]
fn the_table_has_no_other_rows() {
    let placements = alphabet(&[Sum, Avg, Min, Max, Product]);
    let rows = placements.iter().cartesian_product(&placements);
    let rows = rows.filter(|(from, to)| Step::between(0, **from, **to).is_some());
    // Between R and two shards, each way; S and R -> P(sum); five partials -> R and two shards.
    assert_eq!(rows.count(), 6 + 3 + 15);
    assert!(placements.iter().all(|stays| Step::between(0, *stays, *stays).is_none()));
}

#[test]
fn layouts_of_other_meshes_are_refused() {
    let layout = |mesh: &[usize]| Layout::replicate(mesh).unwrap();
    let error = plan(&layout(&[4]), &layout(&[2, 2])).unwrap_err();
    assert_eq!(error, PlacementError::MeshShape { from: vec![4], to: vec![2, 2] });
    assert!(error.to_string().contains("gather to Replicate"), "{error}");
}

#[test]
fn a_partial_target_names_its_remedy() {
    let layout = |placement| Layout::new(&[2], &[placement]).unwrap();
    let error = plan(&layout(Placement::Shard(0)), &layout(Placement::Partial(Max))).unwrap_err();
    assert_eq!(error, PlacementError::PartialTarget { mesh_dim: 0, from: Placement::Shard(0), op: Max });
    assert!(error.to_string().starts_with("cannot redistribute S(0) to P(max) on mesh dim 0"), "{error}");
    assert!(error.to_string().contains("only P(sum)"), "{error}");
}
