//! Operators that move elements, where the rule prover does not look.

use burn::tensor::ops::PadMode;
use burn::tensor::{Bool, Int, Tensor, TensorData};
use burn_dtensor::comm::Op;
use burn_dtensor::dtensor::ops::{linalg, module};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::{MeshTest, assert_full_eq};
use itertools::Itertools;

use super::unwound;

use PartialOp::Sum;
use Placement::{Partial, Replicate as R, Shard as S};

/// A vocabulary stays where it is, in forward and in backward.
#[test]
fn looking_up_in_a_sharded_vocabulary_sends_nothing() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let weights = Tensor::<1, Int>::arange(0..10, &device)
            .float()
            .reshape([5, 2]);
        let weights =
            DTensor::distribute_replicated(weights.detach(), mesh, &[S(0)])?.require_grad();
        let indices = Tensor::<2, Int>::from_data([[4, 0, 4]], &device);
        let indices = DTensor::distribute_replicated(indices, mesh, &[R])?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let rows = module::embedding(weights.clone(), indices);
        assert_eq!(rows.placements(), [Partial(Sum)]);
        let grads = rows.to_local().sum().backward();
        assert_eq!(ledger.total(|_| true).calls, 0);
        // Each rank's loss is its term of the sum of all.
        let counts = if mesh.rank() == 0 {
            vec![1.0f32, 1., 0., 0., 0., 0.]
        } else {
            vec![0.0, 0., 2., 2.]
        };
        let grad = weights
            .local()
            .grad(&grads)
            .expect("the weights are a leaf");
        assert_eq!(grad.into_data().iter::<f32>().collect::<Vec<_>>(), counts);
        Ok(())
    });
}

/// One all-gather serves all pieces.
#[test]
fn a_split_moves_its_input_once() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = DTensor::<1, Int>::arange(0..6, mesh, &[S(0)], mesh.device())?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let chunks = x.chunk(3, 0);
        assert_eq!(ledger.calls(Op::AllGather), 1);
        assert_full_eq(&chunks[1], [2, 3]);
        Ok(())
    });
}

/// burn-flex 0.22 finds bytes in a tensor of booleans.
#[test]
fn looked_up_booleans_are_booleans() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        for placement in [R, S(0), S(1)] {
            let mask = DTensor::<2, Bool>::tril_mask([3, 2], 0, mesh, &[placement], mesh.device())?;
            let rows = DTensor::<1, Int>::arange(0..2, mesh, &[R], mesh.device())?;
            let selected = mask.clone().select(0, rows.clone());
            assert_eq!(selected.dtype(), mask.dtype());
            assert_full_eq(&selected, [[false, true], [false, false]]);
            let gathered = mask.gather(0, rows.reshape([1, 2]));
            assert_full_eq(&gathered, [[false, false]]);
        }
        Ok(())
    });
}

/// On uneven and empty parts, of more rows than columns and fewer.
#[test]
fn masks_do_not_depend_on_placements() {
    MeshTest::new([2, 2], ["rows", "columns"]).run(|mesh| {
        let device = mesh.device();
        for shape in [[3, 5], [5, 3], [1, 3]] {
            for placements in [[R, R], [S(0), R], [S(0), S(1)], [S(1), S(1)], [S(0), S(0)]] {
                for offset in [-1, 0, 2] {
                    let make =
                        |local: fn([usize; 2], i64, &burn::tensor::Device) -> Tensor<2, Bool>| {
                            local(shape, offset, device).into_data()
                        };
                    let upper =
                        DTensor::<2, Bool>::triu_mask(shape, offset, mesh, &placements, device)?;
                    assert_full_eq(&upper, make(Tensor::triu_mask));
                    let lower =
                        DTensor::<2, Bool>::tril_mask(shape, offset, mesh, &placements, device)?;
                    assert_full_eq(&lower, make(Tensor::tril_mask));
                    let diagonal =
                        DTensor::<2, Bool>::diag_mask(shape, offset, mesh, &placements, device)?;
                    assert_full_eq(&diagonal, make(Tensor::diag_mask));
                }
            }
        }
        Ok(())
    });
}

