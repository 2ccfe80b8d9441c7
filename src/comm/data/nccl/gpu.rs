//! [`CudaGpus`]: the calls on GPUs.
//!
//! Tensors are cubecl's. Their pointers and streams are known on the device's server thread, so
//! what needs them is a closure that is submitted there: it runs in the order in which the rank
//! submits kernels, and no rank waits for it. The thread of the GPU waits for the closure, not for
//! the GPU.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use burn::backend::{
    BackendTensor, DispatchAutodiffContext, DispatchDevice, DispatchTensor, DispatchTensorKind,
    TensorMetadata,
};
use burn::tensor::{DType, Device};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use burn_dtensor_nccl::sys::{ncclComm_t, ncclDataType_t, ncclUniqueId};
use burn_dtensor_nccl::{LoadError, NcclLibrary, Progress, RedOp, Version, nonblocking_config};
use cubecl::device::CudaDevice;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Handle;
use cubecl_server::server::ServerStorage;
use cudarc::driver::{DriverError, result, sys as cuda};
use parking_lot::Mutex;

use super::NcclLoader;
use super::api::{
    Comm, CommStream, CopyArgs, Exported, Gpu, GpuAddress, GpuApi, GpuEvent, GpuIdentity,
    InProgress, NativeOp, NcclVersion, ReduceArgs, Registration, UniqueId, error,
};
use super::submitter::GpuThreads;
use crate::burn_compat::internals::CudaServer;
use crate::comm::data::plane::{DataPlaneError, PlaneResult};
use crate::comm::{TensorMeta, backend};
use crate::kernels::cube::{alignment, view};
use crate::memory::cuda::{CudaEvent, Promise, enter, stream_of, text_of};

/// Loads NCCL. Reductions are in the fixed tree if `in_tree`.
///
/// # Errors
/// If NCCL cannot be loaded.
pub(in crate::comm) fn load(in_tree: bool) -> Result<NcclLoader, LoadError> {
    // Loaded once, because a GPU has one thread that makes calls.
    static LOADED: Mutex<Option<(Arc<CudaGpus>, Arc<GpuThreads>)>> = Mutex::new(None);
    let mut loaded = LOADED.lock();
    let (api, threads) = match &*loaded {
        Some(loaded) => loaded.clone(),
        None => {
            let nccl = NcclLibrary::load()?;
            loaded
                .insert((Arc::new(CudaGpus { nccl }), Arc::default()))
                .clone()
        }
    };
    Ok(NcclLoader {
        api,
        threads,
        in_tree,
    })
}

/// The GPUs of this process.
#[derive(Debug)]
struct CudaGpus {
    nccl: NcclLibrary,
}

/// Memory of a tensor, and what keeps it in place.
struct PinnedMemory {
    pointer: cuda::CUdeviceptr,
    bytes: usize,
    _pin: Box<dyn Any + Send>,
}

/// Tensors in memory of a GPU.
struct PinnedTensors {
    memory: Promise<Vec<PinnedMemory>>,
    /// Keeps operations of burn from writing to the memory in place.
    _handles: Vec<Handle>,
}

// SAFETY: what pins memory is only dropped.
unsafe impl Sync for PinnedTensors {}

/// Answer of a closure on the server thread. If there is none, because the closure has panicked,
/// waits for it fail.
struct Answer {
    event: Arc<CudaEvent>,
    memory: Option<Arc<PinnedTensors>>,
}

