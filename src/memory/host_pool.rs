//! [`PooledMemory`]: large blocks of host memory that are reused at the same address.
//!
//! A step gathers the same weights as the previous one. If an allocator returned their memory to the system, new
//! pages would be cleared and mapped one by one, each with a page fault. So large blocks are returned to a
//! [`HostMemoryPool`] and wait for the next request of the same size. Each rank has a pool. Ranks on one core share
//! a pool, because a block that one of them returned may still be in the caches. A thread that is not a rank has
//! its own pool, and so have results that several threads share. If a block has been free for [a while](IDLE), the
//! system is advised that it may reclaim the pages (`MADV_FREE`). It does so only when it is short of memory.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::slice;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use memmap2::MmapMut;
use parking_lot::Mutex;

use super::HostTuning;
#[cfg(feature = "testing")]
use super::counted;

/// Bytes of a huge page, which is mapped by a single page fault.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// Time after which a free block counts as idle. It is checked when another block is returned. Advising the system
/// about a block and writing to it afterwards takes about half as long as the copy for which it is taken. That is
/// too long for a block which the next layer of a model takes.
const IDLE: Duration = Duration::from_secs(1);

/// Maximum number of free bytes that are kept without advising the system. Beyond it, the blocks that have been
/// free longest are advised at once, because no further block may be returned to trigger the check.
const WARM: usize = 256 << 20;

thread_local! {
    static HOME: RefCell<Arc<HostMemoryPool>> = RefCell::default();
}

/// Memory that is returned to its pool when it is dropped, on any thread.
pub(crate) struct PooledMemory {
    /// `None` once it was returned.
    memory: Option<MmapMut>,
    /// Requested bytes, and the alignment of the elements in them.
    len: usize,
    align: usize,
    home: Weak<HostMemoryPool>,
    #[cfg(feature = "testing")]
    account: Option<usize>,
}

impl PooledMemory {
    /// Takes a block of at least `len` bytes, with its previous contents, for elements of `align` bytes. Returns `None`
    /// if the system has too little memory, if it has no `MADV_FREE`, or under a sanitizer, which must see when memory is freed.
    pub fn take(home: &Arc<HostMemoryPool>, len: usize, align: usize) -> Option<Self> {
        if !cfg!(target_os = "linux") || cfg!(sanitized) {
            return None;
        }
        let block = len.checked_next_multiple_of(HostTuning::get().page)?;
        Some(Self {
            memory: Some(home.take(block)?),
            len,
            align,
            home: Arc::downgrade(home),
            #[cfg(feature = "testing")]
            account: counted::taken(block),
        })
    }

    /// Returns the requested bytes.
    pub fn bytes(&mut self) -> &mut [MaybeUninit<u8>] {
        let memory = self.memory.as_mut().expect(HERE);
        // SAFETY: the block has `len` bytes. Who writes through this writes initialized bytes: a tensor by the contract
        // of `memory_mut`, others because an `UninitBytes` becomes a tensor only when all its bytes are written.
        unsafe { slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), self.len) }
    }
}

impl AllocationController for PooledMemory {
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
        let memory = self.memory.as_ref().expect(HERE);
        // SAFETY: the block has `len` bytes, and `u8` is a valid `MaybeUninit<u8>`.
        Ok(unsafe { slice::from_raw_parts(memory.as_ptr().cast(), self.len) })
    }

    unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        Ok(self.bytes())
    }
}

const HERE: &str = "a block has memory until it is dropped";

impl Drop for PooledMemory {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        #[cfg(feature = "testing")]
        if let Some(account) = self.account {
            counted::given_back(memory.len(), account);
        }
        if let Some(home) = self.home.upgrade() {
            home.give(memory, Instant::now());
        }
    }
}

/// Pool of free blocks. Blocks that outlive it are freed.
#[derive(Debug, Default)]
pub(crate) struct HostMemoryPool(Mutex<FreeList>);

#[derive(Debug, Default)]
struct FreeList {
    /// Free blocks, the most recently returned last.
    waiting: VecDeque<FreeBlock>,
    /// Bytes of the free blocks: no more than `most`.
    bytes: usize,
    /// Number of free blocks about which the system was advised. They are the oldest.
    told: usize,
    /// Bytes that are in use.
    used: usize,
    /// Maximum of `used` so far.
    most: usize,
}

#[derive(Debug)]
struct FreeBlock {
    memory: MmapMut,
    since: Instant,
}

impl HostMemoryPool {
    /// Returns the calling thread's pool.
    pub(crate) fn of_thread() -> Arc<Self> {
        // The thread-local is destroyed at the end of a thread.
        HOME.try_with(|home| home.borrow().clone()).unwrap_or_default()
    }

