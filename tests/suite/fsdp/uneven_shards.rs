//! Shards as long as the placement function says, against the model on one rank.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_dtensor::fsdp::{FsdpError, ParamError, ParamInfo, ParamPlacement};
use burn_dtensor::placement::PlacementError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{max_diff, on_device, values};
use crate::parallel::support::{Net, data_rank, devices, distribute_with, full_grads, plan};

const STEPS: usize = 4;

/// A way to share `len` among `ranks`: nothing for the first or for the last, the rest unevenly.
fn uneven(len: usize, ranks: usize, first: bool) -> Vec<usize> {
    let mut lengths = vec![0; ranks];
    for rank in 1..ranks - 1 {
        lengths[rank] = rank.min(len - lengths.iter().sum::<usize>());
    }
    let rest = len - lengths.iter().sum::<usize>();
    lengths[if first { ranks - 1 } else { 0 }] = rest;
    lengths
}

/// Every parameter whose stored shape no layer reads, along a dimension that tensor parallelism
/// leaves or cuts evenly: of 11 tokens and 13 hidden values two ranks have unequal parts.
fn uneven_placement(
    ranks: usize,
) -> impl Fn(ParamInfo<'_>) -> Option<ParamPlacement> + Send + Sync + 'static {
    move |param| {
        if ["gamma", "up.bias", "head.bias"]
            .iter()
            .any(|end| param.path.ends_with(end))
        {
            return None;
        }
        let odd = param.path.starts_with("embedding") || param.path.contains("down.weight");
        let dim = if odd { param.shape.len() - 1 } else { 0 };
        Some(ParamPlacement::uneven(
            dim,
            uneven(param.shape[dim], ranks, param.path.len().is_multiple_of(2)),
        ))
    }
}

fn config(ranks: usize, reshard: ReshardAfterForward) -> FullyShard {
    FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(reshard)
        .with_shard_placement_fn(uneven_placement(ranks))
}

/// Alone, replicated, and after tensor parallelism, which cuts the same dimensions first.
fn meshes() -> [(MeshTest, usize); 5] {
    [
        (MeshTest::new([3], ["shard"]), 3),
        (MeshTest::new([2, 3], ["replicate", "shard"]), 3),
        (MeshTest::new([2, 2], ["shard", "tp"]), 2),
        (MeshTest::new([2, 3], ["tp", "shard"]), 3),
        (MeshTest::new([2, 2, 2], ["replicate", "shard", "tp"]), 2),
    ]
}

fn distributed(model: Net, mesh: &DeviceMesh, config: FullyShard) -> Result<Net> {
    match mesh.names().iter().any(|name| name == "tp") {
        true => distribute_with(model, mesh, plan(), config),
        false => fully_shard(model, mesh, config),
    }
}

#[test]
fn a_model_of_uneven_shards_trains_as_the_full_one() {
    let model = Net::new(&Device::flex());
    for (mesh_test, ranks) in meshes() {
        mesh_test.run(|mesh| {
            let (rank, data_ranks) = data_rank(mesh);
            for device in devices(mesh) {
                let mut plain = on_device(&model, &device);
                let mut own = distributed(
                    plain.clone(),
                    mesh,
                    config(ranks, ReshardAfterForward::Always),
                )?;
                let (mut plain_optim, mut optim) =
                    (AdamWConfig::new().init(), AdamWConfig::new().init());
                for step in 0..STEPS {
                    let losses = (0..data_ranks).map(|rank| plain.loss_on(step, rank, &device));
                    let loss = losses.reduce(|a, b| a + b).expect("a rank") / data_ranks as f32;
                    let full = GradientsParams::from_grads(loss.backward(), &plain);
                    let mut grads = GradientsParams::from_grads(
                        own.loss_on(step, rank, &device).backward(),
                        &own,
                    );
                    let expected = values(&plain, Some(&full));
                    assert!(
                        max_diff(&full_grads(&own, &grads)?, &expected) < 1e-5,
                        "step {step} on {mesh}"
                    );
                    let norm = expected
                        .values()
                        .flatten()
                        .map(|x| f64::from(*x).powi(2))
                        .sum::<f64>()
                        .sqrt();
                    let found = clip_grad_norm(&own, &mut grads, f64::MAX, NormType::L2)?;
                    assert!(
                        (norm - found).abs() < 1e-4 * norm,
                        "step {step} on {mesh}: {found} for {norm}"
                    );
                    plain = plain_optim.step(1e-3, plain, full);
                    own = optim.step(1e-3, own, grads);
                }
                let diff = max_diff(&values(&full_model(&own)?, None), &values(&plain, None));
                assert!(diff < 1e-3, "weights part by {diff} on {mesh}");
            }
            Ok(())
        });
    }
}

/// To the bit, since every element is averaged over the same ranks in the same order.
#[test]
fn uneven_shards_hold_what_even_ones_do_whenever_units_are_freed() {
    let model = Net::new(&Device::flex());
    MeshTest::new([4], ["shard"]).run(|mesh| {
        let (rank, _) = data_rank(mesh);
        let [device, _] = devices(mesh);
        let trained = |config: FullyShard| {
            let mut model = fully_shard(on_device(&model, &device), mesh, config)?;
            let mut optim = AdamWConfig::new().init();
            for step in 0..STEPS {
                let grads = GradientsParams::from_grads(
                    model.loss_on(step, rank, &device).backward(),
                    &model,
                );
                model = optim.step(1e-2, model, grads);
            }
            Ok::<_, Error>(values(&full_model(&model)?, None))
        };
        let even = trained(FullyShard::new().with_units(["blocks.*"]))?;
        for reshard in [
            ReshardAfterForward::Always,
            ReshardAfterForward::Never,
            ReshardAfterForward::Ranks(2),
        ] {
            assert_eq!(trained(config(4, reshard))?, even, "{reshard:?}");
        }
        Ok(())
    });
}

#[test]
fn a_rank_holds_the_length_that_it_was_given() {
    let model = LinearConfig::new(7, 3).init(&Device::flex());
    MeshTest::new([2, 3], ["replicate", "shard"]).run(|mesh| {
        let lengths = [[2, 0, 5], [1, 2, 0]];
        let placement = move |param: ParamInfo<'_>| {
            Some(ParamPlacement::uneven(
                0,
                lengths[usize::from(param.path == "bias")],
            ))
        };
        let sharded = fully_shard(
            model.clone(),
            mesh,
            FullyShard::new().with_shard_placement_fn(placement),
        )?;
        let at = mesh.coordinate().expect("a member")[1];
        let start: usize = lengths[0][..at].iter().sum();
        assert_eq!(sharded.weight.base().dims(), [lengths[0][at], 3]);
        if lengths[0][at] > 0 {
            let expected = model
                .weight
                .val()
                .narrow(0, start, lengths[0][at])
                .into_data();
            assert_eq!(sharded.weight.base().into_data(), expected);
        }
        let shard = sharded.weight.shard().expect("a shard");
        assert_eq!(
            shard.layout().to_string(),
            "[R, S(0); mesh dim 1 sizes 2 + 0 + 5]"
        );
        assert_eq!(
            sharded.bias.as_ref().expect("it has one").base().dims(),
            [lengths[1][at]]
        );
        assert_eq!(values(&full_model(&sharded)?, None), values(&model, None));
        Ok(())
    });
}

