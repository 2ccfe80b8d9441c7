//! What a step of Muon takes of a rank, above shards, state and gradients: a few matrices, however
//! many the model has.
//!
//! What momentum makes of the gradients comes in their place, and the steps in the place of that,
//! round by round. On top there is a round: a matrix in parts, whole, and what makes it orthogonal.

use burn::module::ParamGroup;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig};
use burn::tensor::Tensor;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;

use crate::live::{allocates_for, alone, apart, own, own_peak, restart_peak};

const WIDTH: usize = 192;
/// Bytes of a matrix.
const MATRIX: usize = WIDTH * WIDTH * 4;
const RANKS: usize = 4;

/// The most that a step takes of a rank, in matrices, of a model of so many.
fn taken(matrices: usize) -> f64 {
    let taken = launch(apart(RANKS), |world| {
        allocates_for(world.rank());
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let device = world.device().clone().autodiff();
        let layer = |_| {
            LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(&device)
        };
        let mut model: Vec<Linear> =
            fully_shard((0..matrices).map(layer).collect(), &mesh, FullyShard::new())?;
        let mut optim = sharded(AdamWConfig::new()).with_muon(ParamGroup::all(), MuonConfig::new());
        let mut taken = 0;
        // The first step makes the state, and warms up what is allocated once, and kept.
        for _ in 0..3 {
            let mut grads = GradientsParams::new();
            for layer in &model {
                let shape = layer.weight.base().dims();
                grads.register(layer.weight.id, Tensor::<2>::ones(shape, world.device()));
            }
            world.barrier("step")?;
            let rest = own();
            restart_peak();
            model = optim.step(1e-3, model, grads)?;
            taken = own_peak() - rest;
            world.barrier("stepped")?;
        }
        Ok(taken)
    });
    let most = taken
        .expect("no rank fails")
        .into_iter()
        .map(|(_, taken)| taken)
        .max()
        .expect("there are ranks");
    most as f64 / MATRIX as f64
}

#[test]
fn a_step_of_muon_holds_a_few_matrices_and_not_the_model() {
    let _alone = alone();
    let [few, many] = [8, 32].map(taken);
    let each = (many - few) / 24.0;
    println!("8 matrices {few:.2}, 32 matrices {many:.2}, each {each:.3}");
    // To gather the model takes a matrix each, and to keep the orthogonal ones, of which parts came
    // back, a quarter.
    assert!(
        each < 0.1,
        "{each} matrices more for each: 8 take {few}, 32 take {many}"
    );
    assert!(few < 8.0, "8 take {few}, 32 take {many}");
}