    /// Creates one pool for each of `ranks` ranks, in their order. Ranks share pools if there are fewer `cores`
    /// than ranks.
    pub(crate) fn of_ranks(ranks: usize, cores: usize) -> Vec<Arc<Self>> {
        let homes: Vec<_> = (0..ranks.min(cores)).map(|_| Arc::default()).collect();
        homes.into_iter().cycle().take(ranks).collect()
    }

    /// Makes this the calling thread's pool, for the rest of the thread's life.
    pub(crate) fn settle(self: Arc<Self>) {
        HOME.set(self);
    }

    fn take(&self, len: usize) -> Option<MmapMut> {
        let mut blocks = self.0.lock();
        if let Some(at) = blocks.waiting.iter().rposition(|waiting| waiting.memory.len() == len) {
            blocks.told -= usize::from(at < blocks.told);
            blocks.bytes -= len;
            blocks.use_more(len);
            return blocks.waiting.remove(at).map(|waiting| waiting.memory);
        }
        drop(blocks);
        let memory = MmapMut::map_anon(len).ok()?;
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE {
            // Without huge pages, the advice has no effect.
            let _ = memory.advise(memmap2::Advice::HugePage);
        }
        self.0.lock().use_more(len);
        Some(memory)
    }

    fn give(&self, memory: MmapMut, now: Instant) {
        let mut left = Vec::new();
        let mut blocks = self.0.lock();
        blocks.used -= memory.len();
        blocks.bytes += memory.len();
        blocks.waiting.push_back(FreeBlock { memory, since: now });
        while blocks.bytes > blocks.most
            && let Some(FreeBlock { memory: oldest, .. }) = blocks.waiting.pop_front()
        {
            blocks.told = blocks.told.saturating_sub(1);
            blocks.bytes -= oldest.len();
            left.push(oldest);
        }
        let idle = blocks.without_idle(now);
        drop(blocks);
        // Unmapping and advising take long. Other threads may take blocks at the same time.
        drop(left);
        if !idle.is_empty() {
            idle.iter().for_each(|waiting| tell_of(&waiting.memory));
            let mut blocks = self.0.lock();
            blocks.told += idle.len();
            idle.into_iter().rev().for_each(|waiting| blocks.waiting.push_front(waiting));
        }
    }
}

impl FreeList {
    /// Removes the blocks about which the system should be advised now, and returns them.
    fn without_idle(&mut self, now: Instant) -> Vec<FreeBlock> {
        let mut warm: usize = self.waiting.range(self.told..).map(|waiting| waiting.memory.len()).sum();
        let is_idle = |waiting: &&FreeBlock| {
            let is_idle = warm > WARM || now.saturating_duration_since(waiting.since) >= IDLE;
            warm -= waiting.memory.len();
            is_idle
        };
        let count = self.waiting.range(self.told..).take_while(is_idle).count();
        self.waiting.drain(self.told..self.told + count).collect()
    }

    fn use_more(&mut self, len: usize) {
        self.used += len;
        self.most = self.most.max(self.used);
    }
}

