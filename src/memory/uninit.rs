//! [`UninitBytes`]: uninitialized memory for the elements of a tensor on the host.

use std::mem::MaybeUninit;
use std::slice;
use std::sync::Arc;

use burn::tensor::Bytes;
use burn_std::AllocationController;
use bytemuck::Pod;

use super::HostTuning;
use super::host_pool::{HostMemoryPool, PooledMemory};

/// Uninitialized memory for elements, aligned for them. Large memory is [pooled](super::host_pool).
pub(crate) enum UninitBytes {
    /// A box for each size of elements, because a tensor's memory is freed with the alignment of
    /// its elements.
    Bytes(Box<[MaybeUninit<u8>]>),
    Pairs(Box<[MaybeUninit<u16>]>),
    Fours(Box<[MaybeUninit<u32>]>),
    Eights(Box<[MaybeUninit<u64>]>),
    Pooled(PooledMemory),
}

impl UninitBytes {
    /// Allocates memory for `count` elements of `size` bytes. Large memory is taken from `pool`, or
    /// from the thread's pool if that is `None`.
    pub(crate) fn at(pool: Option<&Arc<HostMemoryPool>>, size: usize, count: usize) -> Self {
        if let Some(len) = count.checked_mul(size)
            && len >= HostTuning::get().min_pooled_bytes
            && let Some(block) = match pool {
                Some(pool) => PooledMemory::take(pool, len, size),
                None => PooledMemory::take(&HostMemoryPool::of_thread(), len, size),
            }
        {
            return Self::Pooled(block);
        }
        match size {
            1 => Self::Bytes(Box::new_uninit_slice(count)),
            2 => Self::Pairs(Box::new_uninit_slice(count)),
            4 => Self::Fours(Box::new_uninit_slice(count)),
            8 => Self::Eights(Box::new_uninit_slice(count)),
            size => unreachable!("no element has {size} bytes"),
        }
    }

    /// Returns the bytes of the elements.
    pub(crate) fn bytes(&mut self) -> &mut [MaybeUninit<u8>] {
        fn bytes<E>(elements: &mut [MaybeUninit<E>]) -> &mut [MaybeUninit<u8>] {
            let len = size_of_val(elements);
            // SAFETY: the result has the same length and a smaller alignment. Neither type requires
            // initialized memory.
            unsafe { slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), len) }
        }
        match self {
            Self::Bytes(elements) => elements,
            Self::Pairs(elements) => bytes(elements),
            Self::Fours(elements) => bytes(elements),
            Self::Eights(elements) => bytes(elements),
            Self::Pooled(block) => block.bytes(),
        }
    }

    /// Returns the elements with any values: what pooled memory had before, and otherwise zeros.
    pub(crate) fn initialized(mut self) -> Bytes {
        if !matches!(self, Self::Pooled(_)) {
            self.bytes().fill(MaybeUninit::new(0));
        }
        // SAFETY: pooled memory is mapped, and all other bytes were written just now.
        unsafe { self.filled() }
    }

    /// Returns the elements.
    ///
    /// # Safety
    /// All bytes are written.
    pub(crate) unsafe fn filled(self) -> Bytes {
        /// # Safety
        /// All elements are written.
        unsafe fn filled<E: Pod + Send + Sync>(elements: Box<[MaybeUninit<E>]>) -> Bytes {
            // SAFETY: guaranteed by the caller.
            Bytes::from_elems(unsafe { elements.assume_init() }.into_vec())
        }
        // SAFETY: guaranteed by the caller; a block has as many bytes as its capacity.
        unsafe {
            match self {
                Self::Bytes(elements) => filled(elements),
                Self::Pairs(elements) => filled(elements),
                Self::Fours(elements) => filled(elements),
                Self::Eights(elements) => filled(elements),
                Self::Pooled(block) => {
                    let len = block.capacity();
                    Bytes::from_controller(Box::new(block), len)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_the_bytes_whatever_their_number() {
        for (size, count) in [
            (4, 0),
            (1, 1),
            (2, 1000),
            (4, 16_384),
            (4, 16_385),
            (8, 1 << 17),
        ] {
            let mut memory = UninitBytes::at(None, size, count);
            assert_eq!(memory.bytes().len(), size * count);
            memory
                .bytes()
                .iter_mut()
                .zip(0_usize..)
                .for_each(|(byte, value)| _ = byte.write(value as u8));
            // SAFETY: all bytes are written.
            let mut bytes = unsafe { memory.filled() };
            assert!(bytes.len() == size * count && bytes.as_ptr().addr().is_multiple_of(size));
            assert!(
                bytes
                    .iter()
                    .copied()
                    .eq((0..size * count).map(|value| value as u8))
            );
            let copy = bytes.clone();
            bytes.fill(0xff);
            assert!(
                copy.iter()
                    .copied()
                    .eq((0..size * count).map(|value| value as u8)),
                "a copy is a copy"
            );
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
