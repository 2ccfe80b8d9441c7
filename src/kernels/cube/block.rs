//! [`SharedAllocation`]: several tensors in one allocation.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::BufferArg;
use cubecl::server::Handle;

/// Offsets of tensors in one allocation. Each offset is one at which the device allows a view to
/// begin.
#[derive(Debug, Clone)]
pub(crate) struct BlockLayout {
    shapes: Vec<Shape>,
    dtype: DType,
    /// Offset of each tensor in bytes.
    pub(super) offsets: Vec<usize>,
    /// Size of the allocation in bytes.
    pub(super) size: usize,
}

impl BlockLayout {
    /// Creates the layout of tensors of these shapes, one after another.
    pub fn new(client: &Client, shapes: &[Shape], dtype: DType) -> Self {
        let align = alignment(client);
        let mut size = 0;
        let offsets = shapes
            .iter()
            .map(|shape| {
                let offset = size;
                size += (shape.num_elements() * dtype.size()).next_multiple_of(align);
                offset
            })
            .collect();
        Self {
            shapes: shapes.to_vec(),
            dtype,
            offsets,
            size: size.max(align),
        }
    }

    /// Allocates uninitialized memory for the tensors.
    pub fn allocate(&self, client: &Client, device: &CubeDevice) -> SharedAllocation {
        let memory = client.empty(self.size);
        let view = |(shape, offset): (&Shape, &usize)| {
            let handle = view(&memory, *offset, shape.num_elements() * self.dtype.size());
            CubeTensor::new_contiguous(
                client.clone(),
                device.clone(),
                shape.clone(),
                handle,
                self.dtype,
            )
        };
        let tensors = self.shapes.iter().zip(&self.offsets).map(view).collect();
        SharedAllocation { memory, tensors }
    }
}

/// Tensors that share one allocation, which lives as long as one of them does.
#[derive(Debug, Clone)]
pub(crate) struct SharedAllocation {
    pub(super) memory: Handle,
    /// Views of the allocation.
    pub tensors: Vec<CubeTensor>,
}

/// Returns the alignment in bytes that a view of memory needs.
pub(crate) fn alignment(client: &Client) -> usize {
    (client.properties().memory.alignment as usize).max(16)
}

/// Returns a handle to `len` bytes of `memory`, starting at `offset`.
pub(crate) fn view(memory: &Handle, offset: usize, len: usize) -> Handle {
    let end = memory.size_in_used() - (offset + len) as u64;
    memory.clone().offset_start(offset as u64).offset_end(end)
}

/// Returns the number of elements of `bytes` bytes in a vector. A vector has 16 bytes if the device
/// supports such accesses. It is never so long that a view could begin inside one.
pub(crate) fn vector_lanes(client: &Client, bytes: usize) -> usize {
    client
        .properties()
        .io_optimized_vector_sizes(bytes)
        .find(|lanes| alignment(client).is_multiple_of(lanes * bytes))
        .unwrap_or(1)
}

/// Returns memory as an argument of a kernel that accesses complete vectors of `bytes` bytes. The
/// last vector may extend past the range of the handle, but never past the allocation.
pub(crate) fn vectors(memory: &Handle, bytes: usize) -> BufferArg {
    let mut memory = memory.clone();
    let used = memory.size_in_used();
    let past = used.next_multiple_of(bytes as u64) - used;
    let spare = memory.offset_end.unwrap_or(0);
    memory.offset_end = Some(
        spare
            .checked_sub(past)
            .expect("allocations are multiples of a vector"),
    );
    // SAFETY: the handle bounds all accesses, and is inside its allocation by the line above.
    unsafe { BufferArg::from_raw_parts(memory, (used + past) as usize / bytes) }
}
