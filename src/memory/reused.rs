//! [`Block`]: large memory of the host's that is used again, at the same address.
//!
//! A step gathers the same weights as the last one, and an allocator that has given their memory back to the system gets
//! other pages, which the system clears and maps one by one, each at the cost of a fault. So large blocks go [`Home`] and
//! wait for the next of their size there; each thread is one, and so is what several threads have in common. While they wait
//! nobody counts on them: but for the [latest](WARM), the system has been told that it may take their pages back
//! (`MADV_FREE`), which it does when it is short of memory.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};

use memmap2::MmapMut;
use parking_lot::Mutex;

#[cfg(feature = "testing")]
use super::counted;

/// Bytes of a page, of most systems.
const PAGE: usize = 4 << 10;
/// Bytes of one of the larger kind, which is mapped by one fault.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// Bytes that came home last, of which the system is not told: to tell it, and to write there afterwards, takes about half
/// as long as the copy for which a block is taken.
const WARM: usize = 16 << 20;

thread_local! {
    static HOME: Arc<Home> = Arc::default();
}

/// Memory that goes home when it is dropped, on whatever thread.
pub(super) struct Block {
    /// Empty once it has gone home.
    memory: Option<MmapMut>,
    home: Weak<Home>,
    #[cfg(feature = "testing")]
    account: Option<usize>,
}

impl Block {
    /// Bytes from which on memory is worth a call of the system's.
    pub const LEAST: usize = 64 << 10;

    /// Of the calling thread's, see [`take_from`](Self::take_from).
    pub fn take(len: usize) -> Option<Self> {
        Self::take_from(&Home::of_thread(), len)
    }

    /// Of `len` bytes or more, with whatever was written there before. `None` if the system has not as much, where there is
    /// no `MADV_FREE`, and where a sanitizer is to see when memory is given back.
    pub fn take_from(home: &Arc<Home>, len: usize) -> Option<Self> {
        if !cfg!(target_os = "linux") || cfg!(sanitized) {
            return None;
        }
        let len = len.checked_next_multiple_of(PAGE)?;
        Some(Self {
            memory: Some(home.take(len)?),
            home: Arc::downgrade(home),
            #[cfg(feature = "testing")]
            account: counted::taken(len),
        })
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.as_ref().expect(HERE)
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().expect(HERE)
    }
}

const HERE: &str = "a block has memory until it is dropped";

impl Drop for Block {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        #[cfg(feature = "testing")]
        if let Some(account) = self.account {
            counted::given_back(memory.len(), account);
        }
        if let Some(home) = self.home.upgrade() {
            home.give(memory);
        }
    }
}

/// Where blocks wait, for as long as it is there.
#[derive(Debug, Default)]
pub(crate) struct Home(Mutex<Blocks>);

#[derive(Debug, Default)]
struct Blocks {
    /// Those that wait, the latest last.
    waiting: VecDeque<MmapMut>,
    /// Their bytes: no more than `most`.
    bytes: usize,
    /// How many of the latest the system has not been told of: none, or of no more than [`WARM`] bytes.
    warm: usize,
    /// Bytes that are in use.
    used: usize,
    /// Most that ever were.
    most: usize,
}

impl Home {
    /// The calling thread's.
    pub(crate) fn of_thread() -> Arc<Self> {
        // A thread at its end has none any more.
        HOME.try_with(Arc::clone).unwrap_or_default()
    }

    fn take(&self, len: usize) -> Option<MmapMut> {
        let mut blocks = self.0.lock();
        if let Some(at) = blocks.waiting.iter().rposition(|memory| memory.len() == len) {
            if at >= blocks.cold() {
                blocks.warm -= 1;
            }
            blocks.bytes -= len;
            blocks.use_more(len);
            return blocks.waiting.remove(at);
        }
        drop(blocks);
        let memory = MmapMut::map_anon(len).ok()?;
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE {
            // A system without them has pages all the same.
            let _ = memory.advise(memmap2::Advice::HugePage);
        }
        self.0.lock().use_more(len);
        Some(memory)
    }

    fn give(&self, memory: MmapMut) {
        // To tell of a large one takes long: meanwhile others may take blocks.
        let is_told = memory.len() > WARM;
        if is_told {
            tell_of(&memory);
        }
        let mut blocks = self.0.lock();
        blocks.used -= memory.len();
        blocks.bytes += memory.len();
        blocks.waiting.push_back(memory);
        blocks.warm += 1;
        let mut left = Vec::new();
        while blocks.bytes > blocks.most
            && let Some(oldest) = blocks.waiting.pop_front()
        {
            blocks.bytes -= oldest.len();
            left.push(oldest);
        }
        blocks.warm = blocks.warm.min(blocks.waiting.len());
        blocks.cool(is_told);
        // Unmapped when others may take blocks again.
        drop(blocks);
    }
}