impl Answer {
    fn set(&self, memory: Result<Vec<PinnedMemory>, String>) {
        if let Err(problem) = &memory {
            self.event.set_failed(problem.clone());
        }
        if let Some(pinned) = &self.memory {
            pinned.memory.set(memory);
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let is_set = self.event.is_recorded()
            && self
                .memory
                .as_ref()
                .is_none_or(|pinned| pinned.memory.is_set());
        if !is_set {
            self.set(Err("the server thread of the GPU has not answered".into()));
        }
    }
}

fn of_text(problem: String) -> DataPlaneError {
    DataPlaneError { problem }
}

fn of_cuda(problem: DriverError) -> DataPlaneError {
    of_text(text_of(problem))
}

fn of_nccl(problem: burn_dtensor_nccl::NcclError) -> DataPlaneError {
    DataPlaneError {
        problem: problem.to_string(),
    }
}

fn in_progress(
    progress: Result<Progress, burn_dtensor_nccl::NcclError>,
) -> PlaneResult<InProgress> {
    Ok(progress.map_err(of_nccl)? == Progress::InProgress)
}

/// Returns the server thread of the GPU that has `memory`.
fn server_of(memory: &Handle) -> DeviceHandle<CudaServer> {
    DeviceHandle::new(memory.service.device)
}

fn cube_device(gpu: Gpu) -> CubeDevice {
    CubeDevice::Cuda(CudaDevice::new(gpu.0))
}

/// Returns the Cube primitive of a tensor of any kind.
fn primitive(tensor: &DispatchTensor) -> Option<&CubeTensor> {
    let DispatchTensorKind::Cube(tensor) = &tensor.kind else {
        return None;
    };
    let tensor: &dyn Any = match tensor {
        BackendTensor::Float(tensor) => tensor,
        BackendTensor::Int(tensor) => tensor,
        BackendTensor::Bool(tensor) => tensor,
        _ => return None,
    };
    tensor.downcast_ref()
}

/// Returns the tensor of a primitive, of the kind of its dtype.
fn wrap(tensor: CubeTensor) -> PlaneResult<DispatchTensor> {
    fn as_primitive<T: 'static>(tensor: CubeTensor) -> PlaneResult<T> {
        let mut tensor = Some(tensor);
        let tensor = (&mut tensor as &mut dyn Any).downcast_mut::<Option<T>>();
        tensor
            .and_then(Option::take)
            .map_or_else(|| error(FUSION), Ok)
    }
    let kind = match tensor.dtype {
        DType::Bool(_) => BackendTensor::Bool(as_primitive(tensor)?),
        dtype if dtype.is_float() => BackendTensor::Float(as_primitive(tensor)?),
        _ => BackendTensor::Int(as_primitive(tensor)?),
    };
    Ok(DispatchTensor {
        kind: DispatchTensorKind::Cube(kind),
        autodiff: DispatchAutodiffContext::Disabled,
    })
}

const FUSION: &str = "tensors cannot be exchanged by NCCL where burn's fusion is enabled";

/// Pins the memory of `handle`, and makes the stream of the thread that has created `own` wait for
/// its writers. Runs on the server thread.
fn pin(server: &mut CudaServer, handle: Handle, own: &Handle) -> Result<PinnedMemory, String> {
    let bytes = handle.size_in_used() as usize;
    if bytes == 0 {
        return Ok(PinnedMemory {
            pointer: 0,
            bytes,
            _pin: Box::new(()),
        });
    }
    let resource = server
        .get_resource(handle.binding(), own.stream)
        .map_err(|problem| problem.to_string())?;
    Ok(PinnedMemory {
        pointer: resource.resource().ptr,
        bytes,
        _pin: Box::new(resource),
    })
}

fn dtype_of(dtype: DType) -> PlaneResult<ncclDataType_t> {
    Ok(match dtype {
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F32 | DType::Flex32 => ncclDataType_t::ncclFloat32,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I8 => ncclDataType_t::ncclInt8,
        DType::U64 => ncclDataType_t::ncclUint64,
        DType::U32 => ncclDataType_t::ncclUint32,
        DType::U8 => ncclDataType_t::ncclUint8,
        dtype => return error(format!("NCCL does not reduce {dtype:?}")),
    })
}

fn op_of(op: NativeOp) -> RedOp {
    match op {
        NativeOp::Sum => RedOp::SUM,
        NativeOp::Avg => RedOp::AVG,
        NativeOp::Min => RedOp::MIN,
        NativeOp::Max => RedOp::MAX,
        NativeOp::Product => RedOp::PROD,
    }
}

