//! [`Reader`]: reads regions of stored tensors by several threads, in bounded memory.
//!
//! Regions are read in batches, in their order, each by a [`ReadPlan`]. Threads of the reader take
//! spans of the batches in flight. The calling thread starts batches as the memory allows, and
//! hands over the regions of the oldest.
//!
//! 1. The memory of batches in flight and of buffers is at most the budget, or one region and
//!    buffers if that is more.
//! 2. A byte that has a checksum is handed over only if its block has that checksum.
//! 3. A failure stops the threads before their next span. They have ended when the call returns.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use burn::tensor::Bytes;
use parking_lot::Mutex;
use twox_hash::XxHash3_64;

use super::fs::{FileSystem, Links, ReadFile};
use super::manifest::{BLOCK, Manifest};
use super::read_plan::{Extent, Limits, Read, ReadPlan, Section};
use super::{CheckpointError, ReadOptions, ReadStats};
use crate::memory::{HostMemoryPool, UninitBytes};

pub(crate) use super::read_plan::Want;

/// Bytes of one read where memory allows: few enough that they are still in a cache when they are
/// verified.
const READ: usize = 4 << 20;

/// Reads regions of the tensors of a manifest.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    fs: &'a dyn FileSystem,
    dir: &'a Path,
    manifest: &'a Manifest,
    links: Links,
    /// Files that are open, by index; others are opened when they are read.
    held: &'a [Arc<dyn ReadFile>],
    rank: usize,
    limits: Limits,
    /// Bytes for batches in flight.
    memory: usize,
    /// Memory of the regions. Not the rank's pool, which would keep as much for the rank's life.
    pool: Arc<HostMemoryPool>,
    /// Returns the configuration of a thread.
    thread: fn() -> thread::Builder,
}

impl<'a> Reader<'a> {
    /// Creates a reader of the manifest's files in `dir`. Errors name the global rank `rank`.
    pub fn new(
        fs: &'a dyn FileSystem,
        dir: &'a Path,
        manifest: &'a Manifest,
        options: &ReadOptions,
        rank: usize,
    ) -> Self {
        // At most a quarter of the memory is for the threads' buffers.
        let share = options.memory / 4;
        let read = if share < READ { BLOCK } else { READ };
        let threads = options.threads.min(share / read).max(1);
        let limits = Limits::new(options.max_over_read.max(1.0), read, threads);
        let memory = options.memory.saturating_sub(threads * read);
        let links = Links::Refuse;
        let pool = Arc::default();
        Self {
            fs,
            dir,
            manifest,
            links,
            held: &[],
            rank,
            limits,
            memory,
            pool,
            thread: thread::Builder::new,
        }
    }

    /// Sets the treatment of files that are symbolic links, as those in caches of models are. By
    /// default they are refused.
    pub fn with_links(self, links: Links) -> Self {
        Self { links, ..self }
    }

    /// Reads from files that are open, in the order of the manifest, as if they were opened now.
    pub fn with_held(self, held: &'a [Arc<dyn ReadFile>]) -> Self {
        Self { held, ..self }
    }

