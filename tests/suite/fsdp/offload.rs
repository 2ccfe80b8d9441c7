//! Shards in host memory. Where ranks compute on the CPU there is no other: what is copied is
//! counted, and the numbers are those of shards that are not offloaded, to the bit.
//! `tests/suite/cube/offload.rs` has a device.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{CallTotals, OffloadTraffic};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    EventKind, FsdpModule, FullyShard, GradScaler, MixedPrecisionPolicy, NormType, OffloadPolicy,
    ReshardAfterForward, clip_grad_norm, full_model, fully_shard, record_events, remesh, reshard,
    unshard,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::mesh_test;
use burn_dtensor::optim::{load_optimizer_state, optimizer_state, parameter_specs};
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::MeshTest;
use burn_dtensor::{Error, Result};

use super::net::{Net, WIDTH, compare, config, net, with_units};
use super::support::{on_device, tensor, values};

const RESHARD: [ReshardAfterForward; 3] = [
    ReshardAfterForward::Auto,
    ReshardAfterForward::Always,
    ReshardAfterForward::Never,
];

fn loss(model: &Net, step: usize, rank: usize, device: &Device) -> Tensor<1> {
    let x = tensor((1 + step * 10 + rank) as u64, [4, WIDTH], device);
    with_units(model, x, rank).square().sum()
}

/// The weights after ten steps of AdamW: all that a step may go through, on one rank as on several.
fn trained(mesh: &DeviceMesh, config: FullyShard) -> Result<BTreeMap<String, Vec<f32>>> {
    let device = mesh.device().clone().autodiff();
    let mut model = net(&device);
    model.blocks[1] = model.blocks[1].clone().no_grad();
    let mut model = fully_shard(model, mesh, config.with_ignored(["spare.bias"]))?;
    let (mut optim, mut scaler) = (
        AdamWConfig::new().init(),
        GradScaler::new().with_init_scale(4.0),
    );
    for step in 0..10 {
        let mut sum = GradientsAccumulator::new();
        for batch in 0..2 {
            match step % 3 {
                0 => FsdpModule::of(&model)?.set_requires_gradient_sync(batch == 1),
                1 => FsdpModule::of(&model)?.set_requires_all_reduce(batch == 1),
                _ => {}
            }
            let loss = scaler.scale(loss(&model, 2 * step + batch, mesh.rank(), &device));
            if step == 4 {
                FsdpModule::of(&model)?.reshard();
            }
            sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
        }
        let mut grads = sum.grads();
        assert!(scaler.unscale(&model, &mut grads)?, "nothing overflows");
        clip_grad_norm(&model, &mut grads, 0.5, NormType::L2)?;
        if step == 5 {
            let state = optimizer_state(&optim, &model)?.full()?;
            let state = state.distribute(parameter_specs(&model)?)?;
            optim = load_optimizer_state(AdamWConfig::new().init(), &model, state)?;
        }
        model = scaler.step(model, grads, |model, grads| {
            Ok(optim.step(1e-2, model, grads))
        })?;
        scaler.update()?;
        if step == 6 {
            unshard(&model.blocks[0])?.wait()?;
            reshard(&model.blocks[0])?;
            unshard(&model.blocks[2])?.wait()?;
        }
        if step == 7 {
            model = remesh(model, mesh)?;
        }
    }
    Ok(values(&full_model(&model)?, None))
}

#[test]
fn weights_are_those_of_shards_on_the_device_to_the_bit() {
    for (mesh, modes) in [
        (MeshTest::new([1], ["shard"]), &RESHARD[..2]),
        (
            MeshTest::new([2], ["shard"]),
            &[ReshardAfterForward::Auto, ReshardAfterForward::Ranks(1)],
        ),
        (MeshTest::new([3], ["shard"]), &RESHARD[1..]),
        (
            MeshTest::new([4], ["shard"]),
            &[ReshardAfterForward::Ranks(2)],
        ),
        (MeshTest::new([8], ["shard"]), &[ReshardAfterForward::Auto]),
        (MeshTest::new([2, 2], ["replicate", "shard"]), &RESHARD[..2]),
    ] {
        for &mode in modes {
            mesh.run(|mesh| {
                let config = || {
                    config()
                        .with_reshard_after_forward(mode)
                        .with_replica_check_every(1)
                        .with_weight_check(true)
                };
                let expected = trained(mesh, config())?;
                assert_eq!(mesh.world().ledger().host_copies(), BTreeMap::new());
                assert_eq!(
                    trained(mesh, config().with_offload(OffloadPolicy::Cpu))?,
                    expected,
                    "{mode:?} on {mesh}"
                );
                assert!(mesh.world().ledger().summary().host_copies.to_device.bytes > 0);
                Ok(())
            });
        }
    }
}

