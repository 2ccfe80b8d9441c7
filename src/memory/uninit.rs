//! [`UninitElements`]: new memory for the elements of a tensor on the host.

use std::mem::MaybeUninit;
use std::slice;
use std::sync::Arc;

use burn::tensor::Bytes;
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use bytemuck::Pod;

use super::host_pool::{HostMemoryPool, PooledMemory};

/// New memory for elements, to be written. Large memory is [used again](super::host_pool).
pub(crate) struct UninitElements<E>(ElementMemory<E>);

enum ElementMemory<E> {
    Heap(Box<[MaybeUninit<E>]>),
    /// In front of the block, so many elements.
    Reused(PooledMemory, usize),
}

impl<E: Pod + Send + Sync> UninitElements<E> {
    /// Large memory is `home`'s; without one, of that of the thread.
    fn at(home: Option<&Arc<HostMemoryPool>>, count: usize) -> Self {
        if let Some(bytes) = count.checked_mul(size_of::<E>())
            && bytes >= PooledMemory::LEAST
            && let Some(block) = home.map_or_else(
                || PooledMemory::take(&HostMemoryPool::of_thread(), bytes),
                |home| PooledMemory::take(home, bytes),
            )
        {
            return Self(ElementMemory::Reused(block, count));
        }
        Self(ElementMemory::Heap(Box::new_uninit_slice(count)))
    }

    fn elements(&mut self) -> &mut [MaybeUninit<E>] {
        match &mut self.0 {
            ElementMemory::Heap(elements) => elements,
            // SAFETY: a block begins with a page, so it is aligned, and has the bytes that were asked for.
            ElementMemory::Reused(block, count) => unsafe {
                slice::from_raw_parts_mut(block.as_mut_ptr().cast(), *count)
            },
        }
    }

    /// The elements' bytes.
    ///
    /// # Safety
    /// All of them are written.
    unsafe fn filled(self) -> Bytes {
        match self.0 {
            // SAFETY: the caller says so.
            ElementMemory::Heap(elements) => Bytes::from_elems(unsafe { elements.assume_init() }.into_vec()),
            ElementMemory::Reused(block, count) => {
                let len = count * size_of::<E>();
                // SAFETY: the block has as many bytes, and as the caller says they are written.
                unsafe { Bytes::from_controller(Box::new(Reused { block, len, align: align_of::<E>() }), len) }
            }
        }
    }
}

/// The same for elements of which only the size is known.
pub(crate) enum UninitBytes {
    Bytes(UninitElements<u8>),
    Pairs(UninitElements<u16>),
    Fours(UninitElements<u32>),
    Eights(UninitElements<u64>),
}

impl UninitBytes {
    /// Large memory is `home`'s; without one, of that of the thread.
    pub(crate) fn at(home: Option<&Arc<HostMemoryPool>>, size: usize, count: usize) -> Self {
        match size {
            1 => Self::Bytes(UninitElements::at(home, count)),
            2 => Self::Pairs(UninitElements::at(home, count)),
            4 => Self::Fours(UninitElements::at(home, count)),
            8 => Self::Eights(UninitElements::at(home, count)),
            size => unreachable!("no element has {size} bytes"),
        }
    }

    /// The elements' bytes, aligned for them.
    pub(crate) fn bytes(&mut self) -> &mut [MaybeUninit<u8>] {
        fn bytes<E>(space: &mut [MaybeUninit<E>]) -> &mut [MaybeUninit<u8>] {
            let len = size_of_val(space);
            // SAFETY: it is as long, of lesser alignment, and need not be initialized before or after.
            unsafe { slice::from_raw_parts_mut(space.as_mut_ptr().cast(), len) }
        }
        match self {
            Self::Bytes(space) => bytes(space.elements()),
            Self::Pairs(space) => bytes(space.elements()),
            Self::Fours(space) => bytes(space.elements()),
            Self::Eights(space) => bytes(space.elements()),
        }
    }

    /// # Safety
    /// All of it is written.
    pub(crate) unsafe fn filled(self) -> Bytes {
        // SAFETY: the caller says so.
        unsafe {
            match self {
                Self::Bytes(space) => space.filled(),
                Self::Pairs(space) => space.filled(),
                Self::Fours(space) => space.filled(),
                Self::Eights(space) => space.filled(),
            }
        }
    }
}

/// A block that is a tensor's.
struct Reused {
    block: PooledMemory,
    len: usize,
    align: usize,
}

impl AllocationController for Reused {
    fn alloc_align(&self) -> usize {
        self.align
    }

    /// It is the tensor's as an allocation would be: nobody else writes there, or takes it away.
    fn property(&self) -> AllocationProperty {
        AllocationProperty::Native
    }

    fn capacity(&self) -> usize {
        self.len
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: `u8` is a valid `MaybeUninit<u8>`.
        Ok(unsafe { slice::from_raw_parts(self.block.as_ptr().cast(), self.len) })
    }

    unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        // SAFETY: the caller only writes initialized bytes, as this function's contract says.
        Ok(unsafe { slice::from_raw_parts_mut(self.block.as_mut_ptr().cast(), self.len) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_the_bytes_whatever_their_number() {
        for count in [0, 1, 1000, 16_384, 16_385, 1 << 20] {
            let mut space = UninitElements::<u32>::at(None, count);
            assert_eq!(space.elements().len(), count);
            space.elements().iter_mut().zip(0..).for_each(|(element, value)| _ = element.write(value));
            // SAFETY: all are written.
            let mut bytes = unsafe { space.filled() };
            assert_eq!(bytes.len(), 4 * count);
            assert!(bytemuck::cast_slice::<u8, u32>(&bytes).iter().copied().eq(0..count as u32));
            let copy = bytes.clone();
            bytes.fill(0xff);
            assert!(bytemuck::cast_slice::<u8, u32>(&copy).iter().copied().eq(0..count as u32), "a copy is a copy");
        }
    }
}
