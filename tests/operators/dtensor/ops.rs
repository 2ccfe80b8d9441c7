//! Operators end to end: what they send, what they cache, what they refuse.

use std::hash::{BuildHasher, RandomState};

use burn::tensor::ops::ConvOptions;
use burn::tensor::{Int, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::ops::loss::CrossEntropyLossConfig;
use burn_dtensor::dtensor::ops::{RedistributePolicy, activation, module};
use burn_dtensor::placement::{Layout, PartialOp};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::unwound;

use Placement::{Replicate as R, Shard as S};

/// Column- then row-sharded products: nothing but one all-reduce each way, shared by three readers.
#[test]
fn three_products_of_one_activation_share_one_all_reduce_in_backward() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x = Tensor::<2>::ones([4, 6], &device);
        let x = DTensor::distribute_replicated(x, mesh, &[R])?.require_grad();
        let weight = |scale: f32| {
            let w = Tensor::<2>::ones([6, 8], &device).mul_scalar(scale);
            DTensor::distribute_replicated(w.detach(), mesh, &[S(1)])
        };
        let ledger = mesh.world().ledger();
        ledger.reset();
        let (q, k, v) = (
            x.clone().matmul(weight(1.0)?),
            x.clone().matmul(weight(2.0)?),
            x.clone().matmul(weight(3.0)?),
        );
        let loss = (q + k + v).full_tensor()?.sum();
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
        let grads = loss.backward();
        assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Backward), 1);
        let grad = x.local().grad(&grads).expect("the activation is a leaf");
        assert_eq!(
            grad.into_data(),
            Tensor::<2>::full([4, 6], 48.0, mesh.device()).into_data()
        );
        Ok(())
    });
}

#[test]
fn deny_names_the_redistribution_to_write() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = DTensor::<2>::ones([4, 4], mesh, &[S(0)], mesh.device())?;
        let y = DTensor::<2>::ones([4, 4], mesh, &[S(1)], mesh.device())?;
        let error = unwound(|| RedistributePolicy::Deny.run(|| x.clone() + y.clone()));
        assert!(
            error.to_string().contains("`add` needs its input"),
            "{error}"
        );
        assert!(
            error.to_string().contains(".redistribute(&[Shard("),
            "{error}"
        );
        assert_eq!(
            (x + y).full_tensor()?.into_data(),
            Tensor::<2>::full([4, 4], 2.0, mesh.device()).into_data()
        );
        Ok(())
    });
}

/// `.redistribute` would cut the other way round, and be denied again.
#[test]
fn deny_names_the_shard_order_to_write() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let turned = Layout::with_shard_order(&[2, 2], &[S(0), S(0)], &[(0, &[1, 0])])?;
        let x = DTensor::<1>::ones([8], mesh, &[R, R], mesh.device())?;
        let y = x.clone().redistribute_to(&turned)?;
        let error = unwound(|| RedistributePolicy::Deny.run(|| x.clone() + y.clone()));
        let write =
            ".redistribute_to(&Layout::with_shard_order(mesh.shape(), &[Shard(0), Shard(0)], &[(0, &[1, 0])])?)?";
        assert!(error.to_string().contains(write), "{error}");
        let x = x.redistribute_to(&turned)?;
        assert_eq!(*RedistributePolicy::Deny.run(|| x + y).layout(), turned);
        Ok(())
    });
}

/// A bias cut by tensor parallelism first, then by FSDP, where a third mesh dimension sums.
#[test]
fn a_bias_that_joins_a_sum_keeps_its_shard_order() {
    MeshTest::new([2, 2, 2], ["dp", "tp", "cp"]).run(|mesh| {
        let ones = |shape: [usize; 2], layout: &Layout| {
            DTensor::<2>::ones(shape, mesh, &[R, R, R], mesh.device())?.redistribute_to(layout)
        };
        let x = ones([2, 4], &Layout::new(mesh.shape(), &[R, R, S(1)])?)?;
        let columns = Layout::with_shard_order(mesh.shape(), &[S(1), S(1), S(0)], &[(1, &[1, 0])])?;
        let weight = ones([4, 8], &columns)?;
        let sizes = Layout::with_shard_order(mesh.shape(), &[S(0), S(0), R], &[(0, &[1, 0])])?;
        let bias = Tensor::<1, Int>::arange(0..8, mesh.device()).float();
        let bias =
            DTensor::distribute_replicated(bias, mesh, &[R, R, R])?.redistribute_to(&sizes)?;
        mesh.world().ledger().reset();
        let y = module::linear(x, weight, Some(bias));
        assert_eq!(mesh.world().ledger().total(|_| true).calls, 0);
        let expected: Vec<f32> = (0..16).map(|at| 4.0 + (at % 8) as f32).collect();
        assert_eq!(
            y.full_tensor()?
                .into_data()
                .try_into_vec::<f32>()
                .expect("floats"),
            expected
        );
        Ok(())
    });
}

