//! `fully_shard` and `parallelize` in either order: the same model, to the bit.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device};
use burn_dtensor::fsdp::{ParamInfo, ParamPlacement};
use burn_dtensor::prelude::*;

use super::support::{Net, data_rank, devices, meshes, plan};
use crate::fsdp::support::{on_device, values};

/// The data-parallel and the tensor-parallel slice of a mesh.
fn slices(mesh: &DeviceMesh) -> Result<(DeviceMesh, DeviceMesh)> {
    let data: Vec<_> = mesh.names().iter().filter(|name| *name != "tp").collect();
    Ok((mesh.slice(data)?, mesh.slice("tp")?))
}

/// Path, unit, mesh, layout and values of every parameter, as this rank holds it.
fn held(model: &Net) -> Vec<(String, String, DeviceMesh, Layout, Vec<u32>)> {
    let stored = bits(model);
    let held = named_parameters(model).unwrap().into_iter().map(|param| {
        let values = stored[&param.path].clone();
        (
            param.path,
            param.unit.to_string(),
            param.spec.mesh().clone(),
            param.spec.layout().clone(),
            values,
        )
    });
    held.collect()
}

fn bits(model: &Net) -> BTreeMap<String, Vec<u32>> {
    to_bits(values(model, None))
}

fn to_bits(values: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<u32>> {
    values
        .into_iter()
        .map(|(path, values)| (path, values.into_iter().map(f32::to_bits).collect()))
        .collect()
}

/// Loss, gradients, and calls and bytes by unit of a step on this rank's data; then the model after
/// it.
type Step = (
    u32,
    BTreeMap<String, Vec<u32>>,
    usize,
    BTreeMap<String, (u64, u64)>,
);

fn step(model: Net, mesh: &DeviceMesh, device: &Device) -> (Step, Net) {
    let ledger = mesh.world().ledger();
    ledger.reset();
    let loss = model.loss_on(0, data_rank(mesh).0, device);
    let value = loss.clone().into_scalar::<f32>().to_bits();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let moved = ledger
        .by_label()
        .into_iter()
        .map(|(label, total)| (label.to_string(), (total.calls, total.bytes)));
    let step = (
        value,
        to_bits(values(&model, Some(&grads))),
        grads.len(),
        moved.collect(),
    );
    (step, AdamWConfig::new().init().step(1e-2, model, grads))
}

/// Holds that both are one model: in what a rank stores, computes, moves and steps, and in what is
/// gathered.
fn assert_same(turned: Net, model: Net, mesh: &DeviceMesh, device: &Device) -> Result<()> {
    assert_eq!(held(&turned), held(&model), "on {mesh}");
    assert!(
        held(&model).iter().any(|(_, _, over, ..)| over == mesh),
        "both cut on {mesh}"
    );
    let ((step_turned, turned), (step, model)) =
        (step(turned, mesh, device), step(model, mesh, device));
    assert_eq!(step_turned, step, "on {mesh}");
    assert_eq!(held(&turned), held(&model), "on {mesh}");
    assert_eq!(
        bits(&full_model(&turned)?),
        bits(&full_model(&model)?),
        "on {mesh}"
    );
    Ok(())
}

/// Both orders on every mesh that has data-parallel ranks, with and without gradient checkpointing.
fn either_order(prepare: fn(Net) -> Net, config: fn() -> FullyShard) {
    let model = Net::new(&Device::flex());
    for mesh in meshes().into_iter().skip(1) {
        mesh.run(|mesh| {
            let (data, tp) = slices(mesh)?;
            for device in devices(mesh) {
                let plain = || prepare(on_device(&model, &device));
                let turned = parallelize(fully_shard(plain(), &data, config())?, &tp, plan())?;
                assert_same(
                    turned,
                    fully_shard(parallelize(plain(), &tp, plan())?, &data, config())?,
                    mesh,
                    &device,
                )?;
            }
            Ok(())
        });
    }
}

#[test]
fn one_unit() {
    either_order(|net| net, FullyShard::new);
}

#[test]
fn a_unit_per_block() {
    either_order(
        |net| net,
        || {
            FullyShard::new()
                .with_units(["blocks.*"])
                .with_reshard_after_forward(ReshardAfterForward::Always)
        },
    );
}

#[test]
fn a_frozen_layer_and_an_ignored_one() {
    let freeze = |net: Net| Net {
        norm: net.norm.no_grad(),
        ..net
    };
    either_order(freeze, || {
        FullyShard::new()
            .with_units(["blocks.*"])
            .with_ignored(["head.*", "blocks.0.up.weight"])
    });
}

#[test]
fn mixed_precision() {
    either_order(
        |net| net,
        || {
            let bf16 = MixedPrecisionPolicy::new().with_param_dtype(DType::BF16);
            FullyShard::new()
                .with_units(["blocks.*"])
                .with_mixed_precision(bf16.clone().with_output_dtype(DType::F32))
                .with_mixed_precision_for(["blocks.*"], bf16)
        },
    );
}

/// Of [8, 13], of which tensor parallelism cuts the second dimension, and of [8], which it leaves
/// whole.
#[test]
fn given_lengths_and_other_dimensions() {
    either_order(
        |net| net,
        || {
            FullyShard::new().with_shard_placement_fn(|param: ParamInfo| match param.path {
                "blocks.0.up.weight" => Some(ParamPlacement::uneven(0, [3, 5])),
                "blocks.1.down.bias" => Some(ParamPlacement::uneven(0, [8, 0])),
                "blocks.1.up.weight" => Some(Placement::Shard(1).into()),
                "embedding.weight" => Some(Placement::Replicate.into()),
                _ => None,
            })
        },
    );
}

/// A block that an earlier call made a unit, one parameter of which it left to the call for the
/// model.
#[test]
fn nested_units() {
    let model = Net::new(&Device::flex());
    for mesh in meshes().into_iter().skip(1) {
        mesh.run(|mesh| {
            let (data, tp) = slices(mesh)?;
            let inner = |mut net: Net| -> Result<_> {
                let block = net.blocks.remove(0);
                let config = FullyShard::new()
                    .with_ignored(["up.weight"])
                    .with_reshard_after_forward(ReshardAfterForward::Never);
                net.blocks
                    .insert(0, fully_shard(block, &mesh.slice("shard")?, config)?);
                Ok(net)
            };
            let outer = |net| fully_shard(net, &data, FullyShard::new().with_units(["blocks.*"]));
            let parallel = |net| parallelize(net, &tp, plan());
            let [device, _] = devices(mesh);
            let plain = || on_device(&model, &device);
            let expected = || outer(inner(parallel(plain())?)?);
            assert_same(
                parallel(outer(inner(plain())?)?)?,
                expected()?,
                mesh,
                &device,
            )?;
            assert_same(
                outer(parallel(inner(plain())?)?)?,
                expected()?,
                mesh,
                &device,
            )
        });
    }
}
