//! [`SharedAllocation`]: several tensors in one block of memory.

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
    pub fn allocate(&self, client: &Client, device: &CubeDevice) -> SharedAllocation {
        let memory = client.empty(self.size);
        let view = |(shape, offset): (&Shape, &usize)| {
            let handle = view(&memory, *offset, shape.num_elements() * self.dtype.size());
            CubeTensor::new_contiguous(client.clone(), device.clone(), shape.clone(), handle, self.dtype)
        };
        let tensors = self.shapes.iter().zip(&self.offsets).map(view).collect();
        SharedAllocation { memory, tensors }
    }
}

/// Tensors that share one block of memory, which stays while one of them does.
#[derive(Debug, Clone)]
pub(crate) struct SharedAllocation {
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

/// Elements of `bytes` bytes in a vector: accesses of 16 bytes where the device has such, and never so long that
/// a view could begin inside one.
pub(crate) fn vector_lanes(client: &Client, bytes: usize) -> usize {
    let aligned = |lanes: &usize| alignment(client).is_multiple_of(lanes * bytes);
    client.properties().io_optimized_vector_sizes(bytes).find(aligned).unwrap_or(1)
}

/// Memory as an argument of a kernel that accesses whole vectors of `bytes` bytes: the last may reach past what
/// the handle bounds, never past its allocation.
pub(crate) fn vectors(memory: &Handle, bytes: usize) -> BufferArg {
    let mut memory = memory.clone();
    let used = memory.size_in_used();
    let past = used.next_multiple_of(bytes as u64) - used;
    let spare = memory.offset_end.unwrap_or(0);
    memory.offset_end = Some(spare.checked_sub(past).expect("allocations are whole vectors"));
    // SAFETY: the handle bounds what is accessed, and lies in its allocation by the line above.
    unsafe { BufferArg::from_raw_parts(memory, (used + past) as usize / bytes) }
}
