//! Reference implementation: tensors as plain vectors, sharded and reduced by brute force.

use std::ops::Range;

use crate::comm::{ReduceOp, TensorMeta};
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Float, Int, Shape, Tensor, TensorData};

/// Number of values after which samples repeat.
const PERIOD: usize = 30;

/// Tensor of the reference implementation. Its elements are small integers, which every dtype
/// represents exactly.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlainTensor {
    pub shape: Vec<usize>,
    pub values: Vec<i64>,
}

impl PlainTensor {
    /// Returns values that differ between ranks and elements, and are exact in f16 and bf16 and in
    /// products.
    pub fn sample(shape: &[usize], rank: usize, dtype: DType) -> Self {
        let range = if dtype.is_bool() { 2 } else { 5 };
        let count: usize = shape.iter().product();
        // Repeating the values is fast. The reference is not optimized, and dominates the time of
        // the suite.
        let period =
            (0..PERIOD).map(|i| ((i * 7 + i / 3 + rank * 11 + (i * rank) % 3) % range) as i64);
        let mut values = period.collect::<Vec<_>>().repeat(count.div_ceil(PERIOD));
        values.truncate(count);
        Self {
            shape: shape.to_vec(),
            values,
        }
    }

    pub fn strides(&self) -> Vec<usize> {
        (0..self.shape.len())
            .map(|d| self.shape[d + 1..].iter().product())
            .collect()
    }

    /// Returns the elements whose index in `dim` is in `range`.
    pub fn narrow(&self, dim: usize, range: Range<usize>) -> Self {
        let stride = self.strides()[dim];
        let rows = self.values.chunks((stride * self.shape[dim]).max(1));
        let values = rows
            .flat_map(|rows| &rows[range.start * stride..range.end * stride])
            .copied()
            .collect();
        let mut shape = self.shape.clone();
        shape[dim] = range.len();
        Self { shape, values }
    }

    /// Converts to a tensor, which is not contiguous if it has several dimensions.
    pub fn tensor(&self, dtype: DType, device: &Device) -> DispatchTensor {
        fn build<const D: usize>(
            plain: &PlainTensor,
            dtype: DType,
            device: &Device,
        ) -> DispatchTensor {
            let turned = plain.turned();
            let last = D - 1;
            let data =
                TensorData::new(turned.values, Shape::from(turned.shape)).convert_dtype(dtype);
            if dtype.is_bool() {
                Tensor::<D, Bool>::from_data(data, device)
                    .swap_dims(0, last)
                    .into_dispatch()
            } else if dtype.is_float() {
                Tensor::<D, Float>::from_data(data, (device, dtype))
                    .swap_dims(0, last)
                    .into_dispatch()
            } else {
                Tensor::<D, Int>::from_data(data, (device, dtype))
                    .swap_dims(0, last)
                    .into_dispatch()
            }
        }
        match self.shape.len() {
            1 => build::<1>(self, dtype, device),
            2 => build::<2>(self, dtype, device),
            3 => build::<3>(self, dtype, device),
            _ => unreachable!(),
        }
    }

    /// Returns the tensor with its first and last dimensions swapped.
    fn turned(&self) -> Self {
        let &[first, .., last] = &self.shape[..] else {
            return self.clone();
        };
        let mut shape = self.shape.clone();
        shape.swap(0, self.shape.len() - 1);
        let count = self.values.len();
        let middle = count.checked_div(first * last).unwrap_or(0);
        let mut values = Vec::with_capacity(count);
        for at in (0..last).flat_map(|at| (0..middle).map(move |row| row * last + at)) {
            values.extend(self.values[at..].iter().step_by(middle * last));
        }
        Self { shape, values }
    }

    /// Reads a tensor, which must have the dtype `dtype`.
    pub fn of(tensor: DispatchTensor, dtype: DType) -> Self {
        assert_eq!(tensor.dtype(), dtype, "the dtype of the received tensor");
        let data = into_data(tensor);
        let shape = data.shape().to_vec();
        let values = data.iter::<f64>().map(|value| value as i64).collect();
        Self { shape, values }
    }

    /// Returns the description of the tensor in `dtype`.
    pub fn meta(&self, dtype: DType) -> TensorMeta {
        TensorMeta {
            shape: Shape::from(self.shape.clone()),
            dtype,
        }
    }

    pub fn reduced(all: &[Self], op: ReduceOp, dtype: DType) -> Self {
        let both: fn(i64, i64) -> i64 = match op {
            ReduceOp::Avg if dtype.is_float() => unreachable!("not an integer"),
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => |a, b| a + b,
            ReduceOp::Min => i64::min,
            ReduceOp::Max => i64::max,
            ReduceOp::Product => |a, b| a * b,
            ReduceOp::BitAnd => |a, b| a & b,
            ReduceOp::BitOr => |a, b| a | b,
            ReduceOp::BitXor => |a, b| a ^ b,
        };
        let mut reduced = all[0].clone();
        for other in &all[1..] {
            reduced
                .values
                .iter_mut()
                .zip(&other.values)
                .for_each(|(value, other)| *value = both(*value, *other));
        }
        reduced.values.iter_mut().for_each(|value| match op {
            ReduceOp::Avg => *value /= all.len() as i64,
            ReduceOp::PremulSum(factor) => *value *= factor.value() as i64,
            _ => {}
        });
        reduced
    }
}

pub(super) fn into_data(tensor: DispatchTensor) -> TensorData {
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
