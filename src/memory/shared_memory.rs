//! [`SharedMemoryPool`]: memory shared by processes of one host.
//!
//! A result that all ranks of a host receive needs to be stored only once. A block is anonymous memory (`memfd`).
//! One process creates it, and the others map it through `/proc/<process>/fd`, so no file remains however a process
//! ends. The first page of a block counts the processes that still use it:
//!
//! ```text
//! | number, users, retired | shared bytes .. |
//! ```
//!
//! The process that created a block reuses it once no process uses it. So no memory is mapped in each step, and
//! pages stay where they are. The pool keeps no more free memory than was ever in use at once, nor more blocks; a
//! few blocks are always kept. Other processes unmap a retired block when they next map a new one. Each launch has
//! its own pool, so blocks that a failed launch still uses do not affect the next.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use burn::tensor::Bytes;
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use memmap2::{MmapOptions, MmapRaw};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::UninitBytes;

/// Environment variable that turns shared memory off. A process in which it is `0` shares no memory with others.
pub(crate) const SWITCH: &str = "BURN_DTENSOR_COMMON_MEMORY";

/// Number of free blocks that are always kept. Each block is an open file of the process that created it.
const FEW: usize = 32;

/// Bytes before the shared bytes: one page.
const HEAD: usize = 4 << 10;

/// Address at which the processes of a host find a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct SharedMemoryHandle {
    /// Process id of the creator.
    pub process: u32,
    /// File descriptor in that process.
    pub file: u32,
    /// Random number that identifies the block. It detects that the descriptor was reused, or that the process is
    /// on another host.
    pub number: u64,
}

/// First page of a block.
#[repr(C)]
struct Head {
    number: AtomicU64,
    /// Number of processes that still use the block.
    users: AtomicU32,
    /// True if the block will not be used again.
    retired: AtomicBool,
}

/// A block as this process has mapped it.
#[derive(Debug)]
struct Mapping {
    address: SharedMemoryHandle,
    memory: MmapRaw,
    /// Keeps the file open, in the process that created the block.
    _file: Option<std::fs::File>,
}

impl Mapping {
    fn head(&self) -> &Head {
        // SAFETY: the head is in the first page of memory that stays mapped. Its fields are atomic, and any bytes
        // are valid values.
        unsafe { &*self.memory.as_ptr().cast() }
    }

    fn is_used(&self) -> bool {
        // Acquire: what its users have written or read happens before the block is reused.
        self.head().users.load(Ordering::Acquire) > 0
    }

    /// Creates memory that other processes can map, of `len` bytes including the head.
    fn new(len: usize) -> io::Result<Self> {
        let file = nameless(len)?;
        let memory = MmapOptions::new().len(len).map_raw(&file)?;
        let address = SharedMemoryHandle { process: std::process::id(), file: number_of(&file)?, number: random() };
        let mapping = Self { address, memory, _file: Some(file) };
        mapping.head().number.store(address.number, Ordering::Relaxed);
        Ok(mapping)
    }

    /// Maps the block at `address`, of `len` bytes including the head.
    fn at(address: SharedMemoryHandle, len: usize) -> io::Result<Self> {
        let SharedMemoryHandle { process, file, number } = address;
        let file = std::fs::File::options().read(true).write(true).open(format!("/proc/{process}/fd/{file}"))?;
        // Reading past the end of a file would kill the process.
        if file.metadata()?.len() != len as u64 {
            return Err(io::Error::other("the file descriptor now refers to another file"));
        }
        let memory = MmapOptions::new().len(len).map_raw(&file)?;
        let mapping = Self { address, memory, _file: None };
        match mapping.head().number.load(Ordering::Relaxed) == number {
            true => Ok(mapping),
            false => Err(io::Error::other("the file descriptor now refers to another block")),
        }
    }
}

/// Creates an anonymous file of `len` bytes.
#[cfg(target_os = "linux")]
fn nameless(len: usize) -> io::Result<std::fs::File> {
    use std::os::fd::{FromRawFd, OwnedFd};
    // SAFETY: the name is null-terminated, and the flag is one of the function's.
    let file = unsafe { libc::memfd_create(c"burn-dtensor".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just opened, and nothing else owns it.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(file) });
    file.set_len(len as u64)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn nameless(_: usize) -> io::Result<std::fs::File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns this process's descriptor of `file`.
#[cfg(target_os = "linux")]
fn number_of(file: &std::fs::File) -> io::Result<u32> {
    use std::os::fd::AsRawFd;
    file.as_raw_fd().try_into().map_err(io::Error::other)
}

#[cfg(not(target_os = "linux"))]
fn number_of(_: &std::fs::File) -> io::Result<u32> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns a random number that identifies a block.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // The keys are random in every process, and differ with every call.
    RandomState::new().hash_one(std::process::id())
}