fn comm_of(comm: Comm) -> ncclComm_t {
    ptr::with_exposed_provenance_mut(comm.0)
}

fn memory_of(address: GpuAddress) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address.0)
}

fn stream_pointer<T>(stream: CommStream) -> *mut T {
    ptr::with_exposed_provenance_mut(stream.0)
}

fn event_of(event: &GpuEvent) -> PlaneResult<Arc<CudaEvent>> {
    let event = event.0.clone().downcast();
    event.map_or_else(|_| error("the event is not one of CUDA"), Ok)
}

impl CudaGpus {
    /// Returns the tensor on the GPU, as a row-major Cube tensor.
    fn on_gpu(gpu: Gpu, tensor: DispatchTensor) -> PlaneResult<CubeTensor> {
        let device = Device::new(DispatchDevice::Cube(cube_device(gpu)));
        let tensor = match tensor.device() == *device.as_dispatch() {
            true => tensor,
            // Of a call that some ranks make without tensors.
            false => backend::from_data(backend::into_data(tensor), &device),
        };
        match primitive(&tensor) {
            Some(tensor) => Ok(burn_cubecl::kernel::into_contiguous(tensor.clone())),
            None => error(FUSION),
        }
    }
}

impl GpuApi for CudaGpus {
    fn version(&self) -> NcclVersion {
        let Version {
            major,
            minor,
            patch,
        } = self.nccl.version();
        NcclVersion(major, minor, patch)
    }

    fn gpu(&self, device: &Device, rank: usize) -> PlaneResult<Gpu> {
        match device.as_dispatch() {
            DispatchDevice::Cube(CubeDevice::Cuda(device)) => Ok(Gpu(device.index)),
            other => error(format!(
                "rank {rank} has device {other:?}, but NCCL needs a GPU of CUDA. Pass one to `Launch::with_device`"
            )),
        }
    }

    fn identity(&self, gpu: Gpu) -> PlaneResult<GpuIdentity> {
        let device = result::device::get(gpu.0 as i32).map_err(of_cuda)?;
        let uuid = result::device::get_uuid(device).map_err(of_cuda)?;
        let uuid = uuid
            .bytes
            .map(|byte| format!("{:02x}", byte as u8))
            .concat();
        let host = fs_err::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Ok(GpuIdentity {
            host: host.trim().into(),
            bus: format!("GPU {uuid}"),
        })
    }

    fn alignment(&self, gpu: Gpu) -> usize {
        alignment(&cube_device(gpu).client())
    }

    fn unique_id(&self) -> PlaneResult<UniqueId> {
        let id = self.nccl.unique_id().map_err(of_nccl)?;
        Ok(id.internal.iter().map(|byte| *byte as u8).collect())
    }

    fn export(
        &self,
        gpu: Gpu,
        _rank: usize,
        tensors: Vec<DispatchTensor>,
    ) -> PlaneResult<Exported> {
        self.enter(gpu)?;
        let tensors = tensors.into_iter().map(|tensor| Self::on_gpu(gpu, tensor));
        let tensors = tensors.collect::<PlaneResult<Vec<_>>>()?;
        let handles: Vec<_> = tensors.iter().map(|tensor| tensor.handle.clone()).collect();
        // Created by this thread, so it names the thread's stream.
        let own = cube_device(gpu).client().empty(1);
        let ready = CudaEvent::new().map_err(of_text)?;
        let pinned = Arc::new(PinnedTensors {
            memory: Promise::new(),
            _handles: handles.clone(),
        });
        let answer = Answer {
            event: ready.clone(),
            memory: Some(pinned.clone()),
        };
        let device = server_of(&own);
        device.submit(move |server: &mut CudaServer| {
            let pinned = handles
                .into_iter()
                .map(|handle| pin(server, handle, &own))
                .collect::<Result<Vec<_>, _>>();
            answer.set(pinned.and_then(|pinned| {
                answer.event.record(stream_of(server, &own)?)?;
                Ok(pinned)
            }));
        });
        // The thread of the GPU waits for it, and does not flush.
        device.flush_queue();
        Ok(Exported {
            ready: GpuEvent(ready),
            tensors: pinned,
        })
    }

