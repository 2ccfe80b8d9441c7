//! Tied weights: within a unit, across units, and clones of one parameter.

use burn::module::{Module, Param};
use burn::nn::Embedding;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::module;
use burn_dtensor::fsdp::{FullyShard, ParamError, ParamExt, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::nn::DTensorForward;
use burn_dtensor::parallel::{Plan, parallelize};
use burn_dtensor::replicate::{DataParallel, replicate};

use super::module_reuse::{Use, trains_as_on_one_device};
use super::params_outside_unit::{Net, WIDTH, config, mesh, net};
use super::support::{furthest, on_device, tensor};
use crate::launched;

#[test]
fn clones_of_one_parameter_are_refused() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let tied = || Net {
            blocks: vec![model.first.clone(), model.blocks[0].clone()],
            ..model.clone()
        };
        let configs = [
            FullyShard::new(),
            config(),
            FullyShard::new().with_ignored(["first.*"]),
        ];
        let sharded = configs.map(|config| fully_shard(tied(), &mesh(world)?, config));
        for refused in sharded
            .into_iter()
            .chain([parallelize(tied(), &mesh(world)?, Plan::new())])
        {
            let error = refused.map(|_| ()).unwrap_err();
            let Error::Param(ParamError::Tied { param, other }) = &error else {
                panic!("{error}")
            };
            assert_eq!(
                (param.as_str(), other.as_str()),
                ("first.weight", "blocks.0.weight")
            );
        }
        // Left to burn altogether: one leaf, of whose gradient the optimizer sees all.
        let device = world.device().clone().autodiff();
        let grad = |net: &Net| {
            let x = tensor(1, [3, WIDTH], &device);
            let y = net.first.forward(x.clone()) * 2.0 + net.blocks[0].forward(x);
            GradientsParams::from_grads(y.square().mean().backward(), net)
                .get::<2>(net.first.weight.id)
        };
        let plain = on_device(&tied(), &device);
        let full = Net {
            blocks: vec![plain.first.clone(), plain.blocks[1].clone()],
            ..plain
        };
        let ignored = fully_shard(
            full.clone(),
            &mesh(world)?,
            FullyShard::new().with_ignored(["first.*", "blocks.0.*"]),
        )?;
        assert!(ignored.blocks[1].weight.shard().is_some());
        assert_eq!(
            grad(&ignored).unwrap().into_data(),
            grad(&full).unwrap().into_data()
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_weight_tied_across_units_trains_as_on_one_device() {
    trains_as_on_one_device(Use::Tied);
}

/// Written once, for one device and for ranks.
#[derive(Module, Debug)]
struct Lm {
    token: Embedding,
}

impl Lm {
    fn forward(&self, tokens: DTensor<2, Int>) -> DTensor<3> {
        unit(self, tokens, |lm, tokens| {
            let x = lm.token.forward_dtensor(tokens);
            let weight = lm.token.weight.dtensor();
            let weight = weight.unwrap_or_else(|error| error.unwind());
            module::linear(x, weight.transpose(), None)
        })
    }
}

fn vec<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// The truth is burn's own forward of the unsharded model, and the mean of the ranks' gradients.
#[test]
fn a_head_that_reads_the_embedding_as_a_dtensor_trains_data_parallel_alone() {
    let device = Device::flex();
    let start = Lm {
        token: Embedding {
            weight: Param::from_tensor(tensor(1, [10, 4], &device)),
        },
    };
    let ranks = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["dp"])?;
        let plain = on_device(&start, &device);
        let first = 5 * world.rank() as i64;
        let tokens = || Tensor::<2, Int>::from_data([[first, 3, 9], [1, first, first]], &device);
        let table = plain.token.weight.val();
        let logits = (plain.token.forward(tokens())).matmul(table.clone().transpose().unsqueeze());
        let own = table.grad(&logits.clone().square().mean().backward());
        let logits = vec(logits);
        let models = [
            fully_shard(plain.clone(), &mesh, FullyShard::new())?,
            replicate(plain, &mesh, DataParallel::new())?,
        ];
        let mut full = Vec::new();
        for model in models {
            let found = model.forward(tokens().into());
            let distance = furthest(&vec(found.local().clone()), &logits);
            assert!(distance < 1e-5, "logits differ by {distance}");
            let grads = found.square().mean().backward();
            full.push(vec(model
                .token
                .weight
                .full_grad(&grads)?
                .expect("it is read")));
            // Outside its unit, too.
            let view = model.token.weight.dtensor()?;
            assert_eq!(view.mesh(), &DeviceMesh::single_device(&device));
            assert_eq!(vec(view.to_local()), vec(start.token.weight.val()));
        }
        Ok((vec(own.expect("it is read")), full))
    });
    let ranks = launched::values(ranks.unwrap());
    let (first, second) = (&ranks[0].0, &ranks[1].0);
    let mean: Vec<f32> = first
        .iter()
        .zip(second)
        .map(|(a, b)| (a + b) / 2.0)
        .collect();
    for (_, full) in &ranks {
        for found in full {
            let distance = furthest(found, &mean);
            assert!(distance < 1e-5, "gradients differ by {distance}");
        }
    }
}
