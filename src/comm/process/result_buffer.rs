//! [`ResultBuffer`]: what a collective returns, while the parts of other processes land in it.
//!
//! Of a rank that is alone in its process, what the others send can land where its result has it, and is not copied again.
//! The rank copies its own part meanwhile:
//!
//! ```text
//! whole   | from rank 0 | own part | from rank 2 |
//! ```
//!
//! That is so where every part has a [`ContiguousLayout`].
//!
//! Ranks of one host may have wholes [in common](ResultBuffer::in_common): each puts its parts there, for all.
//!
//! Own parts may also be made there, as the sums of an all-reduce are, and [sent](ResultBuffer::sent) to others from
//! there. burn writes in place to memory of which there is one handle; while a part is on its way, there is another.

use std::any::Any;
use std::fmt;
use std::mem::{self, MaybeUninit};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::DispatchTensor;
use burn::tensor::{Device, Shape, TensorData};
use parking_lot::Mutex;

use super::contiguous_layout::ContiguousLayout;
use super::header::PayloadDesc;
use super::payload::payload;
use crate::comm::TensorMeta;
use crate::comm::backend;
use crate::comm::transport::{Payload, RecvBuffer};
#[cfg(feature = "flex")]
use crate::kernels::flex::stream;
use crate::memory::shared_memory::SharedMemoryBlock;
use crate::memory::{HostMemoryPool, UninitBytes};
use crate::placement::ShardSizes;

/// Parts of fewer bytes are copied faster than their place is found.
pub(in crate::comm) const WORTH: usize = 64 << 10;

/// Bytes that are copied between looks at what others send.
const FRAGMENT: usize = 1 << 20;

/// Whether wholes of so many `bytes` have parts large enough to land in them, over `ranks` ranks.
pub(in crate::comm) fn pay(bytes: u64, ranks: usize) -> bool {
    bytes >= (WORTH * ranks) as u64
}

/// The wholes of one collective.
pub(in crate::comm) struct ResultBuffer {
    layouts: Vec<ContiguousLayout>,
    /// Where each whole begins.
    starts: Vec<BufferStart>,
    memory: ResultMemory,
    /// Some parts are sent from there.
    are_sent: AtomicBool,
}

/// Where wholes are.
enum ResultMemory {
    Own(Mutex<OwnMemory>),
    /// In others, which there are as long as these.
    Of(Arc<ResultBuffer>),
    /// Other processes have it, too: until the result is taken.
    Common(Mutex<Option<Arc<SharedMemoryBlock>>>),
}

/// Memory of wholes that are in no others.
enum OwnMemory {
    /// Until the result is taken.
    Spaces(Vec<UninitBytes>),
    /// The result's. A handle of its own where parts are [sent](ResultBuffer::sent): who writes to the result
    /// meanwhile, writes elsewhere.
    Taken(#[expect(dead_code, reason = "kept, not read")] Vec<DispatchTensor>),
}

struct BufferStart(NonNull<MaybeUninit<u8>>);

// SAFETY: an address alone; whoever reads or writes there says why it may.
unsafe impl Send for BufferStart {}
// SAFETY: as above.
unsafe impl Sync for BufferStart {}

impl ResultBuffer {
    /// Memory of `home` for them.
    pub fn new(layouts: Vec<ContiguousLayout>, home: &Arc<HostMemoryPool>) -> Arc<Self> {
        let space =
            |layout: &ContiguousLayout| UninitBytes::at(Some(home), layout.dtype.size(), layout.shape.num_elements());
        let mut spaces: Vec<_> = layouts.iter().map(space).collect();
        let start = |space: &mut UninitBytes| BufferStart(NonNull::from(space.bytes()).cast());
        let starts = spaces.iter_mut().map(start).collect();
        let memory = ResultMemory::Own(Mutex::new(OwnMemory::Spaces(spaces)));
        Arc::new(Self { layouts, starts, memory, are_sent: AtomicBool::new(false) })
    }

