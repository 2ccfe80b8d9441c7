//! Gradients of distributed parameters, by shard and whole, against the model on one rank.

use burn::module::{Module, Param};
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Gradients, Tensor, Tolerance};
use burn_dtensor::fsdp::ParamPlacement;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Net, data_rank, distribute_with, plan};
use crate::fsdp::support::on_device;

/// Some parameters of every kind: of the root and of a unit, matrices and vectors, split by tensor
/// parallelism along either dimension and not at all.
fn matrices(net: &Net) -> [&Param<Tensor<2>>; 5] {
    let block = &net.blocks[1];
    [
        &net.embedding.weight,
        &block.attention.query.weight,
        &block.up.weight,
        &block.down.weight,
        &net.head.weight,
    ]
}

fn vectors(net: &Net) -> [&Param<Tensor<1>>; 4] {
    let block = &net.blocks[0];
    let [up, down] = [&block.up, &block.down].map(|linear| linear.bias.as_ref().expect("a bias"));
    [&block.norm.gamma, up, down, &net.norm.gamma]
}

/// The gradients of the mean loss over the data of all data-parallel ranks.
fn on_one_rank(model: &Net, ranks: usize) -> (Net, Gradients) {
    let device = Device::flex().autodiff();
    let model = on_device(model, &device);
    let losses = (0..ranks).map(|rank| model.loss_on(0, rank, &device));
    let loss = losses.reduce(|a, b| a + b).expect("a rank") / ranks as f32;
    let grads = loss.backward();
    (model, grads)
}

/// Both views of a gradient equal the gradient on one rank.
fn check<const D: usize>(
    param: &Param<Tensor<D>>,
    expected: Tensor<D>,
    grads: &Gradients,
    of_optimizer: &GradientsParams,
) -> Result<()> {
    let close = |a: Tensor<D>, b: Tensor<D>| {
        a.into_data()
            .assert_approx_eq::<f32>(&b.into_data(), Tolerance::rel_abs(1e-4, 1e-6))
    };
    let shard = param.shard_grad(grads).expect("a trained parameter");
    let stored = param.shard().expect("a distributed parameter");
    assert_eq!(
        (shard.layout(), shard.mesh()),
        (stored.layout(), stored.mesh())
    );
    assert_eq!(shard.local().dims(), param.base().dims());
    let part =
        DTensor::distribute_replicated_to(expected.clone(), shard.mesh(), shard.layout().clone())?;
    close(shard.local().clone(), part.local().clone());
    close(
        param.full_grad(grads)?.expect("a trained parameter"),
        expected.clone(),
    );
    // The optimizer's are burn's.
    let full = param.full_grad(of_optimizer)?.expect("a trained parameter");
    assert_eq!(
        full.into_data(),
        param
            .full_grad(grads)?
            .expect("a trained parameter")
            .into_data()
    );
    Ok(())
}

fn equal_the_unsharded(mesh: &MeshTest, config: impl Fn() -> FullyShard + Sync) {
    let model = Net::new(&Device::flex());
    mesh.run(|mesh| {
        let (rank, ranks) = data_rank(mesh);
        let (full, expected) = on_one_rank(&model, ranks);
        let device = mesh.device().clone().autodiff();
        let model = on_device(&model, &device);
        let model = match mesh.names().iter().any(|name| name == "tp") {
            true => distribute_with(model, mesh, plan(), config())?,
            false => fully_shard(model, mesh, config())?,
        };
        // burn gives the same gradients from one backward as from another.
        let grads = model.loss_on(0, rank, &device).backward();
        let of_optimizer =
            GradientsParams::from_grads(model.loss_on(0, rank, &device).backward(), &model);
        for (param, full) in matrices(&model).into_iter().zip(matrices(&full)) {
            check(
                param,
                full.grad(&expected).expect("trained"),
                &grads,
                &of_optimizer,
            )?;
        }
        for (param, full) in vectors(&model).into_iter().zip(vectors(&full)) {
            check(
                param,
                full.grad(&expected).expect("trained"),
                &grads,
                &of_optimizer,
            )?;
        }
        Ok(())
    });
}

fn units() -> FullyShard {
    FullyShard::new().with_units(["blocks.*"])
}

#[test]
fn gradients_equal_those_of_one_rank_on_every_mesh() {
    for mesh in [
        MeshTest::new([2], ["shard"]),
        MeshTest::new([3], ["shard"]),
        MeshTest::new([2, 2], ["replicate", "shard"]),
        MeshTest::new([2], ["tp"]),
        MeshTest::new([2, 2], ["shard", "tp"]),
        MeshTest::new([2, 2, 2], ["replicate", "shard", "tp"]),
    ] {
        equal_the_unsharded(&mesh, units);
    }
}

/// A rank that stores nothing of a parameter has an empty shard of its gradient, and gets it whole.
#[test]
fn gradients_of_uneven_and_empty_shards_equal_those_of_one_rank() {
    equal_the_unsharded(&MeshTest::new([3], ["shard"]), || {
        units().with_shard_placement_fn(|param| {
            let last = param.shape[param.shape.len() - 1];
            let may = !param.path.ends_with("gamma") && !param.path.ends_with("bias");
            may.then(|| ParamPlacement::uneven(param.shape.len() - 1, [0, last - 1, 1]))
        })
    });
}

#[test]
fn what_is_not_trained_has_no_gradient() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mut model = on_device(&model, &device);
        model.norm = model.norm.no_grad();
        let model = fully_shard(model, mesh, units())?;
        let grads = model.loss_on(0, mesh.rank(), &device).backward();
        assert!(model.norm.gamma.shard_grad(&grads).is_none());
        assert!(model.norm.gamma.full_grad(&grads)?.is_none());
        assert!(model.head.weight.full_grad(&grads)?.is_some());
        Ok(())
    });
}

/// It has no shards; its gradient is this rank's.
#[test]
fn an_ordinary_parameter_has_the_gradient_that_burn_gives_it() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let layer = LinearConfig::new(2, 2).with_bias(false).init(&device);
        let x = Tensor::<2>::ones([1, 2], &device) * (mesh.rank() + 1) as f32;
        let grads = layer.forward(x).sum().backward();
        assert!(layer.weight.shard_grad(&grads).is_none());
        let grad = layer
            .weight
            .full_grad(&grads)?
            .expect("trained")
            .into_data();
        assert_eq!(
            grad.iter::<f32>().collect::<Vec<_>>(),
            [(mesh.rank() + 1) as f32; 4]
        );
        Ok(())
    });
}
