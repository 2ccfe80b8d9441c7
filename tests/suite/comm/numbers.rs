//! Numbers and plain tensors of all ranks, made one.

use burn::tensor::{DType, Tensor};
use burn_dtensor::comm::{CommError, Op};
use burn_dtensor::mesh::MeshError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

/// What a rank measured: thirds, whose sums are rounded.
fn measured(rank: usize) -> f64 {
    (rank * rank + 1) as f64 / 3.0
}

#[test]
fn numbers_are_reduced_over_all_ranks_of_a_mesh() {
    for shape in [vec![1], vec![2], vec![3], vec![5], vec![2, 3]] {
        let names: Vec<_> = ["dp", "tp"].into_iter().take(shape.len()).collect();
        let ranks: usize = shape.iter().product();
        let all = || (0..ranks).map(measured);
        let expected = [
            (ReduceOp::Avg, all().sum::<f64>() / ranks as f64),
            (ReduceOp::Sum, all().sum()),
            (ReduceOp::Min, all().fold(f64::INFINITY, f64::min)),
            (ReduceOp::Max, all().fold(0.0, f64::max)),
            (ReduceOp::Product, all().product()),
        ];
        for (op, expected) in expected {
            let found = MeshTest::new(&shape, &names).run(|mesh| {
                let mine = measured(mesh.rank());
                let tensor =
                    Tensor::<1>::from_data([mine, 2.0 * mine], (mesh.device(), DType::F64));
                let [single, double] = [
                    mesh.all_reduce(mine as f32, op)? as f64,
                    mesh.all_reduce(mine, op)?,
                ];
                Ok((
                    single,
                    double,
                    mesh.all_reduce(tensor, op)?
                        .into_data()
                        .iter::<f64>()
                        .collect::<Vec<_>>(),
                ))
            });
            for (single, double, tensor) in &found {
                assert!(
                    (single - expected).abs() <= 1e-6 * expected,
                    "{op:?} on {shape:?}: {single}, not {expected}"
                );
                assert!(
                    (double - expected).abs() <= 1e-15 * expected,
                    "{op:?} on {shape:?}: {double}, not {expected}"
                );
                assert_eq!(tensor[0].to_bits(), double.to_bits());
                // The same bits on every rank.
                let bits = |value: &f64| value.to_bits();
                assert_eq!(
                    [single, double].map(bits),
                    [&found[0].0, &found[0].1].map(bits)
                );
            }
        }
    }
}

#[test]
fn a_loss_is_reduced_without_its_graph() {
    MeshTest::new([2], ["dp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x = Tensor::<1>::full([4], mesh.rank() as f32 + 1.0, &device).require_grad();
        let loss = x.clone().square().mean();
        let mean = mesh.all_reduce(loss.clone(), ReduceOp::Avg)?;
        assert!(!mean.is_autodiff() && !mean.is_tracked());
        assert_eq!(mean.into_scalar::<f32>(), 2.5);
        // What the loss is for is still there, and this rank's.
        let grad = x.grad(&loss.backward()).expect("a leaf").into_data();
        assert_eq!(
            grad.iter::<f32>().collect::<Vec<_>>(),
            [(mesh.rank() as f32 + 1.0) / 2.0; 4]
        );
        Ok(())
    });
}

#[test]
fn ranks_of_a_slice_reduce_among_themselves() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let [dp, tp] = [mesh.slice("dp")?, mesh.slice("tp")?];
        let rank = mesh.rank() as f64;
        assert_eq!(
            dp.all_reduce(rank, ReduceOp::Sum)?,
            (mesh.rank() % 2 * 2 + 2) as f64
        );
        assert_eq!(
            tp.all_reduce(rank, ReduceOp::Sum)?,
            (mesh.rank() / 2 * 4 + 1) as f64
        );
        Ok(())
    });
}

#[test]
fn other_numbers_and_other_ranks_are_typed_errors() {
    let error = MeshTest::new([2], ["dp"]).run_failing(|mesh| match mesh.rank() {
        0 => mesh.all_reduce(1.0f64, ReduceOp::Sum),
        _ => mesh.all_reduce(1.0f32, ReduceOp::Sum).map(f64::from),
    });
    let Error::Comm(CommError::Mismatch {
        during, differs, ..
    }) = &error.cause
    else {
        panic!("{error}")
    };
    assert_eq!((during.op, &*during.label), (Op::AllReduce, "mesh_dp"));
    assert!(differs.contains("dtype"), "{differs}");
    MeshTest::new([3], ["dp"]).run(|mesh| {
        let two = DeviceMesh::new(mesh.world(), [2], ["pair"])?;
        let sum = two.all_reduce(1.0, ReduceOp::Sum);
        match mesh.rank() {
            2 => assert!(matches!(
                sum,
                Err(Error::Mesh(MeshError::NotAMember { rank: 2, .. }))
            )),
            _ => assert_eq!(sum?, 2.0),
        }
        Ok(())
    });
}
