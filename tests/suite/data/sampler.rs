//! `DistributedSampler` against brute force, and over the ranks of a mesh.

use burn::tensor::{Int, Tensor, TensorData};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::data::{BatchRows, DataError, DataShard, DistributedSampler, LastBatch};
use burn_dtensor::mesh::{DeviceMesh, MeshError};
use burn_dtensor::mesh_test;
use burn_dtensor::testing::MeshTest;

/// A sampler of single rows for one of several shards.
fn sampler(
    len: usize,
    shard: (usize, usize),
    seed: Option<u64>,
    last: LastBatch,
) -> DistributedSampler {
    let (index, count) = shard;
    let sampler = DistributedSampler::new(len, DataShard { index, count }).with_last_batch(last);
    seed.map_or(sampler, |seed| sampler.with_shuffle(seed))
}

/// The order of all rows in an epoch.
fn order(len: usize, seed: Option<u64>, epoch: usize) -> Vec<usize> {
    sampler(len, (0, 1), seed, LastBatch::Pad)
        .epoch(epoch)
        .unwrap()
        .flat_map(BatchRows::into_rows)
        .collect()
}

fn epoch(sampler: DistributedSampler, epoch: usize) -> Vec<BatchRows> {
    let batches = sampler.epoch(epoch).unwrap();
    assert_eq!(batches.len(), sampler.num_batches().unwrap());
    batches.collect()
}

fn error_of<T>(result: burn_dtensor::Result<T>) -> DataError {
    match result.err() {
        Some(Error::Data(error)) => error,
        other => panic!("no error of the data: {other:?}"),
    }
}

/// Every length up to three global batches, on 1, 2, 3 and 6 shards: the parts of each batch, in
/// the order of shards, are a chunk of the epoch's order; what lies past its end is padding.
#[test]
fn parts_of_a_batch_are_the_global_batch_on_every_number_of_shards() {
    const BATCH: usize = 6;
    for len in 1..=3 * BATCH + 1 {
        for (seed, number) in [(None, 0), (Some(3), 0), (Some(3), 7), (Some(4), 0)] {
            let order = order(len, seed, number);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..len), "each row once: {order:?}");

            for (last, shards) in [LastBatch::Drop, LastBatch::Pad]
                .into_iter()
                .flat_map(|last| [1, 2, 3, 6].map(|shards| (last, shards)))
            {
                let samplers: Vec<_> = (0..shards)
                    .map(|index| {
                        sampler(len, (index, shards), seed, last).with_global_batch_size(BATCH)
                    })
                    .collect();
                if last == LastBatch::Drop && len < BATCH {
                    let expected = DataError::NoFullBatch {
                        rows: len,
                        batch: BATCH,
                        shards,
                    };
                    samplers
                        .iter()
                        .for_each(|sampler| assert_eq!(error_of(sampler.epoch(number)), expected));
                    continue;
                }
                let parts: Vec<_> = samplers
                    .into_iter()
                    .map(|sampler| epoch(sampler, number))
                    .collect();
                let num_batches = if last == LastBatch::Drop {
                    len / BATCH
                } else {
                    len.div_ceil(BATCH)
                };
                for part in &parts {
                    assert_eq!(part.len(), num_batches);
                    assert!(
                        part.iter()
                            .all(|batch| batch.rows().len() == BATCH / shards)
                    );
                }
                for index in 0..num_batches {
                    let global: Vec<_> = (index * BATCH..(index + 1) * BATCH).collect();
                    let rows: Vec<_> = global.iter().map(|at| order[at % len]).collect();
                    let is_padding: Vec<_> = global.iter().map(|at| *at >= len).collect();
                    let at = || parts.iter().map(|part| &part[index]);
                    assert!(at().all(|batch| (batch.epoch(), batch.index()) == (number, index)));
                    assert_eq!(
                        at().flat_map(BatchRows::rows).copied().collect::<Vec<_>>(),
                        rows
                    );
                    assert_eq!(
                        at().flat_map(BatchRows::is_padding).collect::<Vec<_>>(),
                        is_padding
                    );
                    let real: Vec<_> = at().flat_map(BatchRows::real_rows).copied().collect();
                    assert_eq!(real, order[index * BATCH..len.min((index + 1) * BATCH)]);
                }
            }
        }
    }
}

