//! [`CubeError`]: copies that a kernel cannot execute.

use burn::tensor::DType;

/// Reason why copies cannot run as a kernel on a device. The caller then uses burn's own
/// operations.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CubeError {
    /// The device's shaders cannot address single elements of the dtype.
    #[error(
        "the device does not support {dtype:?} in kernels, and a run of these copies does not begin and end at a \
         multiple of 4 bytes. Copy with burn's own operations, or in a dtype of at least 4 bytes"
    )]
    Dtype {
        /// Dtype of the elements.
        dtype: DType,
    },
    /// One row of a target is read from more buffers than a kernel can bind.
    #[error(
        "one row of a target is copied from {needed} buffers, but the device binds at most {limit} sources to a \
         kernel. Join some of them first"
    )]
    Bindings {
        /// Number of sources of the row.
        needed: usize,
        /// Number of sources that the device allows.
        limit: usize,
    },
    /// The targets do not fit one allocation of the device.
    #[error(
        "a block of {bytes} bytes is more than the {most} bytes that the device allocates at once. Copy fewer tensors at once"
    )]
    Allocation {
        /// Bytes of the block.
        bytes: usize,
        /// Most bytes of an allocation.
        most: u64,
    },
    /// A buffer is too large, because kernels count elements in 32 bits.
    #[error(
        "{len} elements are more than a kernel can count in 32 bits. Copy fewer tensors at once"
    )]
    TooLarge {
        /// Number of elements of the largest buffer.
        len: usize,
    },
}
