//! [`UninitElements`]: uninitialized memory for the elements of a tensor on the host.

use std::mem::MaybeUninit;
use std::slice;
use std::sync::Arc;

use burn::tensor::Bytes;
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use bytemuck::Pod;

use super::host_pool::{HostMemoryPool, PooledMemory};

/// Uninitialized memory for elements. Large memory is [pooled](super::host_pool).
pub(crate) struct UninitElements<E>(ElementMemory<E>);

enum ElementMemory<E> {
    Heap(Box<[MaybeUninit<E>]>),
    /// The first elements of a pooled block, and their number.
    Reused(PooledMemory, usize),
}

impl<E: Pod + Send + Sync> UninitElements<E> {
    /// Allocates memory. Large memory is taken from the pool `home`, or from the thread's pool if that is `None`.
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
            // SAFETY: a block begins at a page, so it is aligned, and it has the requested number of bytes.
            ElementMemory::Reused(block, count) => unsafe {
                slice::from_raw_parts_mut(block.as_mut_ptr().cast(), *count)
            },
        }
    }

    /// Returns the elements as bytes.
    ///
    /// # Safety
    /// All elements are written.
    unsafe fn filled(self) -> Bytes {
        match self.0 {
            // SAFETY: guaranteed by the caller.
            ElementMemory::Heap(elements) => Bytes::from_elems(unsafe { elements.assume_init() }.into_vec()),
            ElementMemory::Reused(block, count) => {
                let len = count * size_of::<E>();
                // SAFETY: the block has `len` bytes, and the caller guarantees that they are written.
                unsafe { Bytes::from_controller(Box::new(Reused { block, len, align: align_of::<E>() }), len) }
            }
        }
    }
}

/// Uninitialized memory for elements of which only the size is known.
pub(crate) enum UninitBytes {
    Bytes(UninitElements<u8>),
    Pairs(UninitElements<u16>),
    Fours(UninitElements<u32>),
    Eights(UninitElements<u64>),
}

impl UninitBytes {
    /// Allocates memory for `count` elements of `size` bytes. Large memory is taken from the pool `home`, or from
    /// the thread's pool if that is `None`.
    pub(crate) fn at(home: Option<&Arc<HostMemoryPool>>, size: usize, count: usize) -> Self {
        match size {
            1 => Self::Bytes(UninitElements::at(home, count)),
            2 => Self::Pairs(UninitElements::at(home, count)),
            4 => Self::Fours(UninitElements::at(home, count)),
            8 => Self::Eights(UninitElements::at(home, count)),
            size => unreachable!("no element has {size} bytes"),
        }
    }

    /// Returns the bytes of the elements, with the alignment of the elements.
    pub(crate) fn bytes(&mut self) -> &mut [MaybeUninit<u8>] {
        fn bytes<E>(space: &mut [MaybeUninit<E>]) -> &mut [MaybeUninit<u8>] {
            let len = size_of_val(space);
            // SAFETY: the result has the same length and a smaller alignment. Neither type requires initialized
            // memory.
            unsafe { slice::from_raw_parts_mut(space.as_mut_ptr().cast(), len) }
        }
        match self {
            Self::Bytes(space) => bytes(space.elements()),
            Self::Pairs(space) => bytes(space.elements()),
            Self::Fours(space) => bytes(space.elements()),
            Self::Eights(space) => bytes(space.elements()),
        }
    }

    /// Returns the elements with any values: what pooled memory had before, and otherwise zeros.
    pub(crate) fn initialized(mut self) -> Bytes {
        fn is_pooled<E>(space: &UninitElements<E>) -> bool {
            matches!(space.0, ElementMemory::Reused(..))
        }
        let is_pooled = match &self {
            Self::Bytes(space) => is_pooled(space),
            Self::Pairs(space) => is_pooled(space),
            Self::Fours(space) => is_pooled(space),
            Self::Eights(space) => is_pooled(space),
        };
        if !is_pooled {
            self.bytes().fill(MaybeUninit::new(0));
        }
        // SAFETY: pooled memory is mapped, and all other bytes were written just now.
        unsafe { self.filled() }
    }

    /// Returns the elements as bytes.
    ///
    /// # Safety
    /// All bytes are written.
    pub(crate) unsafe fn filled(self) -> Bytes {
        // SAFETY: guaranteed by the caller.
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

/// Allocation of a tensor in a pooled block.
struct Reused {
    block: PooledMemory,
    len: usize,
    align: usize,
}

impl AllocationController for Reused {
    fn alloc_align(&self) -> usize {
        self.align
    }

    /// Reports an ordinary allocation: only the tensor writes to the block, and nothing takes it away.
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
            // SAFETY: all elements are written.
            let mut bytes = unsafe { space.filled() };
            assert_eq!(bytes.len(), 4 * count);
            assert!(bytemuck::cast_slice::<u8, u32>(&bytes).iter().copied().eq(0..count as u32));
            let copy = bytes.clone();
            bytes.fill(0xff);
            assert!(bytemuck::cast_slice::<u8, u32>(&copy).iter().copied().eq(0..count as u32), "a copy is a copy");
        }
    }

    #[test]
    fn initialized_memory_can_be_read_and_written() {
        for (size, count) in [(1, 0), (1, 7), (2, 1000), (4, 16_384), (8, 1 << 20)] {
            let mut bytes = UninitBytes::at(None, size, count).initialized();
            assert!(bytes.len() == size * count && bytes.as_ptr().addr().is_multiple_of(size));
            let sum = bytes.iter().fold(1, |sum, &byte| sum ^ byte);
            bytes.fill(sum);
            assert!(bytes.iter().all(|&byte| byte == sum));
        }
    }
}
