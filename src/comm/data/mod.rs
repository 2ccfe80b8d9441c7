//! Data planes: they move the elements of calls on which all ranks have agreed.
//!
//! A [`DataPlane`] prepares what a rank contributes and builds its result. Which plane a call uses
//! depends on where its tensors are: each rank's handle on a group has [two planes](Planes::of), one
//! for host memory and one for the rank's device, which may be NCCL's. This file is the only place that picks, by plane
//! or by the backend of a tensor. A further plane is a directory here, a case of
//! [`PlaneContribution`] if its contributions carry something of its own, and a field of [`Planes`].
//!
//! | plane | ranks read | ranks of other processes receive | results |
//! |---|---|---|---|
//! | `host` | each other's memory | bytes | shared by the ranks of a process if they are identical |
//! | `device` | each other's memory, by handle | bytes, through host memory | usable in stream order |
//! | `nccl` | what NCCL exchanges between their GPUs | nothing from the control plane | usable in stream order |
//!
//! Planes are shared trait objects, because they hold no state of a call: one indirect call for a
//! collective. Contributions are an enum, because ranks of one group may be on the first two planes,
//! and each of them reads the contributions of all.
//!
//! | file | content |
//! |---|---|
//! | `plane` | interface, and the operations that planes share |
//! | `call`, `contribution`, `inputs` | what a plane is given: a call, what a rank contributes, and what all have contributed |
//! | `cuda_devices` | the GPUs of this process |
//! | `payload`, `payload_check` | tensors as bytes for other processes |
//! | `result_buffer` | results into which bytes of other processes are received |

pub(in crate::comm) mod call;
pub(in crate::comm) mod contribution;
mod cuda_devices;
#[cfg(feature = "cube")]
mod device;
#[cfg(feature = "flex")]
mod host;
pub(in crate::comm) mod inputs;
#[cfg(any(feature = "nccl", feature = "testing"))]
pub(in crate::comm) mod nccl;
pub(in crate::comm) mod payload;
pub(in crate::comm) mod payload_check;
pub(in crate::comm) mod plane;
pub(in crate::comm) mod result_buffer;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, TensorData};
use parking_lot::Mutex;

use crate::comm::backend::ranges::{Ranges, slice};
use crate::comm::control::rendezvous::SpinPolicy;
use crate::comm::transport::Payload;
use crate::comm::{ReduceOp, backend};
use contribution::Contribution;
pub use cuda_devices::cuda_devices;
use plane::{DataPlane, PlaneResult, TakeExchanged};
use result_buffer::ResultBuffer;

/// The planes of the ranks of a launch in one process.
#[derive(Debug)]
pub(in crate::comm) struct Planes {
    #[cfg(feature = "flex")]
    host: Arc<host::HostPlane>,
    #[cfg(feature = "cube")]
    device: Arc<device::DevicePlane>,
    /// Plane of the GPUs, if the launch has one, in place of `device`.
    #[cfg(any(feature = "nccl", feature = "testing"))]
    nccl: std::sync::OnceLock<Arc<nccl::NcclPlane>>,
    /// True if `nccl` also takes the place of `host`, which has the memory of simulated GPUs.
    #[cfg(feature = "testing")]
    simulates_gpus: std::sync::atomic::AtomicBool,
}

impl Planes {
    /// Creates the planes. Ranks wait for each other's part of a shared result according to
    /// `spin`; they share none if each needs `separate_memory`. After a shrink, `before` has the
    /// planes of the previous world.
    pub fn new(spin: SpinPolicy, separate_memory: bool, before: Option<&Self>) -> Self {
        let _ = (spin, separate_memory, before);
        #[cfg(any(feature = "nccl", feature = "testing"))]
        let nccl = before
            .and_then(|before| before.nccl.get())
            .map(|nccl| Arc::new(nccl.of_survivors()));
        Self {
            #[cfg(feature = "flex")]
            host: Arc::new(host::HostPlane::new(
                spin,
                separate_memory,
                before.map(|before| &*before.host),
            )),
            #[cfg(feature = "cube")]
            device: Arc::default(),
            #[cfg(any(feature = "nccl", feature = "testing"))]
            nccl: nccl.map_or_else(Default::default, Into::into),
            #[cfg(feature = "testing")]
            simulates_gpus: before
                .is_some_and(|before| {
                    before
                        .simulates_gpus
                        .load(std::sync::atomic::Ordering::Relaxed)
                })
                .into(),
        }
    }

