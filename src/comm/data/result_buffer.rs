//! [`ResultBuffer`]: memory for the result of a collective, into which data of other processes is received in
//! place.
//!
//! If a rank is the only one of its process in the group, the shards of the other ranks are
//! received directly into its result and not copied again. At the same time the rank copies its own
//! shard (its sums in an all-reduce: when all others have arrived):
//!
//! ```text
//! full tensor   | from rank 0 | own shard | from rank 2 |
//! ```
//!
//! This requires that every tensor has a [`ContiguousLayout`].
//!
//! # Who accesses the memory
//!
//! Each region has one writer at a time, so nothing locks the bytes:
//!
//! | bytes | accessed by | from | until |
//! |---|---|---|---|
//! | shard of a rank of another process | the transport, through the region that [`regions`](ResultBuffer::regions) returned when the header of its payload arrived. The match table accepts one contribution of each rank, so a shard is given out once | its header has arrived | the payload is delivered as that rank's contribution |
//! | this rank's shard | the thread that has taken the request: the rank or the completion thread ([`put`](ResultBuffer::put)) | it has taken the request | it begins to wait for the contributions |
//! | every byte | that thread ([`take`](ResultBuffer::take)) | the contributions of all ranks are there | |
//!
//! The buffer lives as long as the request, a region, or a contribution that was received into it.

use std::any::Any;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Shape, TensorData};
use parking_lot::Mutex;

use super::payload::payload;
use crate::comm::TensorMeta;
use crate::comm::backend::{self, TensorSignature};
use crate::comm::transport::RecvBuffer;
use crate::memory::{HostMemoryPool, UninitBytes};

/// Minimum number of bytes of a shard that is received in place. Smaller shards are copied faster
/// than their region is found.
pub(in crate::comm) const WORTH: usize = 64 << 10;

/// Number of bytes that are copied between two calls of `meanwhile` in [`ResultBuffer::put`].
const FRAGMENT: usize = 1 << 20;

/// Returns true if results of `bytes` bytes, sharded over `ranks` ranks, have shards large enough
/// to be received in place.
pub(in crate::comm) fn pay(bytes: u64, ranks: usize) -> bool {
    bytes >= (WORTH * ranks) as u64
}

/// Layout of a tensor in which the shard of each rank is contiguous. This is the case if the tensor
/// is sharded along its first dimension, or if all dimensions before the sharded one have size 1.
///
/// ```text
/// | shard of rank 0 | shard of rank 1 | shard of rank 2 |
/// 0 = edges[0]      edges[1]          edges[2]          edges[3]
/// ```
#[derive(Debug, Clone, PartialEq)]
pub(in crate::comm) struct ContiguousLayout {
    pub shape: Shape,
    pub dtype: DType,
    /// Byte offset of each rank's shard, and the end of the last shard.
    pub edges: Vec<usize>,
}

impl ContiguousLayout {
    /// Returns the layout of a tensor whose shards have these `lengths` along `dim`, by rank.
    /// Returns `None` if the shards are not contiguous.
    pub fn new(
        shape: Shape,
        dtype: DType,
        dim: usize,
        lengths: impl IntoIterator<Item = usize>,
    ) -> Option<Self> {
        let (before, rest) = shape.split_at(dim);
        let (_, inner) = rest.split_first()?;
        if before.iter().product::<usize>() != 1 {
            return None;
        }
        let mut end = 0;
        let row = inner.iter().product::<usize>() * dtype.size();
        let ends = lengths.into_iter().map(|len| {
            end += len * row;
            end
        });
        let edges = std::iter::once(0).chain(ends).collect();
        Some(Self {
            shape,
            dtype,
            edges,
        })
    }

    /// Returns the layouts of full tensors that are sharded over `ranks` ranks as the signatures
    /// state. Returns `None` if the shards of a tensor are not contiguous, or if a signature has no
    /// sharding or shard sizes for another number of ranks.
    pub fn of_full(signatures: &[TensorSignature], ranks: usize) -> Option<Vec<Self>> {
        let layout = |signature: &TensorSignature| {
            let sizes = signature.sharding.as_ref().filter(|sizes| {
                sizes
                    .uneven_sizes
                    .as_ref()
                    .is_none_or(|all| all.len() == ranks)
            })?;
            let of = sizes.of(*signature.shape.get(sizes.dim)?);
            let lengths = (0..ranks).map(|member| of.range(ranks, member).len());
            Self::new(signature.shape.clone(), signature.dtype, sizes.dim, lengths)
        };
        signatures.iter().map(layout).collect()
    }

