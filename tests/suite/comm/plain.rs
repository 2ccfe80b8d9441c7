//! The reference: tensors as plain vectors, cut and reduced by brute force.

use std::ops::Range;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Float, Int, Shape, Tensor, TensorData};
use burn_dtensor::comm::ReduceOp;

/// A tensor as the reference sees it: small integers, which every dtype holds exactly.
#[derive(Debug, Clone, PartialEq)]
pub struct Plain {
    pub shape: Vec<usize>,
    pub values: Vec<i64>,
}

impl Plain {
    /// Values that differ between ranks and elements, and survive f16, bf16 and products.
    pub fn sample(shape: &[usize], rank: usize, dtype: DType) -> Self {
        let range = if dtype.is_bool() { 2 } else { 5 };
        let count: usize = shape.iter().product();
        let values = (0..count).map(|i| ((i * 7 + i / 3 + rank * 11 + (i * rank) % 3) % range) as i64);
        Self { shape: shape.to_vec(), values: values.collect() }
    }

    pub fn strides(&self) -> Vec<usize> {
        (0..self.shape.len()).map(|d| self.shape[d + 1..].iter().product()).collect()
    }

    /// The elements whose index in `dim` lies in `range`.
    pub fn narrow(&self, dim: usize, range: Range<usize>) -> Self {
        let stride = self.strides()[dim];
        let inside = |i: &usize| range.contains(&(i / stride % self.shape[dim]));
        let values = (0..self.values.len()).filter(inside).map(|i| self.values[i]).collect();
        let mut shape = self.shape.clone();
        shape[dim] = range.len();
        Self { shape, values }
    }

    pub fn tensor(&self, dtype: DType, device: &Device) -> DispatchTensor {
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

    pub fn of(tensor: DispatchTensor) -> Self {
        let data = into_data(tensor);
        let shape = data.shape().to_vec();
        let values = data.iter::<f64>().map(|value| value as i64).collect();
        Self { shape, values }
    }

    pub fn reduced(all: &[Self], op: ReduceOp, dtype: DType) -> Self {
        let at = |i: usize| -> i64 {
            let values = all.iter().map(|plain| plain.values[i]);
            match op {
                ReduceOp::Sum => values.sum(),
                ReduceOp::Avg if dtype.is_float() => unreachable!("not an integer"),
                ReduceOp::Avg => values.sum::<i64>() / all.len() as i64,
                ReduceOp::Min => values.min().unwrap(),
                ReduceOp::Max => values.max().unwrap(),
                ReduceOp::Product => values.product(),
                ReduceOp::BitAnd => values.fold(-1, |a, b| a & b),
                ReduceOp::BitOr => values.fold(0, |a, b| a | b),
                ReduceOp::BitXor => values.fold(0, |a, b| a ^ b),
                ReduceOp::PremulSum(factor) => (values.sum::<i64>() as f64 * factor.value()) as i64,
            }
        };
        Self { shape: all[0].shape.clone(), values: (0..all[0].values.len()).map(at).collect() }
    }
}

pub fn into_data(tensor: DispatchTensor) -> TensorData {
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
