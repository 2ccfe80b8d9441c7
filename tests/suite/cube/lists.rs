//! Lists of tensors through one all-gather or reduce-scatter.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Int, Shape, Tensor, TensorData};
use burn_dtensor::comm::{Op, PackStats, ReduceOp, ShardedTensor, World};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::gpu;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::run;

/// A list's tensor: its shape, and the cut dimension.
type FullTensor = ([usize; 2], usize);

const LISTS: [&[FullTensor]; 3] = [
    &[([8, 12], 0), ([12, 8], 1)],
    &[
        ([7, 3], 0),
        ([5, 11], 1),
        ([1, 1], 0),
        ([300, 13], 0),
        ([0, 4], 0),
    ],
    &[([2, 64], 0), ([1, 7], 1), ([64, 33], 1), ([9, 2], 0)],
];

/// Even or as even as can be, or ragged: everything but one element on the last rank.
fn shard_sizes(len: usize, ranks: usize, uneven: bool) -> ShardSizes {
    if !uneven || len == 0 {
        return ShardSizes::Chunked(len);
    }
    let mut lengths = vec![0; ranks];
    (lengths[0], lengths[ranks - 1]) = (1, len - 1);
    ShardSizes::Uneven(lengths.into())
}

/// Numbers whose sum depends on the order of addition.
fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count)
        .map(|_| rng.random_range(-1.0f32..1.0) * 10f32.powi(rng.random_range(-3..3)))
        .collect()
}

fn full(([rows, columns], _): FullTensor, seed: u64, dtype: DType, device: &Device) -> Tensor<2> {
    let data = TensorData::new(values(rows * columns, seed), Shape::new([rows, columns]))
        .convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

fn part(tensor: Tensor<2>, dim: usize, sizes: &ShardSizes, world: &World) -> Tensor<2> {
    tensor.slice_dim(dim, sizes.range(world.size(), world.rank()))
}

fn floats(tensor: DispatchTensor) -> (Vec<usize>, Vec<u32>) {
    let tensor = Tensor::<2>::from_dispatch(tensor);
    let bits = |value: f32| if value == 0.0 { 0 } else { value.to_bits() };
    (
        tensor.dims().to_vec(),
        tensor.into_data().iter::<f32>().map(bits).collect(),
    )
}

type Found = Vec<(Vec<usize>, Vec<u32>)>;

/// What every rank has after an all-gather of a list, twice over, and then a reduce-scatter.
fn collectives(
    ranks: usize,
    list: &[FullTensor],
    uneven: bool,
    dtype: DType,
    op: ReduceOp,
    device: &Device,
) -> Vec<Found> {
    run(ranks, device, |world| {
        let comm = world.all();
        let sharded = |seed: u64, chunk: bool| -> Vec<_> {
            let tensor = |(index, full_of): (usize, &FullTensor)| {
                let (shape, dim) = *full_of;
                let sizes = shard_sizes(shape[dim], ranks, uneven);
                let tensor = full(*full_of, seed + index as u64, dtype, world.device());
                let tensor = if chunk {
                    part(tensor, dim, &sizes, world)
                } else {
                    tensor
                };
                ShardedTensor {
                    tensor: tensor.into_dispatch(),
                    dim,
                    sizes,
                }
            };
            list.iter().enumerate().map(tensor).collect()
        };
        // Both are under way at once, and waited for in the other order.
        let first = comm.all_gather("first".into(), sharded(1, true));
        let second = comm.all_gather("second".into(), sharded(100, true));
        let (second, first) = (second.wait()?, first.wait()?);
        let parts = comm
            .reduce_scatter(
                "sum".into(),
                sharded(1000 + 50 * world.rank() as u64, false),
                op,
            )
            .wait()?;
        Ok(first
            .into_iter()
            .chain(second)
            .chain(parts)
            .map(floats)
            .collect())
    })
}

#[test]
fn lists_are_those_of_flex() {
    for ranks in [2, 3, 4] {
        for (index, list) in LISTS.iter().enumerate() {
            let op = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min][index];
            let uneven = (ranks + index).is_multiple_of(2);
            let of = |device: &Device| collectives(ranks, list, uneven, DType::F32, op, device);
            assert_eq!(of(&gpu()), of(&Device::flex()), "{ranks} ranks, {list:?}");
        }
    }
}

