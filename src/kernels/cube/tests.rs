//! Tests of kernels against copies element by element, on the GPU of tests.

mod launches;
mod layouts;

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use itertools::Itertools;
use rand::Rng;
use rand::rngs::StdRng;

use super::CubePlan;
use crate::kernels::CopyPlan;
use crate::memory::gpu::gpu;

/// Returns the device of all tests.
pub(super) fn device() -> CubeDevice {
    match gpu().as_dispatch() {
        DispatchDevice::Cube(device) => device.clone(),
        other => panic!("a GPU is a cube device, not {other:?}"),
    }
}

fn upload(bytes: &[u8], shape: &Shape, dtype: DType) -> CubeTensor {
    let device = device();
    let client = device.client();
    let handle = client.create_from_slice(bytes);
    CubeTensor::new_contiguous(client, device, shape.clone(), handle, dtype)
}

fn download(tensor: &CubeTensor) -> Vec<u8> {
    if tensor.meta.shape().num_elements() == 0 {
        return Vec::new();
    }
    tensor
        .client
        .read_one_unchecked(tensor.handle.clone())
        .to_vec()
}

/// Returns random elements of `dtype`. They have any bits, except that halves are finite: a shader
/// may change other values of halves.
fn random(len: usize, dtype: DType, rng: &mut StdRng) -> Vec<u8> {
    let element = |_| match dtype {
        DType::F16 => half::f16::from_f32(rng.random_range(-9.0..9.0))
            .to_le_bytes()
            .to_vec(),
        dtype => (0..dtype.size()).map(|_| rng.random()).collect(),
    };
    (0..len).flat_map(element).collect()
}

/// Returns the targets that `copies` of elements of `size` bytes must produce.
fn reference(copies: &CopyPlan, sources: &[Vec<u8>], size: usize) -> Vec<Vec<u8>> {
    let mut targets = copies
        .targets
        .iter()
        .map(|shape| vec![0; shape.num_elements() * size])
        .collect_vec();
    for segment in &copies.segments {
        for (row, column) in (0..segment.rows).cartesian_product(0..segment.run) {
            let from = segment.from + row * segment.from_stride + column;
            let to = segment.to + row * segment.to_stride + column;
            let element = &sources[segment.source][from * size..][..size];
            targets[segment.target][to * size..][..size].copy_from_slice(element);
        }
    }
    targets
}

/// Copies random elements, and compares them with the reference.
fn assert_copies(plan: &CubePlan, copies: &CopyPlan, dtype: DType, rng: &mut StdRng) {
    let sources = copies
        .sources
        .iter()
        .map(|shape| random(shape.num_elements(), dtype, rng))
        .collect_vec();
    let tensors = copies
        .sources
        .iter()
        .zip(&sources)
        .map(|(shape, bytes)| upload(bytes, shape, dtype))
        .collect_vec();
    let block = plan.run(&tensors);
    let found = block.tensors.iter().map(download).collect_vec();
    assert!(
        found == reference(copies, &sources, dtype.size()),
        "{dtype:?} {copies:?}"
    );
    let shapes = block
        .tensors
        .iter()
        .map(|tensor| tensor.meta.shape().clone())
        .collect_vec();
    assert_eq!(shapes, copies.targets);
}

/// Creates a plan on the device of tests.
fn plan_of(copies: &CopyPlan, dtype: DType) -> Result<CubePlan, super::CubeError> {
    CubePlan::new(&device(), copies, dtype)
}
