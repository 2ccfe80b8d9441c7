//! What linear transformations send.

use burn::tensor::{Device, Distribution, Tensor, Tolerance, module as plain};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::ops::module;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::{MeshTest, assert_full_close};

use super::{R, S, SUM};

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// Sequence parallel: q, k and v read clones of one sharded activation.
#[test]
fn q_k_and_v_share_one_all_gather_and_one_reduce_scatter() {
    let plain_device = Device::flex();
    let (full, weights) = (
        random([2, 6, 4], &plain_device),
        [0; 3].map(|_| random([4, 8], &plain_device)),
    );
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x = DTensor::distribute_replicated(full.clone().to_device(&device), mesh, &[S(1)])?
            .require_grad();
        let weights = weights
            .clone()
            .map(|w| DTensor::distribute_replicated(w.to_device(&device), mesh, &[S(1)]));
        let ledger = mesh.world().ledger();
        ledger.reset();
        let mut outputs = Vec::new();
        for weight in weights {
            let y = module::linear(x.clone().constrained_to(R), weight?, None);
            assert_eq!(y.placements(), [S(2)]);
            outputs.push(y.to_local().tanh().sum());
        }
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
        assert_eq!(ledger.total(|_| true).calls, 1);
        let grads = outputs
            .into_iter()
            .reduce(|a, b| a + b)
            .expect("three")
            .backward();
        assert_eq!(ledger.calls_in(Op::ReduceScatter, Phase::Backward), 1);
        assert_eq!(ledger.total(|_| true).calls, 2);
        assert_eq!(x.local().grad(&grads).expect("a leaf").dims(), [2, 3, 4]);
        Ok(())
    });
}

/// A bias of a row-sharded weight is a term of the sum: nothing is sent for it either way.
#[test]
fn the_bias_of_a_contraction_costs_nothing() {
    let plain_device = Device::flex();
    let (x, w, b) = (
        random([3, 4], &plain_device),
        random([4, 5], &plain_device),
        random([5], &plain_device),
    );
    let expected = plain::linear(x.clone(), w.clone(), Some(b.clone())).into_data();
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x = DTensor::distribute_replicated(x.clone().to_device(&device), mesh, &[S(1)])?
            .require_grad();
        let w = DTensor::distribute_replicated(w.clone().to_device(&device), mesh, &[S(0)])?
            .require_grad();
        let b = DTensor::distribute_replicated(b.clone().to_device(&device), mesh, &[R])?
            .require_grad();
        let ledger = mesh.world().ledger();
        ledger.reset();
        let y = module::linear(x, w, Some(b.clone()));
        assert_eq!(y.placements(), [SUM]);
        assert_eq!(ledger.total(|_| true).calls, 0);
        let loss = y.clone().full_tensor()?.sum();
        assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Forward), 1);
        let grads = loss.backward();
        assert_eq!(ledger.total(|_| true).calls, 1);
        assert_eq!(
            b.local().grad(&grads).expect("a leaf").into_data(),
            Tensor::<1>::full([5], 3.0, &plain_device).into_data()
        );
        assert_full_close(&y, expected.clone(), Tolerance::default());
        Ok(())
    });
}