    fn import(
        &self,
        gpu: Gpu,
        _rank: usize,
        _device: &Device,
        blocks: Vec<(GpuAddress, TensorMeta)>,
        done: Option<&GpuEvent>,
    ) -> PlaneResult<(Vec<DispatchTensor>, GpuEvent)> {
        self.enter(gpu)?;
        let device = cube_device(gpu);
        let client = device.client();
        let size = |meta: &TensorMeta| meta.shape.num_elements() * meta.dtype.size();
        let full = || blocks.iter().filter(|(_, meta)| size(meta) > 0);
        let start = full().map(|(at, _)| at.0).min().unwrap_or(0);
        let end = full()
            .map(|(at, meta)| at.0 + size(meta))
            .max()
            .unwrap_or(0);
        // The blocks are next to each other, so that one copy of what is between them is enough.
        let memory = client.empty((end - start).max(alignment(&client)));
        let tensors = blocks.iter().map(|(at, meta)| {
            let handle = match size(meta) {
                0 => view(&memory, 0, 0),
                bytes => view(&memory, at.0 - start, bytes),
            };
            wrap(CubeTensor::new_contiguous(
                client.clone(),
                device.clone(),
                meta.shape.clone(),
                handle,
                meta.dtype,
            ))
        });
        let tensors = tensors.collect::<PlaneResult<Vec<_>>>()?;
        let read = CudaEvent::new().map_err(of_text)?;
        let done = done.map(event_of).transpose()?;
        let answer = Answer {
            event: read.clone(),
            memory: None,
        };
        let device = server_of(&memory);
        device.submit(move |server: &mut CudaServer| {
            let copied = pin(server, memory.clone(), &memory).and_then(|target| {
                let stream = stream_of(server, &memory)?;
                if let Some(done) = done {
                    done.wait(stream)?;
                }
                if end > start {
                    // SAFETY: the blocks are staging memory that nothing writes before `read`, and
                    // the target is pinned until the copy is enqueued, on the stream that frees it.
                    unsafe {
                        result::memcpy_dtod_async(
                            target.pointer,
                            start as cuda::CUdeviceptr,
                            end - start,
                            stream,
                        )
                    }
                    .map_err(text_of)?;
                }
                answer.event.record(stream)
            });
            answer.set(copied.map(|()| Vec::new()));
        });
        device.flush_queue();
        Ok((tensors, GpuEvent(read)))
    }

    fn enter(&self, gpu: Gpu) -> PlaneResult<()> {
        enter(gpu.0).map_err(of_text)
    }

