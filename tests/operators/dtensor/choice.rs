//! How an operator chooses its layouts, as a program says and sees it.

use std::time::Duration;

use burn::tensor::Tensor;
use burn_dtensor::comm::{CommError, Launch, LedgerEntry, Op, Phase, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::{CostModel, Explanation, explain};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use burn_dtensor::{Error, Result};
use itertools::Itertools;

use super::{AVG, MAX, R, S, SUM, on_mesh, values};

/// A few rows of a column-parallel layer's output, and a weight that is whole on every rank.
fn unplaced(mesh: &DeviceMesh, rows: usize) -> Result<(DTensor<2>, DTensor<2>)> {
    let device = mesh.device();
    Ok((
        DTensor::ones([rows, 64], mesh, &[S(1)], device)?,
        DTensor::ones([64, 64], mesh, &[R], device)?,
    ))
}

#[test]
fn a_cost_model_decides_as_long_as_it_runs() {
    on_mesh(&[2], |_, mesh| {
        let product = |rows| unplaced(mesh, rows).map(|(x, w)| x.matmul(w).placements().to_vec());
        let ledger = mesh.world().ledger();
        let slow = CostModel::default().with_bandwidth(1e6);
        for _ in 0..2 {
            ledger.reset();
            assert_eq!(product(4)?, [SUM]);
            assert_eq!(ledger.total(|_| true).calls, 0);
            // The rows are gathered, not the weight's gradient.
            slow.run(|| {
                assert_eq!(product(4)?, [R]);
                assert_eq!(ledger.calls(Op::AllGather), 1);
                assert_eq!(slow.clone().with_backward(0.0).run(|| product(4))?, [SUM]);
                // Bytes cost next to nothing, and a call in backward less than one in forward.
                let calls = slow
                    .clone()
                    .with_bandwidth_of("a", 1e15)
                    .with_latency(1.0)
                    .with_backward(0.9);
                assert_eq!(calls.run(|| product(4))?, [SUM]);
                assert_eq!(
                    slow.clone()
                        .with_bandwidth_of("b", 1e15)
                        .run(|| product(4))?,
                    [R]
                );
                assert_eq!(product(4096)?, [SUM]);
                Ok::<_, Error>(())
            })?;
        }
        Ok(())
    });
}

#[test]
fn ranks_that_run_different_cost_models_are_told() {
    let ended = launch(Launch::threads(2), |world| -> Result<()> {
        let mesh = DeviceMesh::new(world, [2], ["tp"])?;
        let (x, w) = unplaced(&mesh, 4)?;
        let slow = CostModel::default().with_bandwidth(1e6);
        let y = if world.rank() == 0 {
            slow.run(|| x.matmul(w))
        } else {
            x.matmul(w)
        };
        y.full_tensor().map(drop)
    });
    let error = ended.expect_err("the ranks go different ways");
    assert!(
        matches!(error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{error}"
    );
}

#[test]
#[should_panic(expected = "a bandwidth must be positive, not 0")]
fn a_bandwidth_of_nothing_is_refused() {
    let _ = CostModel::default().with_bandwidth_of("tp", 0.0);
}

/// Decided before or not: the table is the same, and so is what is computed.
#[test]
fn an_explanation_has_every_operator_and_what_each_would_send() {
    on_mesh(&[2], |_, mesh| {
        let (x, w) = unplaced(mesh, 4)?;
        let expected = values(x.clone().matmul(w.clone()).full_tensor()?);
        for _ in 0..2 {
            let (y, why) = explain(|| x.clone().matmul(w.clone()).argmax(1));
            let tables: Vec<&str> = why.tables().collect();
            let [product, found] = tables[..] else {
                panic!("{why}")
            };
            assert_eq!(
                product.lines().take(5).collect::<Vec<_>>(),
                [
                    "matmul of [4, 64] [S(1)], [64, 64] [R] on DeviceMesh(a=2; ranks 0..2)",
                    "  | inputs                       | output   | forward          | backward",
                    "* | [S(1)], [R] -> [S(0)]        | [P(sum)] |                  | all-gather 8192 B",
                    "  | [S(1)] -> [S(0)], [R]        | [S(0)]   | all-to-all 256 B | all-to-all 256 B, all-reduce 16384 B",
                    "  | [S(1)] -> [R], [R]           | [R]      | all-gather 512 B |",
                ]
            );
            assert!(
                found.starts_with("argmax of [4, 64] [P(sum)] on DeviceMesh"),
                "{found}"
            );
            drop(y);
        }
        let (_, nothing) = explain(|| ());
        assert_eq!(
            (nothing.tables().len(), nothing.to_string().as_str()),
            (0, "")
        );
        assert_eq!(values(x.matmul(w).full_tensor()?), expected);
        Ok(())
    });
}

/// `all-gather 8 B, all-reduce 4 B`, sorted.
fn said(cell: Option<&&str>) -> Vec<(String, u64)> {
    let one = |text: &str| {
        let (name, bytes) = text
            .trim_end_matches(" B")
            .split_once(' ')
            .expect("a name and bytes");
        (name.to_owned(), bytes.parse().expect("a number"))
    };
    cell.unwrap_or(&"")
        .trim()
        .split(", ")
        .filter(|text| !text.is_empty())
        .map(one)
        .sorted()
        .collect()
}

/// What is said of the chosen layouts: forward and backward.
fn explained(why: &Explanation) -> [Vec<(String, u64)>; 2] {
    let why = why.to_string();
    let chosen = why
        .lines()
        .find(|line| line.starts_with('*'))
        .expect("one is chosen");
    let cells: Vec<&str> = chosen.split('|').collect();
    [said(cells.get(3)), said(cells.get(4))]
}

/// What this rank has sent in a phase, by the ledger: in a ring, of the payload.
fn ledger(mesh: &DeviceMesh, phase: Phase) -> Vec<(String, u64)> {
    let sent = |entry: LedgerEntry| {
        let part = entry.bytes / entry.group_size as u64 * (entry.group_size as u64 - 1);
        match entry.op {
            Op::AllGather => ("all-gather".into(), part),
            Op::AllReduce => ("all-reduce".into(), 2 * part),
            Op::ReduceScatter => ("reduce-scatter".into(), part),
            Op::AllToAll => ("all-to-all".into(), part),
            Op::AllToAllList => ("all-to-all-list".into(), entry.bytes),
            other => panic!("no operator makes {other}"),
        }
    };
    let entries = mesh.world().ledger().recent();
    entries
        .into_iter()
        .filter(|entry| entry.phase == phase)
        .map(sent)
        .sorted()
        .collect()
}

type Two = fn(DTensor<2>, DTensor<2>) -> DTensor<2>;

/// What is said to be sent is sent, in forward and in backward, of two operands placed like this.
fn says_what_happens(mesh: &DeviceMesh, operator: Two, [a, b]: [&[Placement]; 2]) -> Result<()> {
    let leaf = |placements: &[Placement]| {
        let device = mesh.device().clone().autodiff();
        let lens: [usize; 2] = std::array::from_fn(|dim| {
            let shardings = placements
                .iter()
                .zip(mesh.shape())
                .filter(|(own, _)| **own == S(dim));
            12 / shardings.map(|(_, &size)| size).product::<usize>()
        });
        let own = Tensor::<2>::ones(lens, &device).require_grad();
        DTensor::from_local(own, mesh, placements)
    };
    let (x, y) = (leaf(a)?, leaf(b)?);
    mesh.world().ledger().reset();
    let (z, why) = explain(|| operator(x, y));
    z.to_local().sum().backward();
    assert_eq!(
        explained(&why),
        [ledger(mesh, Phase::Forward), ledger(mesh, Phase::Backward)],
        "{a:?} {b:?}: {why}"
    );
    Ok(())
}

const OPERATORS: [Two; 5] = [
    |a, b| a.matmul(b),
    |a, b| a + b,
    |a, b| a * b,
    |a, _| a.cumsum(1),
    |a, b| DTensor::cat(vec![a, b], 1),
];

#[test]
fn an_explanation_is_what_happens() {
    let placements = [R, S(0), S(1), SUM, AVG, MAX];
    on_mesh(&[2], |_, mesh| {
        let all = OPERATORS
            .into_iter()
            .cartesian_product(placements.iter().cartesian_product(&placements));
        all.into_iter()
            .try_for_each(|(operator, (a, b))| says_what_happens(mesh, operator, [&[*a], &[*b]]))
    });
}

/// Steps of one kind are one collective, over the ranks of both mesh dimensions; not on a mesh with
/// a deadline of its own.
#[test]
fn an_explanation_counts_steps_that_are_one_collective_as_one() {
    let layouts = [
        [R, R],
        [S(0), S(0)],
        [S(1), S(1)],
        [S(0), S(1)],
        [SUM, SUM],
        [MAX, MAX],
        [R, S(0)],
        [S(1), R],
        [SUM, S(0)],
    ];
    let joined = |shape: [usize; 2], deadline: Option<u64>| -> Vec<Op> {
        on_mesh(&shape, |_, mesh| {
            let mesh = match deadline {
                Some(seconds) => mesh.with_deadline("a", Duration::from_secs(seconds))?,
                None => mesh.clone(),
            };
            let mut joined = Vec::new();
            let pairs = || (0..layouts.len()).cartesian_product(0..layouts.len());
            for ((of, operator), (a, b)) in
                OPERATORS.into_iter().enumerate().cartesian_product(pairs())
            {
                // Each operator has every layout on either side, with two others: the first one
                // with itself, too.
                let apart = (b + layouts.len() - a) % layouts.len();
                if !crate::effort::is_long() && apart != of && apart != of + 4 {
                    continue;
                }
                let (a, b) = (&layouts[a], &layouts[b]);
                says_what_happens(&mesh, operator, [a, b])?;
                let full = shape.iter().product::<usize>();
                let of_all = mesh
                    .world()
                    .ledger()
                    .recent()
                    .into_iter()
                    .filter(|entry| entry.group_size == full);
                joined.extend(of_all.map(|entry| entry.op));
            }
            Ok(joined)
        })
        .remove(0)
    };
    let as_one = joined([2, 3], None);
    for op in [Op::AllGather, Op::AllReduce, Op::ReduceScatter] {
        assert!(as_one.contains(&op), "{op} of all ranks");
    }
    let one_by_one = joined([2, 2], Some(599));
    assert!(!one_by_one.contains(&Op::AllGather) && !one_by_one.contains(&Op::ReduceScatter));
}

#[test]
fn an_explanation_says_why_others_are_out() {
    on_mesh(&[4], |_, mesh| {
        let device = mesh.device();
        let x = DTensor::distribute_replicated(Tensor::<2>::ones([6, 5], device), mesh, &[S(0)])?;
        // 6 over 4 are 2, 2, 2 and 0.
        let (_, why) = explain(|| x.clone().sort(0));
        assert!(
            why.to_string()
                .contains("excluded, a rank would have no elements"),
            "{why}"
        );
        let (_, why) = explain(|| x.clone().cumsum(1));
        assert!(
            why.to_string()
                .contains("excluded, input not partial: P(sum) -> P(sum)"),
            "{why}"
        );
        let (_, why) = CostModel::default().run(|| explain(|| x.cumsum(0)));
        assert!(
            why.to_string()
                .contains("| all-gather 90 B |          | 6.6 us"),
            "{why}"
        );
        Ok(())
    });
}
