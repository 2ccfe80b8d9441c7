//! Tests of [`choose`].

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
    choose(mesh, &operands, &[Shape::from([1])], rows, |_, _| true)
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
    let placed =
        |takes| placements(&choose(&[4], &[operand], &[Shape::from([1])], &rows, |_, _| takes).unwrap().inputs);
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
        let operands = differentiable.map(|differentiable| Incoming { layout: &cut, shape: &shape, differentiable });
        placements(&choose(&[2], &operands, &[Shape::from([1])], &rows, |_, _| true).unwrap().inputs)
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
        .flat_map(|(&a, &b)| [[0, 1], [1, 0]].map(|mesh_order| Layout::in_order(&mesh, &[a, b], &mesh_order).unwrap()))
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
        let found = choose(&mesh, &operands, &[Shape::from([1])], &rows, |_, _| true).unwrap();
        // A sum scattered where nothing is cut will have to be gathered.
        let gathers = |targets: [&Layout; 2]| {
            let alone = |&mesh_dim: &usize| {
                let [from, to] = [[a, b], targets].map(|layouts| layouts.map(|layout| layout.placements()[mesh_dim]));
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
            for mesh_order in [[0, 1], [1, 0]].into_iter().take(1 + usize::from(turned)) {
                let input =
                    |at: usize| Layout::in_order(&mesh, &[first.inputs[at], second.inputs[at]], &mesh_order).unwrap();
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
