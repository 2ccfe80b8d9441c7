//! Redistributions with options: element types to send in, and not waiting at once.

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::{DTensor, DTensorError, RedistributeOptions};
use burn_dtensor::placement::Placement;
use itertools::Itertools;

use super::{
    AVG, MAX, PRODUCT, R, S, SUM, error_of, on_mesh, part, placements_of, ramp, tracked_devices,
    values,
};

/// Thirds: no bf16 is one.
fn thirds(offset: f32, device: &burn::tensor::Device) -> Tensor<2> {
    ramp([5, 4], offset, device).div_scalar(3.0)
}

/// bf16 of burn's own cast, as f32.
fn rounded<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.cast(DType::BF16).cast(DType::F32)
}

#[test]
fn a_tensor_is_cast_before_it_is_sent_and_stays_so() {
    for mesh_shape in [&[2][..], &[3], &[2, 2]] {
        on_mesh(mesh_shape, |world, mesh| {
            let all = placements_of(mesh.ndim(), 2);
            for (from, to) in all.iter().cartesian_product(&all) {
                let full = thirds(-3.0, world.device());
                let x = DTensor::distribute_replicated(full.clone(), mesh, from)?;
                world.ledger().reset();
                x.clone().redistribute(to)?;
                let bytes = world.ledger().total(|_| true).bytes;
                world.ledger().reset();
                let y = RedistributeOptions::to(to)
                    .with_forward_dtype(FloatDType::BF16)
                    .run(x)?;
                assert_eq!(
                    world.ledger().total(|_| true).bytes,
                    bytes / 2,
                    "{from:?} -> {to:?}"
                );
                assert_eq!(
                    (y.dtype(), y.local().dtype(), y.placements()),
                    (DType::BF16, DType::BF16, &to[..])
                );
                assert_eq!(
                    values(y.local().clone()),
                    part(rounded(full), &y),
                    "{from:?} -> {to:?}"
                );
            }
            // Terms are cast, then added up in f32, and rounded once.
            let term = |rank: usize| rounded(thirds(rank as f32, world.device()));
            let sum = (1..world.size()).fold(term(0), |sum, rank| sum + term(rank));
            let placements = vec![SUM; mesh.ndim()];
            let x = DTensor::from_local(
                thirds(world.rank() as f32, world.device()),
                mesh,
                &placements,
            )?;
            let y = RedistributeOptions::to(&vec![R; mesh.ndim()])
                .with_forward_dtype(FloatDType::BF16)
                .run(x)?;
            assert_eq!(values(y.to_local()), values(rounded(sum)));
            Ok(())
        });
    }
}

/// `loss = sum(g * y)`: the gradient is `g`, in the type it is sent in, and f32 at the end.
#[test]
fn a_gradient_is_sent_in_the_backward_dtype_and_comes_back_in_the_tensors_own() {
    // Backward of R -> S and of S -> S sends; that of S -> R does not, and is rounded all the same.
    let cases = [(R, S(0), 20), (S(0), S(1), 4 * 3), (S(1), R, 0)];
    for device in tracked_devices() {
        on_mesh(&[2], |world, mesh| {
            for ((from, to, sent), forward, backward) in cases.into_iter().flat_map(|case| {
                [
                    (case, None, Some(2)),
                    (case, Some(2), Some(2)),
                    (case, Some(2), None),
                ]
            }) {
                let x = DTensor::distribute_replicated(
                    thirds(0.0, &device).require_grad(),
                    mesh,
                    &[from],
                )?;
                let mut request = RedistributeOptions::to(&[to]);
                if forward.is_some() {
                    request = request.with_forward_dtype(FloatDType::BF16);
                }
                if backward.is_some() {
                    request = request.with_backward_dtype(FloatDType::BF16);
                }
                let y = request.run(x.clone())?;
                let g = DTensor::distribute_replicated(thirds(1.0, &device), mesh, &[to])?
                    .to_local()
                    .cast(y.dtype());
                world.ledger().reset();
                let grads = (y.to_local() * g.clone()).sum().backward();
                let bytes = world
                    .ledger()
                    .total(|key| key.phase == Phase::Backward)
                    .bytes;
                // Of rank 0, whose piece of an all-to-all has 3 of 5 rows, or 2 of 4 columns.
                if world.rank() == 0 {
                    let sent = if from == S(0) { 5 * 2 } else { sent };
                    assert_eq!(bytes, sent * backward.unwrap_or(4), "{from} -> {to}");
                }
                let grad = x.grad(&grads).expect("a leaf");
                assert_eq!(grad.dtype(), DType::F32);
                let full = thirds(1.0, &device).inner();
                assert_eq!(
                    values(grad.local().clone()),
                    part(rounded(full), &x),
                    "{from} -> {to}"
                );
            }
            Ok(())
        });
    }
}

