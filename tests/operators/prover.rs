//! The rule prover finds what is wrong with a rule, and says so.

use burn::tensor::{Float, Shape, Tensor};
use burn_dtensor::Result;
use burn_dtensor::dtensor::ops::{Operator, ShardingRule, Strategy, apply, strategy};
use burn_dtensor::placement::{PartialOp, Placement};
use burn_dtensor::testing::prove::{
    Case, CaseInput, Combination, DifferenceKind, Effort, OperatorReport, PlainInput, ShardedInput,
    Wrong, case, prove, prove_with,
};

use Placement::{Partial, Shard as S};

/// A rule of the rows that a test claims: placements that an elementwise operator lets through.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Claim(Vec<Placement>);

impl ShardingRule for Claim {
    fn name(&self) -> &'static str {
        "claimed"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        Ok(inputs.to_vec())
    }

    fn strategies(&self, _inputs: &[Shape], _outputs: &[Shape]) -> Vec<Strategy> {
        self.0
            .iter()
            .map(|&placement| strategy([placement], [placement]))
            .collect()
    }

    fn supports_empty_shards(&self) -> bool {
        true
    }
}

/// An operator on `x: [3, 2]` that claims to let `placements` through.
fn claimed(
    placements: &[Placement],
    plain: impl Fn(Tensor<2>) -> Tensor<2> + Send + Sync + 'static,
    local: impl Fn(Tensor<2>, &Operator) -> Tensor<2> + Send + Sync + 'static,
) -> Case {
    let claim = Claim(placements.to_vec());
    Case::new(
        "claimed",
        [CaseInput::float("x", [3, 2])],
        move |inputs| plain(inputs[0].tensor::<2, Float>()),
        move |inputs| apply(&claim, inputs[0].tensor::<2, Float>(), &local),
    )
}

/// What the prover says of it.
fn proven(
    placements: &[Placement],
    plain: impl Fn(Tensor<2>) -> Tensor<2> + Send + Sync + 'static,
    local: impl Fn(Tensor<2>, &Operator) -> Tensor<2> + Send + Sync + 'static,
) -> OperatorReport {
    prove(&[claimed(placements, plain, local)])
        .operators
        .remove(0)
}

#[test]
fn a_right_rule_is_proven_and_what_it_does_not_take_is_listed() {
    let report = proven(&[S(1), S(0)], |x| x * 2 + 1, |x, _| x * 2 + 1);
    // 1 + 2 + 5 layouts on a mesh of one dimension, 48 on 2 x 2, some on 1 x 2, 2 x 3 and 2 x 2 x 2.
    // With ragged cuts 1 + 3 * 2 + 1 on 2, some on 2 x 2.
    assert_eq!(
        (report.tried, report.wrong.len()),
        (3 * 8 + 48 + 12 + 4 + 6 + 8 + 8, 0),
        "{report}"
    );
    let has_partial = |tried: &Combination| tried.inputs[0].layout.has_partial();
    assert!(report.redistributed.iter().all(has_partial), "{report}");
    let flat = report
        .redistributed
        .iter()
        .filter(|tried| tried.mesh.len() == 1);
    assert_eq!(flat.count(), 3 * 5 + 1, "{report}");
    let text = report.to_string();
    assert!(
        text.contains("redistributed: P(avg) P(max) P(min) P(product) P(sum); and "),
        "{text}"
    );
    assert!(text.contains(" on meshes of several dimensions"), "{text}");
}

#[test]
fn in_brief_a_few_combinations_are_tried_on_each_mesh() {
    let case = claimed(&[S(1), S(0)], |x| x * 2 + 1, |x, _| x * 2 + 1);
    let report = prove_with(&[case], Effort::Brief).operators.remove(0);
    // All 8 layouts on 2 ranks, some on 3, 4, 1 x 2, 2 x 2, 2 x 3 and 2 x 2 x 2, and with ragged
    // cuts on 2 and 2 x 2.
    assert_eq!(
        (report.tried, report.wrong.len()),
        (8 + 3 + 2 + 1 + 4 + 2 + 1 + 4 + 2, 0),
        "{report}"
    );
}