    /// The same in memory that other processes have in common with this one, each of which puts its parts there: of
    /// [so many](Self::bytes_in_common) bytes.
    pub fn in_common(layouts: Vec<ContiguousLayout>, common: SharedMemoryBlock) -> Arc<Self> {
        assert!(Self::bytes_in_common(&layouts) <= common.len(), "all have asked for as many");
        // SAFETY: inside of it.
        let start = |range: Range<usize>| BufferStart(unsafe { common.start().add(range.start) });
        let starts = ranges_in_common(&layouts).map(start).collect();
        let memory = ResultMemory::Common(Mutex::new(Some(Arc::new(common))));
        Arc::new(Self { layouts, starts, memory, are_sent: AtomicBool::new(false) })
    }

    /// Bytes that wholes of these layouts need there.
    pub fn bytes_in_common(layouts: &[ContiguousLayout]) -> usize {
        ranges_in_common(layouts).last().map_or(0, |range| range.end)
    }

    /// Elements of some of these, each a row, as wholes that are cut over `ranks` ranks.
    pub fn window(self: &Arc<Self>, ranges: &[(usize, Range<usize>)], ranks: usize) -> Arc<Self> {
        let window = |(index, range): &(usize, Range<usize>)| {
            let (full, sizes) = (&self.layouts[*index], ShardSizes::Chunked(range.len()));
            assert!(full.shape[..] == [full.shape.num_elements()] && range.end <= full.shape[0], "a part of a row");
            let layout = ContiguousLayout::of_row(
                range.len(),
                full.dtype,
                (0..ranks).map(|rank| sizes.range(ranks, rank).len()),
            );
            // SAFETY: inside the whole.
            let start = unsafe { self.starts[*index].0.add(range.start * full.dtype.size()) };
            (layout, BufferStart(start))
        };
        let (layouts, starts) = ranges.iter().map(window).unzip();
        Arc::new(Self { layouts, starts, memory: ResultMemory::Of(self.clone()), are_sent: AtomicBool::new(false) })
    }

    /// Whether other processes have them, too.
    pub fn are_common(&self) -> bool {
        match &self.memory {
            ResultMemory::Own(_) => false,
            ResultMemory::Of(results) => results.are_common(),
            ResultMemory::Common(_) => true,
        }
    }

    /// Bytes of all wholes, and of those that they are in.
    pub fn bytes(&self) -> usize {
        match &self.memory {
            ResultMemory::Own(_) | ResultMemory::Common(_) => self.layouts.iter().map(ContiguousLayout::len).sum(),
            ResultMemory::Of(results) => results.bytes(),
        }
    }

    /// Where the parts of `member` begin, and their bytes.
    fn places(&self, member: usize) -> impl Iterator<Item = (BufferStart, usize)> {
        self.starts.iter().zip(&self.layouts).map(move |(start, layout)| {
            // SAFETY: inside the whole.
            (BufferStart(unsafe { start.0.add(layout.edges[member]) }), layout.bytes(member))
        })
    }

    /// Where the parts of `member` begin, for who writes them there.
    pub fn starts(&self, member: usize) -> impl Iterator<Item = *mut u8> {
        self.places(member).map(|(start, _)| start.0.as_ptr().cast())
    }

    /// The parts of `member`, those with elements, to be sent from where they are.
    ///
    /// # Safety
    /// They are written, and will not be again by those who have an address here; whoever takes the result takes it on the host.
    pub unsafe fn sent(self: &Arc<Self>, member: usize) -> (PayloadDesc, Vec<Payload>) {
        let owner = if let ResultMemory::Of(results) = &self.memory { results } else { self };
        owner.are_sent.store(true, Ordering::Relaxed);
        let meta = |layout: &ContiguousLayout| TensorMeta {
            shape: Shape::from([layout.bytes(member) / layout.dtype.size()]),
            dtype: layout.dtype,
        };
        let region = |(at, len)| -> Payload { Arc::new(Sent(BufferRegion { at, len, buffer: self.clone() })) };
        let payloads = self.places(member).filter(|(_, len)| *len > 0).map(region).collect();
        (PayloadDesc { tensors: self.layouts.iter().map(meta).collect(), ..PayloadDesc::default() }, payloads)
    }