/// Where the derivative depends on values, these are of the forward type.
#[test]
fn reductions_have_their_derivative_in_other_types() {
    on_mesh(&[2], |world, mesh| {
        for ((from, expected), to) in [(AVG, [1.5, 1.5]), (MAX, [0.0, 3.0]), (PRODUCT, [9.0, 6.0])]
            .into_iter()
            .cartesian_product([R, S(0)])
        {
            let device = world.device().clone().autodiff();
            let local = Tensor::<1>::full([4], 2.0 + world.rank() as f32, &device).require_grad();
            let x = DTensor::from_local(local, mesh, &[from])?;
            let y = RedistributeOptions::to(&[to])
                .with_forward_dtype(FloatDType::BF16)
                .with_backward_dtype(FloatDType::F16)
                .run(x.clone())?;
            let grads = y.to_local().mul_scalar(3.0).sum().backward();
            let grad = x.grad(&grads).expect("a leaf");
            assert_eq!((grad.dtype(), grad.placements()), (DType::F32, &[R][..]));
            assert_eq!(
                values(grad.to_local()),
                [expected[world.rank()]; 4],
                "{from} -> {to}"
            );
        }
        Ok(())
    });
}

#[test]
fn what_is_there_already_costs_nothing_but_the_cast() {
    on_mesh(&[2], |world, mesh| {
        let x = DTensor::distribute_replicated(
            thirds(0.0, &world.device().clone().autodiff()).require_grad(),
            mesh,
            &[S(0)],
        )?;
        world.ledger().reset();
        let same = RedistributeOptions::to(&[S(0)])
            .with_forward_dtype(FloatDType::F32)
            .start(x.clone())?;
        assert!(same.is_complete());
        assert!(same.wait()?.local().is_require_grad(), "the leaf itself");
        let cast = RedistributeOptions::to(&[S(0)])
            .with_forward_dtype(FloatDType::F16)
            .run(x.clone())?;
        let grads = cast.to_local().sum().backward();
        assert_eq!(x.grad(&grads).expect("a leaf").dtype(), DType::F32);
        assert_eq!(world.ledger().total(|_| true).calls, 0);
        Ok(())
    });
}

#[test]
fn integers_have_no_type_to_be_sent_in() {
    on_mesh(&[2], |world, mesh| {
        let x = DTensor::<1, Int>::arange(0..6, mesh, &[S(0)], world.device())?;
        assert_eq!(
            values(
                RedistributeOptions::to(&[R])
                    .run(x.clone())?
                    .to_local()
                    .float()
            ),
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        );
        let error = error_of(
            RedistributeOptions::to(&[R])
                .with_backward_dtype(FloatDType::F16)
                .run(x),
        );
        assert!(
            matches!(
                error,
                Error::DTensor(DTensorError::NotFloat {
                    dtype: DType::I64 | DType::I32,
                    ..
                })
            ),
            "{error}"
        );
        assert!(error.to_string().contains("Omit the dtype"), "{error}");
        Ok(())
    });
}

