//! Kernel that reduces one row of every rank's flat buffer.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::comm::ReduceOp;
use crate::kernels::cube::{BlockLayout, vector_lanes, vectors, view};

/// Number of buffers of the kernel in addition to the rows: the target and the arguments.
const OTHERS: usize = 2;

/// Returns true if one kernel can read a row of each of `ranks` ranks.
pub(super) fn is_possible(client: &Client, ranks: usize, dtype: DType) -> bool {
    let properties = client.properties();
    ranks + OTHERS <= properties.hardware.max_bindings as usize
        && properties.supports_type(dtype_to_storage_type(dtype))
}

/// Returns the reduction of row `rank` of `flats`. Each flat buffer has one row per rank.
///
/// The rows are reduced in the same fixed binary tree as in all reductions: neighbours first, and
/// an odd row moves up. f16 and bf16 accumulate in f32 and are rounded once.
pub(super) fn reduce_row(flats: &[CubeTensor], rank: usize, op: ReduceOp) -> CubeTensor {
    let CubeTensor {
        client,
        device,
        dtype,
        ..
    } = &flats[0];
    let row = flats[0].meta.num_elements() / flats.len();
    let block = BlockLayout::new(client, &[Shape::new([row])], *dtype);
    let result = block.allocate(client, device).tensors.remove(0);
    if row == 0 {
        return result;
    }
    let lanes = vector_lanes(client, dtype.size());
    let size = row * dtype.size();
    let own =
        |flat: &CubeTensor| vectors(&view(&flat.handle, rank * size, size), lanes * dtype.size());
    let sum = if *dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let count = row.div_ceil(lanes);
    let cube = CubeDim::new(client, count);
    let types = [*dtype, sum].map(dtype_to_storage_type);
    // SAFETY: each unit reads and writes only the vector at its own position, if there is one.
    unsafe {
        tree::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, count, cube),
            cube,
            lanes,
            flats.iter().map(own).collect(),
            vectors(&result.handle, lanes * dtype.size()),
            count as u32,
            op,
            types,
        );
    }
    result
}

/// Returns a view of a row: a tensor of shape `shape` that starts at element `offset`.
pub(super) fn view_of(row: &CubeTensor, offset: usize, shape: Shape) -> CubeTensor {
    let size = row.dtype.size();
    let handle = view(&row.handle, offset * size, shape.num_elements() * size);
    CubeTensor::new_contiguous(
        row.client.clone(),
        row.device.clone(),
        shape,
        handle,
        row.dtype,
    )
}

#[cube(launch_unchecked)]
fn tree<E: Numeric, A: Float, N: Size>(
    rows: Sequence<Box<[Vector<E, N>]>>,
    target: &mut [Vector<E, N>],
    count: u32,
    #[comptime] op: ReduceOp,
    #[define(E, A)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if at < count as usize {
        let mut value = node::<E, A, N>(&rows, at, 0usize, rows.len(), op);
        if comptime!(op == ReduceOp::Avg) {
            value /= Vector::new(A::cast_from(rows.len() as u32));
        }
        target[at] = Vector::cast_from(value);
    }
}

/// Reduces `count` rows, starting with row `first`.
#[cube]
fn node<E: Numeric, A: Float, N: Size>(
    rows: &Sequence<Box<[Vector<E, N>]>>,
    at: usize,
    #[comptime] first: usize,
    #[comptime] count: usize,
    #[comptime] op: ReduceOp,
) -> Vector<A, N> {
    if comptime!(count == 1) {
        Vector::cast_from(rows.index(first)[at])
    } else {
        let half = comptime!(count.next_power_of_two() / 2);
        let left = node::<E, A, N>(rows, at, first, half, op);
        let right = node::<E, A, N>(
            rows,
            at,
            comptime!(first + half),
            comptime!(count - half),
            op,
        );
        if comptime!(matches!(op, ReduceOp::Sum | ReduceOp::Avg)) {
            left + right
        } else if comptime!(op == ReduceOp::Product) {
            left * right
        } else if comptime!(op == ReduceOp::Min) {
            // As on the CPU: no comparison with NaN is true, so the result is NaN whichever side
            // has it.
            select_many(left.less_than(&right).or(left.is_nan()), left, right)
        } else {
            select_many(left.greater_than(&right).or(left.is_nan()), left, right)
        }
    }
}
