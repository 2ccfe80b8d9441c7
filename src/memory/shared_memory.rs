//! [`SharedMemoryPool`]: memory that processes of one host have in common.
//!
//! What the ranks of a host all get alike need be there once. A block is memory without a name (`memfd`): one process makes
//! it, and others map it by way of its `/proc/<process>/fd`, so that nothing is left behind, however a process ends. Its
//! first page says how many processes still use it:
//!
//! ```text
//! | number, users, retired | what they have in common .. |
//! ```
//!
//! Whoever has made a block takes it again once nobody uses it. So nothing is mapped from step to step, and pages stay where
//! they are. What waits is no more than was ever in use, and no more blocks, but for a few; what is retired the others unmap
//! when they next map another. A launch has its own: whatever becomes of it, nothing stays in use for ever.

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

use super::UninitBytes;

/// If this variable is `0` in any process, that one has no memory in common with others.
pub(crate) const SWITCH: &str = "BURN_DTENSOR_COMMON_MEMORY";

/// So many blocks may wait, however few were in use: each is an open file of the process that has made it.
const FEW: usize = 32;

/// Bytes before what is in common: a page.
const HEAD: usize = 4 << 10;

/// Where the processes of a host find a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SharedMemoryHandle {
    /// Whose it is, by the number that the system has for it.
    pub process: u32,
    /// Its file there.
    pub file: u32,
    /// By this it is known that it is the one that is meant, and not another of the same place, or host.
    pub number: u64,
}

/// The first page.
#[repr(C)]
struct Head {
    number: AtomicU64,
    /// Processes that still use the block.
    users: AtomicU32,
    /// It will not be used again.
    retired: AtomicBool,
}

/// A block, as this process has mapped it.
#[derive(Debug)]
struct Mapping {
    address: SharedMemoryHandle,
    memory: MmapRaw,
    /// In the process that has made it.
    _file: Option<std::fs::File>,
}

impl Mapping {
    fn head(&self) -> &Head {
        // SAFETY: in the first page of memory that stays mapped, of numbers that are shared as such; any bytes are some.
        unsafe { &*self.memory.as_ptr().cast() }
    }

    fn is_used(&self) -> bool {
        // With what its users have written or read.
        self.head().users.load(Ordering::Acquire) > 0
    }

    /// Memory of so many bytes in all that other processes can map.
    fn new(len: usize) -> io::Result<Self> {
        let file = nameless(len)?;
        let memory = MmapOptions::new().len(len).map_raw(&file)?;
        let address = SharedMemoryHandle { process: std::process::id(), file: number_of(&file)?, number: random() };
        let mapping = Self { address, memory, _file: Some(file) };
        mapping.head().number.store(address.number, Ordering::Relaxed);
        Ok(mapping)
    }

    /// What is at `address`, of so many bytes in all.
    fn at(address: SharedMemoryHandle, len: usize) -> io::Result<Self> {
        let SharedMemoryHandle { process, file, number } = address;
        let file = std::fs::File::options().read(true).write(true).open(format!("/proc/{process}/fd/{file}"))?;
        // Behind the end of a file a read would end the process.
        if file.metadata()?.len() != len as u64 {
            return Err(io::Error::other("another file is there"));
        }
        let memory = MmapOptions::new().len(len).map_raw(&file)?;
        let mapping = Self { address, memory, _file: None };
        match mapping.head().number.load(Ordering::Relaxed) == number {
            true => Ok(mapping),
            false => Err(io::Error::other("another block is there")),
        }
    }
}