/// Every pair, among them plans of several collectives; all are issued by `start`.
#[test]
fn what_is_waited_for_later_is_what_would_have_come_at_once() {
    for mesh_shape in [&[2][..], &[3], &[2, 2]] {
        on_mesh(mesh_shape, |world, mesh| {
            let device = &tracked_devices()[0];
            let all = placements_of(mesh.ndim(), 2);
            for (from, to) in all.iter().cartesian_product(&all) {
                let x =
                    DTensor::distribute_replicated(thirds(1.0, device).require_grad(), mesh, from)?;
                let now = x.clone().redistribute(to)?;
                world.ledger().reset();
                let later = RedistributeOptions::to(to).start(x.clone())?;
                let issued = world.ledger().snapshot();
                let later = later.wait()?;
                assert_eq!(world.ledger().snapshot(), issued, "{from:?} -> {to:?}");
                assert_eq!(values(later.local().clone()), values(now.local().clone()));
                let grad = |y: DTensor<2>| {
                    let grads = y.to_local().powi_scalar(2).sum().backward();
                    values(x.grad(&grads).expect("a leaf").to_local())
                };
                assert_eq!(
                    grad(later),
                    part(thirds(1.0, device).inner().mul_scalar(2.0), &x),
                    "{from:?} -> {to:?}"
                );
            }
            Ok(())
        });
    }
}

/// Whoever forgets one, or waits in another order, has taken part.
#[test]
fn ranks_that_forget_to_wait_stay_in_step() {
    for (mesh_shape, from, to) in [
        (&[2][..], vec![S(0)], vec![R]),
        (&[3], vec![S(0)], vec![S(1)]),
        (&[2, 2], vec![S(0); 2], vec![S(1); 2]),
    ] {
        on_mesh(mesh_shape, |world, mesh| {
            let x = DTensor::distribute_replicated(
                thirds(1.0, &tracked_devices()[0]).require_grad(),
                mesh,
                &from,
            )?;
            for forgetful in 0..world.size() {
                let (first, second) = (
                    RedistributeOptions::to(&to).start(x.clone())?,
                    RedistributeOptions::to(&from).start(x.clone())?,
                );
                let third = RedistributeOptions::to(&vec![R; mesh.ndim()]).start(x.clone())?;
                if world.rank() == forgetful {
                    drop((second, first));
                    assert_eq!(
                        values(third.wait()?.to_local()),
                        values(thirds(1.0, world.device()))
                    );
                } else {
                    second.wait()?;
                    third.wait()?;
                    let y = first.wait()?;
                    assert_eq!(
                        values(y.local().clone()),
                        part(thirds(1.0, world.device()), &y)
                    );
                }
                assert_eq!(
                    values(x.clone().full_tensor()?),
                    values(thirds(1.0, world.device()))
                );
            }
            Ok(())
        });
    }
}

/// Invariant 1, of `loss = sum(w * tanh(x))`.
#[test]
fn the_gradient_of_a_tensor_has_its_layout() {
    for mesh_shape in [&[2][..], &[3], &[2, 2], &[2, 3]] {
        on_mesh(mesh_shape, |world, mesh| {
            let device = &tracked_devices()[0];
            let full = thirds(-3.0, device).require_grad();
            let loss = |x: Tensor<2>| (x.tanh() * ramp([5, 4], 1.0, device)).sum();
            let reference = full.grad(&loss(full.clone()).backward()).expect("a leaf");
            for placements in (0..mesh.ndim())
                .map(|_| [R, S(0), S(1), SUM])
                .multi_cartesian_product()
            {
                let partial = |own: &Placement| if *own == SUM { R } else { *own };
                let full_there: Vec<_> = placements.iter().map(partial).collect();
                // The first rank of a partial mesh dimension has the value, the others have zeros.
                let x = DTensor::distribute_replicated(thirds(-3.0, device), mesh, &full_there)?
                    .redistribute(&placements)?;
                let x = x.detach().require_grad();
                let y = x.clone().full_tensor()?;
                let grad = x.grad(&loss(y).backward()).expect("a leaf");
                assert_eq!(grad.placements(), full_there);
                assert!(!grad.local().device().is_autodiff());
                assert_eq!(
                    values(grad.full_tensor()?),
                    values(reference.clone()),
                    "{placements:?}"
                );
            }
            let unused = DTensor::distribute_replicated(
                full.clone().detach().require_grad(),
                mesh,
                &vec![R; mesh.ndim()],
            )?;
            assert!(unused.grad(&loss(full.clone()).backward()).is_none());
            assert_eq!(world.ledger().calls(Op::Barrier), 0);
            Ok(())
        });
    }
}