#[test]
fn a_bias_that_would_be_reduced_to_join_a_sum_is_denied() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = DTensor::<2>::ones([2, 4], mesh, &[S(1)], mesh.device())?;
        let weight = DTensor::<2>::ones([4, 3], mesh, &[S(0)], mesh.device())?;
        let average = Tensor::<1>::full([3], mesh.rank() as f32, mesh.device());
        let bias = DTensor::from_local(average, mesh, &[Placement::Partial(PartialOp::Avg)])?;
        let run = || module::linear(x.clone(), weight.clone(), Some(bias.clone()));
        let error = unwound(|| RedistributePolicy::Deny.run(run));
        assert!(
            error
                .to_string()
                .contains("`linear` needs its input 2 as [R], but it is [P(avg)]"),
            "{error}"
        );
        let y = run().full_tensor()?;
        assert_eq!(
            y.into_data(),
            Tensor::<2>::full([2, 3], 4.5, mesh.device()).into_data()
        );
        Ok(())
    });
}

/// `softplus(-0.1) = 0.64` is larger than 0.1, what is beyond the threshold.
#[test]
fn a_function_that_falls_takes_no_pending_maximum() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let local = Tensor::<1>::from_data([[0.1, -0.1][mesh.rank()]], mesh.device());
        let x = DTensor::from_local(local, mesh, &[Placement::Partial(PartialOp::Max)])?;
        let y = activation::softplus_with_threshold(x, 1.0, 0.0).full_tensor()?;
        assert_eq!(
            y.into_data(),
            Tensor::<1>::from_data([0.1], mesh.device()).into_data()
        );
        Ok(())
    });
}

#[test]
fn operators_say_what_is_wrong_with_their_arguments() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = || DTensor::<2>::ones([4, 3], mesh, &[S(0)], mesh.device());
        let vector = |len: usize| DTensor::<1>::ones([len], mesh, &[R], mesh.device());
        fn done<T>(_: T) -> Result<()> {
            Ok(())
        }
        let refused = |remedy: &str, run: &dyn Fn() -> Result<()>| {
            let error = unwound(run);
            assert!(error.to_string().contains(remedy), "{error}");
        };
        refused(
            "dimension 2 is out of range for 2 dimensions. Use one in -2..2",
            &|| x().map(|x| drop(x.max_dim(2))),
        );
        refused("dimension -3 is out of range for 2 dimensions", &|| {
            x().map(|x| drop(activation::softmax(x, -3)))
        });
        refused("dimension 1 has 3 elements", &|| {
            x().map(|x| drop(x.topk(4, 1)))
        });
        refused("must have an even length", &|| {
            x().map(|x| drop(activation::glu(x, 1)))
        });
        refused(
            "axis `c` is 3 in the first input and 2 in the second",
            &|| done(activation::prelu(x()?, vector(2)?)),
        );
        refused(
            "axis `D` is 3 in the first input and 4 in the second",
            &|| done(module::layer_norm(x()?, vector(4)?, None, 1e-5)),
        );
        refused("must make 2 groups", &|| {
            done(module::group_norm(x()?, None, 2, 1e-5))
        });
        refused("there is no operand", &|| {
            done(DTensor::<1>::einsum("i->i", []))
        });
        refused("2 dimensions, but 1 were requested", &|| {
            done(DTensor::<1>::einsum("ij->ij", [x()?.into()]))
        });
        refused("dimension 1 has no element 3. Use one in -3..3", &|| {
            done(x()?.select_dim::<1>(1, 3))
        });
        refused("weights for 2 classes", &|| {
            let loss = CrossEntropyLossConfig::new()
                .with_weights([1.0, 2.0])
                .init(mesh.device());
            done(loss.forward(
                x()?,
                DTensor::<1, Int>::zeros([4], mesh, &[S(0)], mesh.device())?,
            ))
        });
        refused("one element per channel", &|| {
            done(module::batch_norm_train(x()?, vector(2)?, vector(3)?, 1e-5))
        });
        Ok(())
    });
}