    /// Returns the plane of calls whose tensors are on `device`.
    pub fn of(&self, device: &Device) -> Arc<dyn DataPlane> {
        #[cfg(any(feature = "nccl", feature = "testing"))]
        if let Some(nccl) = self.nccl.get().filter(|_| self.is_gpu(device)) {
            return nccl.clone();
        }
        #[cfg(all(feature = "flex", feature = "cube"))]
        return match crate::memory::is_host(device) {
            true => self.host.clone(),
            false => self.device.clone(),
        };
        #[cfg(all(feature = "flex", not(feature = "cube")))]
        return (device, self.host.clone()).1;
        #[cfg(not(feature = "flex"))]
        return (device, self.device.clone()).1;
    }

    /// [Aborts](DataPlane::abort) all planes.
    pub fn abort(&self) {
        #[cfg(feature = "flex")]
        self.host.abort();
        #[cfg(feature = "cube")]
        self.device.abort();
        #[cfg(any(feature = "nccl", feature = "testing"))]
        self.nccl.get().into_iter().for_each(|nccl| nccl.abort());
    }

    /// Makes `failed` the function that a plane calls if an exchange fails after it was taken.
    #[cfg(any(feature = "nccl", feature = "testing"))]
    pub fn watch(&self, failed: plane::OnFailure) {
        self.nccl
            .get()
            .into_iter()
            .for_each(|nccl| nccl.watch(failed.clone()));
    }

    /// Makes `nccl` the plane of the GPUs. Before any group is created.
    #[cfg(any(feature = "nccl", feature = "testing"))]
    pub fn use_nccl(&self, nccl: Arc<nccl::NcclPlane>) {
        let _ = self.nccl.set(nccl);
    }

    /// Returns true if ranks exchange tensors on their devices.
    pub fn exchange(&self) -> bool {
        #[cfg(any(feature = "nccl", feature = "testing"))]
        return self.nccl.get().is_some();
        #[cfg(not(any(feature = "nccl", feature = "testing")))]
        false
    }

    /// Makes the plane of the GPUs that of tensors in host memory, too.
    #[cfg(feature = "testing")]
    pub fn simulate_gpus(&self) {
        self.simulates_gpus
            .store(true, std::sync::atomic::Ordering::Relaxed);
    }

    #[cfg(any(feature = "nccl", feature = "testing"))]
    fn is_gpu(&self, device: &Device) -> bool {
        #[cfg(feature = "testing")]
        if self
            .simulates_gpus
            .load(std::sync::atomic::Ordering::Relaxed)
        {
            return true;
        }
        !crate::memory::is_host(device)
    }
}

/// Addition of a contributing rank's plane to its tensors.
#[derive(Debug)]
pub(in crate::comm) enum PlaneContribution {
    #[cfg(feature = "flex")]
    Host(host::HostContribution),
    #[cfg(feature = "cube")]
    Device(Box<device::DeviceContribution>),
    #[cfg(any(feature = "nccl", feature = "testing"))]
    Nccl(Arc<nccl::NcclContribution>),
    /// A message that the sender and the receiver exchange, until the receiver takes it.
    Exchanged(ExchangedMessage),
    /// Nothing but the tensors, or the buffer that has them if they were received there.
    #[cfg(not(feature = "flex"))]
    Received(Option<Arc<ResultBuffer>>),
}

/// A message whose exchange was started, until the receiver takes it. The mutex makes it `Sync`.
pub(in crate::comm) struct ExchangedMessage(Mutex<TakeExchanged>);

impl ExchangedMessage {
    pub fn new(take: TakeExchanged) -> Self {
        Self(Mutex::new(take))
    }

    /// Takes the message, on the receiver's thread, within `time`.
    pub fn take(self, time: Duration) -> PlaneResult<Vec<Contribution>> {
        self.0.into_inner()(time)
    }
}