mesh_test!(processes_copy_as_threads_do, [3], ["shard"], |mesh| {
    assert_eq!(
        trained(mesh, config().with_offload(OffloadPolicy::Cpu))?,
        trained(mesh, config())?
    );
    Ok(())
});

/// Outputs to the bit, gradients averaged by hand; with gradient checkpointing, too.
#[test]
fn gradients_are_those_of_the_unsharded_model() {
    for ranks in 1..=3 {
        for reshard in RESHARD {
            let config = config()
                .with_offload(OffloadPolicy::Cpu)
                .with_reshard_after_forward(reshard);
            compare(ranks, |net| net, config, with_units);
        }
    }
}

/// Bytes of what units have in a step: a weight and a bias of `f32` each, of the root a scale
/// beside.
const BLOCK: u64 = 4 * (WIDTH * WIDTH + WIDTH) as u64;
const ROOT: u64 = BLOCK + 4 * WIDTH as u64;

#[test]
fn copies_are_what_is_gathered_and_what_is_reduced() {
    for (ranks, mode, again) in [
        (1, ReshardAfterForward::Always, [1, 1]),
        (2, ReshardAfterForward::Auto, [0, 1]),
        (3, ReshardAfterForward::Always, [1, 1]),
        (3, ReshardAfterForward::Never, [0, 0]),
        (4, ReshardAfterForward::Ranks(2), [0, 0]),
    ] {
        MeshTest::new([ranks], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let config = config()
                .with_reshard_after_forward(mode)
                .with_offload_for(["blocks.[12]"], OffloadPolicy::Cpu);
            let config = config.with_offload(OffloadPolicy::Never);
            let part = fully_shard(net(&device), mesh, config.clone())?;
            let _ = loss(&part, 0, mesh.rank(), &device).backward();
            let ledger = mesh.world().ledger();
            assert_eq!(
                ledger
                    .host_copies()
                    .keys()
                    .map(|unit| &**unit)
                    .collect::<Vec<_>>(),
                ["blocks.1", "blocks.2"]
            );
            ledger.reset();

            let all = fully_shard(net(&device), mesh, config.with_offload(OffloadPolicy::Cpu))?;
            assert!(
                ledger.host_copies().is_empty(),
                "what is distributed is not counted"
            );
            let _ = loss(&all, 0, mesh.rank(), &device).backward();
            let copies = ledger.host_copies();
            let shard = |rows: u64, len: u64| {
                let chunk = rows.div_ceil(ranks as u64);
                let (start, end) = (mesh.rank() as u64 * chunk, (mesh.rank() as u64 + 1) * chunk);
                4 * len * (end.min(rows) - start.min(rows))
            };
            let width = WIDTH as u64;
            let block = shard(width, width) + shard(width, 1);
            let expected = |full: u64, part: u64, again: u64| OffloadTraffic {
                to_device: CallTotals {
                    calls: 1 + again,
                    bytes: (1 + again) * full,
                },
                to_host: CallTotals {
                    calls: 1,
                    bytes: part,
                },
            };
            for at in 0..3 {
                assert_eq!(
                    copies[&*format!("blocks.{at}")],
                    expected(BLOCK, block, again[1]),
                    "{mode:?}"
                );
            }
            assert_eq!(
                copies["root"],
                expected(ROOT, block + shard(width, 1), again[0]),
                "{mode:?}"
            );
            Ok(())
        });
    }
}

/// One that every rank holds whole is a copy too, and so are gradients that travel in another
/// element type.
#[test]
fn replicated_parameters_are_copied_and_gradients_as_they_are_reduced() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let half = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::BF16)
            .with_reduce_dtype(DType::BF16)
            .with_output_dtype(DType::F32);
        let config = FullyShard::new()
            .with_mixed_precision(half)
            .with_offload(OffloadPolicy::Cpu);
        let config = config.with_shard_placement_fn(|_| Some(Placement::Replicate));
        let model = fully_shard(net(&device), mesh, config)?;
        let grads = loss(&model, 0, mesh.rank(), &device).backward();
        let used = 4 * (WIDTH * WIDTH + WIDTH) + WIDTH;
        let full = used + WIDTH * WIDTH + WIDTH;
        let copies = mesh.world().ledger().host_copies()["root"];
        assert_eq!(
            copies.to_device,
            CallTotals {
                calls: 1,
                bytes: 2 * full as u64
            }
        );
        assert_eq!(
            copies.to_host,
            CallTotals {
                calls: 1,
                bytes: 2 * used as u64
            }
        );
        let grad = model.scale.base().grad(&grads).expect("a gradient");
        assert_eq!(grad.dtype(), DType::F32);
        Ok(())
    });
}