/// On every rank, before anything moves.
#[test]
fn wrong_lengths_are_typed_errors_that_name_the_parameter() {
    let model = LinearConfig::new(7, 3).init(&Device::flex());
    let refused = |mesh: &DeviceMesh, lengths: &'static [usize]| {
        let placement = move |param: ParamInfo<'_>| {
            (param.path == "weight").then(|| ParamPlacement::uneven(0, lengths))
        };
        let error = fully_shard(
            model.clone(),
            mesh,
            FullyShard::new().with_shard_placement_fn(placement),
        );
        match error.map(drop) {
            Err(Error::Fsdp(FsdpError::InvalidShardSizes {
                param,
                dim,
                mesh_dim,
                problem,
            })) => {
                assert_eq!((&*param, dim, &*mesh_dim), ("weight", 0, "shard"));
                let text = FsdpError::InvalidShardSizes {
                    param,
                    dim,
                    mesh_dim,
                    problem: problem.clone(),
                }
                .to_string();
                assert!(
                    text.starts_with(
                        "parameter `weight` cannot be sharded along dimension 0 over the ranks of mesh dimension \
                         `shard`: "
                    ),
                    "{text}"
                );
                assert!(
                    text.contains("Give one size per rank")
                        || text.contains("Give sizes that add up"),
                    "{text}"
                );
                problem
            }
            other => panic!("{other:?}"),
        }
    };
    MeshTest::new([2, 3], ["replicate", "shard"]).run(|mesh| {
        let found = refused(mesh, &[3, 4]);
        assert_eq!(
            found,
            PlacementError::ShardSizeCount {
                mesh_dim: 1,
                ranks: 3,
                lengths: vec![3, 4]
            }
        );
        let found = refused(mesh, &[3, 3, 3]);
        assert_eq!(
            found,
            PlacementError::ShardSizeSum {
                mesh_dim: 1,
                dim: 0,
                lengths: vec![3, 3, 3],
                len: 7
            }
        );
        assert_eq!(mesh.world().ledger().total(|_| true).calls, 0);
        Ok(())
    });
}

/// Lengths for pieces that tensor parallelism makes 7 and 6 long fit one of them at most.
#[test]
fn lengths_of_unequal_tensor_parallel_shards_are_refused_on_every_rank() {
    let model = Net::new(&Device::flex());
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let fitting = |param: ParamInfo<'_>| {
            (param.path == "blocks.0.down.weight")
                .then(|| ParamPlacement::uneven(0, [1, param.shape[0] - 1]))
        };
        let [device, _] = devices(mesh);
        let config = FullyShard::new().with_shard_placement_fn(fitting);
        let error = distribute_with(on_device(&model, &device), mesh, plan(), config).map(drop);
        let Err(Error::Fsdp(FsdpError::InvalidShardSizes { param, problem, .. })) = error else {
            panic!("{error:?}")
        };
        assert_eq!(param, "blocks.0.down.weight");
        assert!(
            matches!(problem, PlacementError::ShardSizeSum { dim: 0, .. }),
            "{problem}"
        );
        Ok(())
    });
}

#[test]
fn ranks_whose_functions_disagree_are_told() {
    let model: Linear = LinearConfig::new(7, 3).init(&Device::flex());
    let error = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        let lengths = [[3, 4], [4, 3]][mesh.rank()];
        let placement = move |param: ParamInfo<'_>| {
            (param.path == "weight").then(|| ParamPlacement::uneven(0, lengths))
        };
        fully_shard(
            model.clone(),
            mesh,
            FullyShard::new().with_shard_placement_fn(placement),
        )
        .map(drop)
    });
    let Error::Param(ParamError::LayoutsDiffer {
        param,
        rank: 0,
        layout,
        other_rank: 1,
        other_layout,
        ..
    }) = &error.cause
    else {
        panic!("{error}")
    };
    assert_eq!(param, "weight");
    assert!(
        layout.contains("3 + 4") && other_layout.contains("4 + 3"),
        "{error}"
    );
}