    /// Where the parts of `member` land, those with elements; `None` if they are not `parts`.
    pub fn regions(self: &Arc<Self>, member: usize, parts: &[TensorMeta]) -> Option<Vec<Box<dyn RecvBuffer>>> {
        let bytes = parts.iter().map(|part| part.shape.num_elements() * part.dtype.size());
        if !self.layouts.iter().map(|layout| layout.bytes(member)).eq(bytes) {
            return None;
        }
        let region = |(at, len)| -> Box<dyn RecvBuffer> { Box::new(BufferRegion { at, len, buffer: self.clone() }) };
        Some(self.places(member).filter(|(_, len)| *len > 0).map(region).collect())
    }

    /// Copies the parts of `member`, which are here; `meanwhile` is called now and then.
    ///
    /// # Safety
    /// They do not land, and nobody else copies them.
    pub unsafe fn put(&self, member: usize, parts: &[DispatchTensor], meanwhile: impl Fn()) {
        assert_eq!(parts.len(), self.layouts.len(), "what ranks have agreed on");
        let bytes = self.bytes();
        for (part, (at, len)) in parts.iter().zip(self.places(member)) {
            let part = payload(part);
            let elements = (*part).as_ref();
            assert_eq!(elements.len(), len, "what ranks have agreed on");
            let mut at = at.0.as_ptr().cast::<u8>();
            for fragment in elements.chunks(FRAGMENT) {
                meanwhile();
                // SAFETY: inside the whole, where only this member's part is; there is as much as there are elements.
                unsafe {
                    copy(fragment, at, bytes);
                    at = at.add(fragment.len());
                }
            }
        }
    }

    /// The wholes, on `device`.
    ///
    /// # Safety
    /// The parts of all members have landed, or were copied. Called once.
    pub unsafe fn take(&self, device: &Device) -> Vec<DispatchTensor> {
        let own = match &self.memory {
            ResultMemory::Own(own) => own,
            ResultMemory::Of(_) => unreachable!("a window is no result"),
            ResultMemory::Common(common) => {
                let common = common.lock().take().expect("a result is taken once");
                let results = self.layouts.iter().zip(ranges_in_common(&self.layouts));
                let full = |(ContiguousLayout { shape, dtype, .. }, range): (&ContiguousLayout, Range<usize>)| {
                    // SAFETY: the parts of all members are written, and nobody writes there before all have let go.
                    let bytes = unsafe { common.bytes(range, dtype.size()) };
                    backend::from_data(TensorData::from_bytes(bytes, shape.clone(), *dtype), device)
                };
                return results.map(full).collect();
            }
        };
        let mut own = own.lock();
        let OwnMemory::Spaces(spaces) = mem::replace(&mut *own, OwnMemory::Taken(Vec::new())) else {
            unreachable!("a result is taken once")
        };
        let full = |(ContiguousLayout { shape, dtype, .. }, space): (&ContiguousLayout, UninitBytes)| {
            // SAFETY: the parts of all members are written, which is all there is.
            let bytes = unsafe { space.filled() };
            backend::from_data(TensorData::from_bytes(bytes, shape.clone(), *dtype), device)
        };
        let results: Vec<_> = self.layouts.iter().zip(spaces).map(full).collect();
        if self.are_sent.load(Ordering::Relaxed) {
            for (full, start) in results.iter().zip(&self.starts) {
                let elements = payload(full);
                let elements = (*elements).as_ref();
                let stays = elements.is_empty() || std::ptr::eq(elements.as_ptr(), start.0.as_ptr().cast());
                assert!(stays, "on the host a result is made of the memory that its parts were written to");
            }
            *own = OwnMemory::Taken(results.clone());
        }
        results
    }
}

/// Where each whole is in memory that is in common: one after another, each at the beginning of a cache line.
fn ranges_in_common(layouts: &[ContiguousLayout]) -> impl Iterator<Item = Range<usize>> {
    const LINE: usize = 64;
    layouts.iter().scan(0, |end: &mut usize, layout| {
        let start = end.next_multiple_of(LINE);
        *end = start + layout.len();
        Some(start..*end)
    })
}

/// Copies `piece` to where there is room for it, in wholes of so many `bytes`: of those that the caches do not hold, what is
/// there now is not read.
///
/// # Safety
/// As many bytes may be written at `at`.
unsafe fn copy(fragment: &[u8], at: *mut u8, bytes: usize) {
    #[cfg(feature = "flex")]
    if stream::pays(bytes) {
        // SAFETY: the caller's; nobody else has the memory.
        unsafe { stream::copy(fragment.as_ptr(), at, fragment.len()) };
        return stream::done();
    }
    let _ = bytes;
    // SAFETY: as above.
    unsafe { at.copy_from_nonoverlapping(fragment.as_ptr(), fragment.len()) }
}

/// Where one part lands.
struct BufferRegion {
    at: BufferStart,
    len: usize,
    buffer: Arc<ResultBuffer>,
}

impl RecvBuffer for BufferRegion {
    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: inside the whole, which is not taken before all parts have landed; no other region is there.
        unsafe { std::slice::from_raw_parts_mut(self.at.0.as_ptr(), self.len) }
    }
}

