//! [`GpuApi`]: the calls of CUDA, NCCL and cubecl that the plane makes.
//!
//! The plane decides what is called and in which order; an implementation only passes the calls on.
//! There is one for GPUs, and one in tests that records the calls and checks NCCL's rules.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};

use crate::comm::TensorMeta;
use crate::comm::data::plane::{DataPlaneError, PlaneResult};

/// Returns an error of the plane.
pub(super) fn error<T>(problem: impl Into<String>) -> PlaneResult<T> {
    let problem = problem.into();
    Err(DataPlaneError { problem })
}

/// Index of a GPU in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::comm) struct Gpu(pub usize);

/// Identity of a GPU among those of all machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GpuIdentity {
    pub host: String,
    /// Address of the GPU on its bus.
    pub bus: String,
}

/// A version of NCCL: major, minor, patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::comm) struct NcclVersion(pub u32, pub u32, pub u32);

impl std::fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Identity of a communicator, which one rank creates and sends to the others.
pub(super) type UniqueId = Vec<u8>;

/// A communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Comm(pub usize);

/// A stream for communication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CommStream(pub usize);

/// An address in memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct GpuAddress(pub usize);

impl GpuAddress {
    pub fn at(self, offset: usize) -> Self {
        Self(self.0 + offset)
    }
}

/// Registration of memory with a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Registration(pub usize);

/// A point on a stream. It is freed when dropped.
#[derive(Debug, Clone)]
pub(super) struct GpuEvent(pub Arc<dyn Any + Send + Sync>);

/// Tensors in memory of a GPU that is not freed while this exists, and the point on the rank's
/// stream after which they have their values.
#[derive(Debug, Clone)]
pub(super) struct Exported {
    pub ready: GpuEvent,
    pub tensors: Arc<dyn Any + Send + Sync>,
}

/// True while a call continues in the background.
pub(super) type InProgress = bool;

/// A reduction of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::comm) enum NativeOp {
    Sum,
    Avg,
    Min,
    Max,
    Product,
}

/// The calls. Those about tensors are made on the thread of a rank; those after
/// [`enter`](Self::enter) only on the thread of the GPU's [submitter](super::submitter).
///
/// Operations are enqueued on a stream, and communicators do not block: a call that returns
/// [`InProgress`] continues in the background, and its communicator takes no other call until
/// [`progress`](Self::progress) returns false.
pub(super) trait GpuApi: Debug + Send + Sync {
    fn version(&self) -> NcclVersion;

    /// Returns the GPU of a rank.
    fn gpu(&self, device: &Device, rank: usize) -> PlaneResult<Gpu>;

    fn identity(&self, gpu: Gpu) -> PlaneResult<GpuIdentity>;

    /// Returns the alignment in bytes of tensors in one block of memory.
    fn alignment(&self, gpu: Gpu) -> usize;

    /// Creates the identity of a communicator. No call for a GPU: any thread may make it.
    fn unique_id(&self) -> PlaneResult<UniqueId>;

    /// Keeps row-major tensors of `rank` in memory, and records when they have their values.
    fn export(&self, gpu: Gpu, rank: usize, tensors: Vec<DispatchTensor>) -> PlaneResult<Exported>;

    /// Copies `blocks` to new tensors of `rank`, on its stream, after `done`. Also returns the point
    /// on the stream after which the blocks are read. Does not wait for the GPU. Without `done`, no
    /// block has elements.
    fn import(
        &self,
        gpu: Gpu,
        rank: usize,
        device: &Device,
        blocks: Vec<(GpuAddress, TensorMeta)>,
        done: Option<&GpuEvent>,
    ) -> PlaneResult<(Vec<DispatchTensor>, GpuEvent)>;

    /// Makes the GPU the one of the calling thread.
    fn enter(&self, gpu: Gpu) -> PlaneResult<()>;

    fn create_stream(&self, gpu: Gpu) -> PlaneResult<CommStream>;
    /// Frees a stream on which nothing is pending.
    fn destroy_stream(&self, stream: CommStream);
    fn record(&self, stream: CommStream) -> PlaneResult<GpuEvent>;
    /// Makes what is enqueued on the stream from now on run after `event`.
    fn wait(&self, stream: CommStream, event: &GpuEvent) -> PlaneResult<()>;
    /// Returns true if a wait for the event no longer waits for the thread that records it.
    fn is_recorded(&self, event: &GpuEvent) -> PlaneResult<bool>;
    fn is_done(&self, event: &GpuEvent) -> PlaneResult<bool>;
    /// Waits on the host. Only when a communicator ends.
    fn synchronize(&self, event: &GpuEvent) -> PlaneResult<()>;

    /// Connects `rank` of `ranks` to the others.
    fn connect(&self, id: &UniqueId, ranks: usize, rank: usize) -> PlaneResult<(Comm, InProgress)>;
    fn progress(&self, comm: Comm) -> PlaneResult<InProgress>;
    /// Ends all operations of the communicator, and frees it. Called in a group for all
    /// communicators of a world: one of them may wait for the work of another on the stream.
    fn abort(&self, comm: Comm) -> PlaneResult<()>;
    /// Frees a communicator without pending operations. Called in a group for all communicators of a
    /// world, because it waits for the other ranks on the machine.
    fn destroy(&self, comm: Comm) -> PlaneResult<()>;

    fn allocate(&self, bytes: usize) -> PlaneResult<GpuAddress>;
    fn free(&self, memory: GpuAddress) -> PlaneResult<()>;
    fn register(&self, comm: Comm, memory: GpuAddress, bytes: usize) -> PlaneResult<Registration>;
    fn deregister(&self, comm: Comm, registration: Registration) -> PlaneResult<()>;

    /// Copies tensor `index` of `exported` to `to`.
    fn copy_in(
        &self,
        exported: &Exported,
        index: usize,
        to: GpuAddress,
        stream: CommStream,
    ) -> PlaneResult<()>;

    fn group_start(&self) -> PlaneResult<()>;
    fn group_end(&self) -> PlaneResult<()>;

    /// Gathers `bytes` bytes of each rank in the order of ranks.
    fn all_gather(&self, args: CopyArgs, recv: GpuAddress) -> PlaneResult<InProgress>;
    /// Reduces a block of `count` elements for each rank.
    fn reduce_scatter(&self, args: ReduceArgs) -> PlaneResult<InProgress>;
    fn all_reduce(&self, args: ReduceArgs) -> PlaneResult<InProgress>;
    fn broadcast(&self, args: CopyArgs, root: usize) -> PlaneResult<InProgress>;
    fn send(&self, args: CopyArgs, peer: usize) -> PlaneResult<InProgress>;
    fn receive(&self, args: CopyArgs, peer: usize) -> PlaneResult<InProgress>;
}

/// Arguments of an operation that moves bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CopyArgs {
    pub memory: GpuAddress,
    pub bytes: usize,
    pub comm: Comm,
    pub stream: CommStream,
}

/// Arguments of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReduceArgs {
    pub send: GpuAddress,
    pub recv: GpuAddress,
    pub count: usize,
    pub dtype: DType,
    pub op: NativeOp,
    pub comm: Comm,
    pub stream: CommStream,
}
