//! Collectives against brute force over plain vectors.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Float, Int, Shape, Tensor, TensorData};
use burn_dtensor::Error;
use burn_dtensor::comm::{Call, Communicator, Launch, Op, Phase, ReduceOp, Sharded, TensorMeta, World, launch};
use burn_dtensor::placement::Cut;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const DTYPES: [DType; 7] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::Bool(burn::tensor::BoolStore::Native),
];

/// A tensor as the reference sees it: small integers, which every dtype holds exactly.
#[derive(Debug, Clone, PartialEq)]
struct Plain {
    shape: Vec<usize>,
    values: Vec<i64>,
}

impl Plain {
    /// Values that differ between ranks and elements, and survive f16, bf16 and products.
    fn sample(shape: &[usize], rank: usize, dtype: DType) -> Self {
        let range = if dtype.is_bool() { 2 } else { 5 };
        let count: usize = shape.iter().product();
        let values = (0..count).map(|i| ((i * 7 + i / 3 + rank * 11 + (i * rank) % 3) % range) as i64);
        Self { shape: shape.to_vec(), values: values.collect() }
    }

    fn strides(&self) -> Vec<usize> {
        (0..self.shape.len()).map(|d| self.shape[d + 1..].iter().product()).collect()
    }

    /// The elements whose index in `dim` lies in `range`.
    fn narrow(&self, dim: usize, range: Range<usize>) -> Self {
        let stride = self.strides()[dim];
        let inside = |i: &usize| range.contains(&(i / stride % self.shape[dim]));
        let values = (0..self.values.len()).filter(inside).map(|i| self.values[i]).collect();
        let mut shape = self.shape.clone();
        shape[dim] = range.len();
        Self { shape, values }
    }

    fn tensor(&self, dtype: DType, device: &Device) -> DispatchTensor {
        fn build<const D: usize>(plain: &Plain, dtype: DType, device: &Device) -> DispatchTensor {
            let data = TensorData::new(plain.values.clone(), Shape::from(plain.shape.clone())).convert_dtype(dtype);
            if dtype.is_bool() {
                Tensor::<D, Bool>::from_data(data, device).into_dispatch()
            } else if dtype.is_float() {
                Tensor::<D, Float>::from_data(data, (device, dtype)).into_dispatch()
            } else {
                Tensor::<D, Int>::from_data(data, (device, dtype)).into_dispatch()
            }
        }
        match self.shape.len() {
            1 => build::<1>(self, dtype, device),
            2 => build::<2>(self, dtype, device),
            3 => build::<3>(self, dtype, device),
            _ => unreachable!(),
        }
    }

    fn of(tensor: DispatchTensor) -> Self {
        let data = into_data(tensor);
        let shape = data.shape().to_vec();
        let values = data.iter::<f64>().map(|value| value as i64).collect();
        Self { shape, values }
    }

    fn reduced(all: &[Self], op: ReduceOp, dtype: DType) -> Self {
        let at = |i: usize| -> i64 {
            let values = all.iter().map(|plain| plain.values[i]);
            match op {
                ReduceOp::Sum => values.sum(),
                ReduceOp::Avg if dtype.is_float() => unreachable!("not an integer"),
                ReduceOp::Avg => values.sum::<i64>() / all.len() as i64,
                ReduceOp::Min => values.min().unwrap(),
                ReduceOp::Max => values.max().unwrap(),
                ReduceOp::Product => values.product(),
            }
        };
        Self { shape: all[0].shape.clone(), values: (0..all[0].values.len()).map(at).collect() }
    }
}

fn into_data(tensor: DispatchTensor) -> TensorData {
    fn read<const D: usize>(tensor: DispatchTensor) -> TensorData {
        let dtype = tensor.dtype();
        if dtype.is_bool() {
            Tensor::<D, Bool>::from_dispatch(tensor).into_data()
        } else if dtype.is_float() {
            Tensor::<D, Float>::from_dispatch(tensor).into_data()
        } else {
            Tensor::<D, Int>::from_dispatch(tensor).into_data()
        }
    }
    match tensor.shape().num_dims() {
        1 => read::<1>(tensor),
        2 => read::<2>(tensor),
        3 => read::<3>(tensor),
        _ => unreachable!(),
    }
}