    fn create_stream(&self, _gpu: Gpu) -> PlaneResult<CommStream> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        Ok(CommStream(stream.map_err(of_cuda)?.expose_provenance()))
    }

    fn destroy_stream(&self, stream: CommStream) {
        // SAFETY: nothing uses the stream any more.
        if let Err(problem) = unsafe { result::stream::destroy(stream_pointer(stream)) } {
            log::warn!("cannot free a stream of CUDA: {problem}");
        }
    }

    fn record(&self, stream: CommStream) -> PlaneResult<GpuEvent> {
        let event = CudaEvent::new().map_err(of_text)?;
        let recorded = event.record(stream_pointer(stream));
        recorded.map_or_else(error, |()| Ok(GpuEvent(event)))
    }

    fn wait(&self, stream: CommStream, event: &GpuEvent) -> PlaneResult<()> {
        event_of(event)?
            .wait(stream_pointer(stream))
            .map_err(of_text)
    }

    fn is_recorded(&self, event: &GpuEvent) -> PlaneResult<bool> {
        Ok(event_of(event)?.is_recorded())
    }

    fn is_done(&self, event: &GpuEvent) -> PlaneResult<bool> {
        event_of(event)?.is_done().map_err(of_text)
    }

    fn synchronize(&self, event: &GpuEvent) -> PlaneResult<()> {
        event_of(event)?.synchronize().map_err(of_text)
    }

    fn connect(&self, id: &UniqueId, ranks: usize, rank: usize) -> PlaneResult<(Comm, InProgress)> {
        let mut unique = ncclUniqueId { internal: [0; 128] };
        if id.len() != unique.internal.len() {
            return error("the identity of a communicator has another length than NCCL's");
        }
        for (to, from) in unique.internal.iter_mut().zip(id) {
            *to = *from as _;
        }
        let mut comm = ptr::null_mut();
        // SAFETY: only this thread makes calls for the GPU.
        let connected = unsafe {
            self.nccl.comm_init_rank_config(
                &mut comm,
                ranks as i32,
                unique,
                rank as i32,
                &mut nonblocking_config(),
            )
        };
        match in_progress(connected) {
            Ok(is_in_progress) => Ok((Comm(comm.expose_provenance()), is_in_progress)),
            Err(problem) => {
                // A failed call may have left a group open, and a communicator.
                let _ = self.nccl.group_end();
                if !comm.is_null() {
                    // SAFETY: nothing else has the communicator.
                    let _ = unsafe { self.nccl.comm_abort(comm) };
                }
                Err(problem)
            }
        }
    }

    fn progress(&self, comm: Comm) -> PlaneResult<InProgress> {
        // SAFETY: the communicator exists, and only this thread makes calls for the GPU.
        in_progress(unsafe { self.nccl.comm_async_error(comm_of(comm)) })
    }

    fn abort(&self, comm: Comm) -> PlaneResult<()> {
        // SAFETY: as above. The plane makes no call with it afterwards.
        unsafe { self.nccl.comm_abort(comm_of(comm)) }.map_err(of_nccl)
    }

    fn destroy(&self, comm: Comm) -> PlaneResult<()> {
        // SAFETY: as above.
        unsafe { self.nccl.comm_destroy(comm_of(comm)) }.map_err(of_nccl)
    }

    fn allocate(&self, bytes: usize) -> PlaneResult<GpuAddress> {
        let memory = self.nccl.mem_alloc(bytes).map_err(of_nccl)?;
        Ok(GpuAddress(memory.expose_provenance()))
    }

    fn free(&self, memory: GpuAddress) -> PlaneResult<()> {
        // SAFETY: the memory is not registered, and nothing uses it.
        unsafe { self.nccl.mem_free(memory_of(memory)) }.map_err(of_nccl)
    }

    fn register(&self, comm: Comm, memory: GpuAddress, bytes: usize) -> PlaneResult<Registration> {
        // SAFETY: the memory has these bytes, and is freed after the registration ends.
        let handle = unsafe {
            self.nccl
                .comm_register(comm_of(comm), memory_of(memory), bytes)
        };
        Ok(Registration(handle.map_err(of_nccl)?.expose_provenance()))
    }

    fn deregister(&self, comm: Comm, registration: Registration) -> PlaneResult<()> {
        // NCCL returns no handle for memory that it does not register.
        if registration.0 == 0 {
            return Ok(());
        }
        let handle = ptr::with_exposed_provenance_mut(registration.0);
        // SAFETY: no operation uses the memory.
        unsafe { self.nccl.comm_deregister(comm_of(comm), handle) }.map_err(of_nccl)
    }

    fn copy_in(
        &self,
        exported: &Exported,
        index: usize,
        to: GpuAddress,
        stream: CommStream,
    ) -> PlaneResult<()> {
        let Some(tensors) = exported.tensors.downcast_ref::<PinnedTensors>() else {
            return error("the tensors are not in memory of a GPU");
        };
        let copied = tensors.memory.wait(|memory| {
            let PinnedMemory { pointer, bytes, .. } = memory[index];
            // SAFETY: the source is pinned until the operation is done, and the target has room.
            unsafe {
                result::memcpy_dtod_async(
                    to.0 as cuda::CUdeviceptr,
                    pointer,
                    bytes,
                    stream_pointer(stream),
                )
            }
            .map_err(of_cuda)
        });
        copied.map_err(of_text)?
    }

    fn group_start(&self) -> PlaneResult<()> {
        self.nccl.group_start().map_err(of_nccl)
    }

    fn group_end(&self) -> PlaneResult<()> {
        in_progress(self.nccl.group_end()).map(drop)
    }

    fn all_gather(&self, args: CopyArgs, recv: GpuAddress) -> PlaneResult<InProgress> {
        // SAFETY: the memory has room for all rows, and only this thread makes calls for the GPU.
        in_progress(unsafe {
            self.nccl.all_gather(
                memory_of(args.memory),
                memory_of(recv),
                args.bytes,
                ncclDataType_t::ncclUint8,
                comm_of(args.comm),
                stream_pointer(args.stream),
            )
        })
    }

    fn reduce_scatter(&self, args: ReduceArgs) -> PlaneResult<InProgress> {
        // SAFETY: as above.
        in_progress(unsafe {
            self.nccl.reduce_scatter(
                memory_of(args.send),
                memory_of(args.recv),
                args.count,
                dtype_of(args.dtype)?,
                op_of(args.op),
                comm_of(args.comm),
                stream_pointer(args.stream),
            )
        })
    }

    fn all_reduce(&self, args: ReduceArgs) -> PlaneResult<InProgress> {
        // SAFETY: as above.
        in_progress(unsafe {
            self.nccl.all_reduce(
                memory_of(args.send),
                memory_of(args.recv),
                args.count,
                dtype_of(args.dtype)?,
                op_of(args.op),
                comm_of(args.comm),
                stream_pointer(args.stream),
            )
        })
    }

    fn broadcast(&self, args: CopyArgs, root: usize) -> PlaneResult<InProgress> {
        // SAFETY: as above.
        in_progress(unsafe {
            self.nccl.broadcast(
                memory_of(args.memory),
                memory_of(args.memory),
                args.bytes,
                ncclDataType_t::ncclUint8,
                root as i32,
                comm_of(args.comm),
                stream_pointer(args.stream),
            )
        })
    }

    fn send(&self, args: CopyArgs, peer: usize) -> PlaneResult<InProgress> {
        // SAFETY: as above.
        in_progress(unsafe {
            self.nccl.send(
                memory_of(args.memory),
                args.bytes,
                ncclDataType_t::ncclUint8,
                peer as i32,
                comm_of(args.comm),
                stream_pointer(args.stream),
            )
        })
    }

    fn receive(&self, args: CopyArgs, peer: usize) -> PlaneResult<InProgress> {
        // SAFETY: as above.
        in_progress(unsafe {
            self.nccl.recv(
                memory_of(args.memory),
                args.bytes,
                ncclDataType_t::ncclUint8,
                peer as i32,
                comm_of(args.comm),
                stream_pointer(args.stream),
            )
        })
    }
}

