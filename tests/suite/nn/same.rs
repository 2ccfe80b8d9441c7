//! One layer on one device and over DTensors.

use burn::module::{Module, ModuleDisplay};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::{Only, floats, near};
use crate::fsdp::support::{on_device, tensor, values};
use crate::parallel::support::full_grads;

use Placement::{Replicate as R, Shard as S};

/// Values and gradients of one layer on one device: output, input's gradient, parameters'
/// gradients.
type Results = (Vec<f32>, Vec<f32>, Vec<(String, Vec<f32>)>);

/// A loss that tells all elements apart.
pub fn loss<const D: usize>(y: Tensor<D>) -> Tensor<1> {
    let weights = tensor(99, y.dims(), &y.device());
    (y * weights).sum()
}

fn plain<L: Module + ModuleDisplay, const D: usize, const E: usize>(
    layer: &L,
    shape: [usize; D],
    forward: &impl Fn(&L, Tensor<D>) -> Tensor<E>,
) -> Results {
    let device = Device::flex().autodiff();
    let model = Only {
        layer: on_device(layer, &device),
    };
    let x = tensor(3, shape, &device).require_grad();
    let y = forward(&model.layer, x.clone());
    let grads = loss(y.clone()).backward();
    let x = floats(x.grad(&grads).expect("the input is in the loss"));
    let grads = GradientsParams::from_grads(grads, &model);
    (
        floats(y.inner()),
        x,
        values(&model, Some(&grads)).into_iter().collect(),
    )
}

/// Runs `parallel` on one device without a launch, and on 4 ranks (also on 2 if `LONG_TESTS` is
/// set), with the input replicated and sharded along each dimension, and holds it to `forward`.
pub fn same<L: Module + ModuleDisplay + Sync, const D: usize, const E: usize>(
    layer: L,
    plan: &(impl Fn() -> Plan + Sync),
    shape: [usize; D],
    forward: impl Fn(&L, Tensor<D>) -> Tensor<E>,
    parallel: impl Fn(&L, DTensor<D>) -> DTensor<E> + Sync,
) {
    let _ = values(
        &Only {
            layer: layer.clone(),
        },
        None,
    ); // Draw now, on one thread.
    let expected = plain(&layer, shape, &forward);
    let name = std::any::type_name::<L>();
    // Without a launch, on ordinary parameters.
    let alone = plain(&layer, shape, &|layer, x| {
        parallel(layer, x.into()).to_local()
    });
    near(&alone.0, &expected.0, || {
        format!("{name}, one device: output")
    });
    near(&alone.1, &expected.1, || {
        format!("{name}, one device: gradient of the input")
    });
    for ((path, grad), (_, expected)) in alone.2.iter().zip(&expected.2) {
        near(grad, expected, || {
            format!("{name}, one device: gradient of {path}")
        });
    }
    let worlds: &[usize] = if crate::effort::is_long() {
        &[2, 4]
    } else {
        &[4]
    };
    for &ranks in worlds {
        MeshTest::new([ranks], ["tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            for placement in std::iter::once(R).chain((0..D).map(S)) {
                let model = parallelize(
                    Only {
                        layer: on_device(&layer, &device),
                    },
                    mesh,
                    plan(),
                )?;
                let x =
                    DTensor::distribute_replicated(tensor(3, shape, &device), mesh, &[placement])?
                        .require_grad();
                let leaf = x.local().clone();
                let y = parallel(&model.layer, x).full_tensor()?;
                let grads = loss(y.clone()).backward();
                let x = leaf
                    .grad(&grads)
                    .unwrap_or_else(|| leaf.clone().inner().zeros_like());
                let x =
                    DTensor::from_local_with_shape(x, mesh, &[placement], shape)?.full_tensor()?;
                let grads = full_grads(&model, &GradientsParams::from_grads(grads, &model))?;
                near(&floats(y.inner()), &expected.0, || {
                    format!("{name}, x {placement}: output")
                });
                near(&floats(x), &expected.1, || {
                    format!("{name}, x {placement}: gradient of the input")
                });
                assert_eq!(grads.len(), expected.2.len(), "{name}");
                for ((path, grad), (_, expected)) in grads.iter().zip(&expected.2) {
                    near(grad, expected, || {
                        format!("{name}, x {placement}: gradient of {path}")
                    });
                }
            }
            Ok(())
        });
    }
}

/// `layer` under each of these plans.
macro_rules! same_under {
    ($layer:expr, $shape:expr, [$($plan:expr),* $(,)?]) => {$(
        same($layer, &|| $plan, $shape, |layer, x| layer.forward(x), |layer, x| layer.forward_dtensor(x));
    )*};
}

pub(super) use same_under;