/// Ceil-sized chunks, the tail ones possibly empty: `torch.chunk`.
fn chunk(len: usize, parts: usize, index: usize) -> Range<usize> {
    let size = len.div_ceil(parts);
    (index * size).min(len)..((index + 1) * size).min(len)
}

/// The cuts of a length that are tried: into chunks, and ragged, with nothing on the first of several
/// ranks and most on the last.
fn cuts(len: usize, ranks: usize) -> [Cut; 2] {
    let mut lengths: Vec<usize> = (0..ranks).map(|rank| usize::from(rank > 0 && rank <= len)).collect();
    lengths[ranks - 1] += len - lengths.iter().sum::<usize>();
    [Cut::Chunks(len), Cut::Lengths(lengths.into())]
}

/// What a rank holds, by the definition.
fn held(cut: &Cut, parts: usize, index: usize) -> Range<usize> {
    match cut {
        Cut::Chunks(len) => chunk(*len, parts, index),
        Cut::Lengths(lengths) => {
            let before = lengths.iter().take(index).sum::<usize>();
            before..before + lengths[index]
        }
    }
}

/// Shapes with even, uneven and empty chunks for groups of up to 8.
fn shapes() -> Vec<Vec<usize>> {
    vec![vec![17], vec![1], vec![8, 6], vec![5, 3], vec![2, 70], vec![3, 4, 5], vec![4, 2, 9]]
}

/// Every case: shape, cut dimension and dtype.
fn cases() -> impl Iterator<Item = (Vec<usize>, usize, DType)> {
    shapes().into_iter().flat_map(|shape| {
        (0..shape.len()).flat_map(move |dim| {
            let shape = shape.clone();
            DTYPES.into_iter().map(move |dtype| (shape.clone(), dim, dtype))
        })
    })
}

fn run(ranks: usize, program: impl Fn(&World) -> Result<(), Error> + Sync) {
    launch(Launch::threads(ranks).deadline(Duration::from_secs(60)), program).unwrap_or_else(|error| panic!("{error}"));
}

/// Runs `program` on the group of all ranks, for every group size to be tested.
fn on_groups(program: impl Fn(&World, &Arc<dyn Communicator>) -> Result<(), Error> + Sync) {
    for ranks in [1, 2, 3, 4, 5, 8] {
        run(ranks, |world| program(world, &world.all()));
    }
}

fn piece(whole: &Plain, dim: usize, cut: Cut, dtype: DType, comm: &dyn Communicator, device: &Device) -> Sharded {
    let range = held(&cut, comm.group().size(), comm.group().rank());
    Sharded { tensor: whole.narrow(dim, range).tensor(dtype, device), dim, cut }
}