    /// Reads regions, each into memory of its own that is aligned for its dtype. Calls `done` with
    /// each one's index and bytes on the calling thread, in the order of `wants`.
    ///
    /// # Panics
    /// If the manifest does not have a wanted tensor, or not all of the region.
    pub fn read(
        &self,
        wants: &[Want],
        mut done: impl FnMut(usize, Bytes) -> Result<(), CheckpointError>,
    ) -> Result<ReadStats, CheckpointError> {
        self.check_lengths(wants)?;
        let (to_threads, tasks) = mpsc::channel();
        let (finish, finished) = mpsc::channel();
        let tasks = Mutex::new(tasks);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let _stop = StopOnDrop(&stop);
            let bytes: usize = wants.iter().map(|want| self.bytes(want)).sum();
            for started in 0..self.limits.threads.min(bytes.div_ceil(self.limits.read)) {
                let finish = finish.clone();
                match (self.thread)().spawn_scoped(scope, || self.work(&tasks, finish, &stop)) {
                    Ok(_) => {}
                    Err(error) if started == 0 => {
                        return Err(self.io("start a thread to read", self.dir, &error));
                    }
                    Err(_) => break,
                }
            }
            drop(finish);
            self.coordinate(wants, to_threads, &finished, &mut done)
        })
    }

    /// Returns the number of bytes of a region.
    fn bytes(&self, want: &Want) -> usize {
        want.region.num_elements() * self.manifest.tensors[&want.key].dtype.bytes()
    }

    /// Starts batches and hands over their regions.
    fn coordinate<'w>(
        &'w self,
        wants: &'w [Want],
        to_threads: mpsc::Sender<Task<'w>>,
        finished: &mpsc::Receiver<Finished>,
        done: &mut dyn FnMut(usize, Bytes) -> Result<(), CheckpointError>,
    ) -> Result<ReadStats, CheckpointError> {
        let buffers = self.limits.threads * self.limits.read;
        let mut stats = ReadStats::default();
        let mut flight = VecDeque::<Flight>::new();
        let mut memory = 0;
        // Regions and batches that were started, and batches that were handed over.
        let mut next = 0;
        let mut started = 0;
        let mut handed = 0;
        loop {
            while next < wants.len() {
                let (count, bytes) = self.next_batch(&wants[next..]);
                if !flight.is_empty() && memory + bytes > self.memory {
                    break;
                }
                let wants = &wants[next..next + count];
                let plan = ReadPlan::new(self.manifest, wants, &self.limits);
                let targets = wants.iter().map(|want| Target::new(self, want)).collect();
                stats.add(&plan.stats);
                memory += bytes;
                stats.peak_memory = stats.peak_memory.max((memory + buffers) as u64);
                let batch = Arc::new(Batch { plan, targets });
                for span in 0..batch.plan.spans.len() {
                    let task = Task {
                        batch: batch.clone(),
                        number: started,
                        span,
                    };
                    to_threads
                        .send(task)
                        .expect("the receiver outlives the scope");
                }
                flight.push_back(Flight {
                    left: batch.plan.spans.len(),
                    batch,
                    first: next,
                    bytes,
                });
                next += count;
                started += 1;
            }
            if flight.is_empty() {
                return Ok(stats);
            }
            while flight[0].left > 0 {
                let (number, outcome) = finished.recv().expect("threads wait for more spans");
                outcome.unwrap_or_else(|panic| resume_unwind(panic))?;
                flight[number - handed].left -= 1;
            }
            let Flight {
                batch,
                first,
                bytes,
                ..
            } = flight.pop_front().expect("the oldest batch");
            let batch = Arc::into_inner(batch).expect("no thread reads for it any more");
            for (index, target) in (first..).zip(batch.targets) {
                done(index, target.memory)?;
            }
            memory -= bytes;
            handed += 1;
        }
    }

    /// Returns the number of regions of the next batch, and their bytes.
    fn next_batch(&self, wants: &[Want]) -> (usize, usize) {
        // Several batches are in flight at once.
        let most = self.memory / 4;
        let mut total = 0;
        let count = wants
            .iter()
            .enumerate()
            .take_while(|(index, want)| {
                total += self.bytes(want);
                *index == 0 || total <= most
            })
            .count();
        (
            count,
            wants[..count].iter().map(|want| self.bytes(want)).sum(),
        )
    }

    fn path(&self, file: usize) -> PathBuf {
        self.manifest.files[file].path(self.dir)
    }

    fn open(&self, file: usize) -> Result<Arc<dyn ReadFile>, CheckpointError> {
        if let Some(held) = self.held.get(file) {
            return Ok(held.clone());
        }
        let path = self.path(file);
        self.fs
            .open(&path, self.links)
            .map_err(|error| self.io("open", &path, &error))
    }

    fn io(&self, action: &str, path: &Path, error: &io::Error) -> CheckpointError {
        CheckpointError::io(self.rank, action, path, error)
    }

    /// Compares the lengths of the files that are read with the manifest.
    fn check_lengths(&self, wants: &[Want]) -> Result<(), CheckpointError> {
        let chunks = wants.iter().flat_map(|want| {
            let chunks = self.manifest.tensors[&want.key].chunks.iter();
            chunks.filter(|chunk| chunk.region.intersection(&want.region).is_some())
        });
        for file in chunks.map(|chunk| chunk.file).collect::<BTreeSet<_>>() {
            let path = self.path(file);
            let expected = self.manifest.files[file].len;
            let found = self
                .open(file)?
                .len()
                .map_err(|error| self.io("read", &path, &error))?;
            if found != expected {
                return Err(CheckpointError::Length {
                    path,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    /// Reads spans until there are no more.
    fn work(
        &self,
        tasks: &Mutex<mpsc::Receiver<Task<'_>>>,
        finish: mpsc::Sender<Finished>,
        stop: &AtomicBool,
    ) {
        let mut open = None;
        let mut buffer = Vec::new();
        loop {
            let task = tasks.lock().recv();
            let Ok(Task {
                batch,
                number,
                span,
            }) = task
            else {
                return;
            };
            if stop.load(Ordering::Relaxed) {
                return;
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                self.read_span(&batch, span, &mut open, &mut buffer)
            }));
            drop(batch);
            if finish.send((number, outcome)).is_err() {
                return;
            }
        }
    }

    /// Reads a span into the memory of its regions. `open` is the file of the thread's last span.
    fn read_span(
        &self,
        batch: &Batch<'_>,
        span: usize,
        open: &mut Option<(usize, Arc<dyn ReadFile>)>,
        buffer: &mut Vec<u8>,
    ) -> Result<(), CheckpointError> {
        let Batch { plan, targets } = batch;
        for Read {
            file,
            bytes,
            extents,
        } in &plan.reads[plan.spans[span].clone()]
        {
            let source = match open {
                Some((number, source)) if number == file => &*source,
                _ => &open.insert((*file, self.open(*file)?)).1,
            };
            let fill = |memory: &mut [u8]| {
                let read = source.read_exact_at(memory, bytes.start);
                read.map_err(|error| self.io("read", &self.path(*file), &error))
            };
            let len = (bytes.end - bytes.start) as usize;
            let extents = &plan.extents[extents.clone()];
            if let [extent] = extents
                && let Some((want, to)) = plan.direct(extent)
            {
                // SAFETY: no other extent has bytes of this section, by rule 1 of plans.
                let memory = unsafe { targets[want].part(to, len) };
                fill(memory)?;
                self.verify(plan, extent, memory)?;
                continue;
            }
            if buffer.len() < len {
                buffer.resize(len, 0);
            }
            fill(&mut buffer[..len])?;
            for extent in extents {
                let sections = &plan.sections[extent.sections.clone()];
                let at =
                    (sections[0].chunk.begin + extent.bytes.start as u64 - bytes.start) as usize;
                let read = &buffer[at..at + extent.bytes.len()];
                self.verify(plan, extent, read)?;
                for Section { want, copies, .. } in sections {
                    for copy in copies.each(extent.bytes.clone()) {
                        let from = copy.from - extent.bytes.start;
                        // SAFETY: no other section or extent has these bytes of the region, by rule
                        // 1 of plans.
                        let memory = unsafe { targets[*want].part(copy.to, copy.len) };
                        memory.copy_from_slice(&read[from..from + copy.len]);
                    }
                }
            }
        }
        Ok(())
    }

    /// Compares the checksums of an extent's blocks.
    fn verify(
        &self,
        plan: &ReadPlan<'_>,
        extent: &Extent,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        let Section { key, chunk, .. } = &plan.sections[extent.sections.start];
        let checksums = chunk.checksums.iter().skip(extent.bytes.start / BLOCK);
        for (index, (block, checksum)) in bytes.chunks(BLOCK).zip(checksums).enumerate() {
            if XxHash3_64::oneshot(block) != *checksum {
                let first = chunk.begin + (extent.bytes.start + index * BLOCK) as u64;
                let path = self.path(chunk.file);
                let last = first + block.len() as u64;
                return Err(CheckpointError::Corrupt {
                    path,
                    key: (*key).into(),
                    first,
                    last,
                });
            }
        }
        Ok(())
    }
}

/// A batch of regions that are read together.
struct Batch<'a> {
    plan: ReadPlan<'a>,
    targets: Vec<Target>,
}

/// A batch that was not handed over yet.
struct Flight<'a> {
    batch: Arc<Batch<'a>>,
    /// Number of spans that were not read yet.
    left: usize,
    /// Index of its first region.
    first: usize,
    bytes: usize,
}

