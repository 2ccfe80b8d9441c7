//! Compares the kernels with burn's own operations, to the bit.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Shape, Tensor, TensorData};
use itertools::Itertools;

use crate::comm::backend::ranges::{Ranges, full, slice};
use crate::comm::backend::{CallSignature, ShardSignature, TensorSignature, concat, reduce};
use crate::comm::control::match_table::{MatchTable, OpHandle};
use crate::comm::control::rendezvous::SpinPolicy;
use crate::comm::data::host;
use crate::comm::data::result_buffer::{ContiguousLayout, ResultBuffer};
use crate::comm::{CollectivePlan, Op, ReduceOp};
use crate::memory::{HostMemoryPool, flex};
use crate::placement::ShardSizes;

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
];

fn random(seed: usize, dtype: DType, device: &Device) -> DispatchTensor {
    let tensor = Tensor::<3>::random([4, 70, 3], Distribution::Uniform(-4.0, 4.0), device);
    let tensor = tensor + seed as f32 * 0.01;
    if dtype.is_float() {
        tensor.cast(dtype).into_dispatch()
    } else if dtype.is_bool() {
        tensor.greater_scalar(0.0).into_dispatch()
    } else {
        // Large enough that sums and products of bytes wrap around, but those of 64 bits do not.
        // burn's multiplication checks the latter in a debug build.
        let scale = if dtype.size() < 8 { 31 } else { 1 };
        let ints = tensor.mul_scalar(scale).int();
        let ints = if dtype.is_uint() { ints.abs() } else { ints };
        ints.cast(dtype).into_dispatch()
    }
}

fn data(tensor: DispatchTensor) -> TensorData {
    let dtype = tensor.dtype();
    if dtype.is_float() {
        Tensor::<3>::from_dispatch(tensor).into_data()
    } else if dtype.is_bool() {
        Tensor::<3, Bool>::from_dispatch(tensor).into_data()
    } else {
        Tensor::<3, Int>::from_dispatch(tensor).into_data()
    }
}

fn dtypes(device: &Device) -> Vec<DType> {
    let bool = random(0, DType::Bool(burn::tensor::BoolStore::Native), device).dtype();
    let ints = [
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
    ];
    [DType::F32, DType::F64, DType::F16, DType::BF16]
        .into_iter()
        .chain(ints)
        .chain([bool])
        .collect()
}

#[test]
fn reduces_like_the_kernels() {
    let device = Device::flex();
    for dtype in dtypes(&device) {
        for ranks in [2, 3, 4, 5, 6, 7, 8, 11, 13] {
            let tensors: Vec<_> = (0..ranks)
                .map(|rank| random(rank, dtype, &device))
                .collect();
            let sources: Vec<_> = tensors.iter().collect();
            let shared = host::CollectiveCache::default();
            let terms = shared
                .terms((0, 1), || tensors.iter().map(host::primitive).collect())
                .expect("all are Flex");
            for op in OPS {
                if dtype.is_bool() && matches!(op, ReduceOp::Sum | ReduceOp::Avg) {
                    continue;
                }
                // With more ranks, burn's own products overflow 64 bits.
                if ranks > 8 && op == ReduceOp::Product {
                    continue;
                }
                for ranges in [
                    full(&[4, 70, 3]),
                    slice(&[4, 70, 3], 1, 10..45),
                    slice(&[4, 70, 3], 2, 1..2),
                    slice(&[4, 70, 3], 1, 70..70),
                ] {
                    let generic = data(reduce(&sources, &ranges, op, &device));
                    let kernel = data(terms.reduce(&ranges, op));
                    assert_eq!(generic, kernel, "{dtype:?} {ranks} ranks {op:?} {ranges:?}");
                }
            }
        }
    }
}

/// Asserts that the sum of `ranges` over all tensors has the bits of burn's own operations.
fn assert_summed_like_the_kernels<const D: usize>(tensors: &[DispatchTensor], ranges: &Ranges) {
    let sources: Vec<_> = tensors.iter().collect();
    let shared = host::CollectiveCache::default();
    let terms = shared
        .terms((0, 1), || tensors.iter().map(host::primitive).collect())
        .expect("all are Flex");
    let [generic, kernel] = [
        reduce(&sources, ranges, ReduceOp::Sum, &Device::flex()),
        terms.reduce(ranges, ReduceOp::Sum),
    ]
    .map(|reduced| Tensor::<D>::from_dispatch(reduced).into_data());
    assert!(
        generic == kernel,
        "{:?} of {} ranks",
        tensors[0].dtype(),
        tensors.len()
    );
}

