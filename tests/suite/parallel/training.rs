//! An ordinary burn model, trained distributed: burn's layers read the whole weights.

use std::time::Duration;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::fsdp::{reshard, unshard};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Block, Net, data_rank, devices, distribute, meshes, plan};
use crate::fsdp::support::{max_diff, on_device, values};

const STEPS: usize = 5;

/// As many steps of the model on one rank, on the data of all data-parallel ranks.
fn trained(model: &Net, data_ranks: usize) -> Net {
    let device = Device::flex().autodiff();
    let mut model = on_device(model, &device);
    let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
    for step in 0..STEPS {
        let losses = (0..data_ranks).map(|rank| model.loss_on(step, rank, &device));
        let loss = losses.reduce(|a, b| a + b).expect("a rank") / data_ranks as f32;
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    model
}

fn trains_equal(mesh_test: &MeshTest, reshard: ReshardAfterForward) {
    let model = Net::new(&Device::flex());
    mesh_test.run(|mesh| {
        let (rank, ranks) = data_rank(mesh);
        let expected = values(&trained(&model, ranks), None);
        for device in devices(mesh) {
            let mut model = distribute(on_device(&model, &device), mesh, plan(), reshard)?;
            let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
            for step in 0..STEPS {
                let loss = model.loss_on(step, rank, &device);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = optim.step(1e-2, model, grads);
            }
            let diff = max_diff(&values(&full_model(&model)?, None), &expected);
            assert!(diff < 1e-4, "weights part by {diff} on {mesh}, {reshard:?}");
        }
        Ok(())
    });
}

#[test]
fn a_burn_model_trains_equal_on_every_mesh() {
    meshes()
        .iter()
        .for_each(|mesh| trains_equal(mesh, ReshardAfterForward::Auto));
}

#[test]
fn a_burn_model_trains_equal_whenever_units_are_freed() {
    let mesh = MeshTest::new([4, 2], ["shard", "tp"]);
    for reshard in [
        ReshardAfterForward::Always,
        ReshardAfterForward::Never,
        ReshardAfterForward::Ranks(2),
    ] {
        trains_equal(&mesh, reshard);
    }
}

/// Records and the optimizer's state hold shards, and resume.
#[test]
fn training_resumes_from_the_records_of_shards() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let [device, _] = devices(mesh);
        let (rank, _) = data_rank(mesh);
        let fresh = || {
            distribute(
                on_device(&model, &device),
                mesh,
                plan(),
                ReshardAfterForward::Auto,
            )
        };
        let mut trained = fresh()?;
        let mut optim = AdamWConfig::new().init();
        let mut middle = None;
        for step in 0..4 {
            if step == 2 {
                middle = Some((
                    trained.clone().into_record().into_bytes(),
                    optim.to_record(),
                ));
            }
            let grads = GradientsParams::from_grads(
                trained.loss_on(step, rank, &device).backward(),
                &trained,
            );
            trained = optim.step(1e-2, trained, grads);
        }
        let (bytes, state) = middle.expect("step 2 was taken");
        let record = burn::store::ModuleRecord::from_bytes(bytes?)?;
        let mut resumed = fresh()?.load_record(record);
        let mut optim = AdamWConfig::new().init().load_record(state);
        for step in 2..4 {
            let grads = GradientsParams::from_grads(
                resumed.loss_on(step, rank, &device).backward(),
                &resumed,
            );
            resumed = optim.step(1e-2, resumed, grads);
        }
        assert_eq!(values(&resumed, None), values(&trained, None));
        Ok(())
    });
}

#[test]
fn a_weight_read_twice_is_gathered_once() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let [device, _] = devices(mesh);
        let model = distribute(
            on_device(&model, &device),
            mesh,
            plan(),
            ReshardAfterForward::Always,
        )?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let loss = unit(&model.blocks[0], (), |block, ()| {
            (block.up.weight.val() + block.up.weight.val()).sum()
        });
        assert_eq!(
            ledger.calls_in(Op::AllGather, Phase::Forward),
            2,
            "over data-parallel and tensor-parallel ranks"
        );
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grad = grads
            .get::<2>(model.blocks[0].up.weight.id)
            .expect("trained");
        assert!(grad.into_data().iter::<f32>().all(|x| x == 2.0));
        Ok(())
    });
}