/// Every length up to three global batches: the rows of the last batch are divided so that shards
/// differ by one at most, the first have more, and each row counts once.
#[test]
fn the_last_batch_is_divided_evenly_where_it_is_asked_for() {
    const BATCH: usize = 6;
    for (len, seed) in (1..=3 * BATCH + 1).flat_map(|len| [(len, None), (len, Some(3))]) {
        let order = order(len, seed, 2);
        for shards in [1, 2, 3, 6] {
            let parts = |last| -> Vec<Vec<BatchRows>> {
                (0..shards)
                    .map(|index| {
                        let sampler = sampler(len, (index, shards), seed, last);
                        epoch(sampler.with_global_batch_size(BATCH), 2)
                    })
                    .collect()
            };
            let (even, padded) = (parts(LastBatch::Even), parts(LastBatch::Pad));
            for (index, rows) in order.chunks(BATCH).enumerate() {
                let batch = |shard: usize| &even[shard][index];
                if rows.len() == BATCH {
                    (0..shards).for_each(|shard| assert_eq!(batch(shard), &padded[shard][index]));
                    continue;
                }
                let real: Vec<_> = (0..shards).map(|shard| batch(shard).real_rows()).collect();
                assert_eq!(real.concat(), rows, "{len} rows on {shards} shards");
                for (shard, real) in real.iter().enumerate() {
                    let more = usize::from(shard < rows.len() % shards);
                    assert_eq!(real.len(), rows.len() / shards + more);
                    assert_eq!(batch(shard).rows().len(), BATCH / shards);
                }
            }
        }
    }
}

#[test]
fn orders_differ_by_epoch_and_seed_and_only_a_shuffle_has_any() {
    assert!(order(50, None, 9).into_iter().eq(0..50));
    let orders = [(1, 0), (1, 1), (1, 2), (2, 0), (1 << 32 | 1, 0)]
        .map(|(seed, epoch)| order(50, Some(seed), epoch));
    for (at, order) in orders.iter().enumerate() {
        assert!(!orders[..at].contains(order));
    }
    assert_eq!(order(50, Some(1), 1), orders[1]);
}

/// The formulas of `torch.utils.data.DistributedSampler`, which counts the rows of a rank: one row
/// is one batch here.
#[test]
fn lengths_are_those_of_pytorch() {
    for ranks in 1..=9_usize {
        // Row F94: a casual dataset, a tiny one, and everything between.
        for len in (1..=40).chain([100 + ranks + 1, (ranks / 2).saturating_sub(1).max(1)]) {
            let lengths = |last| sampler(len, (ranks - 1, ranks), None, last).num_batches();
            assert_eq!(
                lengths(LastBatch::Pad).unwrap(),
                (len as f64 / ranks as f64).ceil() as usize
            );
            let kept = match len % ranks {
                0 => len / ranks,
                _ => ((len as f64 - ranks as f64) / ranks as f64).ceil() as usize,
            };
            match kept {
                // PyTorch iterates over nothing.
                0 => assert!(matches!(
                    error_of(lengths(LastBatch::Drop)),
                    DataError::NoFullBatch { .. }
                )),
                _ => assert_eq!(lengths(LastBatch::Drop).unwrap(), kept),
            }
        }
    }
}

#[test]
fn a_resumed_run_has_the_rows_that_are_left() {
    let sampler = sampler(11, (1, 2), Some(5), LastBatch::Pad).with_batch_size(2);
    let all: Vec<_> = (0..4).flat_map(|number| epoch(sampler, number)).collect();
    assert_eq!(
        (
            all.len(),
            sampler.num_batches().unwrap(),
            sampler.batch_size().unwrap()
        ),
        (12, 3, 2)
    );
    for (step, batch) in all.iter().enumerate() {
        assert_eq!(batch.step(), step);
        assert!(
            sampler
                .steps_from(step)
                .unwrap()
                .take(12 - step)
                .eq(all[step..].iter().cloned())
        );
        let tail = sampler.epoch(step / 3).unwrap().skip(step % 3);
        assert_eq!(tail.len(), 3 - step % 3);
        assert!(tail.eq(all[step..3 * (step / 3 + 1)].iter().cloned()));
    }
    assert_eq!(sampler.epoch(0).unwrap().skip(3).len(), 0);
}

#[test]
fn numbers_that_do_not_fit_are_errors() {
    let one = DistributedSampler::new(12, DataShard { index: 1, count: 4 });
    assert_eq!(
        error_of(one.with_batch_size(0).epoch(0)),
        DataError::EmptyBatch
    );
    assert_eq!(
        error_of(one.with_global_batch_size(0).epoch(0)),
        DataError::EmptyBatch
    );
    let uneven = error_of(one.with_global_batch_size(10).num_batches());
    assert_eq!(
        uneven,
        DataError::UnevenBatch {
            batch: 10,
            shards: 4
        }
    );
    assert!(
        uneven
            .to_string()
            .contains("10 rows cannot be divided evenly among 4 data shards"),
        "{uneven}"
    );
    for last in [LastBatch::Drop, LastBatch::Pad] {
        let empty = DistributedSampler::new(0, DataShard::ALL).with_last_batch(last);
        assert_eq!(
            error_of(empty.steps_from(3).map(|_| ())),
            DataError::EmptyDataset
        );
    }
    for (index, count) in [(4, 4), (0, 0)] {
        let outside = DistributedSampler::new(12, DataShard { index, count });
        assert_eq!(
            error_of(outside.batch_size()),
            DataError::NoSuchShard { index, count }
        );
    }
}