/// Of one rank there is nothing to gather, but there is to copy, and to free.
#[test]
fn a_rank_alone_frees_its_weights_between_forward_and_backward() {
    MeshTest::new([1], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let happened = |config: FullyShard| {
            let model = fully_shard(
                net(&device),
                mesh,
                config.with_reshard_after_forward(ReshardAfterForward::Always),
            )?;
            let (_, events) = record_events(|| loss(&model, 0, 0, &device).backward());
            let of_block = events
                .iter()
                .filter(|event| &*event.unit == "blocks.0")
                .map(|event| event.kind);
            Ok::<_, Error>(
                of_block
                    .filter(|kind| [EventKind::Unshard, EventKind::Reshard].contains(kind))
                    .collect(),
            )
        };
        let nothing: Vec<EventKind> = happened(config())?;
        assert!(nothing.is_empty(), "{nothing:?}");
        let [unshard, reshard] = [EventKind::Unshard, EventKind::Reshard];
        assert_eq!(
            happened(config().with_offload(OffloadPolicy::Cpu))?,
            [unshard, reshard, unshard, reshard]
        );
        Ok(())
    });
}

/// Clones share units and shards; one in validation has shards without a graph.
#[test]
fn a_teacher_and_a_validated_clone_compute_next_to_the_student() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let run = |config: FullyShard| {
            let mut student = fully_shard(net(&device), mesh, config)?;
            let teacher = student.clone().no_grad();
            let mut optim: ModuleOptimizer = AdamWConfig::new().init();
            let mut losses = Vec::new();
            for step in 0..3 {
                let x = || tensor(1 + step, [4, WIDTH], &device);
                let target = with_units(&teacher, x(), mesh.rank()).detach();
                let loss = (with_units(&student, x(), mesh.rank()) - target)
                    .square()
                    .sum();
                let grads = GradientsParams::from_grads(loss.clone().backward(), &student);
                student = optim.step(1e-2, student, grads);
                let valid = student.valid();
                let plain = tensor::<2>(1 + step, [4, WIDTH], mesh.device());
                losses.push((
                    loss.into_data(),
                    with_units(&valid, plain, mesh.rank()).into_data(),
                ));
            }
            Ok::<_, Error>((losses, values(&full_model(&teacher)?, None)))
        };
        assert_eq!(
            run(config().with_offload(OffloadPolicy::Cpu))?,
            run(config())?
        );
        Ok(())
    });
}

#[test]
fn a_pattern_of_offloaded_units_takes_one() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let config = config().with_offload_for(["blokcs.*"], OffloadPolicy::Cpu);
        let refused = fully_shard(net(mesh.device()), mesh, config).unwrap_err();
        let Error::Param(ParamError::NoMatch { pattern, what, .. }) = refused else {
            panic!("{refused}")
        };
        assert_eq!((&*pattern, what), ("blokcs.*", "unit"));
        Ok(())
    });
}

/// The whole model of shards in host memory, and shards that were loaded, are those that were
/// saved.
#[test]
fn records_hold_the_shards() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = || config().with_offload(OffloadPolicy::Cpu);
        let saved = fully_shard(net(&device), mesh, config())?;
        let bytes = saved
            .clone()
            .into_record()
            .into_bytes()
            .map_err(Error::other)?;
        let other = on_device(&net(&device), &device).map(&mut super::support::Shift);
        let mut loaded = fully_shard(other, mesh, config())?;
        assert_ne!(values(&loaded, None), values(&saved, None));
        let record = ModuleRecord::from_bytes(bytes).map_err(Error::other)?;
        loaded = loaded.try_load_record(record).map_err(Error::other)?;
        assert_eq!(
            values(&full_model(&loaded)?, None),
            values(&net(&device), None)
        );
        Ok(())
    });
}