/// The last rank of four has no row of three. Branches communicate in backward in the order of
/// their depth in the graph, so an operator that records fewer nodes without elements would have
/// that rank out of step. Each operator with how often it uses an element of its input, over all.
#[test]
fn a_rank_without_elements_keeps_step_in_backward() {
    type Used = (&'static str, fn(DTensor<2>) -> DTensor<2>, f32);
    let operators: [Used; 9] = [
        ("slice", |x| x.slice_dim(1, 0..1), 3.0),
        ("split", |x| x.split(1, 1).remove(0), 3.0),
        ("cat", |x| DTensor::cat(vec![x.clone(), x], 1), 12.0),
        (
            "slice_assign",
            |x| x.clone().slice_assign([0..3, 0..1], x.slice_dim(1, 1..2)),
            6.0,
        ),
        ("pad", |x| x.pad([(1, 1)], PadMode::Edge), 12.0),
        ("flip", |x| x.flip([1]), 6.0),
        ("roll", |x| x.roll(&[1], &[1]), 6.0),
        ("tril", |x| x.tril(0), 5.0),
        (
            "matmul",
            |x| {
                x.clone()
                    .matmul(DTensor::ones([2, 2], x.mesh(), &[R], x.mesh().device()).unwrap())
            },
            12.0,
        ),
    ];
    MeshTest::new([4], ["dp"]).run(|mesh| {
        for ((name, operator, uses), depth) in operators.into_iter().cartesian_product(0..5) {
            let x = Tensor::<2>::ones([3, 2], &mesh.device().clone().autodiff());
            let x = DTensor::distribute_replicated(x, mesh, &[R])?.require_grad();
            let rows = x.clone().redistribute(&[S(0)])?;
            let other = (0..depth)
                .fold(rows.clone(), |x, _| x.add_scalar(1.0))
                .redistribute(&[S(1)])?;
            let columns = operator(rows).redistribute(&[S(1)])?;
            let grads = (columns.to_local().sum() + other.to_local().sum()).backward();
            let grad = x.local().grad(&grads).expect(name);
            assert_eq!(grad.sum().into_scalar::<f32>(), uses + 6.0, "{name}");
        }
        Ok(())
    });
}

#[test]
fn operands_that_do_not_fit_say_what_would() {
    type Wrong = (&'static str, fn(DTensor<2>) -> DTensor<2>, &'static str);
    let wrong: [Wrong; 9] = [
        (
            "squeeze_dim",
            |x| x.squeeze_dim::<1>(1).unsqueeze(),
            "dimension 1 has length 3",
        ),
        (
            "flatten",
            |x| x.flatten(1, 0),
            "start dimension 1 is after end dimension 0",
        ),
        ("swap_dims", |x| x.swap_dims(0, 2), "Use one in -2..2"),
        (
            "permute",
            |x| x.permute([0, 0]),
            "must contain every dimension once",
        ),
        ("narrow", |x| x.narrow(0, 2, 3), "no 3 elements from 2 on"),
        (
            "slice_assign",
            |x| x.clone().slice_assign(0..1, x),
            "the slice has length 1 in dimension 0. Pass values of the same length",
        ),
        (
            "split_with_sizes",
            |x| x.split_with_sizes(vec![1, 1], 0).remove(0),
            "add up to 2",
        ),
        (
            "cat",
            |x| DTensor::cat(vec![x.clone(), x.transpose()], 0),
            "dimension 1 of the first input is 3 and dimension 1 of the second 4. Make them equal",
        ),
        ("squeeze", |x| x.squeeze(), "2 were requested"),
    ];
    let tall = [4, 3];
    MeshTest::new([1], ["tp"]).run(|mesh| {
        for (name, operator, why) in wrong {
            let shape = if name == "squeeze" { [4, 1] } else { tall };
            let x = DTensor::<2>::ones(shape, mesh, &[R], mesh.device())?;
            let error = unwound(|| operator(x));
            assert!(error.to_string().contains(why), "{name}: {error}");
        }
        Ok(())
    });
}

/// Burn finds them as bytes, which no collective of booleans takes.
#[test]
fn a_diagonal_of_booleans_is_of_booleans_and_moves() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let mask = DTensor::<2, Bool>::tril_mask([3, 4], -1, mesh, &[S(0)], mesh.device())?;
        let diagonal: DTensor<1, Bool> = linalg::diag(mask).redistribute(&[S(0)])?;
        assert_eq!(
            diagonal.full_tensor()?.into_data(),
            TensorData::from([true; 3])
        );
        Ok(())
    });
}