impl std::fmt::Debug for ExchangedMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ExchangedMessage")
    }
}

impl PlaneContribution {
    /// Creates an addition of nothing, or of the `buffer` that has the tensors if they were received
    /// there.
    fn bytes(buffer: Option<Arc<ResultBuffer>>) -> Self {
        #[cfg(feature = "flex")]
        return Self::Host(host::HostContribution::received(buffer));
        #[cfg(not(feature = "flex"))]
        Self::Received(buffer)
    }

    /// Returns the result buffer that has the data of the contribution, if it was received there.
    pub fn result_buffer(&self) -> Option<&ResultBuffer> {
        match self {
            #[cfg(feature = "flex")]
            Self::Host(host) => host.result_buffer.as_deref(),
            #[cfg(not(feature = "flex"))]
            Self::Received(buffer) => buffer.as_deref(),
            _ => None,
        }
    }
}

/// Returns the result of `read`, which reads the contributions `all`. On a GPU, its reads run after
/// what the contributing ranks had submitted, and before what ranks other than `own` submit from
/// now on: they may then write to their tensors in place.
pub(in crate::comm) fn read_in_order<T>(
    all: &[Contribution],
    own: Option<usize>,
    read: impl FnOnce() -> T,
) -> T {
    #[cfg(feature = "cube")]
    return device::read_in_order(all, own, read);
    #[cfg(not(feature = "cube"))]
    (all, own, read()).2
}

/// Returns the tensor, or a copy if other ranks cannot read it in place for as long as they have a
/// handle.
fn lasting(tensor: DispatchTensor) -> DispatchTensor {
    #[cfg(feature = "flex")]
    let tensor = host::contiguous(tensor);
    #[cfg(feature = "cube")]
    let tensor = crate::memory::cube::ensure_persistent(tensor);
    tensor
}

/// Returns the slice `range` of `tensor` along `dim`. It is a view if its elements are adjacent,
/// and a copy otherwise.
pub(in crate::comm) fn shard(
    tensor: &DispatchTensor,
    dim: usize,
    range: Range<usize>,
) -> DispatchTensor {
    #[cfg(feature = "flex")]
    if let Some(shard) = host::adjacent(tensor, dim, range.clone()) {
        return shard;
    }
    concat(
        vec![(tensor, slice(&tensor.shape()[..], dim, range))],
        0,
        &Device::new(tensor.device()),
    )
}

/// Concatenates the blocks of `sources` along `dim`, on `device`.
fn concat(sources: Vec<(&DispatchTensor, Ranges)>, dim: usize, device: &Device) -> DispatchTensor {
    #[cfg(feature = "flex")]
    if let Some(joined) = host::joined(&sources, dim, device) {
        return joined;
    }
    backend::concat(&sources, dim, device)
}

/// Reduces the block `ranges` of every operand, in the fixed tree, on `device`.
fn reduce(
    operands: &[&DispatchTensor],
    ranges: &Ranges,
    op: ReduceOp,
    device: &Device,
) -> DispatchTensor {
    #[cfg(feature = "flex")]
    if let Some(reduced) = host::reduced(operands, ranges, op) {
        return reduced;
    }
    backend::reduce(operands, ranges, op, device)
}

/// Returns the elements of a row-major tensor in its own memory, if that is host memory.
fn in_place(tensor: &DispatchTensor) -> Option<Payload> {
    #[cfg(feature = "flex")]
    return host::payload(tensor);
    #[cfg(not(feature = "flex"))]
    (tensor, None).1
}

/// Returns a function that copies the tensor to the host, after what the calling thread has
/// submitted so far.
fn reader(tensor: DispatchTensor) -> Box<dyn FnOnce() -> TensorData + Send> {
    #[cfg(feature = "cube")]
    return device::reader(tensor);
    #[cfg(not(feature = "cube"))]
    Box::new(|| backend::into_data(tensor))
}

/// Returns true if the reduction has a kernel; the others use burn's operations.
fn has_kernel(op: ReduceOp) -> bool {
    !matches!(
        op,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::PremulSum(_)
    )
}
