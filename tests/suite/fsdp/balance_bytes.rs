//! `FullyShard::with_balanced_bytes`: ranks that hold as many bytes of each unit, beside chunks and
//! the unsharded model.

use std::collections::BTreeMap;

use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::fsdp::{NamedParameter, ParamInfo, ParamPlacement};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{max_diff, on_device, values};
use crate::parallel::support::{Net, data_rank, distribute_with, plan};

const STEPS: usize = 10;

/// The bytes of each unit's cut parameters that a rank holds, and the largest row among them.
fn held(params: &[NamedParameter]) -> BTreeMap<String, (usize, usize)> {
    let mut units: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for param in params {
        let Some(dim) = param.spec.placements()[0].shard_dim() else {
            continue;
        };
        let (local, full) = (param.spec.local_shape(), param.spec.shape());
        let (held, largest) = units.entry(param.unit.to_string()).or_default();
        *held += 4 * local.num_elements();
        *largest = (4 * full.num_elements() / full[dim]).max(*largest);
    }
    units
}

/// By how many bytes the rank that holds most has more than the one that holds least.
fn spread(held: impl Iterator<Item = usize> + Clone) -> usize {
    held.clone().max().expect("a rank") - held.min().expect("a rank")
}

#[test]
fn ranks_hold_the_bytes_of_a_unit_but_for_one_row() {
    let model = Net::new(&Device::flex());
    for ranks in [1, 2, 3, 5, 8] {
        let all = MeshTest::new([ranks], ["shard"]).run(|mesh| {
            let shard = |config: FullyShard| {
                let sharded = fully_shard(
                    on_device(&model, mesh.device()),
                    mesh,
                    config.with_units(["blocks.*"]),
                )?;
                assert_eq!(values(&full_model(&sharded)?, None), values(&model, None));
                Ok::<_, Error>(held(&named_parameters(&sharded)?))
            };
            Ok((
                shard(FullyShard::new())?,
                shard(FullyShard::new().with_balanced_bytes())?,
            ))
        });
        for (unit, (_, row)) in &all[0].1 {
            let chunks = spread(all.iter().map(|(chunks, _)| chunks[unit].0));
            let balanced = spread(all.iter().map(|(_, balanced)| balanced[unit].0));
            assert!(
                balanced <= *row,
                "{unit} on {ranks}: {balanced} bytes apart, a row has {row}"
            );
            // Of the 13 rows of some the last of 8 ranks have none.
            assert!(
                ranks < 8 || chunks > *row,
                "{unit}: {chunks} bytes apart in chunks"
            );
        }
    }
}

/// Lengths that a placement gives stay, and the others make up for them; so do what stays whole and
/// other dimensions.
#[test]
fn what_the_placement_function_says_is_kept() {
    let model = Net::new(&Device::flex());
    let all = MeshTest::new([2], ["shard"]).run(|mesh| {
        let config = FullyShard::new()
            .with_balanced_bytes()
            .with_shard_placement_fn(|param: ParamInfo<'_>| match param.path {
                "head.weight" => Some(ParamPlacement::uneven(0, [8, 0])),
                "embedding.weight" => Some(Placement::Shard(1).into()),
                "norm.beta" => Some(Placement::Replicate.into()),
                _ => None,
            });
        let sharded = fully_shard(
            on_device(&model, mesh.device()),
            mesh,
            config.with_units(["blocks.*"]),
        )?;
        assert_eq!(
            sharded.head.weight.base().dims(),
            [[8, 11], [0, 11]][mesh.rank()]
        );
        assert_eq!(
            sharded.embedding.weight.base().dims()[0],
            11,
            "cut along the second dimension"
        );
        assert_eq!(
            sharded
                .norm
                .beta
                .as_ref()
                .expect("it has one")
                .base()
                .dims(),
            [8]
        );
        assert_eq!(values(&full_model(&sharded)?, None), values(&model, None));
        Ok(held(&named_parameters(&sharded)?)["root"])
    });
    let row = all[0].1;
    assert!(spread(all.iter().map(|(held, _)| *held)) <= row, "{all:?}");
}