/// Gathering ahead moves the data-parallel dimension only.
#[test]
fn unshard_and_reshard_of_a_parallelized_unit() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let [device, _] = devices(mesh);
        let plain = on_device(&model, &device);
        let model = distribute(plain.clone(), mesh, plan(), ReshardAfterForward::Auto)?;
        let gathers = || {
            mesh.world()
                .ledger()
                .total(|key| key.op == Op::AllGather && &*key.label == "blocks.1")
                .calls
        };
        mesh.world().ledger().reset();
        let up = |block: &Block| {
            block
                .up
                .weight
                .dtensor()
                .unwrap_or_else(|error| error.unwind())
                .to_local()
        };
        unshard(&model.blocks[1])?.wait()?;
        let local = unit(&model.blocks[1], (), |block, ()| up(block));
        assert_eq!(gathers(), 1, "gathered ahead");
        let expected = DTensor::distribute_replicated(
            plain.blocks[1].up.weight.val(),
            &mesh.slice("tp")?,
            &[Placement::Shard(1)],
        )?;
        assert_eq!(local.into_data(), expected.to_local().into_data());
        unshard(&model.blocks[1])?.wait()?;
        reshard(&model.blocks[1])?;
        let _ = unit(&model.blocks[1], (), |block, ()| up(block));
        assert_eq!(gathers(), 3, "what was let go is gathered again");

        // Nothing to gather without data-parallel ranks.
        let model = parallelize(plain, &mesh.slice("tp")?, plan())?;
        unshard(&model.blocks[1])?.wait()?;
        assert_eq!(gathers(), 3);
        Ok(())
    });
}

/// Invariant 2.
#[test]
fn units_move_the_tensor_parallel_shard_alone() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let [device, _] = devices(mesh);
        let (rank, _) = data_rank(mesh);
        let model = distribute(
            on_device(&model, &device),
            mesh,
            plan(),
            ReshardAfterForward::Always,
        )?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let loss = model.loss_on(0, rank, &device);
        let _ = GradientsParams::from_grads(loss.backward(), &model);
        // Tensor parallelism holds half of every matrix: 7 or 6 of the 13 hidden features.
        let hidden = [7, 6][mesh.coordinate().expect("a member")[1]];
        let attention = 3 * (8 * 4 + 4) + (4 * 8 + 8);
        let block = 4 * (attention + (8 * hidden + hidden) + (hidden * 8 + 8)) as u64;
        for unit in ["blocks.0", "blocks.1"] {
            let of = |op, phase| {
                ledger.total(|key| &*key.label == unit && (key.op, key.phase) == (op, phase))
            };
            for phase in [Phase::Forward, Phase::Backward] {
                assert_eq!(
                    (
                        of(Op::AllGather, phase).calls,
                        of(Op::AllGather, phase).bytes
                    ),
                    (1, block),
                    "{unit}"
                );
            }
            let reduced = of(Op::ReduceScatter, Phase::Backward);
            // Whether a rank has a gradient of each of the 13 parameters, for both ranks.
            assert_eq!(
                (reduced.calls, reduced.bytes),
                (1, block + 4 * 13 * 2),
                "{unit}"
            );
            // The RMS norm's, which data-parallel ranks hold whole: burn reads its stored shape.
            let replicated = of(Op::AllReduce, Phase::Backward);
            assert_eq!((replicated.calls, replicated.bytes), (1, 4 * 8), "{unit}");
        }
        Ok(())
    });
}

/// Two data-parallel dimensions as one, next to each other and around the tensor-parallel one; and
/// meshes over communicators of their own.
#[test]
fn a_burn_model_trains_equal_over_flattened_dimensions_and_adopted_groups() {
    let model = Net::new(&Device::flex());
    let expected = values(&trained(&model, 4), None);
    let trains = |mesh: &DeviceMesh, data: &DeviceMesh| -> Result<()> {
        let device = mesh.device().clone().autodiff();
        let parallel = parallelize(on_device(&model, &device), &mesh.slice("tp")?, plan())?;
        let mut model = fully_shard(parallel, data, FullyShard::new().with_units(["blocks.*"]))?;
        let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
        for step in 0..STEPS {
            let loss = model.loss_on(step, data.coordinate().expect("a member")[0], &device);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(1e-2, model, grads);
        }
        let diff = max_diff(&values(&full_model(&model)?, None), &expected);
        assert!(diff < 1e-4, "weights part by {diff} on {mesh}, {data}");
        Ok(())
    };
    for names in [["dp", "cp", "tp"], ["dp", "tp", "cp"]] {
        MeshTest::new([2, 2, 2], names).run(|mesh| {
            let data = mesh.flatten(["dp", "cp"])?;
            trains(mesh, &data)?;
            assert_eq!(mesh.slice("dp_cp")?, data);
            Ok(())
        });
    }
    MeshTest::new([4, 2], ["dp", "tp"]).run(|mesh| {
        let deadlines = mesh.with_deadline("dp", Duration::from_secs(60))?;
        trains(&deadlines, &deadlines.slice("dp")?)?;
        let duplicate = |dim: usize| Ok::<_, Error>(mesh.communicator(dim)?.duplicate("adopted"));
        let groups = [duplicate(0)?, duplicate(1)?];
        let adopted =
            DeviceMesh::from_groups(mesh.world(), groups, mesh.ranks(), [4, 2], ["dp", "tp"])?;
        trains(&adopted, &adopted.slice("dp")?)
    });
}
