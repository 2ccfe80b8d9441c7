//! Invariant 6: whatever the shapes of their parts, ranks run the collectives of backward in one
//! order.
//!
//! Burn runs the deepest node first, and its own operators record other numbers of nodes for other
//! shapes. Here three rows lie on two ranks: one has two, the other one.

use burn::tensor::{Device, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Launch, Op, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::{EinsumOperand, module};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::graph_depth;

use super::{R, S, on_mesh, part, ramp, values};
use crate::launched;

fn device() -> Device {
    Device::flex().autodiff()
}

/// A leaf of the whole, and one of this rank's part of it.
fn leaves<const D: usize>(
    shape: [usize; D],
    mesh: &DeviceMesh,
    dim: usize,
) -> burn_dtensor::Result<(Tensor<D>, DTensor<D>)> {
    let full = || {
        ramp(shape, 0.5, &device())
            .div_scalar(10.0)
            .detach()
            .require_grad()
    };
    Ok((
        full(),
        DTensor::distribute_replicated(full(), mesh, &[S(dim)])?,
    ))
}

/// Both branches are redistributed between the same layouts, so that crossed collectives sum one
/// branch's gradient into the other's.
#[test]
fn a_batch_of_three_on_two_ranks_does_not_swap_the_gradients_of_two_branches() {
    on_mesh(&[2], |_, mesh| {
        let ((x, own_x), (y, own_y)) = (leaves([3, 2, 4], mesh, 0)?, leaves([3, 2, 8], mesh, 0)?);
        let w = ramp([4, 8], 0.0, &device());
        let loss = burn::tensor::module::linear(x.clone(), w.clone(), None) * 10.0;
        let expected = (loss.sum() + y.clone().sum()).backward();

        let w = DTensor::distribute_replicated(w, mesh, &[R])?;
        let a = module::linear(own_x.clone(), w, None).redistribute(&[S(1)])?;
        let b = own_y.clone().neg().neg().redistribute(&[S(1)])?;
        let grads = (a.mul_scalar(10.0).sum() + b.sum())
            .full_tensor()?
            .backward();
        assert_eq!(
            values(own_y.local().grad(&grads).unwrap()),
            part(y.grad(&expected).unwrap(), &own_y)
        );
        assert_eq!(
            values(own_x.local().grad(&grads).unwrap()),
            part(x.grad(&expected).unwrap(), &own_x)
        );
        Ok(())
    });
}

/// Burn folds a batch of two into the rows, and leaves one of one.
#[test]
fn linear_of_three_rows_on_two_ranks_is_in_step_with_another_branch() {
    for nodes in 0..6 {
        on_mesh(&[2], |_, mesh| {
            let leaf = |shape| ramp(shape, 0.5, &device()).require_grad();
            let x = DTensor::distribute_replicated(leaf([3, 2, 4]), mesh, &[R])?;
            let w = DTensor::distribute_replicated(
                Tensor::<2>::ones([4, 8], &device()).require_grad(),
                mesh,
                &[R],
            )?;
            let a = module::linear(x.clone().redistribute(&[S(0)])?, w.clone(), None)
                .redistribute(&[S(1)])?;
            let b = (0..nodes)
                .fold(x.clone(), |x, _| x.neg())
                .redistribute(&[S(0)])?;
            let grads = (a.sum() + b.sum()).full_tensor()?.backward();
            let sign = if nodes % 2 == 0 { 1.0 } else { -1.0 };
            assert_eq!(values(x.local().grad(&grads).unwrap()), [8.0 + sign; 24]);
            // Column sums of what came in, a row of the weight.
            let rows = values(ramp([6, 4], 0.5, &device()).sum_dim(0));
            let expected: Vec<f32> = rows.iter().flat_map(|&sum| [sum; 8]).collect();
            assert_eq!(values(w.local().grad(&grads).unwrap()), expected);
            Ok(())
        });
    }
}

/// Decoding: one query row per head. Burn transposes twice where the other factor has one head.
#[test]
fn matmul_of_three_heads_on_two_ranks_is_in_step_with_another_branch() {
    for nodes in 0..5 {
        on_mesh(&[2], |_, mesh| {
            let ((q, own_q), (k, own_k)) = (
                leaves([2, 3, 1, 4], mesh, 1)?,
                leaves([2, 3, 4, 6], mesh, 1)?,
            );
            let expected = q.clone().matmul(k.clone()).sum().backward();
            let leaf = Tensor::<1>::ones([4], &device()).require_grad();
            let other = DTensor::distribute_replicated(leaf, mesh, &[R])?;
            let a = own_q.clone().matmul(own_k.clone()).redistribute(&[S(3)])?;
            let b = (0..nodes)
                .fold(other, |x, _| x.neg())
                .redistribute(&[S(0)])?;
            let grads = (a.sum() + b.sum()).full_tensor()?.backward();
            assert_eq!(
                values(own_q.local().grad(&grads).unwrap()),
                part(q.grad(&expected).unwrap(), &own_q)
            );
            assert_eq!(
                values(own_k.local().grad(&grads).unwrap()),
                part(k.grad(&expected).unwrap(), &own_k)
            );
            Ok(())
        });
    }
}

/// Five rows over three ranks: 2, 2, 1.
#[test]
fn einsum_lies_equally_deep_on_a_rank_with_one_row() {
    let depths = on_mesh(&[3], |_, mesh| {
        let ((_, a), (_, b)) = (leaves([5, 3], mesh, 0)?, leaves([4, 3], mesh, 0)?);
        let operands: [EinsumOperand<_>; 2] = [a.into(), b.redistribute(&[R])?.into()];
        let (product, depth) = graph_depth(DTensor::<2>::einsum("ij,kj->ik", operands));
        product.sum().full_tensor()?.backward();
        Ok(depth.get().expect("backward has come by"))
    });
    assert_eq!(depths, [depths[0]; 3]);
}

/// A program may compute what it likes between `to_local` and `from_local`. Where ranks record
/// other numbers of nodes there, two collectives of one label and shape meet crosswise.
#[test]
fn ranks_that_a_program_puts_out_of_step_get_an_error_and_not_each_others_gradients() {
    let run = |extra: usize| {
        let ended = launch(Launch::threads(2), |world| {
            let mesh = DeviceMesh::new(world, [2], ["dp"])?;
            let (_, x) = leaves([4, 2, 8], &mesh, 0)?;
            let (_, y) = leaves([4, 2, 8], &mesh, 0)?;
            let nodes = if world.rank() == 1 { extra } else { 0 };
            let local = (0..nodes).fold(x.clone().to_local(), |x, _| x.neg());
            let a = DTensor::from_local(local, &mesh, &[S(0)])?.redistribute(&[S(1)])?;
            let b = y.clone().neg().redistribute(&[S(1)])?;
            world.ledger().reset();
            let grads = (a.mul_scalar(10.0).sum() + b.sum())
                .full_tensor()?
                .backward();
            assert_eq!(world.ledger().calls(Op::AllToAll), 2);
            Ok(values(y.local().grad(&grads).unwrap()))
        });
        ended.map(launched::values).map_err(|error| error.cause)
    };
    assert_eq!(run(0).unwrap(), [vec![-1.0; 32], vec![-1.0; 32]]);
    let error = run(2).expect_err("ranks are out of step");
    let Error::Comm(CommError::Mismatch { differs, .. }) = &error else {
        panic!("{error}")
    };
    assert!(differs.contains("forward index"), "{differs}");
}
