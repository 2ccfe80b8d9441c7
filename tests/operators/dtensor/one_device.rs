//! DTensors without a launch, and plain tensors that meet DTensors.

use burn::module::{Module, Param};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_dtensor::dtensor::DTensorError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::ramp;

use Placement::{Partial, Replicate as R, Shard as S};

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter().collect()
}

/// Threads share the mesh of a device, so tensors that they have made meet.
#[test]
fn a_device_has_one_mesh_on_all_threads() {
    let device = Device::flex();
    let mesh = DeviceMesh::single_device(&device);
    assert_eq!(
        (mesh.shape(), mesh.coordinate()),
        (&[1][..], Some(&[0][..]))
    );
    let other = std::thread::spawn(|| {
        let device = Device::flex().autodiff();
        (
            DeviceMesh::single_device(&device),
            DTensor::from(ramp([2, 3], 1.0, &device)),
        )
    });
    let (theirs, x) = other.join().expect("it makes a tensor");
    assert_eq!(theirs, mesh);
    let y = DTensor::from(ramp([2, 3], 2.0, &device.clone().autodiff()));
    assert_eq!(
        floats((x + y).to_local()),
        floats(ramp([2, 3], 1.0, &device) + ramp([2, 3], 2.0, &device))
    );

    // Collectives of one rank return what they are given, also on several threads at once.
    std::thread::scope(|scope| {
        for value in [1.0, 2.0, 3.0] {
            let mesh = &mesh;
            scope.spawn(move || {
                for _ in 0..50 {
                    assert_eq!(
                        mesh.all_reduce(value, ReduceOp::Sum).expect("nobody fails"),
                        value
                    );
                }
            });
        }
    });
}

/// A tensor of one device is no part of a launch, and says so.
#[test]
fn tensors_of_one_device_do_not_meet_those_of_ranks() {
    let alone = DTensor::from(ramp([2], 1.0, &Device::flex()));
    let failed = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["tp"])?;
        let x = DTensor::<1>::ones([2], &mesh, &[R], world.device())?;
        Ok((x + alone.clone()).to_local().into_data())
    });
    let message = failed.expect_err("they belong to other ranks").to_string();
    let says = [
        "of rank ",
        "one of a device outside a launch",
        "`DTensor::replicated_like(tensor, &x)`",
        "`parallelize`",
    ];
    assert!(says.iter().all(|part| message.contains(part)), "{message}");
}

/// A layer that reads its parameter by itself.
#[derive(Module, Debug)]
struct Projection {
    weight: Param<Tensor<2>>,
}

impl Projection {
    fn forward(&self, x: DTensor<2>) -> DTensor<2> {
        x.matmul(self.weight.dtensor().unwrap_or_else(|error| error.unwind()))
    }
}

/// A full model next to the sharded one, as for a comparison.
#[test]
fn a_model_that_is_not_distributed_computes_on_one_device_in_a_launch_as_well() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let projection = Projection {
            weight: Param::from_tensor(ramp([3, 2], 1.0, &device)),
        };
        let x = ramp([4, 3], 2.0, &device);
        let expected = x.clone().matmul(projection.weight.val());
        let product = floats(expected.clone());
        let y = projection.forward(x.clone().into());
        assert_eq!(y.mesh(), &DeviceMesh::single_device(&device));
        assert_eq!(floats(y.clone().to_local()), product);
        let [found, wanted] = [y.sum().backward(), expected.sum().backward()]
            .map(|grads| projection.weight.val().grad(&grads));
        assert_eq!(found.map(floats), wanted.map(floats));
        // On the mesh of the ranks it is missing.
        let x = DTensor::distribute_replicated(x, mesh, &[R])?;
        let error = Error::catch(|| Ok(projection.forward(x.clone())))
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(error, Error::DTensor(DTensorError::OneDevice { .. })),
            "{error}"
        );
        let projection = parallelize(projection, mesh, Plan::new())?;
        assert_eq!(floats(projection.forward(x).to_local()), product);
        Ok(())
    });
}

#[test]
fn backward_reduces_a_partial_loss_first() {
    let device = Device::flex().autodiff();
    let x = ramp([6, 2], 1.0, &device).require_grad();
    let expected = floats(
        x.grad(&x.clone().square().max().backward())
            .expect("x is in the loss"),
    );
    MeshTest::new([3], ["dp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let x = DTensor::distribute_replicated(ramp([6, 2], 1.0, &device), mesh, &[S(0)])?
            .require_grad();
        let loss = x.clone().square().max();
        assert!(
            loss.placements()[0].partial_op().is_some(),
            "the loss is to be reduced"
        );
        let grad = x
            .grad(&loss.backward())
            .expect("x is in the loss")
            .full_tensor()?;
        assert_eq!(floats(grad), expected);
        Ok(())
    });
}

