//! Compares the kernel's reduction with burn's own operations on the same device, to the bit.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Distribution, Tensor};
use itertools::Itertools;

use super::*;
use crate::comm::backend;
use crate::comm::backend::ranges::slice;
use crate::memory::gpu::gpu;

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];

/// Returns flat buffers of `ranks` ranks, each with one row per rank.
fn flats(ranks: usize, row: usize, dtype: DType) -> Vec<DispatchTensor> {
    let flat = |rank: usize| {
        let values = Tensor::<1>::random([ranks * row], Distribution::Uniform(-4.0, 4.0), &gpu());
        (values * (1.0 + rank as f32)).cast(dtype).into_dispatch()
    };
    (0..ranks).map(flat).collect()
}

fn bits(tensor: DispatchTensor) -> Vec<u32> {
    Tensor::<1>::from_dispatch(tensor).into_data().iter::<f32>().map(f32::to_bits).collect()
}

fn dtypes() -> Vec<DType> {
    let Some(CubeTensor { client, .. }) = primitive(&flats(1, 1, DType::F32)[0]).cloned() else { unreachable!() };
    let has = |dtype: &DType| client.properties().supports_type(dtype_to_storage_type(*dtype));
    [DType::F32, DType::F16, DType::BF16].into_iter().filter(has).collect()
}

#[test]
fn reduces_like_burns_operations() {
    for (dtype, ranks) in dtypes().into_iter().cartesian_product([2, 3, 4, 5, 7]) {
        let (row, rank) = (128 * ranks, ranks - 1 - ranks / 3);
        let flats = flats(ranks, row, dtype);
        let primitives = flats.iter().map(|flat| primitive(flat).unwrap().clone()).collect_vec();
        for op in OPS {
            let ranges = slice(&[ranks * row], 0, rank * row..(rank + 1) * row);
            let expected = backend::reduce(&flats.iter().collect_vec(), &ranges, op, &gpu());
            let found = wrap(reduce::reduce_row(&primitives, rank, op));
            assert_eq!(bits(found), bits(expected), "{dtype:?} {ranks} ranks {op:?}");
        }
    }
}
