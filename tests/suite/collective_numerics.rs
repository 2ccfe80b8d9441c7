//! Reductions to the bit: one fixed tree, whoever comes first and however ranks are grouped.

use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Shape, Tensor, TensorData};
use burn_dtensor::Error;
use burn_dtensor::comm::{Communicator, Launch, ReduceOp, ShardedTensor, World, launch};
use burn_dtensor::placement::ShardSizes;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::launched;

/// Numbers whose sum depends on the order of addition, the same on every call.
fn values(count: usize, rank: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(rank as u64);
    (0..count)
        .map(|_| rng.random_range(-1.0f32..1.0) * 10f32.powi(rng.random_range(-4..4)))
        .collect()
}

fn tensor(values: Vec<f32>, dtype: DType, world: &World) -> DispatchTensor {
    let shape = Shape::from([values.len()]);
    let data = TensorData::new(values, shape).convert_dtype(dtype);
    Tensor::<1>::from_data(data, (world.device(), dtype)).into_dispatch()
}

fn floats(tensor: DispatchTensor) -> Vec<f32> {
    Tensor::<1>::from_dispatch(tensor)
        .into_data()
        .iter::<f32>()
        .collect()
}

fn all_reduce(comm: &Communicator, tensor: DispatchTensor) -> Result<DispatchTensor, Error> {
    Ok(comm
        .all_reduce("sum".into(), vec![tensor], ReduceOp::Sum)
        .wait()?
        .remove(0))
}