#[test]
fn concatenates_like_the_kernels() {
    let device = Device::flex();
    for dtype in dtypes(&device) {
        let tensors: Vec<_> = (0..3).map(|rank| random(rank, dtype, &device)).collect();
        for dim in 0..3 {
            for (to_dim, range) in [(0, 1..3), (1, 1..3), (2, 1..3), (1, 7..7)] {
                let ranges = slice(&[4, 70, 3], to_dim, range);
                let sources: Vec<_> = tensors
                    .iter()
                    .map(|tensor| (tensor, ranges.clone()))
                    .collect();
                let flexes: Vec<_> = tensors
                    .iter()
                    .filter_map(host::primitive)
                    .map(|flex| (flex, ranges.clone()))
                    .collect();
                assert_eq!(
                    data(concat(&sources, dim, &device)),
                    data(host::concat(&flexes, dim))
                );
            }
        }
    }
}

/// Tests that only the first rank looks up the shards, and that the others use its result, also if
/// tensors of two dtypes alternate.
#[test]
fn the_parts_of_all_ranks_are_looked_up_once_a_gather() {
    let device = Device::flex();
    let dtypes = [DType::F32, DType::I64, DType::F32];
    let parts: Vec<Vec<_>> = (0..3)
        .map(|rank| {
            dtypes
                .iter()
                .enumerate()
                .map(|(i, of)| random(7 * rank + i, *of, &device))
                .collect()
        })
        .collect();
    let signature = |(dim, dtype): (usize, DType)| {
        let mut shape = Shape::from([4, 70, 3]);
        shape[dim] *= 3;
        let sizes = ShardSizes::Chunked(shape[dim]);
        (
            TensorSignature {
                shape,
                dtype,
                sharding: Some(ShardSignature::new(dim, &sizes)),
                to: None,
            },
            (dim, sizes),
        )
    };
    let (signatures, shardings) = dtypes.into_iter().enumerate().map(signature).unzip();
    let plan = CollectivePlan::new(Op::AllGather, None, signatures, shardings, 3);
    let shared = host::CollectiveCache::default();
    let copies = host::GatherCopyPlan::new(&plan, 3);
    let mut looked = 0;
    for _ in 0..3 {
        let gathered = shared.gathered(&copies, || {
            looked += 1;
            parts
                .iter()
                .map(|parts| parts.iter().map(host::primitive).collect())
                .collect()
        });
        for (index, complete) in copies
            .full_tensors(gathered.expect("all are Flex"), None)
            .into_iter()
            .enumerate()
        {
            let sources: Vec<_> = parts
                .iter()
                .map(|parts| (&parts[index], full(&[4, 70, 3])))
                .collect();
            assert_eq!(
                data(complete),
                data(concat(&sources, index, &device)),
                "tensor {index}"
            );
        }
    }
    assert_eq!(looked, 1);
}

/// Returns the handle of the first collective of `ranks` ranks.
fn ticket(ranks: usize) -> OpHandle {
    let group = MatchTable::<CallSignature, ()>::new(ranks, false)
        .group(&(0..ranks).collect::<Vec<_>>(), "");
    OpHandle {
        group,
        member: 0,
        seq: 0,
    }
}

/// Tests the tree of any number of ranks, over several strips and an incomplete one.
#[test]
fn reduces_several_strips_of_many_ranks_like_the_kernels() {
    let device = Device::flex();
    for ranks in (3..=17).chain([31, 32, 33]) {
        for dtype in [DType::F32, DType::BF16] {
            let random = || {
                Tensor::<1>::random([2500], Distribution::Uniform(-4.0, 4.0), &device).cast(dtype)
            };
            let tensors: Vec<_> = (0..ranks).map(|_| random().into_dispatch()).collect();
            assert_summed_like_the_kernels::<1>(&tensors, &slice(&[2500], 0, 3..2499));
        }
    }
}