/// A file without a name, of so many bytes.
#[cfg(target_os = "linux")]
fn nameless(len: usize) -> io::Result<std::fs::File> {
    use std::os::fd::{FromRawFd, OwnedFd};
    // SAFETY: a name that ends, and a flag of the function's.
    let file = unsafe { libc::memfd_create(c"burn-dtensor".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just opened, and is nobody else's.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(file) });
    file.set_len(len as u64)?;
    Ok(file)
}

#[cfg(not(target_os = "linux"))]
fn nameless(_: usize) -> io::Result<std::fs::File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The number that this process has for `file`.
#[cfg(target_os = "linux")]
fn number_of(file: &std::fs::File) -> io::Result<u32> {
    use std::os::fd::AsRawFd;
    file.as_raw_fd().try_into().map_err(io::Error::other)
}

#[cfg(not(target_os = "linux"))]
fn number_of(_: &std::fs::File) -> io::Result<u32> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Of which nobody has another like it.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // Its keys are random in every process, and others with every call.
    RandomState::new().hash_one(std::process::id())
}

/// What a process has in common with others: blocks that it has made, and those of others that it has mapped.
#[derive(Debug, Default)]
pub(crate) struct SharedMemoryPool {
    made: Mutex<CreatedBlocks>,
    mapped: Mutex<HashMap<SharedMemoryHandle, Arc<Mapping>>>,
    /// As if the system had no memory.
    #[cfg(test)]
    exhausted: AtomicBool,
}

#[derive(Debug, Default)]
struct CreatedBlocks {
    /// The one that was taken last at the end.
    blocks: Vec<Arc<Mapping>>,
    /// Most that ever were in use.
    most: BlockTotals,
}

/// Of some blocks.
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
    /// Those of the next launch.
    pub fn reset(&self) -> Self {
        Self {
            #[cfg(test)]
            exhausted: AtomicBool::new(self.exhausted.load(Ordering::Relaxed)),
            ..Self::default()
        }
    }

    /// Memory of this process's for so many `bytes`, for it and others: in all so many `users`, each of which has to
    /// [map](Self::map) it once. With whatever was written there before. `None` if the system has none.
    pub fn take(&self, bytes: usize, users: u32) -> Option<SharedMemoryBlock> {
        let len = HEAD.checked_add(bytes)?.checked_next_multiple_of(HEAD)?;
        let mut made = self.made.lock();
        // Of several the one that the caches may still hold.
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

    /// What another process has taken: one use of it.
    ///
    /// # Errors
    /// If it cannot be mapped here.
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
    /// From now on the system has no memory for other blocks.
    pub fn exhaust(&self) {
        self.exhausted.store(true, Ordering::Relaxed);
    }

    /// How many blocks it has made, and not retired.
    pub fn blocks(&self) -> usize {
        self.made.lock().blocks.len()
    }
}

impl CreatedBlocks {
    /// Now that a block of `len` bytes more is used, retires of what waits the oldest, until no more waits than was ever in use.
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

/// One process's use of a block, until this is dropped.
#[derive(Debug)]
pub(crate) struct SharedMemoryBlock(Arc<Mapping>);

impl SharedMemoryBlock {
    pub fn address(&self) -> SharedMemoryHandle {
        self.0.address
    }

    /// Bytes that are in common: those that were asked for, or a few more.
    pub fn len(&self) -> usize {
        self.0.memory.len() - HEAD
    }

    /// Where they begin: at a page. Others may write or read there meanwhile.
    pub fn start(&self) -> NonNull<MaybeUninit<u8>> {
        // SAFETY: inside of what is mapped.
        let start = unsafe { self.0.memory.as_mut_ptr().add(HEAD) };
        NonNull::new(start.cast()).expect("nothing is mapped at 0")
    }

    /// The bytes of `range`, aligned to `align`, as those of a tensor. Who writes to them writes elsewhere.
    ///
    /// # Safety
    /// They are written, and will not be again while this is used.
    pub unsafe fn bytes(self: &Arc<Self>, range: std::ops::Range<usize>, align: usize) -> Bytes {
        assert!(range.end <= self.len() && range.start.is_multiple_of(align), "{range:?} of {} bytes", self.len());
        let len = range.len();
        let read = SharedBytes { memory: ReadMemory::Common(self.clone(), range.start), len, align };
        // SAFETY: it has as many bytes, and as the caller says they are written.
        unsafe { Bytes::from_controller(Box::new(read), len) }
    }
}

impl Drop for SharedMemoryBlock {
    fn drop(&mut self) {
        self.0.head().users.fetch_sub(1, Ordering::Release);
    }
}

/// Bytes in common that are a tensor's.
struct SharedBytes {
    memory: ReadMemory,
    len: usize,
    align: usize,
}

enum ReadMemory {
    /// From there on.
    Common(Arc<SharedMemoryBlock>, usize),
    /// Since they were written to.
    Own(Bytes),
}

impl SharedBytes {
    fn bytes(&self) -> &[u8] {
        match &self.memory {
            // SAFETY: inside of what is mapped; they were written, and nobody writes there while it is used.
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

    /// To the tensor it is as an allocation would be: what it reads stays, and it may write.
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
            // SAFETY: all of it was just written.
            self.memory = ReadMemory::Own(unsafe { own.filled() });
        }
        let ReadMemory::Own(bytes) = &mut self.memory else { unreachable!("they are its own now") };
        // SAFETY: the caller only writes initialized bytes, as this function's contract says.
        Ok(unsafe { slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len()) })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// As another process sees what was taken.
    fn mapped(commons: &SharedMemoryPool, common: &SharedMemoryBlock, bytes: usize) -> SharedMemoryBlock {
        commons.map(common.address(), bytes).unwrap()
    }

    fn write(common: &SharedMemoryBlock, values: &[u32]) {
        // SAFETY: as many bytes are there, and nobody else is.
        unsafe { common.start().cast::<u32>().as_ptr().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    }

    #[test]
    fn what_one_writes_others_read() {
        let [one, other] = [SharedMemoryPool::default(), SharedMemoryPool::default()];
        let common = one.take(3 * MIB + 5, 2).unwrap();
        let there = mapped(&other, &common, 3 * MIB + 5);
        assert_ne!(common.start(), there.start(), "mapped a second time");
        write(&common, &[1, 2, 3]);
        // SAFETY: written, and not again.
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
        assert_ne!(second.address(), address, "the other one still uses it");
        drop(there);
        assert_eq!(one.take(MIB, 1).unwrap().address(), address);
        assert_ne!(one.take(2 * MIB, 1).unwrap().address(), address, "of another size");
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
        assert_eq!(lens(&mut one.made.lock().blocks.iter()), [7, 8], "8 were in use, so that 7 may wait");
        let _again = one.take(7 * MIB, 1).unwrap();
        assert_eq!(lens(&mut one.made.lock().blocks.iter()), [8, 7]);
        let mut there = lens(&mut other.mapped.lock().values());
        there.sort_unstable();
        assert_eq!(there, [7, 8], "it has unmapped what was retired");
    }

    #[test]
    fn a_few_blocks_wait_and_no_more_than_were_in_use() {
        let commons = SharedMemoryPool::default();
        let block = |pages: usize| commons.take(pages * HEAD, 1).unwrap();
        let _most = block(1000 * FEW);
        (1..=2 * FEW).for_each(|pages| drop(block(pages)));
        // That in use, and the one that was taken last: then it was none that waits.
        assert_eq!(commons.blocks(), 1 + FEW + 1);
        drop((1..=3 * FEW).map(block).collect::<Vec<_>>());
        drop(block(5 * FEW));
        assert_eq!(commons.blocks(), 1 + 3 * FEW + 1, "all of those that were in use at once may wait");
    }

    #[test]
    fn who_writes_to_a_tensor_writes_elsewhere() {
        let commons = SharedMemoryPool::default();
        let common = Arc::new(commons.take(MIB, 1).unwrap());
        write(&common, &[1, 2, 3, 4]);
        // SAFETY: written, and not again.
        let [mut bytes, other] = [0, 8].map(|from| unsafe { common.bytes(from..from + 8, 4) });
        drop(common);
        bytes[0] = 9;
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&bytes), [9, 2]);
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&other), [3, 4]);
        let used = || commons.made.lock().blocks[0].is_used();
        assert!(used());
        drop(other);
        assert!(!used(), "what was written to is no use of it");
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