fn run<T: Send>(ranks: usize, program: impl Fn(&World) -> Result<T, Error> + Sync) -> Vec<T> {
    let config = Launch::threads(ranks).with_deadline(Duration::from_secs(60));
    launch(config, program)
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// The sum of ranks `from..to`: the larger half, a power of two, plus the rest.
fn tree(all: &[Vec<f32>], i: usize) -> f32 {
    match all {
        [one] => one[i],
        _ => {
            let (left, right) = all.split_at(all.len().next_power_of_two() / 2);
            tree(left, i) + tree(right, i)
        }
    }
}

/// Counts that end within a strip, at its edge and after it, and that ranks share or do not share.
const COUNTS: [usize; 5] = [7, 1024, 1500, 5000, 40_001];

#[test]
fn sums_follow_one_binary_tree() {
    for ranks in [2, 3, 4, 5, 6, 7, 8, 16] {
        let all: Vec<_> = (0..ranks).map(|rank| values(COUNTS[4], rank)).collect();
        run(ranks, |world| {
            let comm = world.all();
            for count in COUNTS {
                let sum = floats(all_reduce(
                    &comm,
                    tensor(all[world.rank()][..count].to_vec(), DType::F32, world),
                )?);
                assert!(
                    (0..count).all(|i| sum[i].to_bits() == tree(&all, i).to_bits()),
                    "{count} on {ranks} ranks"
                );
                let full = tensor(all[world.rank()][..count].to_vec(), DType::F32, world);
                let shard = ShardedTensor {
                    tensor: full,
                    dim: 0,
                    sizes: ShardSizes::Chunked(count),
                };
                let part = comm
                    .reduce_scatter("part".into(), vec![shard], ReduceOp::Sum)
                    .wait()?
                    .remove(0);
                let chunk = count.div_ceil(ranks);
                let start = (chunk * world.rank()).min(count);
                assert_eq!(floats(part), sum[start..(start + chunk).min(count)]);
            }
            Ok(())
        });
    }
}

#[test]
fn half_precision_rounds_once() {
    for ranks in [2, 3, 5, 8] {
        let narrow = |dtype, value: f32| match dtype {
            DType::F16 => f16::from_f32(value).to_f32(),
            _ => bf16::from_f32(value).to_f32(),
        };
        run(ranks, |world| {
            for dtype in [DType::F16, DType::BF16] {
                for op in [ReduceOp::Sum, ReduceOp::Avg] {
                    let round = |rank| {
                        values(3000, rank)
                            .into_iter()
                            .map(|value| narrow(dtype, value))
                            .collect()
                    };
                    let all: Vec<Vec<f32>> = (0..ranks).map(round).collect();
                    let own = tensor(all[world.rank()].clone(), dtype, world);
                    let reduced = floats(
                        world
                            .all()
                            .all_reduce("sum".into(), vec![own], op)
                            .wait()?
                            .remove(0),
                    );
                    let by = if op == ReduceOp::Avg {
                        ranks as f32
                    } else {
                        1.0
                    };
                    let expected: Vec<_> = (0..3000)
                        .map(|i| narrow(dtype, tree(&all, i) / by))
                        .collect();
                    assert_eq!(reduced, expected, "{dtype:?} {op:?} on {ranks} ranks");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn runs_are_repeatable_whichever_rank_is_first() {
    let first = run(4, |world| arrive_and_sum(world, 0));
    assert!(
        first.iter().all(|sum| *sum == first[0]),
        "all ranks have the same bits"
    );
    for seed in 1..20 {
        assert_eq!(run(4, |world| arrive_and_sum(world, seed)), first);
    }
}

/// Bits of a large and a small sum, after a wait that differs from rank to rank and run to run.
fn arrive_and_sum(world: &World, seed: u64) -> Result<Vec<u32>, Error> {
    let mut rng = StdRng::seed_from_u64(seed * 4 + world.rank() as u64);
    let mut bits = Vec::new();
    for count in [100, 20_000] {
        std::thread::sleep(Duration::from_micros(rng.random_range(0..2000)));
        let sum = all_reduce(
            &world.all(),
            tensor(values(count, world.rank()), DType::F32, world),
        )?;
        bits.extend(floats(sum).into_iter().map(f32::to_bits));
    }
    Ok(bits)
}

#[test]
fn four_ranks_equal_two_by_two() {
    run(4, |world| {
        let row = world.group(&[world.rank() / 2 * 2, world.rank() / 2 * 2 + 1])?;
        let column = world.group(&[world.rank() % 2, world.rank() % 2 + 2])?;
        let own = || tensor(values(20_000, world.rank()), DType::F32, world);
        let once = floats(all_reduce(&world.all(), own())?);
        let twice = floats(all_reduce(&column, all_reduce(&row, own())?)?);
        assert!(
            once.iter()
                .map(|x| x.to_bits())
                .eq(twice.iter().map(|x| x.to_bits()))
        );
        Ok(())
    });
}

/// Parameter shapes of an uneven model; none of their sizes is a multiple of 128.
fn uneven_model() -> Vec<Vec<usize>> {
    let shapes: [&[usize]; 8] = [
        &[17, 257],
        &[17],
        &[64, 312],
        &[64],
        &[64, 64],
        &[512, 64],
        &[256],
        &[64, 297],
    ];
    shapes.map(<[usize]>::to_vec).to_vec()
}

/// Small integers, so that sums over 128 ranks are exact even in f16.
fn model(rank: usize) -> Vec<Vec<f32>> {
    let fill = |shape: Vec<usize>| {
        (0..shape.iter().product())
            .map(|i: usize| ((i * 13 + rank * 5) % 8) as f32)
            .collect()
    };
    uneven_model().into_iter().map(fill).collect()
}

fn shaped(values: &[f32], shape: Vec<usize>, dtype: DType, world: &World) -> DispatchTensor {
    let flat = Tensor::<1>::from_dispatch(tensor(values.to_vec(), dtype, world));
    match shape[..] {
        [n] => flat.reshape([n]).into_dispatch(),
        [n, m] => flat.reshape([n, m]).into_dispatch(),
        _ => unreachable!("the model has vectors and matrices"),
    }
}

fn flat(tensor: DispatchTensor, dims: usize) -> Vec<f32> {
    match dims {
        1 => floats(tensor),
        _ => Tensor::<2>::from_dispatch(tensor)
            .into_data()
            .iter::<f32>()
            .collect(),
    }
}

/// Row range of rank `rank` of 128, and the elements in it.
fn rows(shape: &[usize], rank: usize) -> (usize, std::ops::Range<usize>) {
    let chunk = shape[0].div_ceil(128);
    let (start, end) = (
        (chunk * rank).min(shape[0]),
        (chunk * (rank + 1)).min(shape[0]),
    );
    let width: usize = shape[1..].iter().product();
    (end - start, start * width..end * width)
}

#[test]
fn an_uneven_model_is_gathered_on_128_ranks() {
    for dtype in [DType::F32, DType::F16] {
        run(128, |world| {
            let (full_tensors, shapes) = (model(0), uneven_model());
            let chunk = |(full, shape): (&Vec<f32>, &Vec<usize>)| {
                let (count, range) = rows(shape, world.rank());
                let mut chunk = shape.clone();
                chunk[0] = count;
                ShardedTensor {
                    tensor: shaped(&full[range], chunk, dtype, world),
                    dim: 0,
                    sizes: ShardSizes::Chunked(shape[0]),
                }
            };
            let chunks = full_tensors.iter().zip(&shapes).map(chunk).collect();
            let gathered = world.all().all_gather("model".into(), chunks).wait()?;
            for ((tensor, full), shape) in gathered.into_iter().zip(full_tensors).zip(shapes) {
                assert_eq!(flat(tensor, shape.len()), full);
            }
            Ok(())
        });
    }
}

#[test]
fn an_uneven_model_is_reduced_on_128_ranks() {
    let all: Vec<_> = (0..128).map(model).collect();
    for dtype in [DType::F32, DType::F16] {
        run(128, |world| {
            let shapes = uneven_model();
            let full = |(values, shape): (&Vec<f32>, &Vec<usize>)| ShardedTensor {
                tensor: shaped(values, shape.clone(), dtype, world),
                dim: 0,
                sizes: ShardSizes::Chunked(shape[0]),
            };
            let full_tensors = all[world.rank()].iter().zip(&shapes).map(full).collect();
            let parts = world
                .all()
                .reduce_scatter("model".into(), full_tensors, ReduceOp::Sum)
                .wait()?;
            for (index, (part, shape)) in parts.into_iter().zip(shapes).enumerate() {
                let (_, range) = rows(&shape, world.rank());
                let expected: Vec<f32> = range
                    .map(|i| all.iter().map(|model| model[index][i]).sum())
                    .collect();
                assert_eq!(flat(part, shape.len()), expected);
            }
            Ok(())
        });
    }
}

/// Of narrow integers too: the sum is as wide as it has to be.
#[test]
fn an_average_of_integers_does_not_wrap_around() {
    // Two numbers near either end of the type, and one in the middle.
    const TYPES: [(DType, i64, i64); 6] = [
        (DType::I8, i8::MIN as i64, i8::MAX as i64),
        (DType::U8, 0, u8::MAX as i64),
        (DType::I16, i16::MIN as i64, i16::MAX as i64),
        (DType::U16, 0, u16::MAX as i64),
        (DType::I32, i32::MIN as i64, i32::MAX as i64),
        (DType::U32, 0, u32::MAX as i64),
    ];
    for ranks in [2, 3, 5] {
        for (dtype, least, most) in TYPES {
            let own = |rank: usize| {
                [
                    most - rank as i64,
                    least + rank as i64,
                    (least + most) / 2 + 3 * rank as i64,
                ]
            };
            let average =
                |at: usize| (0..ranks).map(|rank| own(rank)[at]).sum::<i64>() / ranks as i64;
            run(ranks, |world| {
                let data = TensorData::new(own(world.rank()).to_vec(), [3]);
                let wide = (world.device(), DType::I64);
                let tensor = Tensor::<1, Int>::from_data(data, wide)
                    .cast(dtype)
                    .into_dispatch();
                let reduced = world
                    .all()
                    .all_reduce("avg".into(), vec![tensor], ReduceOp::Avg)
                    .wait()?
                    .remove(0);
                let found: Vec<i64> = Tensor::<1, Int>::from_dispatch(reduced)
                    .into_data()
                    .iter::<i64>()
                    .collect();
                assert_eq!(found, [0, 1, 2].map(average), "{dtype:?} on {ranks} ranks");
                Ok(())
            });
        }
    }
}
