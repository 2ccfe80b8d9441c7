//! [`ResultBuffer`]: memory for the result of a collective, into which data of other processes is received in
//! place.
//!
//! If a rank is the only one of its process in the group, the shards of the other ranks are received directly into
//! its result and not copied again. At the same time the rank copies its own shard:
//!
//! ```text
//! full tensor   | from rank 0 | own shard | from rank 2 |
//! ```
//!
//! This requires that every tensor has a [`ContiguousLayout`].
//!
//! A rank may also compute its shards in the buffer, like the sums of an all-reduce, and
//! [send](ResultBuffer::sent) them from there. burn writes in place only to memory with a unique handle. While a
//! shard is being sent, a second handle prevents this.

use std::any::Any;
use std::fmt;
use std::mem::{self, MaybeUninit};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::DispatchTensor;
use burn::tensor::{Device, Shape, TensorData};
use parking_lot::Mutex;

use super::contiguous_layout::ContiguousLayout;
use super::payload::payload;
use crate::comm::TensorMeta;
use crate::comm::backend;
use crate::comm::transport::header::PayloadDesc;
use crate::comm::transport::{Payload, RecvBuffer};
use crate::memory::{HostMemoryPool, UninitBytes};

/// Minimum number of bytes of a shard that is received in place. Smaller shards are copied faster than their
/// region is found.
pub(in crate::comm) const WORTH: usize = 64 << 10;

/// Number of bytes that are copied between two calls of `meanwhile` in [`ResultBuffer::put`].
const FRAGMENT: usize = 1 << 20;

/// Returns true if results of `bytes` bytes, sharded over `ranks` ranks, have shards large enough to be received
/// in place.
pub(in crate::comm) fn pay(bytes: u64, ranks: usize) -> bool {
    bytes >= (WORTH * ranks) as u64
}

/// Memory for the results of one collective: full tensors, each with a contiguous shard per rank.
pub(in crate::comm) struct ResultBuffer {
    layouts: Vec<ContiguousLayout>,
    /// Address of the first byte of each tensor.
    starts: Vec<BufferStart>,
    memory: Mutex<ResultMemory>,
    /// True if shards are sent from this memory, so that the result needs a second handle.
    are_sent: AtomicBool,
}

/// State of the memory.
enum ResultMemory {
    /// The memory, until the result is taken.
    Spaces(Vec<UninitBytes>),
    /// The result was taken. If shards are [sent](ResultBuffer::sent), this holds a second handle to each tensor,
    /// so that a rank that writes to the result writes to a copy.
    Taken(#[expect(dead_code, reason = "kept, not read")] Vec<DispatchTensor>),
}

struct BufferStart(NonNull<MaybeUninit<u8>>);

// SAFETY: this is only an address; each access through it states why it is valid.
unsafe impl Send for BufferStart {}
// SAFETY: as above.
unsafe impl Sync for BufferStart {}

impl ResultBuffer {
    /// Allocates memory for these layouts from the pool `home`.
    pub fn new(layouts: Vec<ContiguousLayout>, home: &Arc<HostMemoryPool>) -> Arc<Self> {
        let space =
            |layout: &ContiguousLayout| UninitBytes::at(Some(home), layout.dtype.size(), layout.shape.num_elements());
        let mut spaces: Vec<_> = layouts.iter().map(space).collect();
        let start = |space: &mut UninitBytes| BufferStart(NonNull::from(space.bytes()).cast());
        let starts = spaces.iter_mut().map(start).collect();
        let memory = Mutex::new(ResultMemory::Spaces(spaces));
        Arc::new(Self { layouts, starts, memory, are_sent: AtomicBool::new(false) })
    }

    /// Returns the address and number of bytes of each shard of `member`.
    fn places(&self, member: usize) -> impl Iterator<Item = (BufferStart, usize)> {
        self.starts.iter().zip(&self.layouts).map(move |(start, layout)| {
            // SAFETY: shard offsets are inside the tensor.
            (BufferStart(unsafe { start.0.add(layout.edges[member]) }), layout.bytes(member))
        })
    }

    /// Returns the address of each shard of `member`, for code that writes the shards there.
    pub fn starts(&self, member: usize) -> impl Iterator<Item = *mut u8> {
        self.places(member).map(|(start, _)| start.0.as_ptr().cast())
    }