/// The rows of seed 42 and epoch 0 are those of the known order in `src/data/shuffle.rs`.
fn reads_its_rows(mesh: &DeviceMesh) -> burn_dtensor::Result<()> {
    let shard = mesh.data_shard("dp")?;
    let sampler = DistributedSampler::new(10, shard)
        .with_global_batch_size(4)
        .with_shuffle(42);
    let expected = match mesh.coordinate().expect("inside")[0] {
        0 => [[1, 9], [2, 4], [6, 0]],
        _ => [[8, 7], [5, 3], [1, 9]],
    };
    let rows = |sampler: DistributedSampler| {
        epoch(sampler, 0)
            .into_iter()
            .map(BatchRows::into_rows)
            .collect::<Vec<_>>()
    };
    assert_eq!(rows(sampler), expected[..2]);
    let padded = sampler.with_last_batch(LastBatch::Pad);
    assert_eq!(rows(padded), expected);
    // Gathered along `dp`, the rows of each rank are the global batch.
    let batch = padded
        .epoch(0)?
        .nth(1)
        .expect("the second")
        .into_rows()
        .into_iter()
        .map(|row| row as i64);
    let own = Tensor::<1, Int>::from_data(TensorData::new(batch.collect(), [2]), mesh.device());
    let global: Vec<i64> = mesh
        .slice("dp")?
        .all_gather(own, 0)?
        .into_data()
        .iter::<i64>()
        .collect();
    assert_eq!(global, [2, 4, 5, 3]);
    Ok(())
}

mesh_test!(
    ranks_of_a_mesh_read_their_rows,
    [2, 2],
    ["dp", "tp"],
    reads_its_rows
);

#[test]
fn the_named_dimensions_divide_the_data() {
    let seen = MeshTest::new([2, 1, 2, 2], ["pp", "replicate", "shard", "tp"]).run(|mesh| {
        mesh.flatten_as(["pp", "shard"], "both")?;
        let of = |names: &[&str]| {
            mesh.data_shard(names)
                .map(|shard| (shard.index, shard.count))
        };
        let slice = mesh.slice(["shard", "tp"])?;
        assert_eq!(slice.data_shard("shard")?, mesh.data_shard("shard")?);
        Ok([
            of(&["shard"])?,
            of(&["replicate", "shard"])?,
            of(&["pp", "shard"])?,
            of(&["both"])?,
            of(&["both", "tp"])?,
            of(&[])?,
        ])
    });
    for (rank, seen) in seen.into_iter().enumerate() {
        let [pp, shard, tp] = [rank / 4, rank / 2 % 2, rank % 2];
        let both = (2 * pp + shard, 4);
        assert_eq!(
            seen,
            [
                (shard, 2),
                (shard, 2),
                both,
                both,
                (4 * pp + 2 * shard + tp, 8),
                (0, 1)
            ],
            "rank {rank}"
        );
    }
}

#[test]
fn ranks_in_an_order_of_their_own_have_the_shard_of_their_coordinate() {
    let launched = launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::from_ranks(world, [2, 0, 3, 1], [2, 2], ["dp", "tp"])?;
        Ok((
            mesh.data_shard("dp")?.index,
            mesh.data_shard(["dp", "tp"])?.index,
        ))
    });
    let seen: Vec<_> = launched
        .unwrap()
        .into_iter()
        .map(|(_, seen)| seen)
        .collect();
    assert_eq!(seen, [(0, 1), (1, 3), (0, 0), (1, 2)]);
}

#[test]
fn a_shard_of_unknown_dimensions_or_outside_the_mesh_is_an_error() {
    let launched = launch(Launch::threads(3), |world| {
        let mesh = DeviceMesh::new(world, [1, 2], ["dp", "tp"])?;
        let error = |names: &[&str]| match mesh.data_shard(names) {
            Err(Error::Mesh(error)) => error,
            other => panic!("no error of the mesh: {other:?}"),
        };
        assert!(matches!(error(&["data"]), MeshError::UnknownName { name, .. } if name == "data"));
        assert!(matches!(error(&["tp", "dp"]), MeshError::NameOrder { .. }));
        assert!(matches!(
            error(&["dp", "dp"]),
            MeshError::DuplicateName { .. }
        ));
        if world.rank() == 2 {
            assert!(matches!(
                error(&["dp"]),
                MeshError::NotAMember { rank: 2, .. }
            ));
        }
        Ok(())
    });
    launched.unwrap();
}
