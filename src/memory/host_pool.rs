//! [`PooledMemory`]: large blocks of host memory that are reused at the same address.
//!
//! A step gathers the same weights as the previous one. If an allocator returned their memory to
//! the system, new pages would be cleared and mapped one by one, each with a page fault. So large
//! blocks are returned to a [`HostMemoryPool`] and wait for the next request of the same size. Each
//! rank has a pool, which is freed with it. A thread that is not a rank has its own pool, and so
//! have results that several ranks share.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::slice;
use std::sync::{Arc, Weak};

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use memmap2::MmapMut;
use parking_lot::Mutex;

use super::HostTuning;
#[cfg(feature = "testing")]
use super::counted;

thread_local! {
    static POOL: RefCell<Arc<HostMemoryPool>> = RefCell::default();
}

/// Memory that is returned to its pool when it is dropped, on any thread.
pub(crate) struct PooledMemory {
    /// `None` once it was returned.
    memory: Option<MmapMut>,
    /// Requested bytes, and the alignment of the elements in them.
    len: usize,
    align: usize,
    pool: Weak<HostMemoryPool>,
    #[cfg(feature = "testing")]
    account: Option<usize>,
}

impl PooledMemory {
    /// Takes a block of at least `len` bytes, with its previous contents, for elements of `align`
    /// bytes. Returns `None` if the system has too little memory, or under a sanitizer, which must
    /// see when memory is freed.
    pub fn take(pool: &Arc<HostMemoryPool>, len: usize, align: usize) -> Option<Self> {
        if cfg!(sanitized) {
            return None;
        }
        let block = len.checked_next_multiple_of(HostTuning::get().page)?;
        Some(Self {
            memory: Some(pool.take(block)?),
            len,
            align,
            pool: Arc::downgrade(pool),
            #[cfg(feature = "testing")]
            account: counted::taken(block),
        })
    }

    /// Returns the requested bytes.
    pub fn bytes(&mut self) -> &mut [MaybeUninit<u8>] {
        let memory = self.memory.as_mut().expect(HERE);
        // SAFETY: the block has `len` bytes. Who writes through this writes initialized bytes: a
        // tensor by the contract of `memory_mut`, others because an `UninitBytes` becomes a tensor
        // only when all its bytes are written.
        unsafe { slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), self.len) }
    }
}

impl AllocationController for PooledMemory {
    fn alloc_align(&self) -> usize {
        self.align
    }

    /// Reports an ordinary allocation: only the tensor writes to the block, and nothing takes it
    /// away.
    fn property(&self) -> AllocationProperty {
        AllocationProperty::Native
    }

    fn capacity(&self) -> usize {
        self.len
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let memory = self.memory.as_ref().expect(HERE);
        // SAFETY: the block has `len` bytes, and `u8` is a valid `MaybeUninit<u8>`.
        Ok(unsafe { slice::from_raw_parts(memory.as_ptr().cast(), self.len) })
    }

    unsafe fn memory_mut(
        &mut self,
        _: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        Ok(self.bytes())
    }
}

const HERE: &str = "a block has memory until it is dropped";

impl Drop for PooledMemory {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        #[cfg(feature = "testing")]
        if let Some(account) = self.account {
            counted::given_back(memory.len(), account);
        }
        if let Some(pool) = self.pool.upgrade() {
            pool.give(memory);
        }
    }
}

/// Pool of free blocks. Blocks that outlive it are freed.
#[derive(Debug, Default)]
pub(crate) struct HostMemoryPool(Mutex<FreeList>);

#[derive(Debug, Default)]
struct FreeList {
    /// Free blocks, the most recently returned last.
    blocks: VecDeque<MmapMut>,
    /// Bytes of the free blocks: no more than `most`.
    free: usize,
    /// Bytes that are in use.
    used: usize,
    /// Maximum of `used` so far.
    most: usize,
}

impl HostMemoryPool {
    /// Returns the calling thread's pool.
    pub(crate) fn of_thread() -> Arc<Self> {
        // The thread-local is destroyed at the end of a thread.
        POOL.try_with(|pool| pool.borrow().clone())
            .unwrap_or_default()
    }