    /// Returns the shards of `member` for sending them from this memory. Shards without elements have no payload.
    ///
    /// # Safety
    /// The shards must be written, and must not be written again through an address of this buffer. The result
    /// must be taken on the host device.
    pub unsafe fn sent(self: &Arc<Self>, member: usize) -> (PayloadDesc, Vec<Payload>) {
        self.are_sent.store(true, Ordering::Relaxed);
        let meta = |layout: &ContiguousLayout| TensorMeta {
            shape: Shape::from([layout.bytes(member) / layout.dtype.size()]),
            dtype: layout.dtype,
        };
        let region = |(at, len)| -> Payload { Arc::new(Sent(BufferRegion { at, len, buffer: self.clone() })) };
        let payloads = self.places(member).filter(|(_, len)| *len > 0).map(region).collect();
        (PayloadDesc { tensors: self.layouts.iter().map(meta).collect(), ..PayloadDesc::default() }, payloads)
    }

    /// Returns the regions into which the shards of `member` are received, except shards without elements. Returns
    /// `None` if the sizes of `parts` differ from those of the shards.
    pub fn regions(self: &Arc<Self>, member: usize, parts: &[TensorMeta]) -> Option<Vec<Box<dyn RecvBuffer>>> {
        let bytes = parts.iter().map(|part| part.shape.num_elements() * part.dtype.size());
        if !self.layouts.iter().map(|layout| layout.bytes(member)).eq(bytes) {
            return None;
        }
        let region = |(at, len)| -> Box<dyn RecvBuffer> { Box::new(BufferRegion { at, len, buffer: self.clone() }) };
        Some(self.places(member).filter(|(_, len)| *len > 0).map(region).collect())
    }

    /// Copies the shards of `member`, a rank of this process, into the buffer. Calls `meanwhile` before every
    /// fragment.
    ///
    /// # Safety
    /// These shards must not be received or copied by any other thread.
    pub unsafe fn put(&self, member: usize, parts: &[DispatchTensor], meanwhile: impl Fn()) {
        assert_eq!(parts.len(), self.layouts.len(), "the signatures agree on the number of tensors");
        for (part, (at, len)) in parts.iter().zip(self.places(member)) {
            let part = payload(part);
            let elements = (*part).as_ref();
            assert_eq!(elements.len(), len, "the signatures agree on the shard sizes");
            let mut at = at.0.as_ptr().cast::<u8>();
            for fragment in elements.chunks(FRAGMENT) {
                meanwhile();
                // SAFETY: the region is inside the tensor and belongs to this member alone; its size was compared
                // above.
                unsafe {
                    at.copy_from_nonoverlapping(fragment.as_ptr(), fragment.len());
                    at = at.add(fragment.len());
                }
            }
        }
    }

    /// Returns the results as tensors on `device`.
    ///
    /// # Safety
    /// The shards of all members must be received or copied. Must be called at most once.
    pub unsafe fn take(&self, device: &Device) -> Vec<DispatchTensor> {
        let mut memory = self.memory.lock();
        let ResultMemory::Spaces(spaces) = mem::replace(&mut *memory, ResultMemory::Taken(Vec::new())) else {
            unreachable!("a result is taken once")
        };
        let full = |(ContiguousLayout { shape, dtype, .. }, space): (&ContiguousLayout, UninitBytes)| {
            // SAFETY: the shards of all members are written, and they cover the tensor.
            let bytes = unsafe { space.filled() };
            backend::from_data(TensorData::from_bytes(bytes, shape.clone(), *dtype), device)
        };
        let results: Vec<_> = self.layouts.iter().zip(spaces).map(full).collect();
        if self.are_sent.load(Ordering::Relaxed) {
            for (full, start) in results.iter().zip(&self.starts) {
                let elements = payload(full);
                let elements = (*elements).as_ref();
                let stays = elements.is_empty() || std::ptr::eq(elements.as_ptr(), start.0.as_ptr().cast());
                assert!(stays, "a host tensor must use the memory into which its shards were written");
            }
            *memory = ResultMemory::Taken(results.clone());
        }
        results
    }
}

/// Region of a [`ResultBuffer`] into which one shard is received.
struct BufferRegion {
    at: BufferStart,
    len: usize,
    buffer: Arc<ResultBuffer>,
}

impl RecvBuffer for BufferRegion {
    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: the region is inside the tensor, which is not taken before all shards are received, and regions
        // do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.at.0.as_ptr(), self.len) }
    }
}

/// Payload: one shard, sent from its region of the buffer.
struct Sent(BufferRegion);

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        let BufferRegion { at, len, .. } = &self.0;
        // SAFETY: the caller of `sent` guarantees that the shard is written. The result uses the same memory, but
        // has a second handle, so that writes to it go to a copy.
        unsafe { std::slice::from_raw_parts(at.0.as_ptr().cast(), *len) }
    }
}