/// Tests ranks of a group that wait at the same time, for results large enough to be shared,
/// sharded along either dimension and of two dtypes. The results must equal those of burn's own
/// operations.
#[test]
fn shared_results_are_like_the_kernels() {
    let device = Device::flex();
    let ranks = 3;
    let [rows, columns] = [1031, 257];
    let complete = [(0, DType::F32), (1, DType::F32), (0, DType::I64)];
    let signature = |(dim, dtype): (usize, DType)| {
        let shape = Shape::from([rows, columns]);
        let sizes = ShardSizes::Chunked(shape[dim]);
        (
            TensorSignature {
                shape,
                dtype,
                sharding: Some(ShardSignature::new(dim, &sizes)),
                to: None,
            },
            (dim, sizes),
        )
    };
    let (signatures, shardings): (Vec<_>, Vec<_>) = complete.into_iter().map(signature).unzip();
    let part = |rank: usize, (dim, sizes): &(usize, ShardSizes), dtype: DType| {
        let mut shape = [rows, columns];
        shape[*dim] = sizes.range(ranks, rank).len();
        let values = Tensor::<2>::random(shape, Distribution::Uniform(-99.0, 99.0), &device);
        if dtype.is_float() {
            values.into_dispatch()
        } else {
            values.int().cast(dtype).into_dispatch()
        }
    };
    let parts: Vec<Vec<_>> = (0..ranks)
        .map(|rank| {
            shardings
                .iter()
                .zip(complete)
                .map(|(sizes, (_, of))| part(rank, sizes, of))
                .collect()
        })
        .collect();
    let plan = CollectivePlan::new(Op::AllGather, None, signatures, shardings.clone(), ranks);
    let shared = host::CollectiveCache::default();
    let cache = host::SharedResultCache::new(SpinPolicy::Spinning(1000), None);
    let copies = host::GatherCopyPlan::new(&plan, ranks);
    let ticket = ticket(ranks);
    let gathered = shared
        .gathered(&copies, || {
            parts
                .iter()
                .map(|parts| parts.iter().map(host::primitive).collect())
                .collect()
        })
        .expect("all are Flex");
    let generic: Vec<_> = (shardings.iter().enumerate())
        .map(|(index, (dim, _))| {
            let tensors = parts.iter().map(|parts| &parts[index]);
            concat(
                &tensors
                    .map(|part| (part, full(&part.shape()[..])))
                    .collect::<Vec<_>>(),
                *dim,
                &device,
            )
        })
        .collect();
    let get = || {
        let waited = Cell::default();
        copies.full_tensors(
            gathered,
            Some(shared.owner(&cache, ticket, host::ResultRetention::Latest, &waited)),
        )
    };
    let all: Vec<_> = thread::scope(|scope| {
        [(); 3]
            .map(|()| scope.spawn(get))
            .map(|rank| rank.join().unwrap())
            .into_iter()
            .collect()
    });
    let bytes = |tensor: &DispatchTensor| host::primitive(tensor).unwrap().bytes().to_vec();
    for of_rank in &all {
        assert_eq!(of_rank.len(), 3);
        for ((own, first), generic) in of_rank.iter().zip(&all[0]).zip(&generic) {
            assert_eq!(
                (own.shape(), own.dtype()),
                (generic.shape(), generic.dtype())
            );
            assert!(bytes(own) == bytes(generic));
            let address =
                |tensor: &DispatchTensor| host::primitive(tensor).unwrap().bytes().as_ptr();
            assert_eq!(address(own), address(first));
        }
    }
}

/// Tests large results, of which each rank reduces slices for all, and small and empty results,
/// which each rank reduces alone.
#[test]
fn a_reduction_in_common_is_like_the_kernels() {
    let device = Device::flex();
    for (elements, ranks) in [(150_001, 2), (150_001, 3), (150_001, 7), (400, 3), (0, 3)] {
        let tensors: Vec<_> = (0..ranks)
            .map(|rank| {
                Tensor::<1>::random([elements], Distribution::Uniform(-4.0, 4.0), &device)
                    + rank as f32
            })
            .map(Tensor::into_dispatch)
            .collect();
        let shared = host::CollectiveCache::default();
        let cache = host::SharedResultCache::new(SpinPolicy::Spinning(0), None);
        let ticket = ticket(ranks);
        let looked = AtomicUsize::new(0);
        let terms = || {
            let terms = shared.terms((1, 2), || {
                looked.fetch_add(1, Ordering::SeqCst);
                tensors.iter().map(host::primitive).collect()
            });
            terms.expect("all are Flex")
        };
        // Otherwise, ranks that start at the same time could both look up the operands.
        terms();
        let generic = reduce(
            &tensors.iter().collect::<Vec<_>>(),
            &full(&[elements]),
            ReduceOp::Avg,
            &device,
        );
        let generic = Tensor::<1>::from_dispatch(generic).into_data();
        let get = || {
            let waited = Cell::default();
            terms().reduce_full(
                ReduceOp::Avg,
                Some(shared.owner(&cache, ticket, host::ResultRetention::All, &waited)),
            )
        };
        let all: Vec<_> = thread::scope(|scope| {
            [(); 2]
                .map(|()| scope.spawn(get))
                .map(|rank| rank.join().unwrap())
                .into_iter()
                .collect()
        });
        let address = |tensor: &DispatchTensor| host::primitive(tensor).unwrap().bytes().as_ptr();
        assert_eq!(
            address(&all[0]) == address(&all[1]),
            elements > 1000 || elements == 0
        );
        all.into_iter()
            .for_each(|own| assert_eq!(Tensor::<1>::from_dispatch(own).into_data(), generic));
        assert_eq!(looked.into_inner(), 1);
    }
}