    /// Makes this the calling thread's pool, for the rest of the thread's life.
    pub(crate) fn install(self: Arc<Self>) {
        POOL.set(self);
    }

    /// Takes the most recent free block of `len` bytes, or maps a new one.
    fn take(&self, len: usize) -> Option<MmapMut> {
        let reused = {
            let mut list = self.0.lock();
            let at = list.blocks.iter().rposition(|block| block.len() == len);
            at.and_then(|at| list.blocks.remove(at))
                .inspect(|_| list.free -= len)
        };
        let memory = reused.or_else(|| MmapMut::map_anon(len).ok())?;
        let mut list = self.0.lock();
        list.used += len;
        list.most = list.most.max(list.used);
        Some(memory)
    }

    /// Keeps a block for the next request of its size. Frees the oldest blocks while more bytes are
    /// free than were ever in use at once.
    fn give(&self, memory: MmapMut) {
        let mut freed = Vec::new();
        let mut list = self.0.lock();
        list.used -= memory.len();
        list.free += memory.len();
        list.blocks.push_back(memory);
        while list.free > list.most
            && let Some(oldest) = list.blocks.pop_front()
        {
            list.free -= oldest.len();
            freed.push(oldest);
        }
        // Unmapping takes long. Other threads may take blocks at the same time.
        drop(list);
    }
}

#[cfg(all(test, not(sanitized)))]
mod tests {
    use std::thread;

    use super::*;

    /// Takes a block from the calling thread's pool.
    fn take(len: usize) -> Option<PooledMemory> {
        PooledMemory::take(&HostMemoryPool::of_thread(), len, 1)
    }

    fn address(block: &PooledMemory) -> usize {
        block.memory.as_ref().unwrap().as_ptr().addr()
    }

    /// Runs a test on a new thread, so that tests share no blocks.
    fn on_a_thread<T: Send>(test: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| scope.spawn(test).join().unwrap())
    }

    #[test]
    fn the_next_block_of_a_size_is_where_the_last_was() {
        on_a_thread(|| {
            let [first, second] = [3 << 20, 2 << 20].map(|len| take(len).unwrap());
            let before = [address(&first), address(&second)];
            drop((first, second));
            let [second, first] = [2 << 20, 3 << 20].map(|len| take(len).unwrap());
            assert_eq!([address(&first), address(&second)], before);
            let third = take(3 << 20).unwrap();
            assert_ne!(
                address(&third),
                address(&first),
                "the first block is in use"
            );
        });
    }

    #[test]
    fn free_blocks_are_no_more_than_were_ever_in_use() {
        on_a_thread(|| {
            let unit = HostTuning::get().min_pooled_bytes;
            let sizes = (1..=20).map(|units| units * unit);
            sizes.for_each(|len| drop(take(len).unwrap()));
            let pool = HostMemoryPool::of_thread();
            let list = pool.0.lock();
            assert_eq!((list.used, list.most, list.free), (0, 20 * unit, 20 * unit));
            let blocks: Vec<_> = list.blocks.iter().map(|block| block.len() / unit).collect();
            assert_eq!(blocks, [20], "the oldest were freed");
        });
    }

    #[test]
    fn a_block_returns_to_its_pool_from_another_thread() {
        on_a_thread(|| {
            let block = take(3 << 20).unwrap();
            let before = address(&block);
            on_a_thread(|| drop(block));
            assert_eq!(address(&take(3 << 20).unwrap()), before);
        });
    }

    #[test]
    fn a_block_outlives_its_thread() {
        let mut block = on_a_thread(|| take(3 << 20).unwrap());
        block.bytes().fill(MaybeUninit::new(7));
        // SAFETY: all bytes are written.
        assert_eq!(unsafe { block.bytes()[(3 << 20) - 1].assume_init() }, 7);
    }

    #[test]
    fn more_than_there_is_is_not_given() {
        assert!(take(usize::MAX / 2).is_none());
        assert!(take(usize::MAX).is_none());
    }
}
