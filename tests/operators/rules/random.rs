//! Dropout and random values: what one rank draws is what all draw.

use burn::tensor::{Device, Distribution, Float, Int, Tensor, TensorData};
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::{module, random};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::prove::{Case, CaseInput};

/// What `make` gives of ones on a mesh of one rank.
fn alone(shape: [usize; 2], make: impl Fn(DTensor<2>) -> DTensor<2> + Sync) -> Tensor<2> {
    let mut all = launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["one"])?;
        let ones = DTensor::ones(shape, &mesh, &[Placement::Replicate], &Device::flex())?;
        Ok(make(ones).to_local().into_data())
    })
    .expect("one rank");
    Tensor::from_data(all.remove(0).1, &Device::flex().autodiff())
}

fn drawn(like: &DTensor<2>) -> DTensor<2> {
    random::seed(5);
    like.random_like(Distribution::Normal(1.0, 2.0))
}

/// By the definition: the first category up to which the shares add up to a uniform number, of the
/// numbers that `random_like` draws.
fn drawn_by_hand(weights: Tensor<3>, samples: usize) -> Tensor<3, Int> {
    let [a, b, categories] = weights.dims();
    let uniform = alone([a * b, samples], |ones| {
        random::seed(11);
        ones.random_like(Distribution::Uniform(0.0, 1.0))
    });
    let (uniform, weights): (Vec<f32>, Vec<f32>) = (
        uniform.into_data().iter().collect(),
        weights.into_data().iter().collect(),
    );
    let category = |(at, uniform): (usize, &f32)| {
        let weights = &weights[at / samples * categories..][..categories];
        let total: f32 = weights.iter().sum();
        let mut up_to = 0.0;
        let reaches = |weight: &f32| {
            up_to += weight / total;
            up_to >= *uniform
        };
        weights.iter().position(reaches).unwrap_or(categories - 1) as i64
    };
    let categories: Vec<i64> = uniform.iter().enumerate().map(category).collect();
    Tensor::from_data(
        TensorData::new(categories, [a, b, samples]),
        &Device::flex(),
    )
}

pub fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "dropout",
            [CaseInput::float("x", [3, 6])],
            |inputs| {
                inputs[0].tensor::<2, Float>() * alone([3, 6], |ones| module::dropout(ones, 0.4, 9))
            },
            |inputs| module::dropout(inputs[0].tensor::<2, Float>(), 0.4, 9),
        ),
        Case::new(
            "categorical",
            [CaseInput::float("weights", [2, 3, 5]).with_range(0.1..4.0)],
            |inputs| drawn_by_hand(inputs[0].tensor::<3, Float>(), 4),
            |inputs| {
                random::seed(11);
                inputs[0].tensor::<3, Float>().categorical(4)
            },
        ),
        Case::new(
            "random_like",
            [CaseInput::float("x", [3, 6])],
            |_| alone([3, 6], |ones| drawn(&ones)),
            |inputs| drawn(&inputs[0].tensor::<2, Float>()),
        ),
    ]
}