/// The mean, and in backward its gradient: three numbers each, where the rows have three hundred.
#[test]
fn a_variance_over_sharded_rows_sends_no_rows() {
    MeshTest::new([2], ["dp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x =
            DTensor::distribute_replicated(Tensor::<2>::ones([100, 3], &device), mesh, &[S(0)])?
                .require_grad();
        let ledger = mesh.world().ledger();
        ledger.reset();
        let var = x.clone().var_bias(0);
        assert_eq!(var.placements(), [Placement::Partial(PartialOp::Sum)]);
        assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Forward), 1);
        let loss = var.full_tensor()?.sum();
        loss.backward();
        assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Backward), 1);
        assert_eq!(
            ledger.calls_in(Op::AllGather, Phase::Forward)
                + ledger.calls_in(Op::AllGather, Phase::Backward),
            0
        );
        Ok(())
    });
}

/// Running statistics are made of them, rank by rank.
#[test]
fn the_statistics_of_a_sharded_batch_are_replicated() {
    MeshTest::new([2], ["dp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let rows = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0], [8.0, 0.0]], &device);
        let x = DTensor::distribute_replicated(rows, mesh, &[S(0)])?;
        let vector = || DTensor::<1>::ones([2], mesh, &[R], &device);
        let normalized = module::batch_norm_train(x, vector()?, vector()?, 1e-5);
        for (found, expected) in [
            (normalized.mean, [4.0, 2.0]),
            (normalized.variance, [26.0 / 3.0, 8.0 / 3.0]),
        ] {
            assert_eq!(found.placements(), [R]);
            let found: Vec<f32> = found.to_local().into_data().iter::<f32>().collect();
            assert!(
                found
                    .iter()
                    .zip(expected)
                    .all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-5),
                "{found:?}"
            );
        }
        Ok(())
    });
}

/// A program that works on a small batch works on a large one: a residual meets a partial sum, and
/// its local part is read.
#[test]
fn the_layout_of_a_result_does_not_depend_on_the_size_of_the_batch() {
    let placed = |batch: usize| {
        MeshTest::new([4], ["tp"]).run(|mesh| {
            let of =
                |shape, placement| DTensor::<2>::ones(shape, mesh, &[placement], mesh.device());
            let sum = of([batch, 4], R)?
                + of([batch, 4], R)?.redistribute(&[Placement::Partial(PartialOp::Sum)])?;
            let product = of([batch, 4], S(1))?.matmul(of([4, 64], S(1))?);
            Ok([sum.placements().to_vec(), product.placements().to_vec()])
        })
    };
    assert_eq!(placed(4)[0][0], [R]);
    assert_eq!(placed(4), placed(4 << 16));
}

