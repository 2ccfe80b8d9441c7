//! Data parallelism inside tensor parallelism, and around it: HSDP in every order of mesh
//! dimensions, over several dimensions joined, and gathered again over a few ranks.

use std::collections::BTreeMap;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_dtensor::comm::{LedgerEntry, Op, Phase};
use burn_dtensor::fsdp::remesh;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;
use itertools::Itertools;

use super::support::{Net, data_rank, plan};
use crate::fsdp::support::{max_diff, on_device, values};

/// Returns the number of steps that are trained.
fn steps() -> usize {
    if crate::effort::is_long() { 10 } else { 4 }
}

/// Parameters of a block that are cut.
const SHARD: u64 = 12;

fn optimizer() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-5)
}

/// Weights after so many steps on one rank, on the data of all data-parallel ranks.
fn trained(model: &Net, data_ranks: usize) -> BTreeMap<String, Vec<f32>> {
    let device = Device::flex().autodiff();
    let mut model = on_device(model, &device);
    let mut optim = optimizer().init();
    for step in 0..steps() {
        let losses = (0..data_ranks).map(|rank| model.loss_on(step, rank, &device));
        let loss = losses.reduce(|a, b| a + b).expect("a rank") / data_ranks as f32;
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    values(&model, None)
}

/// Trains on `mesh`, tensor parallel over `tp`, and returns what the ledger has of the last step.
fn train(
    model: &Net,
    mesh: &DeviceMesh,
    config: FullyShard,
    expected: &BTreeMap<String, Vec<f32>>,
) -> Result<Vec<LedgerEntry>> {
    let (device, (rank, _)) = (mesh.device().clone().autodiff(), data_rank(mesh));
    let mut net = on_device(model, &device);
    if mesh.names().iter().any(|name| name == "tp") {
        net = parallelize(net, &mesh.slice("tp")?, plan())?;
    }
    net = fully_shard(net, mesh, config.with_units(["blocks.*"]))?;
    let mut optim = optimizer().init();
    for step in 0..steps() {
        mesh.world().ledger().reset();
        let grads = GradientsParams::from_grads(net.loss_on(step, rank, &device).backward(), &net);
        net = optim.step(1e-2, net, grads);
    }
    let entries = mesh.world().ledger().recent();
    let diff = max_diff(&values(&full_model(&net)?, None), expected);
    assert!(diff < 1e-4, "weights part by {diff} on {mesh}");
    Ok(entries
        .into_iter()
        .filter(|entry| &*entry.label == "blocks.1")
        .collect())
}

/// Group sizes and bytes of the unit's calls.
fn sent(entries: &[LedgerEntry], op: Op, phase: Phase) -> Vec<(usize, u64)> {
    let of = entries
        .iter()
        .filter(|entry| (entry.op, entry.phase) == (op, phase));
    of.map(|entry| (entry.group_size, entry.bytes)).collect()
}

/// Bytes of a block's cut parameters that a rank at this tensor-parallel coordinate of two has.
fn block(tp: usize) -> u64 {
    let (attention, hidden) = (3 * (8 * 4 + 4) + (4 * 8 + 8), [7, 6][tp]);
    4 * (attention + (8 * hidden + hidden) + (hidden * 8 + 8)) as u64
}

/// Bytes of the norm's scale, which every data-parallel rank holds whole.
const NORM: u64 = 4 * 8;

fn tp_coordinate(mesh: &DeviceMesh) -> usize {
    mesh.coordinate().expect("a member")[mesh.dim("tp").expect("it has one")]
}

/// Trains HSDP inside or around tensor parallelism, each on two ranks, and holds what was sent to
/// what a step needs.
fn train_hybrid(
    model: &Net,
    mesh: &DeviceMesh,
    expected: &BTreeMap<String, Vec<f32>>,
) -> Result<()> {
    let config = FullyShard::new()
        .with_shard_dims("shard")
        .with_replicate_dims("replicate");
    let entries = train(model, mesh, config, expected)?;
    let block = block(tp_coordinate(mesh));
    assert_eq!(
        sent(&entries, Op::AllGather, Phase::Forward),
        [(2, block)],
        "{mesh}"
    );
    assert_eq!(
        sent(&entries, Op::AllGather, Phase::Backward),
        [(2, block)],
        "{mesh}"
    );
    let flags = 4 * (SHARD + 1);
    assert_eq!(
        sent(&entries, Op::ReduceScatter, Phase::Backward),
        [(2, block + 2 * flags)],
        "{mesh}"
    );
    // Over the ranks that shard that of the norm; over the replicas all.
    let all_reduces = sent(&entries, Op::AllReduce, Phase::Backward);
    assert_eq!(all_reduces.len(), 2, "{mesh}: {all_reduces:?}");
    assert!(all_reduces.contains(&(2, NORM)), "{mesh}: {all_reduces:?}");
    Ok(())
}

/// Tensor parallelism outermost, between, and innermost; what shards before what replicates, and
/// behind.
#[test]
fn hsdp_trains_inside_and_around_tensor_parallelism_in_every_order_of_dimensions() {
    let model = Net::new(&Device::flex());
    let expected = trained(&model, 4);
    for names in ["replicate", "shard", "tp"].into_iter().permutations(3) {
        MeshTest::new([2, 2, 2], names).run(|mesh| train_hybrid(&model, mesh, &expected));
    }
}

/// Within a process the dimension that comes last alone.
#[cfg(feature = "mpi")]
#[test]
fn hsdp_trains_around_tensor_parallelism_on_processes() {
    let model = Net::new(&Device::flex());
    let expected = trained(&model, 4);
    let test = MeshTest::new([2, 2, 2], ["replicate", "shard", "tp"]).with_processes(4);
    let _ = test.run(|mesh| train_hybrid(&model, mesh, &expected));
}

/// Trains where 4 ranks shard and 2 keep what forward has gathered, and holds what was sent to what
/// a step needs.
fn train_over_few(
    model: &Net,
    mesh: &DeviceMesh,
    expected: &BTreeMap<String, Vec<f32>>,
) -> Result<()> {
    let config = FullyShard::new()
        .with_shard_dims("shard")
        .with_reshard_after_forward(ReshardAfterForward::Ranks(2));
    let entries = train(model, mesh, config, expected)?;
    let block = block(tp_coordinate(mesh));
    assert_eq!(
        sent(&entries, Op::AllGather, Phase::Forward),
        [(4, block)],
        "{mesh}"
    );
    assert_eq!(
        sent(&entries, Op::AllGather, Phase::Backward),
        [(2, block)],
        "{mesh}"
    );
    let flags = 4 * (SHARD + 1);
    assert_eq!(
        sent(&entries, Op::ReduceScatter, Phase::Backward),
        [(4, block + 4 * flags)],
        "{mesh}"
    );
    assert_eq!(
        sent(&entries, Op::AllReduce, Phase::Backward),
        [(4, NORM)],
        "{mesh}"
    );
    Ok(())
}

/// Backward gathers over a few ranks what forward has left of the rank's tensor-parallel part.
#[test]
fn a_part_of_a_tensor_parallel_shard_is_kept_over_a_few_ranks() {
    let model = Net::new(&Device::flex());
    let expected = trained(&model, 4);
    for (shape, names) in [([4, 2], ["shard", "tp"]), ([2, 4], ["tp", "shard"])] {
        MeshTest::new(shape, names).run(|mesh| train_over_few(&model, mesh, &expected));
    }
}

#[cfg(feature = "mpi")]
#[test]
fn a_part_of_a_tensor_parallel_shard_is_kept_over_a_few_ranks_on_processes() {
    let model = Net::new(&Device::flex());
    let expected = trained(&model, 4);
    let test = MeshTest::new([4, 2], ["shard", "tp"]).with_processes(4);
    let _ = test.run(|mesh| train_over_few(&model, mesh, &expected));
}

/// As over one dimension of so many ranks: next to each other and around another, beside one that
/// replicates.
#[test]
fn shards_over_several_dimensions_are_those_over_one() {
    let model = Net::new(&Device::flex());
    let joined = FullyShard::new().with_shard_dims(["dp", "cp"]);
    let hybrid = || joined.clone().with_replicate_dims("replicate");
    let cases: [(&[usize], &[&str], FullyShard); 6] = [
        (&[2, 2], &["dp", "cp"], joined.clone()),
        (&[2, 3], &["dp", "cp"], joined.clone()),
        (&[3, 1], &["dp", "cp"], joined.clone()),
        (&[2, 2, 2], &["dp", "tp", "cp"], joined.clone()),
        (&[2, 2, 2], &["replicate", "dp", "cp"], hybrid()),
        (&[2, 2, 2], &["dp", "replicate", "cp"], hybrid()),
    ];
    for (shape, names, config) in cases {
        let test = MeshTest::new(shape, names);
        let ranks = test.run(|mesh| Ok(data_rank(mesh).1))[0];
        let expected = trained(&model, ranks);
        test.run(|mesh| {
            let entries = train(&model, mesh, config.clone(), &expected)?;
            let size = |name: &str| mesh.size_of(mesh.dim(name).expect("it has one"));
            let gathered = sent(&entries, Op::AllGather, Phase::Forward);
            assert_eq!(
                gathered.iter().map(|(ranks, _)| *ranks).collect::<Vec<_>>(),
                [size("dp") * size("cp")],
                "{mesh}"
            );
            Ok(())
        });
    }
    // Each rank's chunk of 11 rows is that of one dimension of 4 ranks.
    MeshTest::new([2, 2], ["dp", "cp"]).run(|mesh| {
        let sharded = fully_shard(model.clone(), mesh, joined.clone())?;
        assert_eq!(
            sharded.embedding.weight.base().dims(),
            [[3, 8], [3, 8], [3, 8], [2, 8]][mesh.rank()]
        );
        Ok(())
    });
}

#[cfg(feature = "mpi")]
#[test]
fn joined_dimensions_train_on_processes() {
    let model = Net::new(&Device::flex());
    let expected = trained(&model, 4);
    MeshTest::new([2, 2], ["dp", "cp"])
        .with_processes(2)
        .run(|mesh| {
            train(
                &model,
                mesh,
                FullyShard::new().with_shard_dims(["dp", "cp"]),
                &expected,
            )
            .map(drop)
        });
}

/// By name, where the last dimension of the mesh replicates.
#[test]
fn a_model_goes_on_along_the_dimension_that_shards() {
    let model = Net::new(&Device::flex());
    MeshTest::new([3, 2], ["shard", "replicate"]).run(|mesh| {
        let config = FullyShard::new()
            .with_shard_dims("shard")
            .with_replicate_dims("replicate");
        let before = fully_shard(model.clone(), mesh, config)?;
        let layouts = |net: &Net| {
            Ok::<_, Error>(
                named_parameters(net)?
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>(),
            )
        };
        let after = remesh(before.clone(), mesh)?;
        assert_eq!(layouts(&after)?, layouts(&before)?);
        assert_eq!(values(&full_model(&after)?, None), values(&model, None));
        Ok(())
    });
}
