//! Experts on a mesh of their own: expert, fully sharded and tensor parallel, against the unsharded
//! model.

mod misuse;
mod net;
mod sent;

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::{FsdpModule, ParamInfo, ParamPlacement, describe, reshard, unshard};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{data_rank, devices, full_grads};
use crate::fsdp::support::{max_diff, on_device, values};
use net::{BLOCKS, Net, Read, blocks, distribute};

/// Returns the number of steps that are trained. A rank has tokens for two experts of three in
/// each: in 4, twice for every one.
fn steps() -> usize {
    if crate::effort::is_long() { 10 } else { 4 }
}

type Values = BTreeMap<String, Vec<f32>>;

/// What an unsharded step has: gradients of the mean loss of all data-parallel ranks.
fn expected_grads(model: &Net, step: usize, data_ranks: usize, device: &Device) -> GradientsParams {
    let losses = (0..data_ranks).map(|rank| model.loss_on(step, rank, Read::Full, device));
    let loss = losses.reduce(|a, b| a + b).expect("a rank") / data_ranks as f32;
    GradientsParams::from_grads(loss.backward(), model)
}

/// Weights after so many steps on one rank, and the gradients of the first.
fn trained(model: &Net, data_ranks: usize) -> (Values, Values) {
    let device = Device::flex().autodiff();
    let mut model = on_device(model, &device);
    let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
    let mut first = None;
    for step in 0..steps() {
        let grads = expected_grads(&model, step, data_ranks, &device);
        first.get_or_insert_with(|| values(&model, Some(&grads)));
        model = optim.step(1e-2, model, grads);
    }
    (values(&model, None), first.expect("a step"))
}

/// Trains with experts read so: weights and gradients are those of the unsharded model, which
/// begins with the same weights.
fn trains(test: &MeshTest, config: &FullyShard, read: Read) {
    let model = Net::new();
    // Of the mesh's ranks but those along `tp`, which have the same tokens.
    let ranks = test.run(|mesh| Ok(data_rank(mesh).1))[0];
    let (expected, first) = trained(&model, ranks);
    test.run(|mesh| trains_on(&model, mesh, config, read, (&expected, &first)));
}

fn trains_on(
    model: &Net,
    mesh: &DeviceMesh,
    config: &FullyShard,
    read: Read,
    (expected, first): (&Values, &Values),
) -> Result<()> {
    let (rank, _) = data_rank(mesh);
    for device in devices(mesh) {
        let mut net = distribute(on_device(model, &device), mesh, config.clone())?;
        assert_eq!(
            values(&full_model(&net)?, None),
            values(model, None),
            "experts keep their values on {mesh}"
        );
        let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
        for step in 0..steps() {
            let loss = net.loss_on(step, rank, read, &device);
            let mut grads = GradientsParams::from_grads(loss.backward(), &net);
            if step == 0 {
                let diff = max_diff(&full_grads(&net, &grads)?, first);
                assert!(diff < 1e-5, "gradients part by {diff} on {mesh}");
                let norm = first
                    .values()
                    .flatten()
                    .map(|x| f64::from(*x).powi(2))
                    .sum::<f64>()
                    .sqrt();
                let found = clip_grad_norm(&net, &mut grads, f64::MAX, NormType::L2)?;
                assert!(
                    (norm - found).abs() < 1e-4 * norm,
                    "{found} for {norm} on {mesh}"
                );
            }
            net = optim.step(1e-2, net, grads);
        }
        let diff = max_diff(&values(&full_model(&net)?, None), expected);
        assert!(diff < 1e-4, "weights part by {diff} on {mesh}");
    }
    Ok(())
}

fn meshes() -> Vec<MeshTest> {
    vec![
        MeshTest::new([1, 1], ["efsdp", "ep"]),
        MeshTest::new([2, 2], ["efsdp", "ep"]),
        MeshTest::new([2, 3], ["ep", "efsdp"]),
        MeshTest::new([3, 2], ["efsdp", "ep"]),
        MeshTest::new([1, 3], ["efsdp", "ep"]),
        MeshTest::new([2, 2, 2], ["efsdp", "ep", "tp"]),
        MeshTest::new([2, 2, 2], ["tp", "ep", "efsdp"]),
        MeshTest::new([2, 2, 2], ["replicate", "efsdp", "ep"]),
        MeshTest::new([2, 2, 2], ["ep", "replicate", "efsdp"]),
    ]
}