/// A span to be read.
struct Task<'a> {
    batch: Arc<Batch<'a>>,
    /// Number of the batch.
    number: usize,
    span: usize,
}

/// The number of a batch, and the outcome of one of its spans.
type Finished = (usize, thread::Result<Result<(), CheckpointError>>);

/// Memory of a region, which several threads write.
struct Target {
    memory: Bytes,
    first: *mut u8,
}

// SAFETY: the pointer is that of the memory, which can be sent and shared.
unsafe impl Send for Target {}
// SAFETY: as above. Writes through the pointer are the callers' matter.
unsafe impl Sync for Target {}

impl Target {
    fn new(reader: &Reader<'_>, want: &Want) -> Self {
        let element = reader.manifest.tensors[&want.key].dtype.bytes();
        let mut memory =
            UninitBytes::at(Some(&reader.pool), element, want.region.num_elements()).initialized();
        let first = memory.as_mut_ptr();
        Self { memory, first }
    }

    /// Returns a part of the memory.
    ///
    /// # Safety
    /// No other part in use has any of these bytes.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, begin: usize, len: usize) -> &mut [u8] {
        assert!(
            begin <= self.memory.len() && len <= self.memory.len() - begin,
            "a part of the memory"
        );
        // SAFETY: the bytes are in the memory, which is initialized, and the caller guarantees that
        // no other part has them.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(begin), len) }
    }
}

/// Stops the threads even if the calling thread unwinds.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
