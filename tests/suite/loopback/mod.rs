//! Ranks in several processes, each of which is simulated by threads and connected to the others by
//! queues.

#[expect(clippy::result_large_err, reason = "made once per test")]
mod background;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod bits;
mod conformance;
#[cfg(feature = "cube")]
#[expect(clippy::result_large_err, reason = "made once per test")]
mod device;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod digests;
mod going_on;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod landing;
mod prefetch;
#[expect(clippy::result_large_err, reason = "made once per test")]
mod traffic;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Tensor, TensorData};

/// Returns the elements of a tensor of floats.
fn read(tensor: DispatchTensor) -> TensorData {
    match tensor.shape().num_dims() {
        1 => Tensor::<1>::from_dispatch(tensor).into_data(),
        2 => Tensor::<2>::from_dispatch(tensor).into_data(),
        3 => Tensor::<3>::from_dispatch(tensor).into_data(),
        dims => panic!("no test sends a tensor of {dims} dimensions"),
    }
}