/// Shared memory of one process: the blocks that it created, and those of other processes that it mapped.
#[derive(Debug, Default)]
pub(crate) struct SharedMemoryPool {
    made: Mutex<CreatedBlocks>,
    mapped: Mutex<HashMap<SharedMemoryHandle, Arc<Mapping>>>,
    /// Simulates a system without free memory.
    #[cfg(test)]
    exhausted: AtomicBool,
}

#[derive(Debug, Default)]
struct CreatedBlocks {
    /// The block that was taken last is at the end.
    blocks: Vec<Arc<Mapping>>,
    /// Maximum that was ever in use at once.
    most: BlockTotals,
}

/// Number and bytes of some blocks.
#[derive(Debug, Default, Clone, Copy)]
struct BlockTotals {
    blocks: usize,
    bytes: usize,
}

impl BlockTotals {
    fn add(&mut self, bytes: usize) {
        self.blocks += 1;
        self.bytes += bytes;
    }
}

impl SharedMemoryPool {
    /// Returns an empty pool for the next launch.
    pub fn reset(&self) -> Self {
        Self {
            #[cfg(test)]
            exhausted: AtomicBool::new(self.exhausted.load(Ordering::Relaxed)),
            ..Self::default()
        }
    }

    /// Takes a block of `bytes` bytes for `users` processes including this one. Each of the others must
    /// [map](Self::map) it once. The block has its previous contents. Returns `None` if the system has no memory.
    pub fn take(&self, bytes: usize, users: u32) -> Option<SharedMemoryBlock> {
        let len = HEAD.checked_add(bytes)?.checked_next_multiple_of(HEAD)?;
        let mut made = self.made.lock();
        // Prefers the most recently used block, which may still be in the CPU caches.
        let waiting = made.blocks.iter().rposition(|block| block.memory.len() == len && !block.is_used());
        let block = match waiting {
            Some(at) => made.blocks.remove(at),
            None => Arc::new(self.mapping(|| Mapping::new(len)).ok()?),
        };
        made.retire(len);
        made.blocks.push(block.clone());
        block.head().users.store(users, Ordering::Relaxed);
        Some(SharedMemoryBlock(block))
    }

    /// Maps a block that another process has taken. The returned value is one use of it.
    ///
    /// # Errors
    /// If the block cannot be mapped in this process.
    pub fn map(&self, address: SharedMemoryHandle, bytes: usize) -> io::Result<SharedMemoryBlock> {
        let mut mapped = self.mapped.lock();
        if let Some(block) = mapped.get(&address) {
            return Ok(SharedMemoryBlock(block.clone()));
        }
        mapped.retain(|_, block| !block.head().retired.load(Ordering::Relaxed));
        let block = Arc::new(self.mapping(|| Mapping::at(address, (HEAD + bytes).next_multiple_of(HEAD)))?);
        mapped.insert(address, block.clone());
        Ok(SharedMemoryBlock(block))
    }

    fn mapping(&self, map: impl FnOnce() -> io::Result<Mapping>) -> io::Result<Mapping> {
        #[cfg(test)]
        if self.exhausted.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        map()
    }
}

#[cfg(test)]
impl SharedMemoryPool {
    /// Simulates that the system has no memory for new blocks from now on.
    pub fn exhaust(&self) {
        self.exhausted.store(true, Ordering::Relaxed);
    }

    /// Returns the number of blocks that were created and not retired.
    pub fn blocks(&self) -> usize {
        self.made.lock().blocks.len()
    }
}

impl CreatedBlocks {
    /// Retires free blocks when a block of `len` bytes is about to be used: the oldest first, until no more are
    /// free than were ever in use.
    fn retire(&mut self, len: usize) {
        let (mut waiting, mut used) = (BlockTotals::default(), BlockTotals { blocks: 1, bytes: len });
        self.blocks
            .iter()
            .for_each(|block| if block.is_used() { &mut used } else { &mut waiting }.add(block.memory.len()));
        let BlockTotals { blocks, bytes } = self.most;
        self.most = BlockTotals { blocks: blocks.max(used.blocks), bytes: bytes.max(used.bytes) };
        while (waiting.bytes > self.most.bytes || waiting.blocks > self.most.blocks.max(FEW))
            && let Some(oldest) = self.blocks.iter().position(|block| !block.is_used())
        {
            let oldest = self.blocks.remove(oldest);
            oldest.head().retired.store(true, Ordering::Relaxed);
            waiting = BlockTotals { blocks: waiting.blocks - 1, bytes: waiting.bytes - oldest.memory.len() };
        }
    }
}