    /// Returns the number of bytes of the shard of `member`.
    pub fn bytes(&self, member: usize) -> usize {
        self.edges[member + 1] - self.edges[member]
    }
}

/// Memory for the results of one collective: full tensors, each with a contiguous shard per rank.
pub(in crate::comm) struct ResultBuffer {
    layouts: Vec<ContiguousLayout>,
    /// Address of the first byte of each tensor.
    starts: Vec<BufferStart>,
    /// The memory, until the result is taken.
    memory: Mutex<Option<Vec<UninitBytes>>>,
}

struct BufferStart(NonNull<MaybeUninit<u8>>);

// SAFETY: this is only an address; each access through it states why it is valid.
unsafe impl Send for BufferStart {}
// SAFETY: as above.
unsafe impl Sync for BufferStart {}

impl ResultBuffer {
    /// Allocates memory for these layouts from the pool `home`.
    pub fn new(layouts: Vec<ContiguousLayout>, home: &Arc<HostMemoryPool>) -> Arc<Self> {
        let space = |layout: &ContiguousLayout| {
            UninitBytes::at(Some(home), layout.dtype.size(), layout.shape.num_elements())
        };
        let mut spaces: Vec<_> = layouts.iter().map(space).collect();
        let starts = spaces
            .iter_mut()
            .map(|space| BufferStart(NonNull::from(space.bytes()).cast()))
            .collect();
        Arc::new(Self {
            layouts,
            starts,
            memory: Mutex::new(Some(spaces)),
        })
    }

    /// Returns the address and number of bytes of each shard of `member`.
    fn places(&self, member: usize) -> impl Iterator<Item = (BufferStart, usize)> {
        self.starts
            .iter()
            .zip(&self.layouts)
            .map(move |(start, layout)| {
                // SAFETY: shard offsets are inside the tensor.
                (
                    BufferStart(unsafe { start.0.add(layout.edges[member]) }),
                    layout.bytes(member),
                )
            })
    }

    /// Returns the regions into which the shards of `member` are received, except shards without
    /// elements. Returns `None` if the sizes of `parts` differ from those of the shards.
    pub fn regions(
        self: &Arc<Self>,
        member: usize,
        parts: &[TensorMeta],
    ) -> Option<Vec<Box<dyn RecvBuffer>>> {
        let bytes = parts
            .iter()
            .map(|part| part.shape.num_elements() * part.dtype.size());
        if !self
            .layouts
            .iter()
            .map(|layout| layout.bytes(member))
            .eq(bytes)
        {
            return None;
        }
        Some(
            self.places(member)
                .filter(|(_, len)| *len > 0)
                .map(|(at, len)| -> Box<dyn RecvBuffer> {
                    Box::new(BufferRegion {
                        at,
                        len,
                        buffer: self.clone(),
                    })
                })
                .collect(),
        )
    }