#[test]
fn all_gather_restores_the_whole() {
    on_groups(|world, comm| {
        for (shape, dim, dtype) in cases() {
            for cut in cuts(shape[dim], comm.group().size()) {
                let whole = Plain::sample(&shape, 0, dtype);
                let piece = piece(&whole, dim, cut.clone(), dtype, comm.as_ref(), world.device());
                let gathered = comm.all_gather(Call::default(), vec![piece]).wait()?.remove(0);
                assert_eq!(gathered.dtype(), dtype);
                assert_eq!(Plain::of(gathered), whole, "{shape:?} dim {dim} {cut:?} {dtype:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn reduce_scatter_gives_each_rank_its_part_of_the_sum() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for (shape, dim, dtype) in cases() {
            for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
                if dtype.is_bool() && op == ReduceOp::Sum {
                    continue;
                }
                for cut in cuts(shape[dim], size) {
                    let all: Vec<_> = (0..size).map(|rank| Plain::sample(&shape, rank, dtype)).collect();
                    let tensor = all[rank].tensor(dtype, world.device());
                    let whole = Sharded { tensor, dim, cut: cut.clone() };
                    let part = comm.reduce_scatter(Call::default(), vec![whole], op).wait()?.remove(0);
                    let expected = Plain::reduced(&all, op, dtype).narrow(dim, held(&cut, size, rank));
                    assert_eq!(part.dtype(), dtype);
                    assert_eq!(Plain::of(part), expected, "{shape:?} dim {dim} {cut:?} {dtype:?} {op:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn all_reduce_gives_every_rank_the_same() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        let big = vec![vec![40_003], vec![150, 300]];
        for shape in shapes().into_iter().chain(big) {
            for dtype in DTYPES {
                for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product] {
                    let no_sum = matches!(op, ReduceOp::Sum | ReduceOp::Avg) && dtype.is_bool();
                    let rounded = op == ReduceOp::Avg && dtype.is_float();
                    let large = op == ReduceOp::Product && size > 4;
                    if no_sum || rounded || large {
                        continue;
                    }
                    let all: Vec<_> = (0..size).map(|rank| Plain::sample(&shape, rank, dtype)).collect();
                    let tensor = all[rank].tensor(dtype, world.device());
                    let reduced = comm.all_reduce(Call::default(), vec![tensor], op).wait()?.remove(0);
                    assert_eq!(reduced.dtype(), dtype);
                    assert_eq!(Plain::of(reduced), Plain::reduced(&all, op, dtype), "{shape:?} {dtype:?} {op:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn the_average_is_the_sum_over_the_number_of_ranks() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for dtype in [DType::F32, DType::F64] {
            let tensor = Plain::sample(&[33], rank, dtype).tensor(dtype, world.device());
            let average = comm.all_reduce(Call::default(), vec![tensor], ReduceOp::Avg).wait()?.remove(0);
            let sums = (0..33).map(|i| (0..size).map(|r| Plain::sample(&[33], r, dtype).values[i]).sum::<i64>());
            let expected: Vec<f64> = match dtype {
                DType::F32 => sums.map(|sum| (sum as f32 / size as f32) as f64).collect(),
                _ => sums.map(|sum| sum as f64 / size as f64).collect(),
            };
            assert_eq!(into_data(average).iter::<f64>().collect::<Vec<_>>(), expected);
        }
        Ok(())
    });
}

#[test]
fn all_to_all_moves_the_cut_to_another_dimension() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for (shape, dim, dtype) in cases() {
            for to_dim in (0..shape.len()).filter(|to_dim| *to_dim != dim) {
                let pairs = cuts(shape[dim], size).map(|cut| cuts(shape[to_dim], size).map(|to| (cut.clone(), to)));
                for (cut, to_cut) in pairs.into_iter().flatten() {
                    let whole = Plain::sample(&shape, 0, dtype);
                    let piece = piece(&whole, dim, cut.clone(), dtype, comm.as_ref(), world.device());
                    let recut = comm.all_to_all(Call::default(), piece, to_dim, to_cut.clone()).wait()?;
                    let expected = whole.narrow(to_dim, held(&to_cut, size, rank));
                    assert_eq!(Plain::of(recut), expected, "{shape:?} {dim} {cut:?} -> {to_dim} {to_cut:?} {dtype:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn broadcast_and_scatter_take_the_roots_tensors() {
    on_groups(|world, comm| {
        let (size, rank) = (comm.group().size(), comm.group().rank());
        for (shape, dim, dtype) in cases() {
            for root in [0, size - 1] {
                let whole = Plain::sample(&shape, root, dtype);
                let metas = vec![TensorMeta { shape: Shape::from(shape.clone()), dtype }];
                let tensors = || (rank == root).then(|| vec![whole.tensor(dtype, world.device())]);
                let copy = comm.broadcast(Call::default(), tensors(), metas.clone(), root).wait()?.remove(0);
                assert_eq!(Plain::of(copy), whole);
                for cut in cuts(shape[dim], size) {
                    let sent = comm.scatter(Call::default(), tensors(), metas.clone(), vec![(dim, cut.clone())], root);
                    let expected = whole.narrow(dim, held(&cut, size, rank));
                    assert_eq!(Plain::of(sent.wait()?.remove(0)), expected, "{shape:?} dim {dim} {cut:?}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn strided_inputs_are_read_as_they_look() {
    run(3, |world| {
        let (comm, device) = (world.all(), world.device());
        let base = |rank: usize| {
            Tensor::<1, Int>::arange(0..60, device).float().reshape([6, 10]).mul_scalar(rank as f32 + 1.0)
        };
        let view = |rank: usize| base(rank).transpose().slice([2..8, 1..4]);
        let expected: Vec<f32> = (view(0) + view(1) + view(2)).into_data().try_to_vec().unwrap();
        let tensor = view(world.rank()).into_dispatch();
        let sum = comm.all_reduce("sum".into(), vec![tensor.clone()], ReduceOp::Sum).wait()?.remove(0);
        assert_eq!(into_data(sum).try_to_vec::<f32>().unwrap(), expected);
        let gathered =
            comm.all_gather("gather".into(), vec![Sharded { tensor, dim: 0, cut: Cut::Chunks(18) }]).wait()?.remove(0);
        let expected = Tensor::cat(vec![view(0), view(1), view(2)], 0).into_data();
        assert_eq!(into_data(gathered), expected);
        Ok(())
    });
}

#[test]
fn results_do_not_share_memory_with_peers() {
    run(2, |world| {
        let comm = world.all();
        let tensor = Tensor::<1>::ones([8], world.device());
        let metas = vec![TensorMeta { shape: Shape::from([8]), dtype: DType::F32 }];
        let root = (world.rank() == 0).then(|| vec![tensor.clone().into_dispatch()]);
        let copy = comm.broadcast("b".into(), root, metas, 0).wait()?.remove(0);
        world.barrier("all have copied")?;
        assert!(copy.can_mut(), "the copy is the rank's own");
        Ok(())
    });
}

#[test]
fn several_tensors_travel_together() {
    run(4, |world| {
        let comm = world.all();
        let wholes: Vec<_> = cases().map(|(shape, dim, dtype)| (Plain::sample(&shape, 1, dtype), dim, dtype)).collect();
        // Cut in turn into chunks and raggedly.
        let pieces = wholes.iter().enumerate().map(|(at, (whole, dim, dtype))| {
            let cut = cuts(whole.shape[*dim], comm.group().size())[at % 2].clone();
            piece(whole, *dim, cut, *dtype, comm.as_ref(), world.device())
        });
        let gathered = comm.all_gather("unit".into(), pieces.collect()).wait()?;
        assert!(gathered.into_iter().map(Plain::of).eq(wholes.into_iter().map(|(whole, ..)| whole)));
        assert_eq!(world.ledger().calls(Op::AllGather), 1);
        Ok(())
    });
}

#[test]
fn works_may_be_waited_for_in_any_order_or_not_at_all() {
    run(4, |world| {
        let comm = world.all();
        for round in 0..20 {
            let mut rng = StdRng::seed_from_u64(round * 4 + world.rank() as u64);
            let issue = |value: usize| {
                let tensor = Tensor::<1>::full([value + 1], value as f32, world.device()).into_dispatch();
                (value, comm.all_reduce(Call::default(), vec![tensor], ReduceOp::Sum))
            };
            let mut works: Vec<_> = (0..10).map(issue).collect();
            while !works.is_empty() {
                let (value, work) = works.swap_remove(rng.random_range(0..works.len()));
                if rng.random_bool(0.3) {
                    continue;
                }
                let sum = into_data(work.wait()?.remove(0)).try_to_vec::<f32>().unwrap();
                assert_eq!(sum, vec![4.0 * value as f32; value + 1]);
            }
        }
        Ok(())
    });
}

#[test]
fn a_work_says_when_all_have_joined() {
    run(2, |world| {
        let (comm, pair) = (world.all(), world.group(&[1, 0])?);
        if world.rank() == 0 {
            let work = comm.barrier("late".into());
            assert!(!work.is_complete());
            pair.barrier("go".into()).wait()?;
            pair.barrier("gone".into()).wait()?;
            assert!(work.is_complete());
            work.wait()?;
        } else {
            pair.barrier("go".into()).wait()?;
            let work = comm.barrier("late".into());
            pair.barrier("gone".into()).wait()?;
            work.wait()?;
        }
        Ok(())
    });
}

#[test]
fn rows_and_columns_of_a_mesh_work_at_once() {
    run(8, |world| {
        let (row, column) = (world.rank() / 4, world.rank() % 4);
        let rows = world.group(&(0..4).map(|c| row * 4 + c).collect::<Vec<_>>())?;
        let columns = world.group(&[column, 4 + column])?;
        let sum = |comm: &Arc<dyn Communicator>| -> Result<f32, Error> {
            let tensor = Tensor::<1>::full([3], world.rank() as f32, world.device()).into_dispatch();
            let sum = comm.all_reduce("sum".into(), vec![tensor], ReduceOp::Sum).wait()?.remove(0);
            Ok(into_data(sum).try_to_vec::<f32>().unwrap()[0])
        };
        for _ in 0..50 {
            assert_eq!(sum(&rows)?, (16 * row + 6) as f32);
            assert_eq!(sum(&columns)?, (2 * column + 4) as f32);
        }
        assert_eq!(rows.group().rank(), column);
        Ok(())
    });
}

#[test]
fn groups_are_checked() {
    run(3, |world| {
        let problem = |ranks: &[usize]| world.group(ranks).unwrap_err().to_string();
        assert!(problem(&[0, 1, 2, 3]).contains("rank 3 is outside a world of 3 ranks"));
        assert!(problem(&[0, 1, 0, 2]).contains("rank 0 is named twice"));
        assert!(problem(&[]).contains("only its members"));
        assert!(problem(&[(world.rank() + 1) % 3]).contains("only its members"));
        Ok(())
    });
}

#[test]
fn the_ledger_counts_payload() {
    run(4, |world| {
        let (comm, device) = (world.all(), world.device());
        let tensor = |shape: [usize; 2]| Tensor::<2>::ones(shape, device).into_dispatch();
        let forward = Call::new("block").in_phase(Phase::Forward);
        comm.all_gather(forward, vec![Sharded { tensor: tensor([2, 3]), dim: 0, cut: Cut::Chunks(8) }]).wait()?;
        comm.reduce_scatter(
            "block".into(),
            vec![Sharded { tensor: tensor([8, 3]), dim: 0, cut: Cut::Chunks(8) }],
            ReduceOp::Sum,
        )
        .wait()?;
        comm.all_reduce("norm".into(), vec![tensor([1, 1]), tensor([2, 2])], ReduceOp::Sum).wait()?;
        comm.all_to_all(
            "a2a".into(),
            Sharded { tensor: tensor([2, 3]), dim: 0, cut: Cut::Chunks(8) },
            1,
            Cut::Chunks(3),
        )
        .wait()?;
        comm.barrier("end".into()).wait()?;
        world.group(&[world.rank()])?.all_reduce("alone".into(), vec![tensor([9, 9])], ReduceOp::Sum).wait()?;
        let ledger = world.ledger();
        assert_eq!((ledger.calls(Op::AllGather), ledger.bytes(Op::AllGather)), (1, 8 * 3 * 4));
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
        assert_eq!(ledger.bytes(Op::ReduceScatter), 8 * 3 * 4);
        assert_eq!(ledger.bytes(Op::AllReduce), 5 * 4);
        assert_eq!(ledger.bytes(Op::AllToAll), 6 * 4);
        assert_eq!((ledger.calls(Op::Barrier), ledger.bytes(Op::Barrier)), (1, 0));
        assert_eq!(ledger.by_label()["block"].calls, 2);
        assert!(!ledger.by_label().contains_key("alone"), "a group of one moves nothing");
        assert_eq!(ledger.recent().len(), 5);
        Ok(())
    });
}
