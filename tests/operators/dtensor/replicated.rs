//! Operators without a rule, on whole tensors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Bool, Float, Int, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::{RedistributePolicy, replicated};
use burn_dtensor::testing::prove::{Case, CaseInput, prove};

use super::{R, S, SUM, on_mesh, ramp, values};

type Made = (Tensor<1>, Tensor<2, Int>, Vec<Tensor<1>>);

/// Of rows that a mask keeps, as many as there are: their sums times a factor, their ranks, and
/// their elements.
fn kept((x, mask, factors): (Tensor<2>, Tensor<1, Bool>, Vec<Tensor<1>>)) -> Made {
    let rows = x.dims()[0];
    let kept = mask.clone().argwhere().reshape([-1]);
    let sums = x.clone().sum_dim(1).reshape([rows]).select(0, kept.clone());
    let factors = factors
        .into_iter()
        .map(|factor| factor.select(0, kept.clone()) * sums.clone())
        .collect();
    (
        x.clone()
            .mask_select(mask.unsqueeze_dim::<2>(1).expand(x.dims())),
        kept.unsqueeze(),
        factors,
    )
}

/// On meshes of one, two and three dimensions, of partial inputs too, and of several numbers of
/// dimensions and kinds: values, gradients, and how deep in the graph they lie.
#[test]
fn operators_without_a_rule_equal_those_on_full_tensors() {
    let case = Case::new(
        "kept",
        [
            CaseInput::float("x", [5, 3]),
            CaseInput::bool("mask", [5]),
            CaseInput::float("a", [5]),
            CaseInput::float("b", [5]),
        ],
        |inputs| {
            let factors = vec![inputs[2].tensor::<1, Float>(), inputs[3].tensor()];
            kept((inputs[0].tensor(), inputs[1].tensor(), factors))
        },
        |inputs| {
            let factors = vec![inputs[2].tensor::<1, Float>(), inputs[3].tensor()];
            let inputs: (DTensor<2>, DTensor<1, Bool>, _) =
                (inputs[0].tensor(), inputs[1].tensor(), factors);
            replicated("kept", inputs, kept)
        },
    );
    let report = prove(&[case]);
    assert_eq!(report.wrong(), 0, "{report}");
}

#[test]
fn gathers_are_in_the_ledger_and_replicated_inputs_cost_nothing() {
    on_mesh(&[3], |world, mesh| {
        let device = mesh.device().clone().autodiff();
        let full = ramp([5, 2], 0.0, &device);
        let x = DTensor::distribute_replicated(full.clone(), mesh, &[S(0)])?.require_grad();
        let term = DTensor::from_local(full.clone(), mesh, &[SUM])?.require_grad();
        let ledger = world.ledger();
        ledger.reset();
        let product = |(x, y): (Tensor<2>, Tensor<2>)| x * y;
        let y = replicated("product", (x.clone(), term.clone()), product);
        assert_eq!(y.placements(), [R]);
        assert_eq!(
            [Op::AllGather, Op::AllReduce].map(|op| ledger.calls(op)),
            [1, 1]
        );
        let again = replicated("product", (y.clone(), y.clone()), product);
        assert_eq!(
            [Op::AllGather, Op::AllReduce].map(|op| ledger.calls(op)),
            [1, 1],
            "all was whole"
        );
        let grads = y.to_local().sum().backward();
        let sent: u64 = [Op::AllGather, Op::AllReduce, Op::ReduceScatter]
            .map(|op| ledger.calls_in(op, Phase::Backward))
            .iter()
            .sum();
        assert_eq!(sent, 0, "a whole gradient is there already");
        let of_x = x.local().grad(&grads).expect("a leaf");
        assert_eq!(values(of_x), super::part(full.clone().inner() * 3.0, &x));
        assert_eq!(
            values(term.local().grad(&grads).expect("a leaf")),
            values(full.inner())
        );
        drop(again);
        Ok(())
    });
}

#[test]
fn deny_names_what_it_would_gather() {
    on_mesh(&[2], |_, mesh| {
        let x = DTensor::<2>::ones([4, 4], mesh, &[S(0)], mesh.device())?;
        let run =
            || RedistributePolicy::Deny.run(|| replicated("mine", x.clone(), |x: Tensor<2>| x));
        let error = catch_unwind(AssertUnwindSafe(run)).expect_err("it is cut");
        let error = error
            .downcast::<Error>()
            .expect("a typed error")
            .to_string();
        assert!(error.contains("`mine` needs its input 0"), "{error}");
        assert!(error.contains(".redistribute(&[Replicate])"), "{error}");
        Ok(())
    });
}