#[test]
fn experts_train_as_on_one_device_on_every_mesh() {
    meshes()
        .iter()
        .for_each(|test| trains(test, &blocks(), Read::Placed));
}

#[test]
fn experts_train_whenever_units_are_freed() {
    let test = MeshTest::new([2, 2], ["efsdp", "ep"]);
    for reshard in [
        ReshardAfterForward::Always,
        ReshardAfterForward::Never,
        ReshardAfterForward::Ranks(2),
    ] {
        trains(
            &test,
            &blocks().with_reshard_after_forward(reshard),
            Read::Placed,
        );
    }
    trains(&test, &blocks().with_balanced_bytes(), Read::Placed);
}

/// One unit of the model, and one of both blocks: each is two.
#[test]
fn experts_train_in_whatever_units_they_are() {
    let test = MeshTest::new([2, 2], ["efsdp", "ep"]);
    trains(&test, &FullyShard::new(), Read::Placed);
    trains(
        &test,
        &FullyShard::new().with_group_unit(["blocks.0", "blocks.1"]),
        Read::Placed,
    );
    trains(
        &test,
        &FullyShard::new().with_units(["blocks.*.experts", "blocks.*"]),
        Read::Placed,
    );
}

/// Each rank reads all experts for its own tokens: their gradients are summed over the ranks along
/// `ep`.
#[test]
fn experts_that_are_read_unsharded_have_the_gradients_of_all_ranks() {
    trains(
        &MeshTest::new([2, 2], ["efsdp", "ep"]),
        &blocks(),
        Read::Full,
    );
    trains(
        &MeshTest::new([1, 2, 2], ["efsdp", "ep", "tp"]),
        &blocks(),
        Read::Full,
    );
}

/// A parameter's own mesh without tensor parallelism: cut over fewer ranks, and replicated over the
/// others.
#[test]
fn parameters_are_sharded_over_the_dimensions_that_the_placement_function_says() {
    let model = Net::new();
    let (expected, _) = trained(&model, 4);
    MeshTest::new([2, 2], ["node", "local"]).run(|mesh| {
        let (device, (rank, _)) = (mesh.device().clone().autodiff(), data_rank(mesh));
        let config = FullyShard::new()
            .with_shard_dims(["node", "local"])
            .with_units(["blocks.*"]);
        let config = config.with_shard_placement_fn(|param: ParamInfo<'_>| match param.path {
            "first.weight" => {
                Some(ParamPlacement::from(Placement::Shard(1)).with_mesh_dims("local"))
            }
            path if path.ends_with("up") => {
                Some(ParamPlacement::from(Placement::Shard(0)).with_mesh_dims("node"))
            }
            _ => None,
        });
        let mut net = fully_shard(on_device(&model, &device), mesh, config)?;
        let layouts = || {
            named_parameters(&net)
                .map(|params| params.into_iter().map(|param| (param.path, param.spec)))
        };
        let layout = |path: &str| {
            let (_, spec) = layouts()
                .unwrap()
                .find(|(other, _)| other == path)
                .expect("it is there");
            format!("{} on {}", spec.layout(), spec.mesh())
        };
        assert!(layout("first.weight").starts_with("[R, S(1)] on DeviceMesh(node=2, local=2"));
        assert!(
            layout("blocks.0.experts.up").starts_with("[S(0), R] on DeviceMesh(node=2, local=2")
        );
        assert!(layout("blocks.0.experts.down").starts_with("[S(0)] on DeviceMesh(node_local=4"));
        let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
        for step in 0..steps() {
            let grads = GradientsParams::from_grads(
                net.loss_on(step, rank, Read::Full, &device).backward(),
                &net,
            );
            net = optim.step(1e-2, net, grads);
        }
        let diff = max_diff(&values(&full_model(&net)?, None), &expected);
        assert!(diff < 1e-4, "weights part by {diff}");
        Ok(())
    });
}