#[test]
fn a_reduction_that_must_not_go_through_is_a_wrong_value() {
    let report = proven(&[Partial(PartialOp::Sum)], |x| x * 2 + 1, |x, _| x * 2 + 1);
    let wrong = &report.wrong[0];
    assert_eq!(
        wrong.combination.to_string(),
        "mesh [2]: x [3, 2] as [P(sum)]"
    );
    assert_eq!(wrong.differences.len(), 1);
    assert_eq!(wrong.differences[0].what, DifferenceKind::Output(0));
    assert!(
        (wrong.differences[0].error - 1.0).abs() < 1e-4,
        "every rank adds its own 1: {report}"
    );
    assert!(
        report.to_string().contains("output 0 is off by 1.00e0"),
        "{report}"
    );
}

#[test]
fn a_gradient_that_loses_a_term_is_found_where_the_value_is_right() {
    let report = proven(
        &[S(0)],
        |x| x * 2,
        |x, op| {
            if op.input_range(0, 0).len() == 3 {
                x * 2
            } else {
                x.clone() + x.detach()
            }
        },
    );
    let mut differences = report.wrong.iter().flat_map(|wrong| &wrong.differences);
    assert!(
        differences.all(|difference| difference.what == DifferenceKind::Gradient("x")),
        "{report}"
    );
    assert_eq!(
        report.wrong[0].combination.to_string(),
        "mesh [2]: x [3, 2] as [S(0)]"
    );
}

/// Values are right, and all gradients that there are.
#[test]
fn a_rank_that_drops_its_graph_is_found() {
    let local = |x: Tensor<2>, _: &Operator| if x.dims()[0] == 0 { x.detach() } else { x };
    let report = proven(&[S(0)], |x| x, local);
    assert_eq!(
        report.wrong[0].combination.to_string(),
        "mesh [4]: x [3, 2] as [S(0)]"
    );
    assert!(
        report
            .to_string()
            .contains("gradient of `x` is missing (rank 3)"),
        "{report}"
    );
}

#[test]
fn shards_that_are_not_where_the_rule_says_are_found() {
    let report = proven(&[S(0)], |x| x.flip([0]), |x, _| x.flip([0]));
    assert_eq!(
        report.wrong[0].combination.to_string(),
        "mesh [2]: x [3, 2] as [S(0)]"
    );
    let replicated = |wrong: &Wrong| {
        wrong.combination.inputs[0]
            .layout
            .placements()
            .iter()
            .all(|p| p.is_replicate())
    };
    assert!(!report.wrong.iter().any(replicated), "{report}");
}

/// On one rank alone: the ranks with elements go on to wait for it.
#[test]
fn a_rank_that_panics_is_named_and_the_others_are_tried() {
    let local = |x: Tensor<2>, _: &Operator| {
        if x.dims()[0] == 0 {
            panic!("no rows")
        } else {
            x
        }
    };
    let report = proven(&[S(0), S(1)], |x| x, local);
    assert_eq!(report.tried, 3 * 8 + 48 + 12 + 4 + 6 + 8 + 8);
    let wrong: Vec<_> = report
        .wrong
        .iter()
        .map(|wrong| wrong.combination.to_string())
        .collect();
    let of_four = [
        "mesh [4]: x [3, 2] as [S(0)]",
        "mesh [2, 2]: x [3, 2] as [S(0), S(0)]",
    ];
    assert_eq!(wrong[..2], of_four, "{report}");
    assert!(
        wrong[2].starts_with("mesh [2, 2]"),
        "the other order of cuts: {report}"
    );
    let uneven = "mesh [2]: x [3, 2] as [S(0); mesh dim 0 sizes 0 + 3]";
    let sizes = |wrong: &String| wrong.contains("S(0), ") && !wrong.starts_with("mesh [1");
    assert!(wrong.iter().any(|wrong| wrong == uneven), "{report}");
    assert!(
        wrong[3..]
            .iter()
            .all(|wrong| sizes(wrong) || wrong.contains("sizes 0 + ")),
        "{report}"
    );
    let failure = &report.wrong[0].differences;
    assert!(
        failure
            .iter()
            .any(|difference| difference.how.contains("rank 3 panicked: no rows")),
        "{report}"
    );
}