    /// Copies the shards of `member`, a rank of this process, into the buffer. Calls `meanwhile`
    /// before every fragment.
    ///
    /// # Safety
    /// These shards must not be received or copied by any other thread.
    pub unsafe fn put(&self, member: usize, parts: &[DispatchTensor], meanwhile: impl Fn()) {
        assert_eq!(
            parts.len(),
            self.layouts.len(),
            "the signatures agree on the number of tensors"
        );
        for (part, (at, len)) in parts.iter().zip(self.places(member)) {
            let part = payload(part);
            let elements = (*part).as_ref();
            assert_eq!(
                elements.len(),
                len,
                "the signatures agree on the shard sizes"
            );
            let mut at = at.0.as_ptr().cast::<u8>();
            for fragment in elements.chunks(FRAGMENT) {
                meanwhile();
                // SAFETY: the region is inside the tensor and belongs to this member alone; its
                // size was compared above.
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
        let spaces = self.memory.lock().take().expect("a result is taken once");
        let full =
            |(ContiguousLayout { shape, dtype, .. }, space): (&ContiguousLayout, UninitBytes)| {
                // SAFETY: the shards of all members are written, and they cover the tensor.
                let bytes = unsafe { space.filled() };
                backend::from_data(TensorData::from_bytes(bytes, shape.clone(), *dtype), device)
            };
        self.layouts.iter().zip(spaces).map(full).collect()
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
        // SAFETY: the region is inside the tensor, which is not taken before all shards are
        // received, and regions do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.at.0.as_ptr(), self.len) }
    }
}

/// Returns the buffer of which `buffers` are regions, or `None` if they are separate buffers.
pub(in crate::comm) fn of_regions(buffers: &[Box<dyn RecvBuffer>]) -> Option<Arc<ResultBuffer>> {
    let first: &dyn Any = &**buffers.first()?;
    first
        .downcast_ref::<BufferRegion>()
        .map(|region| region.buffer.clone())
}

impl fmt::Debug for ResultBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResultBuffer")
            .field("layouts", &self.layouts)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::comm::backend::ShardSignature;
    use crate::placement::ShardSizes;

    /// Copies shards that are larger than the caches and begin at unaligned offsets.
    #[test]
    fn parts_of_large_results_are_put_where_they_belong() {
        let lens = [1_400_003, 0, 2_800_001];
        let layout = ContiguousLayout::new(Shape::from([4_200_004]), DType::F32, 0, lens).unwrap();
        let results = ResultBuffer::new(vec![layout], &HostMemoryPool::of_thread());
        let device = crate::memory::host();
        let mut values = (0..4_200_004).map(|value| value as f32);
        for (member, len) in lens.into_iter().enumerate() {
            let part = TensorData::new(values.by_ref().take(len).collect(), [len]);
            // SAFETY: only this thread accesses the buffer.
            unsafe {
                results.put(
                    member,
                    &[Tensor::<1>::from_data(part, &device).into_dispatch()],
                    || {},
                )
            };
        }
        // SAFETY: the shards of all members are copied.
        let full = unsafe { results.take(&device) }.pop().unwrap();
        let full = Tensor::<1>::from_dispatch(full).into_data();
        assert!(
            full.iter::<f32>()
                .eq((0..4_200_004).map(|value| value as f32))
        );
    }

    #[test]
    fn parts_of_other_lengths_have_none() {
        let layout = ContiguousLayout::new(Shape::from([7, 2]), DType::F32, 0, [3, 3, 1]).unwrap();
        let results = ResultBuffer::new(vec![layout], &HostMemoryPool::of_thread());
        let part = |rows: usize| TensorMeta {
            shape: Shape::from([rows, 2]),
            dtype: DType::F32,
        };
        let lengths = |member: usize, parts: &[TensorMeta]| -> Option<Vec<usize>> {
            Some(
                results
                    .regions(member, parts)?
                    .iter_mut()
                    .map(|region| region.space().len())
                    .collect(),
            )
        };
        assert_eq!(lengths(1, &[part(3)]), Some(vec![24]));
        assert_eq!(lengths(2, &[part(1)]), Some(vec![8]));
        assert_eq!(
            [lengths(2, &[part(3)]), lengths(1, &[part(3), part(3)])],
            [None, None]
        );
    }

    fn edges_of<const D: usize>(
        shape: [usize; D],
        dim: usize,
        sizes: &ShardSizes,
    ) -> Option<Vec<usize>> {
        let sharding = Some(ShardSignature::new(dim, sizes));
        let signature = TensorSignature {
            shape: Shape::from(shape),
            dtype: DType::F32,
            sharding,
            to: None,
        };
        Some(ContiguousLayout::of_full(&[signature], 3)?.remove(0).edges)
    }

    #[test]
    fn contiguous_shards_have_an_offset() {
        assert_eq!(
            edges_of([7, 2], 0, &ShardSizes::Chunked(7)),
            Some(vec![0, 24, 48, 56])
        );
        assert_eq!(
            edges_of([1, 1, 5], 2, &ShardSizes::Uneven([3, 0, 2].into())),
            Some(vec![0, 12, 12, 20])
        );
        assert_eq!(
            edges_of([2, 6], 1, &ShardSizes::Chunked(6)),
            None,
            "each shard consists of two separate ranges"
        );
        assert_eq!(
            edges_of([5], 0, &ShardSizes::Uneven([3, 2].into())),
            None,
            "shard sizes for two ranks only"
        );
    }
}