/// Alone, replicated, and after tensor parallelism, some of whose parts are of unequal lengths.
#[test]
fn balanced_shards_train_as_the_full_model_and_send_its_bytes() {
    let model = Net::new(&Device::flex());
    for (shape, names) in [
        (&[3][..], &["shard"][..]),
        (&[5], &["shard"]),
        (&[2, 3], &["replicate", "shard"]),
        (&[3, 2], &["shard", "tp"]),
    ] {
        MeshTest::new(shape, names).run(|mesh| {
            let (device, (rank, data_ranks)) = (mesh.device().clone().autodiff(), data_rank(mesh));
            let mut plain = on_device(&model, &device);
            let has_tp = names.contains(&"tp");
            let distribute = |config: FullyShard| match has_tp {
                true => distribute_with(on_device(&model, &device), mesh, plan(), config),
                false => fully_shard(on_device(&model, &device), mesh, config),
            };
            let config = FullyShard::new()
                .with_units(["blocks.*"])
                .with_reshard_after_forward(ReshardAfterForward::Always);
            let sent = |net: &Net| {
                mesh.world().ledger().reset();
                net.loss_on(0, rank, &device).backward();
                let ledger = mesh.world().ledger();
                let calls = [
                    (Op::AllGather, Phase::Forward),
                    (Op::AllGather, Phase::Backward),
                    (Op::ReduceScatter, Phase::Backward),
                ];
                calls.map(|(op, phase)| (ledger.calls_in(op, phase), ledger.bytes_in(op, phase)))
            };
            let chunks = distribute(config.clone())?;
            let mut own = distribute(config.with_balanced_bytes())?;
            assert_eq!(sent(&own), sent(&chunks), "on {mesh}");
            let (mut plain_optim, mut optim) =
                (AdamWConfig::new().init(), AdamWConfig::new().init());
            for step in 0..STEPS {
                let losses = (0..data_ranks).map(|rank| plain.loss_on(step, rank, &device));
                let loss = losses.reduce(|a, b| a + b).expect("a rank") / data_ranks as f32;
                let grads = GradientsParams::from_grads(loss.backward(), &plain);
                plain = plain_optim.step(1e-3, plain, grads);
                let grads =
                    GradientsParams::from_grads(own.loss_on(step, rank, &device).backward(), &own);
                own = optim.step(1e-3, own, grads);
            }
            let diff = max_diff(&values(&full_model(&own)?, None), &values(&plain, None));
            assert!(diff < 1e-3, "weights part by {diff} on {mesh}");
            Ok(())
        });
    }
}

/// One parameter has one layout, also where what another one weighs differs between tensor-parallel
/// ranks.
#[test]
fn tensor_parallel_ranks_choose_the_same_lengths() {
    let rows = |len| {
        LinearConfig::new(3, len)
            .with_bias(false)
            .init(&Device::flex())
    };
    let model = vec![rows(5), rows(2)];
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let styles = Plan::new()
            .with_style("0", Style::colwise())
            .with_style("1", Style::rowwise());
        let model = parallelize(on_device(&model, mesh.device()), &mesh.slice("tp")?, styles)?;
        let model = fully_shard(
            model,
            &mesh.slice("shard")?,
            FullyShard::new().with_balanced_bytes(),
        )?;
        for layer in &model {
            let layout = layer
                .weight
                .shard()
                .expect("it is sharded")
                .spec()
                .layout()
                .to_string();
            let all = mesh
                .world()
                .all()
                .all_gather_object("layouts".into(), &layout)?;
            assert!(all.iter().all(|other| *other == layout), "{all:?}");
            layer.weight.shard().expect("it is sharded").full_tensor()?;
        }
        Ok(())
    });
}