/// One part on its way from there.
struct Sent(BufferRegion);

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        let BufferRegion { at, len, .. } = &self.0;
        // SAFETY: written, as whoever sends it has said; the result has the same memory, and does not write to what is not its
        // alone.
        unsafe { std::slice::from_raw_parts(at.0.as_ptr().cast(), *len) }
    }
}

/// The wholes that `landings` are regions of, if they are.
pub(in crate::comm) fn of_landings(landings: &[Box<dyn RecvBuffer>]) -> Option<Arc<ResultBuffer>> {
    let first: &dyn Any = &**landings.first()?;
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

    /// Past the caches, in pieces that begin anywhere.
    #[test]
    fn parts_of_large_results_are_put_where_they_belong() {
        let lens = [1_400_003, 0, 2_800_001];
        let layout = ContiguousLayout::new(Shape::from([4_200_004]), DType::F32, 0, lens).unwrap();
        let (results, device) = (ResultBuffer::new(vec![layout], &HostMemoryPool::of_thread()), crate::memory::host());
        let mut values = (0..4_200_004).map(|value| value as f32);
        for (member, len) in lens.into_iter().enumerate() {
            let part = TensorData::new(values.by_ref().take(len).collect(), [len]);
            // SAFETY: here alone.
            unsafe { results.put(member, &[Tensor::<1>::from_data(part, &device).into_dispatch()], || {}) };
        }
        // SAFETY: all are put.
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

    /// Of 8 elements, 3 and 5 of two members: the address of the result, and what becomes of it, whose own one may be the same.
    #[cfg(feature = "flex")]
    fn add_one(results: &ResultBuffer) -> (usize, Tensor<1>, usize) {
        use crate::memory::flex;
        let address = |tensor: &DispatchTensor| flex::primitive(tensor).unwrap().bytes().as_ptr().addr();
        let device = crate::memory::host();
        for (member, part) in [vec![0.0, 1.0, 2.0], vec![3.0, 4.0, 5.0, 6.0, 7.0_f32]].into_iter().enumerate() {
            let part = Tensor::<1>::from_floats(&part[..], &device).into_dispatch();
            // SAFETY: here alone.
            unsafe { results.put(member, &[part], || {}) };
        }
        // SAFETY: all are put.
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
        assert_eq!(before, after, "nobody else has it");

        let results = new();
        let window = results.window(&[(0, 0..8)], 2);
        // SAFETY: written before they are read; on the host.
        let (contents, payloads) = unsafe { window.sent(1) };
        assert_eq!((&contents.tensors[0].shape[..], payloads.len()), (&[4][..], 1), "halves");
        let (before, changed, after) = add_one(&results);
        drop((results, window));
        assert_ne!(before, after, "others read it");
        assert_eq!((*payloads[0]).as_ref(), bytemuck::cast_slice::<f32, u8>(&[4.0, 5.0, 6.0, 7.0]));
        assert!(changed.into_data().iter::<f32>().eq((1..9).map(|value| value as f32)));
    }
}