/// One process's use of a block. Dropping it ends the use.
#[derive(Debug)]
pub(crate) struct SharedMemoryBlock(Arc<Mapping>);

impl SharedMemoryBlock {
    pub fn address(&self) -> SharedMemoryHandle {
        self.0.address
    }

    /// Returns the number of shared bytes: those that were requested, or a few more.
    pub fn len(&self) -> usize {
        self.0.memory.len() - HEAD
    }

    /// Returns the address of the shared bytes, which begin at a page. Other processes may write or read them at
    /// the same time.
    pub fn start(&self) -> NonNull<MaybeUninit<u8>> {
        // SAFETY: the address is inside the mapping.
        let start = unsafe { self.0.memory.as_mut_ptr().add(HEAD) };
        NonNull::new(start.cast()).expect("nothing is mapped at 0")
    }

    /// Returns the bytes of `range`, aligned to `align`, for a tensor. Writing to the returned bytes first makes a
    /// private copy.
    ///
    /// # Safety
    /// The bytes are written, and will not be written again while the result is used.
    pub unsafe fn bytes(self: &Arc<Self>, range: std::ops::Range<usize>, align: usize) -> Bytes {
        assert!(range.end <= self.len() && range.start.is_multiple_of(align), "{range:?} of {} bytes", self.len());
        let len = range.len();
        let read = SharedBytes { memory: ReadMemory::Common(self.clone(), range.start), len, align };
        // SAFETY: the controller has `len` bytes, and the caller guarantees that they are written.
        unsafe { Bytes::from_controller(Box::new(read), len) }
    }
}

impl Drop for SharedMemoryBlock {
    fn drop(&mut self) {
        self.0.head().users.fetch_sub(1, Ordering::Release);
    }
}

/// Shared bytes that belong to a tensor.
struct SharedBytes {
    memory: ReadMemory,
    len: usize,
    align: usize,
}

enum ReadMemory {
    /// Shared memory, from this offset.
    Common(Arc<SharedMemoryBlock>, usize),
    /// Private copy, made at the first write.
    Own(Bytes),
}

impl SharedBytes {
    fn bytes(&self) -> &[u8] {
        match &self.memory {
            // SAFETY: the range is inside the mapping. Its bytes were written, and nothing writes there while it is
            // used.
            ReadMemory::Common(common, from) => unsafe {
                slice::from_raw_parts(common.start().as_ptr().cast::<u8>().add(*from), self.len)
            },
            ReadMemory::Own(bytes) => bytes,
        }
    }
}

impl AllocationController for SharedBytes {
    fn alloc_align(&self) -> usize {
        self.align
    }

    /// Reports an ordinary allocation: the bytes do not change, and the tensor may write to them.
    fn property(&self) -> AllocationProperty {
        AllocationProperty::Native
    }

    fn capacity(&self) -> usize {
        self.len
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes = self.bytes();
        // SAFETY: `u8` is a valid `MaybeUninit<u8>`.
        Ok(unsafe { slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
    }

    unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        if let ReadMemory::Common(..) = self.memory {
            let mut own = UninitBytes::at(None, self.align, self.len / self.align);
            own.bytes().write_copy_of_slice(self.bytes());
            // SAFETY: all bytes were just written.
            self.memory = ReadMemory::Own(unsafe { own.filled() });
        }
        let ReadMemory::Own(bytes) = &mut self.memory else { unreachable!("a private copy was just made") };
        // SAFETY: the caller only writes initialized bytes, as this function's contract says.
        Ok(unsafe { slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len()) })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Maps a block as another process would.
    fn mapped(commons: &SharedMemoryPool, common: &SharedMemoryBlock, bytes: usize) -> SharedMemoryBlock {
        commons.map(common.address(), bytes).unwrap()
    }

    fn write(common: &SharedMemoryBlock, values: &[u32]) {
        // SAFETY: the block has as many bytes, and no other reference to it is in use.
        unsafe { common.start().cast::<u32>().as_ptr().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }

    #[test]
    fn what_one_writes_others_read() {
        let [one, other] = [SharedMemoryPool::default(), SharedMemoryPool::default()];
        let common = one.take(3 * MIB + 5, 2).unwrap();
        let there = mapped(&other, &common, 3 * MIB + 5);
        assert_ne!(common.start(), there.start(), "it is mapped at two addresses");
        write(&common, &[1, 2, 3]);
        // SAFETY: the bytes are written, and will not be written again.
        let bytes = unsafe { Arc::new(there).bytes(4..12, 4) };
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&bytes), [2, 3]);
    }

