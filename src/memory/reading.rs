//! [`Reading`]: asynchronous copies of Cube tensors to the host.

use std::future::Future;
use std::pin::Pin;

use burn::backend::DispatchTensor;
use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous_aligned;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::future::reader::read_sync;
use cubecl::server::{CopyDescriptor, ServerError};

use parking_lot::Mutex;

use super::cube::primitive;

/// One client for each device that was read from. A reading future borrows its client and outlives
/// the caller, so clients are never freed.
static CLIENTS: Mutex<Vec<(CubeDevice, &Client)>> = Mutex::new(Vec::new());

fn client(tensor: &CubeTensor) -> &'static Client {
    let mut clients = CLIENTS.lock();
    if let Some((_, client)) = clients.iter().find(|(device, _)| *device == tensor.device) {
        return client;
    }
    let client: &Client = Box::leak(Box::new(tensor.device.client()));
    clients.push((tensor.device.clone(), client));
    client
}

/// Copies that were requested from the device. burn's own reads start only when they are polled,
/// and keep the tensors alive until then.
pub(super) struct Reading {
    copies: Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send>>,
    like: Vec<(Shape, DType)>,
}

impl Reading {
    /// Requests copies of tensors of one device. Returns `None` if they are not Cube tensors.
    pub(super) fn begin(tensors: &[DispatchTensor]) -> Option<Self> {
        let tensors: Vec<CubeTensor> = tensors
            .iter()
            .map(|tensor| primitive(tensor).cloned())
            .collect::<Option<_>>()?;
        let client = client(tensors.first()?);
        let like = tensors
            .iter()
            .map(|tensor| (tensor.meta.shape().clone(), tensor.dtype))
            .collect();
        let copy = |tensor: CubeTensor| {
            let tensor = into_contiguous_aligned(tensor);
            let shape = tensor.meta.shape().clone();
            let strides = tensor.meta.strides().clone();
            CopyDescriptor::new(tensor.handle.binding(), shape, strides, tensor.dtype.size())
        };
        let copies = Box::pin(client.read_tensor_async(tensors.into_iter().map(copy).collect()));
        Some(Self { copies, like })
    }

    /// Waits for the copies.
    ///
    /// # Panics
    /// If the device fails.
    pub(super) fn wait(self) -> Vec<TensorData> {
        let copies = read_sync(self.copies)
            .unwrap_or_else(|error| panic!("cannot read gradients: {error:?}"));
        copies
            .into_iter()
            .zip(self.like)
            .map(|(bytes, (shape, dtype))| TensorData::from_bytes(bytes, shape, dtype))
            .collect()
    }
}
