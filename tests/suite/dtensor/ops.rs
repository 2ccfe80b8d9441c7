//! Operators end to end: what they send, what they cache, what they refuse.

use burn::tensor::Tensor;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::ops::{RedistributePolicy, activation, module};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use Placement::{Replicate as R, Shard as S};

/// Column- then row-sharded products: nothing but one all-reduce each way, shared by three readers.
#[test]
fn three_products_of_one_activation_share_one_all_reduce_in_backward() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x = Tensor::<2>::ones([4, 6], &device);
        let x = DTensor::distribute_local(x, mesh, &[R])?.require_grad();
        let weight = |scale: f32| {
            let w = Tensor::<2>::ones([6, 8], &device).mul_scalar(scale);
            DTensor::distribute_local(w.detach(), mesh, &[S(1)])
        };
        let ledger = mesh.world().ledger();
        ledger.reset();
        let (q, k, v) =
            (x.clone().matmul(weight(1.0)?), x.clone().matmul(weight(2.0)?), x.clone().matmul(weight(3.0)?));
        let loss = (q + k + v).full_tensor()?.sum();
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
        let grads = loss.backward();
        assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Backward), 1);
        let grad = x.local().grad(&grads).expect("the activation is a leaf");
        assert_eq!(grad.into_data(), Tensor::<2>::full([4, 6], 48.0, mesh.device()).into_data());
        Ok(())
    });
}

#[test]
fn deny_names_the_redistribution_to_write() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = DTensor::<2>::ones([4, 4], mesh, &[S(0)], mesh.device())?;
        let y = DTensor::<2>::ones([4, 4], mesh, &[S(1)], mesh.device())?;
        let denied = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            RedistributePolicy::Deny.run(|| x.clone() + y.clone())
        }));
        let error = denied.expect_err("the inputs differ").downcast::<Error>().expect("a typed error");
        assert!(error.to_string().contains("`add` needs its input"), "{error}");
        assert!(error.to_string().contains(".redistribute(&[Shard("), "{error}");
        assert_eq!((x + y).full_tensor()?.into_data(), Tensor::<2>::full([4, 4], 2.0, mesh.device()).into_data());
        Ok(())
    });
}

#[test]
fn operators_say_what_is_wrong_with_their_arguments() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = || DTensor::<2>::ones([4, 3], mesh, &[S(0)], mesh.device());
        let vector = |len: usize| DTensor::<1>::ones([len], mesh, &[R], mesh.device());
        let refused = |remedy: &str, run: &dyn Fn() -> Result<()>| {
            let denied = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            let error = denied.expect_err("the arguments do not fit").downcast::<Error>().expect("a typed error");
            assert!(error.to_string().contains(remedy), "{error}");
        };
        refused("there is no dimension 2 of 2; use one in -2..2", &|| x().map(|x| drop(x.max_dim(2))));
        refused("there is no dimension -3 of 2", &|| x().map(|x| drop(activation::softmax(x, -3))));
        refused("dimension 1 has 3 elements", &|| x().map(|x| drop(x.topk(4, 1))));
        refused("must have two halves", &|| x().map(|x| drop(activation::glu(x, 1))));
        refused("one a channel", &|| Ok(drop(activation::prelu(x()?, vector(2)?))));
        refused("the last dimension has 3 elements", &|| Ok(drop(module::layer_norm(x()?, vector(4)?, None, 1e-5))));
        refused("must make 2 groups", &|| Ok(drop(module::group_norm(x()?, None, 2, 1e-5))));
        refused("one element a channel", &|| Ok(drop(module::batch_norm_train(x()?, vector(2)?, vector(3)?, 1e-5))));
        Ok(())
    });
}

/// The mean, and in backward its gradient: three numbers each, where the rows have three hundred.
#[test]
fn a_variance_over_cut_rows_sends_no_rows() {
    MeshTest::new([2], ["dp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x = DTensor::distribute_local(Tensor::<2>::ones([100, 3], &device), mesh, &[S(0)])?.require_grad();
        let ledger = mesh.world().ledger();
        ledger.reset();
        let var = x.clone().var_bias(0);
        assert_eq!(var.placements(), [Placement::Partial(PartialOp::Sum)]);
        assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Forward), 1);
        let loss = var.full_tensor()?.sum();
        loss.backward();
        assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Backward), 1);
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward) + ledger.calls_in(Op::AllGather, Phase::Backward), 0);
        Ok(())
    });
}
