//! [`is_unsafe`]: inputs without elements with which burn's layers read foreign memory.
//!
//! # What it relies on
//! * burn-flex multiplies a batch of no matrices with one matrix, as `Linear` does with an input of
//!   shape `[0, 4, 8]`, by reading batch 0 of the empty operand. The process is killed, or computes
//!   with memory of others. So does a batch of matrices of which one of the leading dimensions is
//!   0, such as `[2, 0, 4, 8]`.
//! * With matrices of no rows, `[0, 8]` or `[4, 0, 8]`, burn returns matrices of no rows.
//!
//! # The issue to file
//! *`matmul` of an empty batch reads out of bounds (burn-flex).* `Tensor::<3>::zeros([0, 4, 8],
//! &device).matmul(weight)`, with `weight` of shape `[1, 8, 8]` or broadcast from `[8, 8]`, reads
//! batch 0 of a tensor without elements in `matmul_batched_gemm`, in safe code. Expected: a tensor
//! of shape `[0, 4, 8]`. An early return of zeros of the output's shape, if it has no elements,
//! would be enough.

use burn::tensor::{DType, Shape};

/// Returns true if a layer may read foreign memory with an input of this shape and dtype: a batch
/// of no matrices. Indices and masks of two dimensions count, because embeddings and attention make
/// such batches of them.
pub(crate) fn is_unsafe(shape: &Shape, dtype: DType) -> bool {
    let matrix_dims = if dtype.is_float() || matches!(dtype, DType::QFloat(_)) {
        2
    } else {
        1
    };
    shape.num_dims() > matrix_dims && shape[..shape.num_dims() - matrix_dims].contains(&0)
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Tensor};

    use super::*;

    #[test]
    fn batches_without_matrices_are_unsafe() {
        let float = |shape: &[usize]| is_unsafe(&Shape::from(shape.to_vec()), DType::F32);
        assert!(float(&[0, 4, 8]) && float(&[0, 4, 0, 8]) && float(&[2, 0, 4, 8]));
        assert!(
            !float(&[0, 8])
                && !float(&[0])
                && !float(&[4, 0, 8])
                && !float(&[4, 8, 0])
                && !float(&[])
        );
        let tokens = |shape: &[usize]| is_unsafe(&Shape::from(shape.to_vec()), DType::I64);
        assert!(
            tokens(&[0, 4])
                && tokens(&[2, 0, 4])
                && !tokens(&[0])
                && !tokens(&[4, 0])
                && !tokens(&[2, 4])
        );
    }

    /// Units rely on this: experts without tokens compute with such inputs.
    #[test]
    fn a_matrix_without_rows_has_a_result_without_rows() {
        let device = Device::flex().autodiff();
        let layer: Linear = LinearConfig::new(8, 3).init(&device);
        assert_eq!(
            layer.forward(Tensor::<3>::zeros([4, 0, 8], &device)).dims(),
            [4, 0, 3]
        );
        let output = layer.forward(Tensor::<2>::zeros([0, 8], &device));
        assert_eq!(output.dims(), [0, 3]);
        let grads = output.sum().backward();
        let grad = |grad: Option<Tensor<1>>| {
            grad.map(|grad| grad.into_data().iter::<f32>().collect::<Vec<_>>())
        };
        assert_eq!(
            grad(layer.bias.expect("it has one").grad(&grads)),
            Some(vec![0.0; 3])
        );
        assert_eq!(
            grad(layer.weight.grad(&grads).map(|grad| grad.flatten(0, 1))),
            Some(vec![0.0; 24])
        );
    }
}