#[test]
fn outputs_of_another_number_or_type_are_found() {
    let more = Case::new(
        "more",
        [CaseInput::float("x", [3, 2])],
        |inputs| inputs[0].tensor::<2, Float>(),
        |inputs| {
            [
                inputs[0].tensor::<2, Float>(),
                inputs[0].tensor::<2, Float>(),
            ]
        },
    );
    let other = Case::new(
        "other",
        [CaseInput::float("x", [3, 2])],
        |inputs| inputs[0].tensor::<2, Float>().int(),
        |inputs| inputs[0].tensor::<2, Float>(),
    );
    let report = prove(&[more, other]);
    assert!(
        report
            .operators
            .iter()
            .all(|operator| operator.wrong.len() == operator.tried)
    );
    let text = report.to_string();
    assert!(text.contains("2 outputs, must be 1"), "{text}");
    assert!(text.contains("is of F32, must be of I"), "{text}");
}

#[test]
fn one_expression_is_compiled_for_both_kinds_of_tensor() {
    let report = prove(&[
        case!("kinds", (x: 2 within(-1.0..1.0) = [3, 2], i: 2 int(4) = [3, 2], m: 2 bool = [3, 2]) => {
            (x.clone() * 2.0, i + 1, m.bool_not(), vec![x])
        }),
        case!("joined", (a: 1 positive = [3], b: 1 = [3]) => Tensor::cat(vec![a, b], 0)),
    ]);
    assert_eq!(report.wrong(), 0, "{report}");
    assert_eq!(report.operators[0].name, "kinds");
    // 7 x 7 on each mesh of one dimension, and what the others and those with ragged cuts are
    // capped at.
    assert_eq!(
        report.operators[1].tried,
        49 + 48 + 24 + 24 + 8 + 4 + 4 + 24 + 8
    );
}

/// Values and gradients are right. Of 3 rows over 2 ranks, the second rank has one.
#[test]
fn a_rank_that_records_more_nodes_than_another_is_found() {
    let local = |x: Tensor<2>, _: &Operator| if x.dims()[0] == 1 { x.neg().neg() } else { x };
    let report = proven(&[S(0)], |x| x, local);
    let first = &report.wrong[0];
    assert_eq!(
        first.combination.to_string(),
        "mesh [2]: x [3, 2] as [S(0)]"
    );
    assert_eq!(
        first
            .differences
            .iter()
            .map(|difference| difference.what)
            .collect::<Vec<_>>(),
        [DifferenceKind::Depth(0)]
    );
    let text = report.to_string();
    assert!(
        text.contains(
            "output 0 lies 2 nodes deep in the graph of rank 1, 0 nodes deep in that of rank 0"
        ),
        "{text}"
    );
}

/// Where another rank holds a number: `max(0, 5)` is 5, and NaN must be 0.
#[test]
fn a_reduction_that_loses_a_nan_is_found() {
    let claim = Claim(vec![Partial(PartialOp::Max)]);
    let filled = |x: Tensor<2>| x.clone().mask_fill(x.is_nan(), 0);
    let prove_on = |input: CaseInput| {
        let claim = claim.clone();
        let plain = move |inputs: &[_]| filled(PlainInput::tensor::<2, Float>(&inputs[0]));
        let local = move |inputs: &[_]| {
            apply(
                &claim,
                ShardedInput::tensor::<2, Float>(&inputs[0]),
                |x, _| filled(x),
            )
        };
        prove(&[Case::new("claimed", [input], plain, local)])
            .operators
            .remove(0)
    };
    let report = prove_on(CaseInput::float("x", [3, 2]));
    assert!(report.wrong.is_empty(), "{report}");
    let report = prove_on(CaseInput::nan("x", [3, 2]));
    assert_eq!(
        report.wrong[0].combination.to_string(),
        "mesh [2]: x [3, 2] as [P(max)]",
        "{report}"
    );
}