impl fmt::Debug for PinnedTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PinnedTensors")
    }
}

/// These need GPUs: `.ci/gpu` runs them.
#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::comm::{CommError, Launch, NcclReductions, ReduceOp, World, cuda_devices, launch};
    use crate::testing::Conformance;
    use crate::{Error, Result};

    fn api() -> CudaGpus {
        let nccl = NcclLibrary::load().unwrap();
        CudaGpus { nccl }
    }

    fn finish(api: &CudaGpus, comm: Comm) {
        while api.progress(comm).unwrap() {
            std::thread::yield_now();
        }
    }

    /// One rank on one GPU: all calls but those of several ranks.
    #[test]
    fn a_communicator_of_one_rank_reduces() {
        let device = cuda_devices().unwrap().remove(0);
        let api = api();
        let gpu = api.gpu(&device, 0).unwrap();
        api.enter(gpu).unwrap();
        let stream = api.create_stream(gpu).unwrap();
        let (comm, _) = api.connect(&api.unique_id().unwrap(), 1, 0).unwrap();
        finish(&api, comm);
        let memory = api.allocate(1 << 16).unwrap();
        let registration = api.register(comm, memory, 1 << 16).unwrap();
        let values: Vec<f32> = (0..1000).map(|value| value as f32).collect();
        for round in 0..3 {
            let tensor = Tensor::<1>::from_data(&values[..], &device) * (round + 1) as f32;
            let meta = TensorMeta {
                shape: [1000].into(),
                dtype: DType::F32,
            };
            let exported = api.export(gpu, 0, vec![tensor.into_dispatch()]).unwrap();
            api.wait(stream, &exported.ready).unwrap();
            api.copy_in(&exported, 0, memory, stream).unwrap();
            let args = ReduceArgs {
                send: memory,
                recv: memory,
                count: 1000,
                dtype: DType::F32,
                op: NativeOp::Sum,
                comm,
                stream,
            };
            api.all_reduce(args).unwrap();
            finish(&api, comm);
            let done = api.record(stream).unwrap();
            let (sum, read) = api
                .import(gpu, 0, &device, vec![(memory, meta)], Some(&done))
                .unwrap();
            api.wait(stream, &read).unwrap();
            let sum = Tensor::<1>::from_dispatch(sum[0].clone()).into_data();
            let expected = values.iter().map(|value| value * (round + 1) as f32);
            assert!(sum.iter::<f32>().eq(expected));
        }
        let last = api.record(stream).unwrap();
        api.synchronize(&last).unwrap();
        api.deregister(comm, registration).unwrap();
        api.free(memory).unwrap();
        api.destroy(comm).unwrap();
        api.destroy_stream(stream);
    }

    fn sum(world: &World) -> Result<f32> {
        let own = Tensor::<1>::full([1000], 1.0 + world.rank() as f32, world.device());
        let sum = world
            .all()
            .all_reduce("sum".into(), vec![own.into_dispatch()], ReduceOp::Sum)
            .wait()?
            .remove(0);
        let sum = Tensor::<1>::from_dispatch(sum).into_data();
        Ok(sum.iter::<f32>().next().unwrap_or_default())
    }

    /// NCCL allows this since 2.30, with `NCCL_MULTI_RANK_GPU_ENABLE=1`.
    #[test]
    fn two_ranks_on_one_gpu_reduce_or_are_refused() {
        let device = cuda_devices().unwrap().remove(0);
        let ranks = Launch::threads(2).with_device(device);
        let ranks = ranks.with_nccl(NcclReductions::Native).unwrap();
        match launch(ranks, sum) {
            Ok(sums) => assert_eq!(sums, [(0, 3.0), (1, 3.0)]),
            Err(error) => {
                let Error::Comm(CommError::DataPlane { problem, .. }) = error.cause else {
                    panic!("{error}")
                };
                assert!(problem.contains("have the same GPU"), "{problem}");
                println!("skipped: {problem}");
            }
        }
    }

    /// One thread rank for each GPU.
    #[test]
    fn ranks_on_all_gpus_conform() {
        let devices = cuda_devices().unwrap();
        if devices.len() == 1 {
            println!("skipped: there is one GPU");
            return;
        }
        for reductions in [NcclReductions::Native, NcclReductions::FixedTree] {
            let launch = |ranks| {
                let devices = devices.iter().take(ranks).cloned();
                let ranks = Launch::threads(ranks).with_devices(devices);
                ranks.with_nccl(reductions).unwrap()
            };
            let report = Conformance::of(launch).with_ranks([2, devices.len()]).run();
            println!("{reductions:?}: {report}");
        }
    }
}