/// Tells the system that it may take the memory's pages back. One that cannot has them stay.
fn tell_of(memory: &MmapMut) {
    // SAFETY: nobody has a reference into the memory, and whoever takes it expects nothing of what is there.
    #[cfg(target_os = "linux")]
    let _ = unsafe { memory.unchecked_advise(memmap2::UncheckedAdvice::Free) };
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

impl Blocks {
    /// How many the system has been told of: the oldest.
    fn cold(&self) -> usize {
        self.waiting.len() - self.warm
    }

    /// Tells the system of all but the latest; of the very last it `is_told`, maybe.
    fn cool(&mut self, is_told: bool) {
        while self.waiting.range(self.cold()..).map(|memory| memory.len()).sum::<usize>() > WARM {
            if !is_told || self.warm > 1 {
                tell_of(&self.waiting[self.cold()]);
            }
            self.warm -= 1;
        }
    }

    fn use_more(&mut self, len: usize) {
        self.used += len;
        self.most = self.most.max(self.used);
    }
}

#[cfg(all(test, target_os = "linux", not(sanitized)))]
mod tests {
    use std::thread;

    use super::*;

    fn address(block: &Block) -> usize {
        block.as_ptr().addr()
    }

    /// Tests share no blocks: each has a thread of its own.
    fn on_a_thread<T: Send>(test: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| scope.spawn(test).join().unwrap())
    }

    #[test]
    fn the_next_block_of_a_size_is_where_the_last_was() {
        on_a_thread(|| {
            let [first, second] = [3 << 20, 70_000].map(|len| Block::take(len).unwrap());
            let before = [address(&first), address(&second)];
            drop((first, second));
            let [second, first] = [70_000, 3 << 20].map(|len| Block::take(len).unwrap());
            assert_eq!([address(&first), address(&second)], before);
            let third = Block::take(3 << 20).unwrap();
            assert_ne!(address(&third), address(&first), "that one is in use");
        });
    }

    #[test]
    fn what_waits_is_no_more_than_was_ever_in_use() {
        on_a_thread(|| {
            let sizes = (1..=20).map(|pages| 16 * pages * PAGE);
            sizes.for_each(|len| drop(Block::take(len).unwrap()));
            HOME.with(|home| {
                let blocks = home.0.lock();
                assert_eq!((blocks.used, blocks.most), (0, 20 * 16 * PAGE));
                let waiting: Vec<_> = blocks.waiting.iter().map(|memory| memory.len() / PAGE / 16).collect();
                assert_eq!(waiting, [20], "the oldest have left");
                assert_eq!(blocks.bytes, 20 * 16 * PAGE);
            });
        });
    }

    #[test]
    fn the_system_is_told_of_all_that_waits_but_for_the_latest() {
        on_a_thread(|| {
            let warm = || HOME.with(|home| home.0.lock().warm);
            let after = [4, 8, 4, 8, 4].map(|mib| Block::take(mib << 20).unwrap()).map(|block| {
                drop(block);
                warm()
            });
            assert_eq!(after, [1, 2, 3, 2, 3], "of 16 MiB all, of 24 the latest 12");
            drop(Block::take(8 << 20).unwrap());
            assert_eq!(warm(), 3, "what is used again comes home as the latest");
            drop(Block::take(WARM + 1).unwrap());
            assert_eq!(warm(), 0, "of what is larger nothing");
        });
    }

    #[test]
    fn a_block_goes_home_from_another_thread() {
        on_a_thread(|| {
            let block = Block::take(100_000).unwrap();
            let before = address(&block);
            on_a_thread(|| drop(block));
            assert_eq!(address(&Block::take(100_000).unwrap()), before);
        });
    }

    #[test]
    fn a_block_outlives_its_thread() {
        let mut block = on_a_thread(|| Block::take(100_000).unwrap());
        block.fill(7);
        assert_eq!(block[99_999], 7);
    }

    #[test]
    fn more_than_there_is_is_not_given() {
        assert!(Block::take(usize::MAX / 2).is_none());
        assert!(Block::take(usize::MAX).is_none());
    }
}
