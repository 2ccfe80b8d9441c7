//! DTensor from outside. Tests name the invariants of `burn_dtensor::dtensor` they guard.

mod choice;
mod distribute;
mod empty_parts;
mod factory;
mod far;
mod gradient;
mod halo;
mod in_step;
mod initialize;
mod joined;
mod linear;
mod local_map;
mod loss;
mod misuse;
mod movement;
mod nan;
mod narrow;
mod one_device;
mod ops;
mod parts;
mod random;
mod refused;
mod replica_checks;
mod replicated;
mod request;
mod source;
mod stream;
mod strided;
mod text;
mod transfer;
mod uneven;
mod vary;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::comm::{Launch, World, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{PartialOp, Placement};
use burn_dtensor::{Error, Result};
use itertools::Itertools;

use crate::launched;

use Placement::{Partial, Replicate as R, Shard as S};

const SUM: Placement = Partial(PartialOp::Sum);
const AVG: Placement = Partial(PartialOp::Avg);
const MAX: Placement = Partial(PartialOp::Max);
const PRODUCT: Placement = Partial(PartialOp::Product);

fn names(ndim: usize) -> &'static [&'static str] {
    &["a", "b", "c"][..ndim]
}

/// Runs `program` on every rank of a mesh that is the whole world.
fn on_mesh<T: Send>(
    shape: &[usize],
    program: impl Fn(&World, &DeviceMesh) -> Result<T> + Sync,
) -> Vec<T> {
    let size = shape.iter().product();
    launch(Launch::threads(size), |world| {
        let mesh = DeviceMesh::new(world, shape, names(shape.len()))?;
        program(world, &mesh)
    })
    .map(launched::values)
    .unwrap_or_else(|error| panic!("{error}"))
}

fn devices() -> [Device; 3] {
    let plain = Device::flex();
    [
        plain.clone(),
        plain.clone().autodiff(),
        plain.autodiff().gradient_checkpointing(),
    ]
}

fn tracked_devices() -> [Device; 2] {
    let [_, disabled, balanced] = devices();
    [disabled, balanced]
}

/// Distinct values, shifted by `offset`.
fn ramp<const D: usize>(shape: [usize; D], offset: f32, device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let values: Vec<f32> = (0..len).map(|i| i as f32 + offset).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// The part that this rank must have of the `gradient` of the whole that `x` is.
fn part<const D: usize>(gradient: Tensor<D>, x: &DTensor<D>) -> Vec<f32> {
    let local = x.spec().local_shape();
    let ranges: [_; D] = std::array::from_fn(|dim| x.spec().local_range(dim));
    if local.num_elements() == 0 {
        Vec::new()
    } else {
        values(gradient.slice(ranges))
    }
}

/// Every choice of `R`, `S(0)`, .. for a mesh of `ndim` dimensions.
fn placements_of(ndim: usize, dims: usize) -> Vec<Vec<Placement>> {
    let one = || std::iter::once(R).chain((0..dims).map(S));
    (0..ndim).map(|_| one()).multi_cartesian_product().collect()
}

/// The error with which `f` unwinds.
fn unwound<T>(f: impl FnOnce() -> T) -> Error {
    let payload = catch_unwind(AssertUnwindSafe(f))
        .err()
        .expect("must be refused");
    *payload.downcast().expect("a typed error")
}

fn error_of<T: std::fmt::Debug>(result: Result<T>) -> Error {
    result.expect_err("must be refused")
}