    #[test]
    fn a_block_is_taken_again_once_no_tensor_uses_it() {
        let [one, other] = [SharedMemoryPool::default(), SharedMemoryPool::default()];
        let common = one.take(MIB, 2).unwrap();
        let (address, there) = (common.address(), mapped(&other, &common, MIB));
        drop(common);
        let second = one.take(MIB, 1).unwrap();
        assert_ne!(second.address(), address, "the other process still uses it");
        drop(there);
        assert_eq!(one.take(MIB, 1).unwrap().address(), address);
        assert_ne!(one.take(2 * MIB, 1).unwrap().address(), address, "the sizes differ");
    }

    #[test]
    fn what_waits_is_no_more_than_was_ever_in_use() {
        let [one, other] = [SharedMemoryPool::default(), SharedMemoryPool::default()];
        for mib in 1..=8 {
            let common = one.take(mib * MIB, 2).unwrap();
            drop(mapped(&other, &common, mib * MIB));
        }
        let lens = |blocks: &mut dyn Iterator<Item = &Arc<Mapping>>| -> Vec<usize> {
            blocks.map(|block| block.memory.len() / MIB).collect()
        };
        assert_eq!(lens(&mut one.made.lock().blocks.iter()), [7, 8], "8 MiB were in use, so 7 MiB may stay free");
        let _again = one.take(7 * MIB, 1).unwrap();
        assert_eq!(lens(&mut one.made.lock().blocks.iter()), [8, 7]);
        let mut there = lens(&mut other.mapped.lock().values());
        there.sort_unstable();
        assert_eq!(there, [7, 8], "retired blocks are unmapped");
    }

    #[test]
    fn a_few_blocks_wait_and_no_more_than_were_in_use() {
        let commons = SharedMemoryPool::default();
        let block = |pages: usize| commons.take(pages * HEAD, 1).unwrap();
        let _most = block(1000 * FEW);
        (1..=2 * FEW).for_each(|pages| drop(block(pages)));
        // One block in use, and the block that was taken last, which was not free when blocks were retired.
        assert_eq!(commons.blocks(), 1 + FEW + 1);
        drop((1..=3 * FEW).map(block).collect::<Vec<_>>());
        drop(block(5 * FEW));
        assert_eq!(commons.blocks(), 1 + 3 * FEW + 1, "as many blocks may be free as were in use at once");
    }

    #[test]
    fn who_writes_to_a_tensor_writes_elsewhere() {
        let commons = SharedMemoryPool::default();
        let common = Arc::new(commons.take(MIB, 1).unwrap());
        write(&common, &[1, 2, 3, 4]);
        // SAFETY: the bytes are written, and will not be written again.
        let [mut bytes, other] = [0, 8].map(|from| unsafe { common.bytes(from..from + 8, 4) });
        drop(common);
        bytes[0] = 9;
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&bytes), [9, 2]);
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&other), [3, 4]);
        let used = || commons.made.lock().blocks[0].is_used();
        assert!(used());
        drop(other);
        assert!(!used(), "a private copy does not use the block");
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&bytes), [9, 2]);
    }

    #[test]
    fn what_is_not_there_is_not_mapped() {
        let (one, other) = (SharedMemoryPool::default(), SharedMemoryPool::default());
        let common = one.take(MIB, 2).unwrap();
        let address = common.address();
        for (wrong, bytes) in [
            (SharedMemoryHandle { number: address.number ^ 1, ..address }, MIB),
            (SharedMemoryHandle { file: 1 << 30, ..address }, MIB),
            (SharedMemoryHandle { process: u32::MAX, ..address }, MIB),
            (address, 2 * MIB),
        ] {
            assert!(other.map(wrong, bytes).is_err(), "{wrong:?} of {bytes}");
        }
        assert!(other.map(address, MIB).is_ok());
        assert!(one.take(usize::MAX, 1).is_none());
        assert!(one.take(usize::MAX / 2, 1).is_none());
    }
}