/// Burn's own gradient is wrong: see `burn_limits`.
#[test]
fn a_grouped_conv1d_whose_stride_leaves_elements_over_has_the_gradient_of_its_weight() {
    // The windows that fit: of the first two elements, or with one of padding in front of none and
    // the first.
    for (padding, expected) in [
        ((0, 0), [[1.0, 2.0], [3.0, 5.0]]),
        ((1, 1), [[2.0, 41.0], [5.0, 73.0]]),
    ] {
        for placements in [[R, R], [S(1), S(0)]] {
            MeshTest::new([2], ["tp"]).run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let x = Tensor::<3>::from_data([[[1.0, 2.0, 40.0], [3.0, 5.0, 70.0]]], &device);
                let x = DTensor::distribute_replicated(x, mesh, &placements[..1])?.require_grad();
                let weight = DTensor::distribute_replicated(
                    Tensor::<3>::ones([6, 1, 2], &device),
                    mesh,
                    &placements[1..],
                )?;
                let weight = weight.require_grad();
                let mut options = ConvOptions::new([2], [0], [1], 2);
                options.padding = [padding];
                let y = module::conv1d(x.clone(), weight.clone(), None, options);
                let grads = y.sum().full_tensor()?.backward();
                let found: Vec<f32> = weight
                    .local()
                    .grad(&grads)
                    .expect("a leaf")
                    .into_data()
                    .iter::<f32>()
                    .collect();
                let all: Vec<f32> = expected
                    .iter()
                    .flat_map(|row| [*row; 3])
                    .flatten()
                    .collect();
                let own = weight.spec().local_range(0);
                assert_eq!(
                    found,
                    all[2 * own.start..2 * own.end],
                    "{padding:?} {placements:?}"
                );
                assert_eq!(
                    x.local().grad(&grads).expect("a leaf").dims(),
                    x.local().dims()
                );
                Ok(())
            });
        }
    }
}

/// What its terms were computed from is no part of a spec.
#[test]
fn specs_of_pending_sums_are_equal_however_their_terms_came_about() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let ones = |shape, placement| DTensor::<2>::ones(shape, mesh, &[placement], mesh.device());
        let product = |len| Ok::<_, Error>(ones([2, len], S(1))?.matmul(ones([len, 2], S(0))?));
        let (four, eight) = (product(4)?, product(8)?);
        let made = ones([2, 2], R)?.redistribute(&[Placement::Partial(PartialOp::Sum)])?;
        assert_eq!(four.placements(), [Placement::Partial(PartialOp::Sum)]);
        assert_eq!(four.spec(), eight.spec());
        assert_eq!(four.spec(), made.spec());
        let hasher = RandomState::new();
        assert_eq!(hasher.hash_one(four.spec()), hasher.hash_one(eight.spec()));
        Ok(())
    });
}

/// A stride of 8 leaves one window, and its kernel lies before the two elements.
#[test]
fn a_grouped_conv1d_whose_only_window_sees_padding_alone_is_that_of_burn() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        for padding in [3, 2, 1] {
            let options = || ConvOptions::new([8], [padding], [1], 2);
            let x = Tensor::<3>::from_floats([[[1.0, 2.0], [3.0, 5.0]]], &device).require_grad();
            let weight =
                Tensor::<3>::from_floats([[[7.0, 11.0]], [[13.0, 17.0]]], &device).require_grad();
            let expected = burn::tensor::module::conv1d(x.clone(), weight.clone(), None, options());
            for placements in [[R, R], [S(1), S(0)]] {
                let sizes = |tensor: &Tensor<3>, placement| {
                    DTensor::distribute_replicated(tensor.clone().detach(), mesh, &[placement])
                        .map(DTensor::require_grad)
                };
                let (own_x, own_weight) =
                    (sizes(&x, placements[0])?, sizes(&weight, placements[1])?);
                let y = module::conv1d(own_x.clone(), own_weight.clone(), None, options())
                    .full_tensor()?;
                assert_eq!(y.to_data(), expected.to_data(), "padding {padding}");
                // The kernel's second element lies on the first of each row where the padding is 1.
                let seen = if padding == 1 { 1.0 } else { 0.0 };
                let grads = y.sum().backward();
                let full = |found: Tensor<3>, of: &DTensor<3>| {
                    let grad = DTensor::from_local(found, mesh, of.placements())?;
                    grad.full_tensor()
                        .map(|grad| grad.into_data().iter::<f32>().collect::<Vec<_>>())
                };
                let of_x = full(own_x.local().grad(&grads).expect("a leaf"), &own_x)?;
                assert_eq!(
                    of_x,
                    [11.0 * seen, 0.0, 17.0 * seen, 0.0],
                    "padding {padding}"
                );
                let of_weight = full(
                    own_weight.local().grad(&grads).expect("a leaf"),
                    &own_weight,
                )?;
                assert_eq!(of_weight, [0.0, seen, 0.0, 3.0 * seen], "padding {padding}");
            }
        }
        Ok(())
    });
}