#[test]
fn means_and_products_are_those_of_flex() {
    for (ranks, op) in [(3, ReduceOp::Avg), (4, ReduceOp::Product)] {
        let of = |device: &Device| collectives(ranks, LISTS[1], false, DType::F32, op, device);
        assert_eq!(of(&gpu()), of(&Device::flex()), "{op:?}");
    }
}

#[test]
fn halves_are_those_of_flex() {
    if !gpu().supports_dtype(DType::F16) {
        return;
    }
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        let of = |device: &Device| collectives(3, LISTS[2], true, DType::F16, op, device);
        assert_eq!(of(&gpu()), of(&Device::flex()), "{op:?}");
    }
}

#[test]
fn strided_tensors_are_gathered_as_they_look() {
    run(2, &gpu(), |world| {
        let of_rank = |rank: usize| (0..6).map(|i| (10 * rank + i) as f32).collect::<Vec<_>>();
        let rows = Tensor::<2>::from_data(
            TensorData::new(of_rank(world.rank()), [2, 3]),
            world.device(),
        );
        let shard = ShardedTensor {
            tensor: rows.transpose().into_dispatch(),
            dim: 0,
            sizes: ShardSizes::Chunked(6),
        };
        let full_tensors = world
            .all()
            .all_gather("strided".into(), vec![shard; 2])
            .wait()?;
        for full in full_tensors {
            let values: Vec<i32> = Tensor::<2>::from_dispatch(full)
                .into_data()
                .iter::<i32>()
                .collect();
            assert_eq!(values, [0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15]);
        }
        assert_eq!(world.ledger().copied().launches, 2);
        Ok(())
    });
}

#[test]
fn a_list_takes_one_kernel_before_the_ranks_meet_and_one_after() {
    run(3, &gpu(), |world| {
        let comm = world.all();
        let tensor = |rows: usize| Tensor::<2>::ones([rows, 2], world.device()).into_dispatch();
        let shards = [1, 2, 5].map(|rows| ShardedTensor {
            tensor: tensor(rows),
            dim: 0,
            sizes: ShardSizes::Chunked(3 * rows),
        });
        comm.all_gather("gather".into(), shards.to_vec()).wait()?;
        let PackStats {
            launches,
            bytes,
            padding,
        } = world.ledger().copied();
        // 8 rows of 2 floats go in, 24 come out; each part is padded to the device's alignment.
        assert_eq!((launches, bytes), (2, (8 + 24) * 8));
        assert!(padding > 0 && padding.is_multiple_of(8), "{padding}");

        let full_tensors = [4, 6].map(|rows| ShardedTensor {
            tensor: tensor(rows),
            dim: 0,
            sizes: ShardSizes::Chunked(rows),
        });
        comm.reduce_scatter("reduce".into(), full_tensors.to_vec(), ReduceOp::Sum)
            .wait()?;
        assert_eq!(world.ledger().copied().launches, 4);
        assert_eq!(world.ledger().calls(Op::AllGather), 1);
        let backends = world.ledger().backends();
        assert!(
            backends.iter().all(|name| name.starts_with("cubecl<")) && backends.len() == 1,
            "{backends:?}"
        );
        Ok(())
    });
}

#[test]
fn what_kernels_do_not_copy_goes_through_burns_operations() {
    run(2, &gpu(), |world| {
        let comm = world.all();
        let start = 2 * world.rank() as i64;
        let ints = Tensor::<1, Int>::arange(start..start + 2, world.device());
        let shard = |tensor: DispatchTensor| ShardedTensor {
            tensor,
            dim: 0,
            sizes: ShardSizes::Chunked(4),
        };

        let alone = vec![shard(ints.clone().float().into_dispatch())];
        let full = comm.all_gather("alone".into(), alone).wait()?.remove(0);
        let values: Vec<i32> = Tensor::<1>::from_dispatch(full)
            .into_data()
            .iter::<i32>()
            .collect();
        assert_eq!(values, [0, 1, 2, 3]);

        let mixed = vec![
            shard(ints.clone().float().into_dispatch()),
            shard(ints.into_dispatch()),
        ];
        let full = comm.all_gather("mixed".into(), mixed).wait()?.remove(1);
        let values: Vec<i32> = Tensor::<1, Int>::from_dispatch(full)
            .into_data()
            .iter::<i32>()
            .collect();
        assert_eq!(values, [0, 1, 2, 3]);
        assert_eq!(world.ledger().copied(), PackStats::default());
        Ok(())
    });
}
