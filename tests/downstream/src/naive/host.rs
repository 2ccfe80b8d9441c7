//! Tensors as bytes and numbers of the host: split, concatenated and reduced one element after
//! another.

use std::ops::Range;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Float, Int, Tensor, TensorData};
use burn_dtensor::comm::ReduceOp;

/// Returns the elements of a tensor.
pub fn read(tensor: DispatchTensor) -> TensorData {
    fn typed<const D: usize>(tensor: DispatchTensor) -> TensorData {
        match tensor.dtype() {
            dtype if dtype.is_float() => Tensor::<D, Float>::from_dispatch(tensor).into_data(),
            dtype if dtype.is_bool() => Tensor::<D, Bool>::from_dispatch(tensor).into_data(),
            _ => Tensor::<D, Int>::from_dispatch(tensor).into_data(),
        }
    }
    match tensor.shape().num_dims() {
        1 => typed::<1>(tensor),
        2 => typed::<2>(tensor),
        3 => typed::<3>(tensor),
        4 => typed::<4>(tensor),
        dims => panic!("no tensor of {dims} dimensions is sent here"),
    }
}

/// Returns a tensor with the elements of `data`.
pub fn write(data: TensorData, device: &Device) -> DispatchTensor {
    fn typed<const D: usize>(data: TensorData, device: &Device) -> DispatchTensor {
        match data.dtype() {
            dtype if dtype.is_float() => {
                Tensor::<D, Float>::from_data(data, (device, dtype)).into_dispatch()
            }
            dtype if dtype.is_bool() => Tensor::<D, Bool>::from_data(data, device).into_dispatch(),
            dtype => Tensor::<D, Int>::from_data(data, (device, dtype)).into_dispatch(),
        }
    }
    match data.rank() {
        1 => typed::<1>(data, device),
        2 => typed::<2>(data, device),
        3 => typed::<3>(data, device),
        4 => typed::<4>(data, device),
        dims => panic!("no tensor of {dims} dimensions is sent here"),
    }
}

/// Returns the number of rows along `dim`, and the bytes of one element of a row.
fn rows(data: &TensorData, dim: usize) -> (usize, usize) {
    let shape = &data.shape()[..];
    (
        shape[..dim].iter().product(),
        shape[dim + 1..].iter().product::<usize>() * data.dtype().size(),
    )
}

/// Returns the elements whose index in `dim` lies in `range`.
pub fn narrow(data: &TensorData, dim: usize, range: Range<usize>) -> TensorData {
    let (count, width) = rows(data, dim);
    let (mut shape, bytes) = (data.shape().clone(), data.as_bytes());
    let starts = (0..count).map(|row| row * shape[dim]);
    let parts =
        starts.map(|start| &bytes[(start + range.start) * width..(start + range.end) * width]);
    let bytes = parts.collect::<Vec<_>>().concat();
    shape[dim] = range.len();
    TensorData::from_bytes_vec(bytes, shape, data.dtype())
}

/// Concatenates `parts` along `dim`.
pub fn concat(parts: &[TensorData], dim: usize) -> TensorData {
    let (count, width) = rows(&parts[0], dim);
    let row = |part: &TensorData, row: usize| {
        let length = part.shape()[dim] * width;
        part.as_bytes()[row * length..(row + 1) * length].to_vec()
    };
    let bytes = (0..count)
        .flat_map(|at| parts.iter().flat_map(move |part| row(part, at)))
        .collect();
    let mut shape = parts[0].shape().clone();
    shape[dim] = parts.iter().map(|part| part.shape()[dim]).sum();
    TensorData::from_bytes_vec(bytes, shape, parts[0].dtype())
}

/// Reduces `terms`, neighbours first.
pub fn reduce(terms: &[TensorData], op: ReduceOp) -> TensorData {
    let (shape, dtype) = (terms[0].shape().clone(), terms[0].dtype());
    if dtype.is_float() {
        return TensorData::new(floats(terms, op, dtype), shape).convert_dtype(dtype);
    }
    // Of two's complement, the low bytes are the number modulo a power of two.
    let bytes = integers(terms, op, dtype)
        .into_iter()
        .flat_map(|value| low_bytes(value, dtype));
    TensorData::from_bytes_vec(bytes.collect(), shape, dtype)
}

fn low_bytes(value: i128, dtype: DType) -> Vec<u8> {
    value.to_le_bytes()[..dtype.size()].to_vec()
}

/// Reduces floats. An operation in 64 bits, rounded to 32, is the operation in 32 bits.
fn floats(terms: &[TensorData], op: ReduceOp, dtype: DType) -> Vec<f64> {
    let round = |value: f64| {
        if dtype == DType::F64 {
            value
        } else {
            f64::from(value as f32)
        }
    };
    let term = |term: &TensorData| match op {
        ReduceOp::PremulSum(factor) => term
            .iter::<f64>()
            .map(|x| round(round(factor.value()) * x))
            .collect(),
        _ => term.iter::<f64>().collect(),
    };
    let terms: Vec<Vec<_>> = terms.iter().map(term).collect();
    let reduced = tree(&terms, &|a, b| match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => round(a + b),
        ReduceOp::Product => round(a * b),
        // `f64::min` drops NaN.
        ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => panic!("{op:?} of floats"),
    });
    let count = if op == ReduceOp::Avg {
        terms.len() as f64
    } else {
        1.0
    };
    reduced
        .into_iter()
        .map(|value| round(value / count))
        .collect()
}

/// Reduces integers, in enough bits for every sum; the sum of an average has 64 bits.
fn integers(terms: &[TensorData], op: ReduceOp, dtype: DType) -> Vec<i128> {
    let signed = !dtype.is_uint() && !dtype.is_bool();
    let term = |term: &TensorData| -> Vec<i128> {
        if signed {
            term.iter::<i64>().map(i128::from).collect()
        } else {
            term.iter::<u64>().map(i128::from).collect()
        }
    };
    let terms: Vec<_> = terms.iter().map(term).collect();
    let reduced = tree(&terms, &|a, b| match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Product => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::BitAnd => a & b,
        ReduceOp::BitOr => a | b,
        ReduceOp::BitXor => a ^ b,
        ReduceOp::PremulSum(_) => panic!("{op:?} of integers"),
    });
    let in_64_bits = |sum: i128| {
        if signed {
            i128::from(sum as i64)
        } else {
            i128::from(sum as u64)
        }
    };
    let averaged = |sum: i128| in_64_bits(sum) / terms.len() as i128;
    if op == ReduceOp::Avg {
        reduced.into_iter().map(averaged).collect()
    } else {
        reduced
    }
}

/// Combines neighbours in a binary tree whose first half is a power of two: pairs, then pairs of
/// pairs, and so on.
fn tree<T: Copy>(terms: &[Vec<T>], combine: &impl Fn(T, T) -> T) -> Vec<T> {
    if let [one] = terms {
        return one.clone();
    }
    let half = terms.len().next_power_of_two() / 2;
    let (low, high) = (tree(&terms[..half], combine), tree(&terms[half..], combine));
    low.into_iter()
        .zip(high)
        .map(|(a, b)| combine(a, b))
        .collect()
}
