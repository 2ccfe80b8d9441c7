//! [`CudaStreams`]: the streams of the threads that submit work to a GPU of CUDA.

use std::any::TypeId;
use std::sync::Arc;

use burn::backend::{CudaDevice, DispatchDevice, DispatchTensor, TensorMetadata};
use burn_cubecl::CubeDevice;
use cubecl::client::Client;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Handle;

use super::submitted_work::{RankStreams, StreamPoint};
use crate::burn_compat::internals::CudaServer;
use crate::memory::cuda::{CudaEvent, enter, stream_of};

/// The streams of a GPU.
pub(super) struct CudaStreams {
    gpu: usize,
    client: Client,
}

/// A point on the stream of the thread that has created `own`.
struct CudaPoint {
    event: Arc<CudaEvent>,
    own: Handle,
}

impl CudaStreams {
    /// Returns the streams of the GPU of `tensor`; `None` if it is on another device.
    pub fn of(tensor: &DispatchTensor) -> Option<Self> {
        match tensor.device() {
            DispatchDevice::Cube(device @ CubeDevice::Cuda(CudaDevice { index: gpu })) => {
                let client = device.client();
                Some(Self { gpu, client })
            }
            _ => None,
        }
    }

    /// Lets the stream of the thread that has created `own` wait for an event.
    fn let_wait(&self, own: Handle, event: Arc<CudaEvent>) {
        server_of(&own).submit(move |server: &mut CudaServer| {
            let waits = stream_of(server, &own).and_then(|stream| event.wait(stream));
            if let Err(problem) = waits {
                log::error!("cannot order streams of a GPU: {problem}");
            }
        });
    }
}

fn server_of(memory: &Handle) -> DeviceHandle<CudaServer> {
    assert_eq!(memory.service.service, TypeId::of::<CudaServer>());
    DeviceHandle::new(memory.service.device)
}

impl RankStreams for CudaStreams {
    fn record(&self) -> StreamPoint {
        // Created by this thread, so it names the thread's stream.
        let own = self.client.empty(1);
        let created = enter(self.gpu).and_then(|()| CudaEvent::new());
        let event = created.unwrap_or_else(|problem| crate::Error::other(problem).unwind());
        let point = Arc::new(CudaPoint {
            event: event.clone(),
            own: own.clone(),
        });
        server_of(&own).submit(
            move |server: &mut CudaServer| match stream_of(server, &own) {
                Ok(stream) => drop(event.record(stream)),
                Err(problem) => event.set_failed(problem),
            },
        );
        point
    }

    fn wait(&self, point: &StreamPoint) {
        let own = self.client.empty(1);
        self.let_wait(own, of_cuda(point).event.clone());
    }

    fn hold(&self, other: &StreamPoint, point: &StreamPoint) {
        let own = of_cuda(other).own.clone();
        self.let_wait(own, of_cuda(point).event.clone());
    }
}

fn of_cuda(point: &StreamPoint) -> &CudaPoint {
    point
        .downcast_ref()
        .expect("the points of a contribution are those of its GPU")
}