/// Records load where the same part is held; the table counts every expert once.
#[test]
fn experts_are_described_and_recorded_as_parts_of_all_experts() {
    let model = Net::new();
    let count = model.num_params();
    MeshTest::new([2, 2, 2], ["efsdp", "ep", "tp"]).run(|mesh| {
        let net = distribute(on_device(&model, mesh.device()), mesh, blocks())?;
        let table = describe(&net);
        assert_eq!(table.global_count(), count);
        let text = table.to_string();
        assert!(
            text.contains("[S(0), S(0), S(2); dim 0 sharded by mesh dims 1, 0] on DeviceMesh(efsdp=2, ep=2, tp=2"),
            "{text}"
        );
        let held =
            mesh.all_reduce(net.blocks[0].experts.up.base().dims().iter().product::<usize>() as f64, ReduceOp::Sum)?;
        assert_eq!(held as usize, model.blocks[0].experts.up.base().shape().num_elements());
        let record = ModuleRecord::from_bytes(net.clone().into_record().into_bytes()?)?;
        let loaded = distribute(on_device(&model, mesh.device()), mesh, blocks())?.load_record(record);
        assert_eq!(values(&loaded, None), values(&net, None));
        Ok(())
    });
}

/// Both units of a module at once.
#[test]
fn a_module_whose_experts_are_on_another_mesh_is_two_units() {
    let model = Net::new();
    MeshTest::new([2, 2], ["efsdp", "ep"]).run(|mesh| {
        let (device, (rank, _)) = (mesh.device().clone().autodiff(), data_rank(mesh));
        let net = distribute(on_device(&model, &device), mesh, blocks())?;
        assert_eq!(FsdpModule::of(&net)?.paths().len(), 1 + 2 * BLOCKS);
        let block = FsdpModule::of(&net.blocks[1])?.own();
        assert_eq!(block.paths(), ["blocks.1", "blocks.1"]);
        let gathers = || mesh.world().ledger().calls(Op::AllGather);
        mesh.world().ledger().reset();
        unshard(&net.blocks[1])?.wait()?;
        assert!(block.is_prefetched());
        assert_eq!(gathers(), 2);
        reshard(&net.blocks[1])?;
        assert!(!block.is_prefetched());
        unshard(&net.blocks[1])?.wait()?;
        let _ = net.loss_on(0, rank, Read::Placed, &device);
        assert_eq!(
            gathers(),
            4 + 1 + 2 * BLOCKS as u64 - 2,
            "what was gathered ahead is not gathered again"
        );
        Ok(())
    });
}

/// Without `unit` in the model's blocks, reads open both, each once.
#[test]
fn sibling_units_that_reads_open_are_gathered_once() {
    let model = Net::new();
    MeshTest::new([2, 2], ["efsdp", "ep"]).run(|mesh| {
        let (device, (rank, _)) = (mesh.device().clone().autodiff(), data_rank(mesh));
        let config = blocks().with_reshard_after_forward(ReshardAfterForward::Always);
        let net = distribute(on_device(&model, &device), mesh, config)?;
        let run = |by_read: bool| {
            mesh.world().ledger().reset();
            let loss = match by_read {
                // Experts, router, norm and experts again, all by their parameters.
                true => unit(&net, (), |net, ()| {
                    let block = &net.blocks[0];
                    let sum = |weight: &Param<Tensor<3>>| {
                        weight.dtensor().unwrap().to_local().square().sum()
                    };
                    sum(&block.experts.up)
                        + block.router.weight.val().square().sum()
                        + sum(&block.experts.down)
                        + block.norm.gamma.val().square().sum()
                }),
                false => net.loss_on(0, rank, Read::Placed, &device),
            };
            let labelled = |op| {
                mesh.world()
                    .ledger()
                    .total(|key| &*key.label == "blocks.0" && key.op == op)
                    .calls
            };
            let forward = labelled(Op::AllGather);
            loss.backward();
            (
                forward,
                labelled(Op::AllGather),
                labelled(Op::ReduceScatter),
            )
        };
        assert_eq!(run(false), (2, 4, 2));
        assert_eq!(run(true), (2, 4, 2));
        Ok(())
    });
}

#[cfg(feature = "mpi")]
#[test]
fn experts_train_on_processes_as_on_one_device() {
    let model = Net::new();
    let (expected, first) = trained(&model, 4);
    MeshTest::new([2, 2], ["efsdp", "ep"])
        .with_processes(2)
        .run(|mesh| trains_on(&model, mesh, &blocks(), Read::Placed, (&expected, &first)));
}
