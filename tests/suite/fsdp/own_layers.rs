//! Layers of the program that are named like burn's, which store other things under the same names.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{FsdpError, FullyShard, ParamExt, full_model, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::{Plan, Style, parallelize};
use burn_dtensor::placement::Placement;

use super::support::{Holder, max_diff, mean, on_device, tensor, values};
use crate::launched;

/// Named like burn's, whose `gamma` can only be replicated because burn reads its stored shape.
/// This one reads nothing.
#[derive(Module, Debug)]
struct RmsNorm {
    gamma: Param<Tensor<1>>,
}

/// Named like burn's, but stores `[d_output, d_input]`.
#[derive(Module, Debug)]
struct Linear {
    weight: Param<Tensor<2>>,
}

/// Named like burn's, about which `fully_shard` warns.
#[derive(Module, Debug)]
struct BatchNorm {
    gamma: Param<Tensor<1>>,
}

#[derive(Module, Debug)]
struct Net {
    norm: RmsNorm,
    linear: Linear,
    batch: BatchNorm,
}

const INPUT: usize = 4;
const OUTPUT: usize = 6;

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            norm: RmsNorm {
                gamma: Param::from_tensor(tensor(1, [INPUT], device)),
            },
            linear: Linear {
                weight: Param::from_tensor(tensor(2, [OUTPUT, INPUT], device)),
            },
            batch: BatchNorm {
                gamma: Param::from_tensor(tensor(3, [OUTPUT], device)),
            },
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = x * self.norm.gamma.val().unsqueeze();
        x.matmul(self.linear.weight.val().transpose()) * self.batch.gamma.val().unsqueeze()
    }
}

/// Each parameter gets the placement of any other layer, and values are those of one device.
#[test]
fn layers_named_like_burns_are_sharded_as_the_programs_own() {
    let net = Net::new(&Device::flex());
    let results = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let plain = on_device(&net, &device);
        let mut trained = Vec::new();
        for config in [
            FullyShard::new(),
            FullyShard::new().with_shard_placement_fn(|_| Some(Placement::Shard(0))),
        ] {
            let sharded = fully_shard(plain.clone(), &mesh, config)?;
            for own in [
                sharded
                    .norm
                    .gamma
                    .shard()
                    .map(|shard| shard.placements().to_vec()),
                sharded
                    .linear
                    .weight
                    .shard()
                    .map(|shard| shard.placements().to_vec()),
                sharded
                    .batch
                    .gamma
                    .shard()
                    .map(|shard| shard.placements().to_vec()),
            ] {
                assert_eq!(own, Some(vec![Placement::Shard(0)]));
            }
            let x = || tensor(10 + world.rank() as u64, [3, INPUT], &device);
            let y = unit(&sharded, x(), |net, x| net.forward(x));
            assert_eq!(y.to_data(), plain.forward(x()).into_data());
            let mut grads = GradientsParams::from_grads(y.square().mean().backward(), &sharded);
            let holder = sharded.clone().map(&mut Holder(&mut grads));
            let plain_grads =
                GradientsParams::from_grads(plain.forward(x()).square().mean().backward(), &plain);
            trained.push((
                values(&full_model(&holder)?, None),
                values(&plain, Some(&plain_grads)),
            ));
        }
        Ok(trained)
    });
    let results: Vec<Vec<(BTreeMap<_, _>, _)>> =
        launched::values(results.unwrap_or_else(|error| panic!("{error}")));
    for config in 0..2 {
        let expected = mean(results.iter().map(|trained| &trained[config].1));
        for trained in &results {
            let diff = max_diff(&trained[config].0, &expected);
            assert!(diff < 1e-6, "gradients differ by {diff}");
        }
    }
}

/// burn's `Linear` stores `[d_input, d_output]`, so `colwise` shards its dimension 1. That would
/// split this one's inputs.
#[test]
fn a_style_for_burns_linear_does_not_place_the_programs_own() {
    launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["tp"])?;
        for style in [Style::colwise(), Style::rowwise()] {
            let net = Net::new(world.device());
            let error = parallelize(net, &mesh, Plan::new().with_style("linear", style))
                .expect_err("it is no `Linear`");
            assert!(error.to_string().contains("Style::custom"), "{error}");
        }
        Ok(())
    })
    .unwrap();
}

/// burn's own layer of the same name is refused where its stored shape is read.
#[test]
fn burns_own_layer_of_the_name_is_still_recognized() {
    launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let config = FullyShard::new().with_shard_placement_fn(|_| Some(Placement::Shard(0)));
        let burns = burn::nn::RmsNormConfig::new(INPUT).init(world.device());
        let error = fully_shard(burns, &mesh, config.clone());
        assert!(matches!(
            error,
            Err(Error::Fsdp(FsdpError::StoredShape {
                module: "RmsNorm",
                ..
            }))
        ));
        let own = RmsNorm {
            gamma: Param::from_tensor(tensor(1, [INPUT], world.device())),
        };
        assert_eq!(
            fully_shard(own, &mesh, config)?.gamma.base().dims(),
            [INPUT / 2]
        );
        Ok(())
    })
    .unwrap();
}
