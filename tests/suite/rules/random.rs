//! Dropout and random values: what one rank draws is what all draw.

use burn::tensor::{Device, Distribution, Float, Tensor};
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::{module, random};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::prove::{Case, Input};

/// What `make` gives of ones on a mesh of one rank.
fn alone(shape: [usize; 2], make: impl Fn(DTensor<2>) -> DTensor<2> + Sync) -> Tensor<2> {
    let mut all = launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["one"])?;
        let ones = DTensor::ones(shape, &mesh, &[Placement::Replicate], &Device::flex())?;
        Ok(make(ones).to_local().into_data())
    })
    .expect("one rank");
    Tensor::from_data(all.remove(0), &Device::flex().autodiff())
}

fn drawn(like: &DTensor<2>) -> DTensor<2> {
    random::seed(5);
    like.random_like(Distribution::Normal(1.0, 2.0))
}

pub fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "dropout",
            [Input::float("x", [3, 6])],
            |inputs| inputs[0].tensor::<2, Float>() * alone([3, 6], |ones| module::dropout(ones, 0.4, 9)),
            |inputs| module::dropout(inputs[0].tensor::<2, Float>(), 0.4, 9),
        ),
        Case::new(
            "random_like",
            [Input::float("x", [3, 6])],
            |_| alone([3, 6], |ones| drawn(&ones)),
            |inputs| drawn(&inputs[0].tensor::<2, Float>()),
        ),
    ]
}
