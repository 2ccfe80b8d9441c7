//! What changing a layout does to gradients, and what it costs when there is nothing to do.

use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::placement::PartialOp;
use itertools::Itertools;

use super::{
    AVG, MAX, PRODUCT, Partial, R, S, SUM, devices, on_mesh, placements_of, ramp, tracked_devices,
    values,
};

/// Invariant 5.
#[test]
fn an_unchanged_layout_costs_nothing() {
    on_mesh(&[2, 1], |world, mesh| {
        for device in tracked_devices() {
            let leaf = ramp([4, 4], 0.0, &device).require_grad();
            let x = DTensor::from_local(leaf, mesh, &[S(0), R])?;
            world.ledger().reset();
            // The mesh dimension of size 1 may say what it likes.
            let y = x
                .redistribute(&[S(0), R])?
                .redistribute(&[S(0), S(1)])?
                .redistribute(&[S(0), SUM])?;
            assert!(y.local().is_require_grad(), "the leaf itself comes back");
            assert_eq!(y.placements(), [S(0), SUM]);
            let z = y.redistribute(&[S(0), R])?;
            assert!(z.vary(&[1])?.is_require_grad());
            assert_eq!(world.ledger().total(|_| true).calls, 0);
        }
        Ok(())
    });
}

/// Invariant 5.
#[test]
fn without_gradients_nothing_is_recorded() {
    on_mesh(&[2], |world, mesh| {
        for device in devices() {
            let x = DTensor::from_local(ramp([4, 4], 0.0, &device), mesh, &[S(0)])?;
            let y = x.clone().redistribute(&[S(1)])?.redistribute(&[R])?;
            assert!(!y.local().is_tracked());
            assert_eq!(y.local().device().is_autodiff(), device.is_autodiff());
            assert_eq!(
                y.local().gradient_checkpointing_strategy(),
                device.gradient_checkpointing_strategy()
            );
            assert!(!y.vary(&[0])?.is_tracked());
            world.ledger().reset();
            assert!(!x.all_gather_varying(&[0])?.is_tracked());
            assert!(!x.clone().all_gather_varying(&[0])?.is_tracked());
            assert_eq!(
                world.ledger().calls(Op::AllGather),
                1,
                "the second is cached"
            );
        }
        Ok(())
    });
}

/// Rules of the table that need more than PyTorch's values: (from, to, local values by rank,
/// gradient by rank of `sum(g * full)` with `g = [1, 2, 3]`).
#[test]
fn reductions_have_their_true_derivative() {
    // Its square is infinite.
    const BIG: f32 = (1u128 << 100) as f32;
    let nan = f32::NAN;
    let cases = [
        (
            AVG,
            [[1.0, 5.0, 2.0], [4.0, 5.0, 0.0]],
            [[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]],
        ),
        // Ties share evenly.
        (
            MAX,
            [[1.0, 5.0, 2.0], [4.0, 5.0, 0.0]],
            [[0.0, 1.0, 3.0], [1.0, 1.0, 0.0]],
        ),
        (
            Partial(PartialOp::Min),
            [[1.0, 5.0, 2.0], [4.0, 5.0, 0.0]],
            [[1.0, 1.0, 0.0], [0.0, 1.0, 3.0]],
        ),
        // Zeros, and a product that overflows.
        (
            PRODUCT,
            [[0.0, 0.0, BIG], [4.0, 0.0, BIG]],
            [[4.0, 0.0, 3.0 * BIG], [0.0, 0.0, 3.0 * BIG]],
        ),
        (
            SUM,
            [[1.0, nan, 2.0], [4.0, 5.0, 0.0]],
            [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]],
        ),
    ];
    on_mesh(&[2], |world, mesh| {
        for (device, (from, locals, expected)) in tracked_devices().iter().cartesian_product(cases)
        {
            for to in [R, S(0)] {
                let leaf = Tensor::<1>::from_floats(locals[world.rank()], device).require_grad();
                let y = DTensor::from_local(leaf.clone(), mesh, &[from])?.redistribute(&[to])?;
                let g = Tensor::<1>::from_floats([1.0, 2.0, 3.0], device);
                let g = DTensor::distribute_replicated(g, mesh, &[to])?.to_local();
                let grads = (y.to_local() * g).sum().backward();
                assert_eq!(
                    values(leaf.grad(&grads).unwrap()),
                    expected[world.rank()],
                    "{from} -> {to}"
                );
            }
        }
        Ok(())
    });
}

/// Invariant 1: `loss = sum(w * tanh(2 x))` through every pair of layouts, against the
/// single-device gradient.
#[test]
fn gradients_pass_every_pair_of_layouts_under_both_checkpointing_strategies() {
    let shape = [5, 4];
    for device in tracked_devices() {
        let reference = {
            let x = ramp(shape, -9.0, &device).div_scalar(10.0).require_grad();
            let w = ramp(shape, 1.0, &device);
            let grads = ((x.clone() * 2.0).tanh() * w).sum().backward();
            x.grad(&grads).unwrap()
        };
        for mesh_shape in [&[2][..], &[3], &[2, 2]] {
            on_mesh(mesh_shape, |_, mesh| {
                let all = placements_of(mesh.ndim(), 2);
                for (from, to) in all.iter().cartesian_product(&all) {
                    let full = ramp(shape, -9.0, &device).div_scalar(10.0).require_grad();
                    let x = DTensor::distribute_replicated(full, mesh, from)?;
                    let leaf = x.local().clone();
                    let doubled =
                        DTensor::from_local_with_shape(leaf.clone() * 2.0, mesh, from, shape)?;
                    let y = doubled.redistribute(to)?.to_local().tanh();
                    let y =
                        DTensor::from_local_with_shape(y, mesh, to, shape)?.redistribute(from)?;
                    let w = DTensor::distribute_replicated(ramp(shape, 1.0, &device), mesh, from)?;
                    let grads = (y.to_local() * w.to_local()).sum().backward();
                    let expected = DTensor::distribute_replicated(reference.clone(), mesh, from)?;
                    let grad = leaf.grad(&grads).unwrap();
                    assert_eq!(
                        grad.into_data(),
                        expected.to_local().into_data(),
                        "{from:?} -> {to:?}"
                    );
                }
                Ok(())
            });
        }
    }
}

#[test]
fn other_float_types_keep_their_type_both_ways() {
    on_mesh(&[2], |_, mesh| {
        for dtype in [DType::F16, DType::BF16, DType::F64] {
            for (from, to) in [
                (S(0), R),
                (R, S(0)),
                (AVG, R),
                (MAX, S(0)),
                (PRODUCT, R),
                (S(0), S(1)),
                (R, SUM),
                (S(1), SUM),
            ] {
                let device = Device::flex().autodiff();
                let local = ramp([2, 2], 1.0, &device)
                    .cast(dtype)
                    .detach()
                    .require_grad();
                let x = DTensor::from_local(local.clone(), mesh, &[from])?;
                let y = x.redistribute(&[to])?;
                assert_eq!((y.dtype(), y.local().dtype()), (dtype, dtype));
                let grads = y.to_local().sum().backward();
                assert_eq!(local.grad(&grads).unwrap().dtype(), dtype, "{from} -> {to}");
            }
        }
        Ok(())
    });
}
