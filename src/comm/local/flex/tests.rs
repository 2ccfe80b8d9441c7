//! The kernels beside burn's own operations: the same bits.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Shape, Tensor, TensorData};

use crate::comm::engine::ranges::{cut, full};
use crate::comm::engine::{CutPrint, TensorPrint, concat, reduce};
use crate::comm::{Op, Plan, ReduceOp, local::flex};
use crate::placement::Cut;

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

fn random(seed: usize, dtype: DType, device: &Device) -> DispatchTensor {
    let tensor = Tensor::<3>::random([4, 70, 3], Distribution::Uniform(-4.0, 4.0), device);
    let tensor = tensor + seed as f32 * 0.01;
    if dtype.is_float() {
        tensor.cast(dtype).into_dispatch()
    } else if dtype.is_bool() {
        tensor.greater_scalar(0.0).into_dispatch()
    } else {
        // So large that sums and products of bytes wrap around, and none of 64 bits, where burn
        // multiplies: a debug build checks those.
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
    let ints = [DType::I64, DType::I32, DType::I16, DType::I8, DType::U64, DType::U32, DType::U16, DType::U8];
    [DType::F32, DType::F64, DType::F16, DType::BF16].into_iter().chain(ints).chain([bool]).collect()
}

#[test]
fn reduces_like_the_kernels() {
    let device = Device::flex();
    for dtype in dtypes(&device) {
        for ranks in [2, 3, 4, 5, 7, 8] {
            let tensors: Vec<_> = (0..ranks).map(|rank| random(rank, dtype, &device)).collect();
            let sources: Vec<_> = tensors.iter().collect();
            let shared = flex::Shared::default();
            let terms = shared.terms((0, 1), || tensors.iter().map(flex::primitive).collect()).expect("all are Flex");
            for op in OPS {
                if dtype.is_bool() && matches!(op, ReduceOp::Sum | ReduceOp::Avg) {
                    continue;
                }
                for ranges in [
                    full(&[4, 70, 3]),
                    cut(&[4, 70, 3], 1, 10..45),
                    cut(&[4, 70, 3], 2, 1..2),
                    cut(&[4, 70, 3], 1, 70..70),
                ] {
                    let generic = data(reduce(&sources, &ranges, op, &device));
                    let kernel = data(terms.reduce(&ranges, op));
                    assert_eq!(generic, kernel, "{dtype:?} {ranks} ranks {op:?} {ranges:?}");
                }
            }
        }
    }
}

/// Results of 16 MiB and more are written past the caches, in strips that begin anywhere in a line of them.
#[test]
fn reduces_large_tensors_like_the_kernels() {
    let device = Device::flex();
    for (dtype, rows) in [(DType::F32, 2062), (DType::BF16, 4124)] {
        for ranks in [2, 3] {
            let random = || Tensor::<2>::random([rows, 4099], Distribution::Uniform(-4.0, 4.0), &device);
            let tensors: Vec<_> = (0..ranks).map(|_| random().cast(dtype).into_dispatch()).collect();
            let sources: Vec<_> = tensors.iter().collect();
            let shared = flex::Shared::default();
            let terms = shared.terms((0, 1), || tensors.iter().map(flex::primitive).collect()).expect("all are Flex");
            let ranges = cut(&[rows, 4099], 1, 3..2058);
            let [generic, kernel] =
                [reduce(&sources, &ranges, ReduceOp::Sum, &device), terms.reduce(&ranges, ReduceOp::Sum)]
                    .map(|reduced| Tensor::<2>::from_dispatch(reduced).into_data());
            assert!(generic == kernel, "{dtype:?} of {ranks} ranks");
        }
    }
}

#[test]
fn concatenates_like_the_kernels() {
    let device = Device::flex();
    for dtype in dtypes(&device) {
        let tensors: Vec<_> = (0..3).map(|rank| random(rank, dtype, &device)).collect();
        for dim in 0..3 {
            for (to_dim, range) in [(0, 1..3), (1, 1..3), (2, 1..3), (1, 7..7)] {
                let ranges = cut(&[4, 70, 3], to_dim, range);
                let sources: Vec<_> = tensors.iter().map(|tensor| (tensor, ranges.clone())).collect();
                let flexes: Vec<_> =
                    tensors.iter().filter_map(flex::primitive).map(|flex| (flex, ranges.clone())).collect();
                assert_eq!(data(concat(&sources, dim, &device)), data(flex::concat(&flexes, dim)));
            }
        }
    }
}

/// Whatever the number of ranks that take part, who comes later uses what the first has looked up; also where tensors
/// of two dtypes take turns.
#[test]
fn the_parts_of_all_ranks_are_looked_up_once_a_gather() {
    let device = Device::flex();
    let dtypes = [DType::F32, DType::I64, DType::F32];
    let parts: Vec<Vec<_>> = (0..3)
        .map(|rank| dtypes.iter().enumerate().map(|(i, of)| random(7 * rank + i, *of, &device)).collect())
        .collect();
    let print = |(dim, dtype): (usize, DType)| {
        let mut shape = Shape::from([4, 70, 3]);
        shape[dim] *= 3;
        let cut = Cut::Chunks(shape[dim]);
        (TensorPrint { shape, dtype, cut: Some(CutPrint::new(dim, &cut)), to: None }, (dim, cut))
    };
    let (prints, cuts) = dtypes.into_iter().enumerate().map(print).unzip();
    let plan = Plan::new(Op::AllGather, None, prints, cuts, 3);
    let (shared, joints, mut looked) = (flex::Shared::default(), flex::Joints::new(&plan, 3), 0);
    for _ in 0..3 {
        let gathered = shared.gathered(&joints, || {
            looked += 1;
            parts.iter().map(|parts| parts.iter().map(flex::primitive).collect()).collect()
        });
        for (index, whole) in joints.wholes(gathered.expect("all are Flex")).into_iter().enumerate() {
            let sources: Vec<_> = parts.iter().map(|parts| (&parts[index], full(&[4, 70, 3]))).collect();
            assert_eq!(data(whole), data(concat(&sources, index, &device)), "tensor {index}");
        }
    }
    assert_eq!(looked, 1);
}

/// Also with fewer elements than ranks, where some slices are empty.
#[test]
fn slices_that_any_rank_makes_join_to_what_one_rank_reduces() {
    let device = Device::flex();
    for (elements, ranks) in [(840, 3), (840, 7), (3, 5), (0, 3)] {
        let tensors: Vec<_> = (0..ranks)
            .map(|rank| Tensor::<1>::random([elements], Distribution::Uniform(-4.0, 4.0), &device) + rank as f32)
            .map(Tensor::into_dispatch)
            .collect();
        let (shared, mut looked) = (flex::Shared::default(), 0);
        for member in 0..ranks {
            let terms = shared.terms((1, 2), || {
                looked += 1;
                tensors.iter().map(flex::primitive).collect()
            });
            let terms = terms.expect("all are Flex");
            let whole = terms.reduce(&full(&[elements]), ReduceOp::Avg);
            assert_eq!(
                Tensor::<1>::from_dispatch(terms.reduce_shared(member, ReduceOp::Avg)).into_data(),
                Tensor::<1>::from_dispatch(whole).into_data()
            );
        }
        assert_eq!(looked, 1);
    }
}
