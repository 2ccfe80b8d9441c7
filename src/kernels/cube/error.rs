//! [`CubeError`]: what a kernel cannot copy.

use burn::tensor::DType;

/// Why copies cannot run as a kernel on a device; burn's own operations remain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CubeError {
    /// The device's shaders cannot address single elements of the dtype.
    #[error(
        "the device has no {dtype:?} in kernels, and not every run of these copies begins and ends at a word of 4 \
         bytes; copy with burn's own operations, or in a dtype of at least 4 bytes"
    )]
    Dtype {
        /// Of the sources or the targets.
        dtype: DType,
    },
    /// Only floats are cast and scaled.
    #[error("{from:?} cannot be cast to {to:?}, scaled or accumulated on the way: only floats can")]
    Convert {
        /// Of the sources.
        from: DType,
        /// Of the targets.
        to: DType,
    },
    /// One place is written from more buffers than a kernel can have.
    #[error(
        "{needed} buffers meet in one row of a target, but the device binds at most {limit} sources to a kernel; \
         join some of them first"
    )]
    Bindings {
        /// How many sources the row has.
        needed: usize,
        /// How many the device allows.
        limit: usize,
    },
    /// Kernels count elements in 32 bits.
    #[error("{len} elements are more than a kernel counts in 32 bits; copy fewer tensors at once")]
    TooLarge {
        /// Elements of the largest buffer.
        len: usize,
    },
}