/// Advises the system that it may reclaim the pages. If it cannot, they stay.
fn tell_of(memory: &MmapMut) {
    // SAFETY: no reference into the memory exists, and the next user does not rely on its contents.
    #[cfg(target_os = "linux")]
    let _ = unsafe { memory.unchecked_advise(memmap2::UncheckedAdvice::Free) };
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

#[cfg(all(test, target_os = "linux", not(sanitized)))]
mod tests {
    use std::thread;

    use super::*;

    const PAGE: usize = 4 << 10;

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
            let [first, second] = [3 << 20, 70_000].map(|len| take(len).unwrap());
            let before = [address(&first), address(&second)];
            drop((first, second));
            let [second, first] = [70_000, 3 << 20].map(|len| take(len).unwrap());
            assert_eq!([address(&first), address(&second)], before);
            let third = take(3 << 20).unwrap();
            assert_ne!(address(&third), address(&first), "the first block is in use");
        });
    }

    #[test]
    fn what_waits_is_no_more_than_was_ever_in_use() {
        on_a_thread(|| {
            let sizes = (1..=20).map(|pages| 16 * pages * PAGE);
            sizes.for_each(|len| drop(take(len).unwrap()));
            let home = HostMemoryPool::of_thread();
            let blocks = home.0.lock();
            assert_eq!((blocks.used, blocks.most), (0, 20 * 16 * PAGE));
            let waiting: Vec<_> = blocks.waiting.iter().map(|waiting| waiting.memory.len() / PAGE / 16).collect();
            assert_eq!(waiting, [20], "the oldest were freed");
            assert_eq!(blocks.bytes, 20 * 16 * PAGE);
        });
    }

    #[test]
    fn the_system_is_told_of_what_has_waited_for_a_while() {
        let (home, start) = (HostMemoryPool::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        let told = || home.0.lock().told;
        let [first, second, third] = [1, 2, 3].map(|mib| home.take(mib << 20).unwrap());
        home.give(first, start);
        home.give(second, after(500));
        assert_eq!(told(), 0);
        home.give(third, after(1200));
        assert_eq!(told(), 1, "the first block is idle");
        let second = home.take(2 << 20).unwrap();
        assert_eq!(told(), 1, "no change");
        home.give(second, after(1600));
        assert_eq!(told(), 1, "a reused block is returned as the most recent");
        let first = home.take(1 << 20).unwrap();
        assert_eq!(told(), 0);
        home.give(first, after(2700));
        assert_eq!(told(), 2, "the third and the second block are idle");
        let waiting: Vec<_> = home.0.lock().waiting.iter().map(|waiting| waiting.memory.len() >> 20).collect();
        assert_eq!(waiting, [3, 2, 1]);
    }

    /// Returns the KiB at `address` that the system may reclaim, or `None` if it does not report them.
    fn lazily_free(address: usize) -> Option<usize> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let mut lines = smaps.lines().skip_while(|line| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends = range.and_then(|(start, end)| {
                Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
            });
            !ends.is_some_and(|range| range.contains(&address))
        });
        let line = lines.find(|line| line.starts_with("LazyFree:"))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    #[test]
    fn what_the_system_is_told_of_it_may_take() {
        let (home, start) = (HostMemoryPool::default(), Instant::now());
        let [mut first, second] = [1, 2].map(|mib| home.take(mib << 20).unwrap());
        first.fill(7);
        let address = first.as_ptr().addr();
        if lazily_free(address).is_none() {
            return eprintln!("/proc/self/smaps does not report lazily freed memory on this system");
        }
        home.give(first, start);
        home.give(second, start + IDLE);
        // The last pages may be counted later.
        let free = lazily_free(address);
        assert!(free >= Some(512), "{free:?} KiB");
    }

    #[test]
    fn the_system_is_told_at_once_of_much_that_waits() {
        let (home, now) = (HostMemoryPool::default(), Instant::now());
        let blocks = [WARM / 2, WARM / 4, WARM / 4, PAGE].map(|len| home.take(len).unwrap());
        let told = blocks.map(|block| {
            home.give(block, now);
            home.0.lock().told
        });
        assert_eq!(told, [0, 0, 0, 1]);
        let blocks = home.0.lock();
        let waiting: Vec<_> = blocks.waiting.iter().map(|waiting| waiting.memory.len()).collect();
        assert_eq!(waiting, [WARM / 2, WARM / 4, WARM / 4, PAGE]);
    }

    #[test]
    fn what_leaves_is_no_longer_told_of() {
        let (home, start) = (HostMemoryPool::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        let [first, second, third] = [1, 2, 4].map(|mib| home.take(mib << 20).unwrap());
        home.give(first, start);
        home.give(second, start);
        home.give(third, after(1500));
        assert_eq!(home.0.lock().told, 2);
        let other = home.take(6 << 20).unwrap();
        home.give(other, after(1600));
        let blocks = home.0.lock();
        let waiting: Vec<_> = blocks.waiting.iter().map(|waiting| waiting.memory.len() >> 20).collect();
        assert_eq!((&waiting[..], blocks.told), (&[6][..], 0), "only the most recent block is kept");
    }

    #[test]
    fn a_block_goes_home_from_another_thread() {
        on_a_thread(|| {
            let block = take(100_000).unwrap();
            let before = address(&block);
            on_a_thread(|| drop(block));
            assert_eq!(address(&take(100_000).unwrap()), before);
        });
    }

    #[test]
    fn ranks_of_one_core_take_each_others_blocks() {
        let homes = HostMemoryPool::of_ranks(5, 2);
        let after = |rank: usize| {
            let home = homes[rank].clone();
            on_a_thread(|| {
                home.settle();
                address(&take(100_000).unwrap())
            })
        };
        let first = [0, 1].map(after);
        assert_ne!(first[0], first[1]);
        assert_eq!([2, 3, 4].map(after), [first[0], first[1], first[0]]);
        assert_eq!(HostMemoryPool::of_ranks(2, 8).len(), 2);
    }

    #[test]
    fn a_block_outlives_its_thread() {
        let mut block = on_a_thread(|| take(100_000).unwrap());
        block.bytes().fill(MaybeUninit::new(7));
        // SAFETY: all bytes are written.
        assert_eq!(unsafe { block.bytes()[99_999].assume_init() }, 7);
    }

    #[test]
    fn more_than_there_is_is_not_given() {
        assert!(take(usize::MAX / 2).is_none());
        assert!(take(usize::MAX).is_none());
    }
}