/// Checks that NaN of any rank is in the result, and that infinities are values like others, by the
/// kernels and by burn's operations.
#[test]
fn nan_and_infinities_are_reduced_like_the_kernels() {
    let device = Device::flex();
    let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, 1.5];
    for (dtype, ranks) in [DType::F32, DType::F64, DType::F16, DType::BF16]
        .into_iter()
        .cartesian_product([2, 3, 5])
    {
        // The elements are all pairs of values, held by neighbouring ranks.
        let term = |rank: usize| {
            let value = |at: usize| match (at / 36 + 1) % ranks {
                _ if rank == at / 36 => values[at % 6],
                next if rank == next => values[at / 6 % 6],
                _ => 1.0,
            };
            let data = (0..36 * ranks).map(value).collect::<Vec<_>>();
            Tensor::<1>::from_floats(&data[..], &device)
                .cast(dtype)
                .into_dispatch()
        };
        let tensors: Vec<_> = (0..ranks).map(term).collect();
        let shared = host::CollectiveCache::default();
        let terms = shared
            .terms((0, 1), || tensors.iter().map(host::primitive).collect())
            .expect("all are Flex");
        for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Sum] {
            let ranges = full(&[36 * ranks]);
            // `None` is any NaN.
            let bits = |tensor: DispatchTensor| -> Vec<Option<u64>> {
                let data = Tensor::<1>::from_dispatch(tensor).into_data();
                data.iter::<f64>()
                    .map(|value| (!value.is_nan()).then_some(value.to_bits()))
                    .collect()
            };
            let generic = bits(reduce(
                &tensors.iter().collect::<Vec<_>>(),
                &ranges,
                op,
                &device,
            ));
            let kernel = bits(terms.reduce(&ranges, op));
            assert_eq!(generic, kernel, "{dtype:?} {ranks} ranks {op:?}");
            for (at, value) in kernel.iter().enumerate().filter(|_| op != ReduceOp::Sum) {
                let has_nan = values[at % 6].is_nan() || values[at / 6 % 6].is_nan();
                assert_eq!(
                    value.is_none(),
                    has_nan,
                    "{dtype:?} {ranks} ranks {op:?}, element {at}"
                );
            }
        }
    }
}

/// Fills a result of 8 elements, with shards of 3 and 5, and adds 1 to it. Returns the result's
/// address, the sum, and the sum's address; the addresses are equal if burn wrote in place.
fn add_one(results: &ResultBuffer) -> (usize, Tensor<1>, usize) {
    let address =
        |tensor: &DispatchTensor| flex::primitive(tensor).unwrap().bytes().as_ptr().addr();
    let device = crate::memory::host();
    for (member, part) in [vec![0.0, 1.0, 2.0], vec![3.0, 4.0, 5.0, 6.0, 7.0_f32]]
        .into_iter()
        .enumerate()
    {
        let part = Tensor::<1>::from_floats(&part[..], &device).into_dispatch();
        // SAFETY: only this thread accesses the buffer.
        unsafe { results.put(member, &[part], || {}) };
    }
    // SAFETY: the shards of all members are copied.
    let full = unsafe { results.take(&device) }.pop().unwrap();
    let before = address(&full);
    let changed = Tensor::<1>::from_dispatch(full).add_scalar(1.0);
    let after = address(&changed.clone().into_dispatch());
    (before, changed, after)
}

#[test]
fn a_result_is_written_in_place() {
    let layout = ContiguousLayout::new(Shape::from([8]), DType::F32, 0, [3, 5]).unwrap();
    let (before, changed, after) = add_one(&ResultBuffer::new(
        vec![layout],
        &HostMemoryPool::of_thread(),
    ));
    assert_eq!(before, after, "the handle is unique");
    assert!(
        changed
            .into_data()
            .iter::<f32>()
            .eq((1..9).map(|value| value as f32))
    );
}