/// Returns the buffer of which `buffers` are regions, or `None` if they are separate buffers.
pub(in crate::comm) fn of_regions(buffers: &[Box<dyn RecvBuffer>]) -> Option<Arc<ResultBuffer>> {
    let first: &dyn Any = &**buffers.first()?;
    first.downcast_ref::<BufferRegion>().map(|region| region.buffer.clone())
}

impl fmt::Debug for ResultBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResultBuffer").field("layouts", &self.layouts).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Shape, Tensor};

    use super::*;

    /// Copies shards that are larger than the caches and begin at unaligned offsets.
    #[test]
    fn parts_of_large_results_are_put_where_they_belong() {
        let lens = [1_400_003, 0, 2_800_001];
        let layout = ContiguousLayout::new(Shape::from([4_200_004]), DType::F32, 0, lens).unwrap();
        let (results, device) = (ResultBuffer::new(vec![layout], &HostMemoryPool::of_thread()), crate::memory::host());
        let mut values = (0..4_200_004).map(|value| value as f32);
        for (member, len) in lens.into_iter().enumerate() {
            let part = TensorData::new(values.by_ref().take(len).collect(), [len]);
            // SAFETY: only this thread accesses the buffer.
            unsafe { results.put(member, &[Tensor::<1>::from_data(part, &device).into_dispatch()], || {}) };
        }
        // SAFETY: the shards of all members are copied.
        let full = unsafe { results.take(&device) }.pop().unwrap();
        let full = Tensor::<1>::from_dispatch(full).into_data();
        assert!(full.iter::<f32>().eq((0..4_200_004).map(|value| value as f32)));
    }

    #[test]
    fn parts_of_other_lengths_have_none() {
        let layout = ContiguousLayout::new(Shape::from([7, 2]), DType::F32, 0, [3, 3, 1]).unwrap();
        let results = ResultBuffer::new(vec![layout], &HostMemoryPool::of_thread());
        let part = |rows: usize| TensorMeta { shape: Shape::from([rows, 2]), dtype: DType::F32 };
        let lengths = |member: usize, parts: &[TensorMeta]| -> Option<Vec<usize>> {
            Some(results.regions(member, parts)?.iter_mut().map(|region| region.space().len()).collect())
        };
        assert_eq!(lengths(1, &[part(3)]), Some(vec![24]));
        assert_eq!(lengths(2, &[part(1)]), Some(vec![8]));
        assert_eq!([lengths(2, &[part(3)]), lengths(1, &[part(3), part(3)])], [None, None]);
    }

    /// Fills a result of 8 elements, with shards of 3 and 5, and adds 1 to it. Returns the result's address, the
    /// sum, and the sum's address; the addresses are equal if burn wrote in place.
    #[cfg(feature = "flex")]
    fn add_one(results: &ResultBuffer) -> (usize, Tensor<1>, usize) {
        use crate::memory::flex;
        let address = |tensor: &DispatchTensor| flex::primitive(tensor).unwrap().bytes().as_ptr().addr();
        let device = crate::memory::host();
        for (member, part) in [vec![0.0, 1.0, 2.0], vec![3.0, 4.0, 5.0, 6.0, 7.0_f32]].into_iter().enumerate() {
            let part = Tensor::<1>::from_floats(&part[..], &device).into_dispatch();
            // SAFETY: only this thread accesses the buffer.
            unsafe { results.put(member, &[part], || {}) };
        }
        // SAFETY: the shards of all members are copied.
        let full = unsafe { results.take(&device) }.pop().unwrap();
        let before = address(&full);
        let changed = Tensor::<1>::from_dispatch(full).add_scalar(1.0);
        let after = address(&changed.clone().into_dispatch());
        (before, changed, after)
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_result_is_written_in_place_but_while_it_is_sent() {
        let new =
            || ResultBuffer::new(vec![ContiguousLayout::of_row(8, DType::F32, [3, 5])], &HostMemoryPool::of_thread());
        let (before, _, after) = add_one(&new());
        assert_eq!(before, after, "the handle is unique");

        let results = new();
        // SAFETY: the shards are written before the payloads are read, and the result is taken on the host.
        let (contents, payloads) = unsafe { results.sent(1) };
        assert_eq!((&contents.tensors[0].shape[..], payloads.len()), (&[5][..], 1), "the elements of the second shard");
        let (before, changed, after) = add_one(&results);
        drop(results);
        assert_ne!(before, after, "the shard is still being sent");
        assert_eq!((*payloads[0]).as_ref(), bytemuck::cast_slice::<f32, u8>(&[3.0, 4.0, 5.0, 6.0, 7.0]));
        assert!(changed.into_data().iter::<f32>().eq((1..9).map(|value| value as f32)));
    }
}
