//! Tests of [`select_strategy`].

use super::super::placements::{AVG, MAX, R, S, SUM};
use super::super::strategy;
use super::*;
use crate::placement::{CommVolume, sent_backward, sent_forward};

fn layout(mesh: &[usize], placements: &[Placement]) -> Layout {
    Layout::new(mesh, placements).unwrap()
}

/// Selects for float operands and one output.
fn choice(
    mesh: &[usize],
    operands: &[(&[usize], Layout)],
    rows: &[Strategy],
) -> Option<SelectedStrategy> {
    let shapes: Vec<Shape> = operands
        .iter()
        .map(|(shape, _)| Shape::from(shape.to_vec()))
        .collect();
    let operands: Vec<_> = operands
        .iter()
        .zip(&shapes)
        .map(|((_, layout), shape)| float(layout, shape))
        .collect();
    chosen(mesh, &operands, rows, true, None)
}

/// An operand in single precision.
fn float<'a>(layout: &'a Layout, shape: &'a Shape) -> OperandInfo<'a> {
    OperandInfo {
        layout,
        shape,
        bytes: 4 * shape.num_elements() as u64,
        differentiable: true,
        wanted: &[],
        joins: true,
    }
}

fn chosen(
    mesh_shape: &[usize],
    operands: &[OperandInfo<'_>],
    strategies: &[Strategy],
    takes_empty_parts: bool,
    times: Option<&Times>,
) -> Option<SelectedStrategy> {
    let outputs = &[Shape::from([1])];
    let takes_empty_parts = &|_, _| takes_empty_parts;
    select_strategy(SelectionProblem {
        mesh_shape,
        operands,
        outputs,
        strategies,
        takes_empty_parts,
        times,
    })
}

fn placements(layouts: &[Layout]) -> Vec<Vec<Placement>> {
    layouts
        .iter()
        .map(|layout| layout.placements().to_vec())
        .collect()
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

/// Five rows over four ranks are 2, 2, 1 and 0.
#[test]
fn a_rank_is_left_without_elements_only_where_the_operator_takes_that() {
    let comes = layout(&[4], &[S(0)]);
    let shape = Shape::from([5, 8]);
    let operand = float(&comes, &shape);
    let rows = [strategy([R], [R]), strategy([S(0)], [S(0)])];
    let placed = |takes| placements(&chosen(&[4], &[operand], &rows, takes, None).unwrap().inputs);
    assert_eq!(placed(true), [[S(0)]]);
    assert_eq!(placed(false), [[R]]);
}

#[test]
fn what_fits_is_taken_as_it_comes() {
    let mesh = [2, 2];
    let rows_and_columns = [
        (&[4, 4][..], layout(&mesh, &[S(0), R])),
        (&[4, 4][..], layout(&mesh, &[R, S(1)])),
    ];
    let found = choice(&mesh, &rows_and_columns, &product()).unwrap();
    assert_eq!(placements(&found.inputs), [[S(0), R], [R, S(1)]]);
    assert_eq!(placements(&found.outputs), [[S(0), S(1)]]);
    assert_eq!(
        found.varying,
        [Dims::from_slice(&[1]), Dims::from_slice(&[0])]
    );
}

#[test]
fn nothing_varies_where_all_ranks_do_the_same_or_there_is_one_rank() {
    let mesh = [2, 1, 2];
    let operands = [
        (&[4, 4][..], layout(&mesh, &[S(0), S(0), R])),
        (&[4, 4][..], layout(&mesh, &[R, R, R])),
    ];
    let found = choice(&mesh, &operands, &product()).unwrap();
    assert_eq!(placements(&found.outputs), [[S(0), S(0), R]]);
    assert_eq!(found.varying, [Dims::new(), Dims::from_slice(&[0])]);
}

#[test]
fn what_is_only_repeated_moves_rather_than_what_it_is_added_to() {
    let rows = [
        strategy([R, R], [R]),
        strategy([S(0), R], [S(0)]),
        strategy([S(1), S(1)], [S(1)]),
    ];
    for batch in [2, 8, 1 << 20] {
        let operands = [
            (&[batch, 4][..], layout(&[2], &[S(0)])),
            (&[1, 4][..], layout(&[2], &[S(1)])),
        ];
        assert_eq!(
            placements(&choice(&[2], &operands, &rows).unwrap().inputs),
            [[S(0)], [R]]
        );
    }
}

/// Both strategies take one collective in forward, but gathered indices have no gradient to
/// scatter.
#[test]
fn collectives_in_backward_decide_where_those_in_forward_are_as_many() {
    let rows = [
        strategy([R, R], [R]),
        strategy([R, S(0)], [S(0)]),
        strategy([S(0), R], [SUM]),
    ];
    let sizes = layout(&[2], &[S(0)]);
    let shape = Shape::from([8, 8]);
    let moved = |differentiable: [bool; 2]| {
        let operands = differentiable.map(|differentiable| OperandInfo {
            differentiable,
            ..float(&sizes, &shape)
        });
        placements(&chosen(&[2], &operands, &rows, true, None).unwrap().inputs)
    };
    assert_eq!(moved([true, false]), [[S(0)], [R]]);
    assert_eq!(moved([false, true]), [[R], [S(0)]]);
}

/// All pairs of layouts, for a matrix product and for a sum, with lengths that the ranks divide
/// evenly.
#[test]
fn layouts_do_not_depend_on_lengths() {
    let mesh = [2, 3];
    let all = [R, S(0), S(1), SUM];
    let layouts = all
        .iter()
        .cartesian_product(&all)
        .map(|(&a, &b)| layout(&mesh, &[a, b]));
    let layouts: Vec<Layout> = layouts.collect();
    let sum: Vec<Strategy> = [R, S(0), S(1), SUM]
        .map(|one| strategy([one, one], [one]))
        .to_vec();
    let lengths = [6, 6 << 16];
    for (a, b) in layouts.iter().cartesian_product(&layouts) {
        let chosen = |rows: &[Strategy], first: [usize; 2], second: [usize; 2]| {
            choice(
                &mesh,
                &[(&first[..], a.clone()), (&second[..], b.clone())],
                rows,
            )
            .unwrap()
        };
        let of_product = chosen(&product(), [6, 6], [6, 6]);
        let of_sum = chosen(&sum, [6, 6], [6, 6]);
        for (m, k) in lengths.into_iter().cartesian_product(lengths) {
            assert_eq!(chosen(&sum, [m, k], [m, k]), of_sum, "{a} {b} {m} {k}");
            for n in lengths {
                assert_eq!(
                    chosen(&product(), [m, k], [k, n]),
                    of_product,
                    "{a} {b} {m} {k} {n}"
                );
            }
        }
    }
}

#[test]
fn a_replicated_operand_is_sliced_for_free() {
    let operands = [
        (&[4, 8][..], layout(&[2], &[S(1)])),
        (&[8, 4][..], layout(&[2], &[R])),
    ];
    let found = choice(&[2], &operands, &product()).unwrap();
    assert_eq!(
        (placements(&found.inputs), placements(&found.outputs)),
        (vec![vec![S(1)], vec![S(0)]], vec![vec![SUM]])
    );
}

#[test]
fn shards_keep_their_order() {
    let mesh = [2, 2];
    let turned = Layout::with_shard_order(&mesh, &[S(0), S(0)], &[(0, &[1, 0])]).unwrap();
    let found = choice(
        &mesh,
        &[(&[8, 4], turned.clone()), (&[4, 4], layout(&mesh, &[R, R]))],
        &product(),
    )
    .unwrap();
    assert_eq!((&found.inputs[0], &found.outputs[0]), (&turned, &turned));
}

#[test]
fn pending_reductions_are_never_made() {
    let rows = [strategy([R, R], [R]), strategy([SUM, SUM], [SUM])];
    let operands = [
        (&[4][..], layout(&[2], &[SUM])),
        (&[4][..], layout(&[2], &[R])),
    ];
    assert_eq!(
        placements(&choice(&[2], &operands, &rows).unwrap().inputs),
        [[R], [R]]
    );
}

#[test]
fn reductions_that_do_not_commute_are_never_left_pending() {
    let mesh = [2, 2];
    let rows = [
        strategy([R, R], [R]),
        strategy([SUM, R], [SUM]),
        strategy([R, MAX], [MAX]),
    ];
    let operands = [
        (&[4][..], layout(&mesh, &[SUM, R])),
        (&[4][..], layout(&mesh, &[R, MAX])),
    ];
    let found = choice(&mesh, &operands, &rows).unwrap();
    assert_eq!(placements(&found.outputs), [[R, MAX]]);
}

#[test]
fn a_dimension_shorter_than_the_mesh_is_sharded_only_if_its_input_is() {
    let rows = [strategy([S(0), S(0)], [S(0)]), strategy([R, R], [R])];
    let of = |first, second| {
        let operands = [
            (&[3, 9][..], layout(&[4], &[first])),
            (&[3, 9][..], layout(&[4], &[second])),
        ];
        placements(&choice(&[4], &operands, &rows).unwrap().inputs)
    };
    assert_eq!(of(S(0), S(0)), [[S(0)], [S(0)]]);
    assert_eq!(of(R, S(0)), [[R], [R]]);
}

#[test]
fn shards_over_all_mesh_dimensions_divide_what_the_strategies_require() {
    let mesh = [2, 2];
    let of = |heads: usize| {
        let rows = [
            strategy([R], [R]),
            strategy([S(0)], [S(0)]).if_divides(heads),
        ];
        placements(
            &choice(&mesh, &[(&[8, 8], layout(&mesh, &[S(0), S(0)]))], &rows)
                .unwrap()
                .inputs,
        )
    };
    assert_eq!(of(8), [[S(0), S(0)]]);
    assert_eq!(of(6), [[S(0), R]]);
    assert_eq!(of(5), [[R, R]]);
}

#[test]
fn no_row_that_can_be_reached_is_no_choice() {
    assert_eq!(
        choice(
            &[2],
            &[(&[4], layout(&[2], &[R]))],
            &[strategy([AVG], [AVG])]
        ),
        None
    );
}

/// Compares with the definition: all combinations of strategies, in all orders of mesh dimensions
/// that are tried.
#[test]
fn nothing_is_cheaper() {
    let mesh = [2, 3];
    let all = [R, S(0), S(1), SUM, AVG];
    let layouts: Vec<Layout> = all
        .iter()
        .cartesian_product(&all)
        .flat_map(|(&a, &b)| {
            [[0, 1], [1, 0]]
                .map(|mesh_order| Layout::in_order(&mesh, &[a, b], &mesh_order).unwrap())
        })
        .unique()
        .collect();
    let rows = product();
    let shape = Shape::from([12, 12]);
    // The gradient of a replicated value is summed if ranks use it in different computations.
    let summed = |layout: &Layout, varies: &[bool]| -> Vec<usize> {
        (0..mesh.len())
            .filter(|&dim| layout.placements()[dim].is_replicate() && varies[dim])
            .collect()
    };
    let times = Times {
        call: 1e-6,
        bandwidths: vec![1e8, 3e8],
        backward: 1.5,
    };
    let sent = |from: &Layout, to: &Layout, varies: &[bool], joins: bool| {
        let steps = crate::placement::plan(from, to).ok()?;
        let varying = summed(to, varies);
        let forward: Vec<CommVolume> = sent_forward(from, &steps, &varying, joins).collect();
        let backward: Vec<CommVolume> = sent_backward(from, &steps, &varying, joins).collect();
        Some((steps.len(), forward, backward))
    };
    let all = layouts
        .iter()
        .cartesian_product(&layouts)
        .cartesian_product([None, Some(&times)]);
    for (((a, b), times), joins) in all.cartesian_product([true, false]) {
        let operands = [a, b].map(|layout| OperandInfo {
            joins,
            ..float(layout, &shape)
        });
        let found = chosen(&mesh, &operands, &rows, true, times).unwrap();
        // A sum that is reduce-scattered although no input is sharded will have to be gathered.
        let gathers = |targets: [&Layout; 2]| {
            let alone = |&mesh_dim: &usize| {
                let [from, to] = [[a, b], targets]
                    .map(|layouts| layouts.map(|layout| layout.placements()[mesh_dim]));
                let scatters =
                    |at: usize| from[at].partial_op().is_some() && to[at].shard_dim().is_some();
                (scatters(0) || scatters(1))
                    && from.iter().all(|placement| placement.shard_dim().is_none())
            };
            (0..mesh.len()).filter(alone).count()
        };
        let total = |targets: [&Layout; 2], varies: &[bool]| {
            let (some, mut forward, mut backward) = sent(a, targets[0], varies, joins)?;
            let (more, forward_of_second, backward_of_second) = sent(b, targets[1], varies, joins)?;
            forward.extend(forward_of_second);
            backward.extend(backward_of_second);
            let share = |sent: &[CommVolume]| -> u64 { sent.iter().map(|sent| sent.share).sum() };
            let time = times.map(|times| {
                let bytes = operands[0].bytes;
                let forward: u128 = forward.iter().map(|sent| times.of(sent, bytes)).sum();
                forward
                    + backward
                        .iter()
                        .map(|sent| times.of_backward(sent, bytes))
                        .sum::<u128>()
            });
            let calls = (forward.len() + gathers(targets), backward.len());
            Some((
                time,
                calls.0,
                share(&forward),
                calls.1,
                share(&backward),
                some + more,
            ))
        };
        let varies: Vec<bool> = (0..mesh.len())
            .map(|dim| {
                let all = found.inputs.iter().chain(&found.outputs);
                !all.map(|layout| layout.placements()[dim])
                    .all(|own| own.is_replicate())
            })
            .collect();
        let found = total([&found.inputs[0], &found.inputs[1]], &varies).unwrap();
        for (first, second) in rows.iter().cartesian_product(&rows) {
            let turned = !a.has_default_order() || !b.has_default_order();
            for mesh_order in [[0, 1], [1, 0]].into_iter().take(1 + usize::from(turned)) {
                let input = |at: usize| {
                    Layout::in_order(&mesh, &[first.inputs[at], second.inputs[at]], &mesh_order)
                        .unwrap()
                };
                let made = |at: usize| {
                    let from = [a, b][at].placements();
                    let to = input(at);
                    from.iter()
                        .zip(to.placements())
                        .any(|(from, to)| from != to && to.partial_op().is_some())
                };
                if made(0) || made(1) {
                    continue;
                }
                let varies = [first, second].map(|row| *row != strategy([R, R], [R]));
                let Some(other) = total([&input(0), &input(1)], &varies) else {
                    continue;
                };
                let model = if times.is_some() { "with times" } else { "" };
                assert!(
                    found <= other,
                    "{a} {b} {model}: {} {} is cheaper",
                    input(0),
                    input(1)
                );
            }
        }
    }
}

#[test]
fn a_sum_is_scattered_where_an_input_is_sharded_and_nowhere_else() {
    let rows = [strategy([R, R], [R]), strategy([S(0), S(0)], [S(0)])];
    let moved = |len: usize, other| {
        let operands: [(&[usize], Layout); 2] = [
            (&[len], layout(&[4], &[SUM])),
            (&[len], layout(&[4], &[other])),
        ];
        placements(&choice(&[4], &operands, &rows).unwrap().inputs)[0].clone()
    };
    for len in [1 << 10, 1 << 30] {
        assert_eq!(moved(len, R), [R]);
        assert_eq!(moved(len, S(0)), [S(0)]);
    }
}

/// A wide layer's column-sharded output times a weight without a placement. Slicing the weight
/// costs communication in backward, where its gradient is gathered.
#[test]
fn with_times_what_is_sent_in_backward_counts_and_lengths_decide() {
    let moved = |rows: usize, times: Option<&Times>| {
        let x = Shape::from([rows, 512]);
        let w = Shape::from([512, 512]);
        let sizes = layout(&[4], &[S(1)]);
        let full = layout(&[4], &[R]);
        placements(
            &chosen(
                &[4],
                &[float(&sizes, &x), float(&full, &w)],
                &product(),
                true,
                times,
            )
            .unwrap()
            .inputs,
        )
    };
    let times = Times {
        call: 1e-6,
        bandwidths: vec![1e9],
        backward: 1.0,
    };
    let inference = Times {
        backward: 0.0,
        bandwidths: vec![1e9],
        ..times
    };
    for rows in [8, 1 << 16] {
        assert_eq!(moved(rows, None), [[S(1)], [S(0)]]);
        assert_eq!(moved(rows, Some(&inference)), [[S(1)], [S(0)]]);
    }
    assert_eq!(moved(8, Some(&times)), [[R], [R]]);
    assert_eq!(moved(1 << 16, Some(&times)), [[S(1)], [S(0)]]);
}

/// A call takes a microsecond, and a byte takes ten times as long along the second mesh dimension.
#[test]
fn a_collective_takes_its_call_and_its_bytes() {
    let times = Times {
        call: 1e-6,
        bandwidths: vec![1e9, 1e8],
        backward: 0.5,
    };
    let sent = |dims: &[usize]| CommVolume {
        mesh_dims: dims.into(),
        collective: "all-gather",
        share: CommVolume::FULL_TENSOR / 4,
    };
    assert_eq!(
        [times.of(&sent(&[0]), 4000), times.of(&sent(&[1]), 4000)],
        [2_000_000, 11_000_000]
    );
    assert_eq!(
        times.of(&sent(&[0, 1]), 4000),
        11_000_000,
        "the slower one counts"
    );
    assert_eq!(times.of_backward(&sent(&[1]), 4000), 5_500_000);
}

#[test]
fn what_parts_come_down_to_counts_as_sent() {
    let sizes = layout(&[4], &[S(0)]);
    let shape = Shape::from([64, 64]);
    let told = strategy([S(0)], [S(0)]).with_slots(1);
    // Both take one collective. The summaries have one dimension less, so they send less.
    let rows = [strategy([S(1)], [S(1)]), told.clone()];
    assert_eq!(
        placements(
            &chosen(&[4], &[float(&sizes, &shape)], &rows, true, None)
                .unwrap()
                .inputs
        ),
        [[S(0)]]
    );
    // The other strategy takes none.
    let rows = [told, strategy([S(0)], [S(0)])];
    let free = Times {
        call: 1.0,
        bandwidths: vec![1e9],
        backward: 1.0,
    };
    let operands = [float(&sizes, &shape)];
    for times in [None, Some(&free)] {
        let found = weighed(SelectionProblem {
            mesh_shape: &[4],
            operands: &operands,
            outputs: std::slice::from_ref(&shape),
            strategies: &rows,
            takes_empty_parts: &|_, _| true,
            times,
        });
        let cost = |at: usize| found[at].found.as_ref().unwrap().0;
        assert_eq!((cost(0).forward, cost(0).backward), (1, 1));
        assert_eq!(cost(1), StrategyCost::default());
        // Forward and backward take a second and 768 bytes each.
        assert_eq!(
            cost(0).time,
            if times.is_some() {
                2 * (1_000_000_000_000 + 768_000)
            } else {
                0
            }
        );
    }
}