/// Every placement of scores, beside burn's mask of the full scores.
#[test]
fn masks_are_laid_out_as_the_tensor_that_they_are_like() {
    let [batch, rows, columns] = [2, 5, 4];
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let sum = Partial(PartialOp::Sum);
        for placements in [
            [R, R],
            [S(0), S(1)],
            [S(1), S(2)],
            [S(2), R],
            [S(1), S(1)],
            [sum, S(2)],
        ] {
            let device = mesh.device();
            let shape = [batch, rows, columns];
            let x = DTensor::<3>::ones(
                shape,
                mesh,
                &placements.map(|own| if own == sum { R } else { own }),
                device,
            )?;
            let x = x.redistribute(&placements)?;
            for offset in -2..=2 {
                let masks = [x.tril_mask_like(offset), x.triu_mask_like(offset)];
                let expected = [Tensor::tril_mask, Tensor::triu_mask].map(
                    |mask: fn([usize; 2], i64, &Device) -> Tensor<2, Bool>| {
                        mask([rows, columns], offset, device)
                    },
                );
                for (mask, expected) in masks.into_iter().zip(expected) {
                    let kept = placements.map(|own| if own == sum { R } else { own });
                    assert_eq!(mask.placements(), kept, "as the tensor, reduced");
                    let expected = expected.unsqueeze::<3>().repeat_dim(0, batch);
                    assert_eq!(
                        mask.full_tensor()?.into_data(),
                        expected.into_data(),
                        "{placements:?}, {offset}"
                    );
                }
            }
        }
        Ok(())
    });
}

/// Values and the gradient of a learned factor, beside plain tensors.
#[test]
fn a_plain_tensor_of_one_element_combines_like_a_number() {
    let program = |x: Tensor<2>, factor: Tensor<1>| {
        (x.clone() * factor.clone().unsqueeze() - x / factor.unsqueeze()).square()
    };
    let device = Device::flex().autodiff();
    let factor = ramp([1], 2.0, &device).require_grad();
    let y = program(ramp([4, 3], 1.0, &device), factor.clone());
    let grads = y.clone().sum().backward();
    let (y, grad) = (
        floats(y.inner()),
        floats(factor.grad(&grads).expect("it is in the loss")),
    );
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        for placements in [[R, R], [S(0), R], [S(0), S(1)]] {
            let device = mesh.device().clone().autodiff();
            let factor = ramp([1], 2.0, &device).require_grad();
            let x = DTensor::distribute_replicated(ramp([4, 3], 1.0, &device), mesh, &placements)?;
            let z = (x.clone() * factor.clone() - x / factor.clone()).square();
            let grads = z.clone().sum().backward();
            let own = floats(factor.grad(&grads).expect("it is in the loss"));
            assert!(
                (own[0] - grad[0]).abs() < 1e-4 * grad[0].abs(),
                "{own:?}, expected {grad:?}"
            );
            let z = floats(z.full_tensor()?.inner());
            assert!(
                z.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-5),
                "{z:?}, expected {y:?}"
            );
            let counts = DTensor::<1, Int>::arange(0..4, mesh, &[S(0), R], mesh.device())?;
            let two = Tensor::<3, Int>::from_data([[[2]]], mesh.device());
            assert_eq!(
                (counts % two)
                    .full_tensor()?
                    .into_data()
                    .iter::<i64>()
                    .collect::<Vec<_>>(),
                [0, 1, 0, 1]
            );
        }
        Ok(())
    });
}

#[test]
fn a_larger_plain_tensor_is_refused_by_name() {
    let failed = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["tp"])?;
        let x = DTensor::<2>::ones([4, 3], &mesh, &[S(0)], world.device())?;
        Ok((x * ramp([3], 1.0, world.device())).to_local().into_data())
    });
    let error = failed.expect_err("3 elements are no number").cause;
    let Error::DTensor(DTensorError::PlainTensor {
        operator, shape, ..
    }) = &error
    else {
        panic!("{error}")
    };
    assert_eq!((*operator, &shape[..]), ("mul", &[3][..]));
    assert!(
        error
            .to_string()
            .contains("`DTensor::replicated_like(tensor, &x)`"),
        "{error}"
    );
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let x = DTensor::<2>::ones([4, 3], mesh, &[S(0)], mesh.device())?;
        let table = DTensor::replicated_like(ramp([3], 1.0, mesh.device()).unsqueeze(), &x);
        let expected = ramp([3], 1.0, mesh.device())
            .unsqueeze::<2>()
            .repeat_dim(0, 4);
        assert_eq!(floats((x * table).full_tensor()?), floats(expected));
        Ok(())
    });
}
