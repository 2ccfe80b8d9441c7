//! The kernels beside burn's own operations: the same bits.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};

use crate::comm::engine::ranges::{cut, full};
use crate::comm::engine::{concat, reduce};
use crate::comm::{ReduceOp, local::flex};

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
            let primitives: Vec<_> = tensors.iter().filter_map(flex::primitive).collect();
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
                    let kernel = data(flex::reduce(&primitives, &ranges, op));
                    assert_eq!(generic, kernel, "{dtype:?} {ranks} ranks {op:?} {ranges:?}");
                }
            }
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
