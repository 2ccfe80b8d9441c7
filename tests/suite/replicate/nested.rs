//! `replicate` together with `fully_shard`, inside and outside.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, World, launch};
use burn_dtensor::fsdp::{FullyShard, full_model, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::replicate::{DataParallel, replicate};

use crate::fsdp::collective_counts::{Stack, WIDTH, stack};
use crate::fsdp::support::{furthest, on_device, tensor, values};
use crate::launched;

type Distribute = fn(Stack, &DeviceMesh) -> Result<Stack>;

fn train(world: &World, start: &Stack, distribute: Distribute) -> Result<Vec<f32>> {
    let device = world.device().clone().autodiff();
    let mesh = DeviceMesh::new(world, [world.size()], ["dp"])?;
    let mut model = distribute(on_device(start, &device), &mesh)?;
    let mut optim = AdamWConfig::new().init();
    for step in 0..3 {
        let x = tensor((step * 10 + world.rank()) as u64, [3, WIDTH], &device);
        let loss = model.forward(x).square().sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    Ok(values(&full_model(&model)?, None)
        .into_values()
        .flatten()
        .collect())
}

fn sharded(model: Stack, mesh: &DeviceMesh) -> Result<Stack> {
    fully_shard(model, mesh, FullyShard::new().with_units(["blocks.*"]))
}

fn replicated(model: Stack, mesh: &DeviceMesh) -> Result<Stack> {
    replicate(model, mesh, DataParallel::new())
}

/// DDP around FSDP: one block is sharded, the others and the first layer are replicated.
fn replicated_around(mut model: Stack, mesh: &DeviceMesh) -> Result<Stack> {
    model.blocks[1] = fully_shard(model.blocks[1].clone(), mesh, FullyShard::new())?;
    let model = replicate(model, mesh, DataParallel::new())?;
    assert_eq!(model.blocks[1].weight.base().dims()[0], WIDTH / mesh.size());
    assert_eq!(model.blocks[2].weight.base().dims()[0], WIDTH);
    Ok(model)
}

/// FSDP around DDP.
fn sharded_around(mut model: Stack, mesh: &DeviceMesh) -> Result<Stack> {
    for at in [0, 2] {
        model.blocks[at] = replicate(model.blocks[at].clone(), mesh, DataParallel::new())?;
    }
    let model = fully_shard(model, mesh, FullyShard::new().with_units(["blocks.*"]))?;
    assert_eq!(model.blocks[0].weight.base().dims()[0], WIDTH);
    assert_eq!(model.first.weight.base().dims()[0], WIDTH / mesh.size());
    Ok(model)
}

/// Three calls: a replicated block, a sharded one, and a replicated one, in a model that is ignored.
fn one_after_the_other(mut model: Stack, mesh: &DeviceMesh) -> Result<Stack> {
    model.first = replicate(model.first, mesh, DataParallel::new())?;
    for at in 0..3 {
        let block = model.blocks[at].clone();
        model.blocks[at] = match at {
            1 => fully_shard(block, mesh, FullyShard::new())?,
            _ => replicate(block, mesh, DataParallel::new())?,
        };
    }
    Ok(model)
}

#[derive(Module, Debug)]
struct Inner {
    middle: Linear,
    last: Linear,
}

/// DDP around FSDP around DDP.
#[derive(Module, Debug)]
struct Outer {
    first: Linear,
    inner: Inner,
}

impl Outer {
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = unit(self, x, |net, x| {
            let x = net.first.forward(x).tanh();
            unit(&net.inner, x, |inner, x| {
                let x = inner.middle.forward(x).tanh();
                unit(&inner.last, x, |last, x| last.forward(x))
            })
        });
        y.square().sum()
    }
}

#[test]
fn three_calls_one_inside_the_other_train_as_one() {
    let linear = |seed| Linear {
        weight: Param::from_tensor(tensor(seed, [WIDTH, WIDTH], &Device::flex())),
        bias: None,
    };
    let start = || Outer {
        first: linear(1),
        inner: Inner {
            middle: linear(2),
            last: linear(3),
        },
    };
    let run = |nests: bool| {
        let ranks = launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [2], ["dp"])?;
            let mut model = on_device(&start(), &device);
            if nests {
                model.inner.last = replicate(model.inner.last, &mesh, DataParallel::new())?;
                model.inner = fully_shard(model.inner, &mesh, FullyShard::new())?;
                assert_eq!(model.inner.middle.weight.base().dims(), [WIDTH / 2, WIDTH]);
                assert_eq!(model.inner.last.weight.base().dims(), [WIDTH, WIDTH]);
            }
            let mut model = replicate(model, &mesh, DataParallel::new().with_one_unit())?;
            let mut optim = AdamWConfig::new().init();
            for step in 0..3 {
                let x = tensor((step * 10 + world.rank()) as u64, [3, WIDTH], &device);
                let grads = GradientsParams::from_grads(model.loss(x).backward(), &model);
                model = optim.step(1e-2, model, grads);
            }
            Ok(values(&full_model(&model)?, None))
        });
        launched::values(ranks.unwrap())
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn replicated_and_sharded_modules_train_in_one_model() {
    let start = stack(&Device::flex());
    for ranks in [2, 3] {
        let run = |distribute: Distribute| {
            let program = |world: &World| train(world, &start, distribute);
            launched::values(launch(Launch::threads(ranks), program).unwrap())
        };
        let expected = run(sharded);
        for distribute in [
            replicated as Distribute,
            replicated_around,
            sharded_around,
            one_after_the_other,
        ] {
            let found = run(distribute);
            let furthest = furthest(&found[0], &expected[0]);
            // On a power of two the divisions round nothing.
            assert!(
                furthest <= if ranks == 2 { 0.0 } else { 1e-6 },
                "{furthest}"
            );
            assert!(found.iter().all(|rank| *rank == found[0]));
        }
    }
}
