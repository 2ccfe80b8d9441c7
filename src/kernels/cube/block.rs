//! [`Block`]: several tensors in one block of memory.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;

/// Where tensors lie in one block: each begins where the device allows a view to begin.
#[derive(Debug, Clone)]
pub(crate) struct BlockLayout {
    shapes: Vec<Shape>,
    dtype: DType,
    /// Bytes before each tensor.
    offsets: Vec<usize>,
    /// Bytes of the block.
    size: usize,
}

impl BlockLayout {
    /// Of tensors of these shapes, one after another.
    pub fn new(client: &Client, shapes: &[Shape], dtype: DType) -> Self {
        let (align, mut size) = (alignment(client), 0);
        let offset = |shape: &Shape| {
            let offset = size;
            size += (shape.num_elements() * dtype.size()).next_multiple_of(align);
            offset
        };
        let offsets = shapes.iter().map(offset).collect();
        Self { shapes: shapes.to_vec(), dtype, offsets, size: size.max(align) }
    }

    /// Bytes before each tensor.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Bytes of the block.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Memory for the tensors, not written yet.
    pub fn allocate(&self, client: &Client, device: &CubeDevice) -> Block {
        let memory = client.empty(self.size);
        let view = |(shape, offset): (&Shape, &usize)| {
            let handle = view(&memory, *offset, shape.num_elements() * self.dtype.size());
            CubeTensor::new_contiguous(client.clone(), device.clone(), shape.clone(), handle, self.dtype)
        };
        let tensors = self.shapes.iter().zip(&self.offsets).map(view).collect();
        Block { memory, tensors }
    }
}

/// Tensors that share one block of memory, which stays while one of them does.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(super) memory: Handle,
    /// Views of the block.
    pub tensors: Vec<CubeTensor>,
}

/// Bytes at a multiple of which a view of memory may begin.
pub(crate) fn alignment(client: &Client) -> usize {
    (client.properties().memory.alignment as usize).max(16)
}

/// `len` bytes of `memory` from `offset` on.
pub(crate) fn view(memory: &Handle, offset: usize, len: usize) -> Handle {
    let end = memory.size_in_used() - (offset + len) as u64;
    memory.clone().offset_start(offset as u64).offset_end(end)
}

/// The memory of a tensor with adjacent elements as an argument of a kernel that reads whole vectors of `bytes`
/// bytes: the last may reach past the tensor, never past its allocation.
pub(crate) fn vectors(tensor: &CubeTensor, bytes: usize) -> BufferArg {
    let mut handle = tensor.handle.clone();
    let used = handle.size_in_used();
    let past = used.next_multiple_of(bytes as u64) - used;
    let spare = handle.offset_end.unwrap_or(0);
    handle.offset_end = Some(spare.checked_sub(past).expect("allocations are whole vectors"));
    let len = (used + past) as usize / bytes;
    // SAFETY: the handle bounds what is read, as the line above has made sure.
    unsafe { BufferArg::from_raw_parts(handle, len) }
}
