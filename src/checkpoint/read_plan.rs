//! [`ReadPlan`]: which bytes of which files are read for regions of tensors, and where they go.
//!
//! ```text
//! region     wanted elements of a tensor
//! section    those of one chunk; runs of bytes in the chunk, and of the region's memory
//! extent     bytes of a chunk that are read for its sections: runs, joined, rounded out to blocks with a checksum
//! read       extents of a file, read into one buffer, or one extent directly into the memory of its region
//! span       reads of a file, one after the other by one thread
//! ```
//!
//! 1. Every byte of a region is in exactly one section, and every byte of a section in exactly one
//!    extent.
//! 2. No byte of a file is in two reads of a plan.
//! 3. An extent of a chunk with checksums consists of complete blocks.
//! 4. Where runs of a section are long, at least 16 KiB, they are joined as long as the bytes read
//!    are at most `max_over_read` times the bytes needed. Shorter runs are joined if less than a
//!    page lies between them, or until they are long. Both without the bytes that rule 3 adds.
//! 5. Extents that a page or more lies between, or two long ones that anything lies between, are
//!    not in one read.

use std::ops::Range;

use itertools::Itertools;
use smallvec::SmallVec;

use super::manifest::{BLOCK, ChunkEntry, Manifest};
use super::read_stats::{ReadStats, RunClass};
use super::region::Region;

/// A region of a stored tensor that is to be read.
#[derive(Debug, Clone)]
pub(crate) struct Want {
    /// Key of the tensor.
    pub key: String,
    /// The wanted elements.
    pub region: Region,
}

/// Limits of a plan. All lengths are in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Most bytes read for each byte needed.
    pub max_over_read: f64,
    /// Length of a block that has a checksum.
    pub block: usize,
    /// Distance from which on short runs are read apart.
    pub page: usize,
    /// Length from which on a run is long.
    pub long: usize,
    /// Most bytes of one read: a multiple of `block`.
    pub read: usize,
    /// Most bytes of a span.
    pub span: usize,
    /// Number of threads among which the spans are divided.
    pub threads: usize,
}

impl Limits {
    /// Returns the limits for reads of at most `read` bytes by so many threads.
    pub fn new(max_over_read: f64, read: usize, threads: usize) -> Self {
        Self {
            max_over_read,
            block: BLOCK,
            page: 4 << 10,
            long: 16 << 10,
            read,
            span: 128 << 20,
            threads,
        }
    }
}

/// The reads of some wanted regions.
#[derive(Debug)]
pub(super) struct ReadPlan<'a> {
    /// Ordered by file and position in it.
    pub sections: Vec<Section<'a>>,
    /// Ordered by file and position in it.
    pub extents: Vec<Extent>,
    /// Ordered by file and position in it.
    pub reads: Vec<Read>,
    /// Reads of each span.
    pub spans: Vec<Range<usize>>,
    /// Sums of what is read.
    pub stats: ReadStats,
}

/// The elements of a chunk that a region wants.
#[derive(Debug)]
pub(super) struct Section<'a> {
    /// Index of the region.
    pub want: usize,
    /// Key of the tensor.
    pub key: &'a str,
    /// The chunk.
    pub chunk: &'a ChunkEntry,
    /// Bytes of the chunk.
    len: usize,
    /// Runs of bytes in the chunk and in the region's memory.
    pub copies: Runs,
    /// Runs of bytes in the chunk.
    runs: Runs,
}

/// Bytes of a chunk that are read for its sections.
#[derive(Debug)]
pub(super) struct Extent {
    /// All sections of the chunk.
    pub sections: Range<usize>,
    /// Bytes, counted from the first of the chunk.
    pub bytes: Range<usize>,
}

/// Bytes of a file that are read together.
#[derive(Debug)]
pub(super) struct Read {
    /// Index of the file.
    pub file: usize,
    /// Bytes of the file.
    pub bytes: Range<u64>,
    /// The extents in it.
    pub extents: Range<usize>,
}

impl<'a> ReadPlan<'a> {
    /// Plans the reads of regions of the manifest's tensors.
    ///
    /// # Panics
    /// If there is no such tensor, or a region is not covered by disjoint chunks, as it is in a
    /// valid manifest.
    pub fn new(manifest: &'a Manifest, wants: &'a [Want], limits: &Limits) -> Self {
        let mut sections: Vec<_> = wants
            .iter()
            .enumerate()
            .flat_map(|(index, want)| sections(manifest, index, want))
            .collect();
        sections.sort_by_key(|section| (section.chunk.file, section.chunk.begin));
        let mut plan = Self {
            sections,
            extents: Vec::new(),
            reads: Vec::new(),
            spans: Vec::new(),
            stats: Default::default(),
        };
        plan.add_extents(limits);
        plan.add_reads(limits);
        plan.add_spans(limits);
        plan
    }

    fn add_extents(&mut self, limits: &Limits) {
        let mut first = 0;
        for of_chunk in self
            .sections
            .chunk_by(|a, b| (a.chunk.file, a.chunk.begin) == (b.chunk.file, b.chunk.begin))
        {
            let chunk = of_chunk[0].chunk;
            let len = of_chunk[0].len;
            let mut class = RunClass::Contiguous;
            let mut needed = 0;
            let mut joined = Vec::new();
            for section in of_chunk {
                class = class.max(section.runs.class(limits));
                needed += section.runs.bytes();
                let joined_runs = section.runs.clone().joined(limits);
                joined.extend(
                    joined_runs
                        .each(0..len)
                        .map(|copy| copy.from..copy.from + copy.len),
                );
            }
            let joined = union(joined);
            let read: usize = joined.iter().map(Range::len).sum();
            let complete = if chunk.checksums.is_empty() {
                joined
            } else {
                union(
                    joined
                        .iter()
                        .map(|run| {
                            let block = limits.block;
                            run.start / block * block..run.end.next_multiple_of(block).min(len)
                        })
                        .collect(),
                )
            };
            let rounding = complete.iter().map(Range::len).sum::<usize>() - read;
            let stats = self.stats.by_class.entry(class).or_default();
            stats.needed += needed as u64;
            stats.read += read as u64;
            stats.block_rounding += rounding as u64;
            self.stats.needed += needed as u64;
            self.stats.read += read as u64;
            self.stats.block_rounding += rounding as u64;
            let sections = first..first + of_chunk.len();
            first = sections.end;
            for bytes in complete {
                let extents = bytes
                    .clone()
                    .step_by(limits.read)
                    .map(|begin| begin..bytes.end.min(begin + limits.read));
                self.extents.extend(extents.map(|bytes| Extent {
                    sections: sections.clone(),
                    bytes,
                }));
            }
        }
    }

    /// Returns the file of an extent and its bytes there.
    fn place(&self, extent: &Extent) -> (usize, Range<u64>) {
        let chunk = self.sections[extent.sections.start].chunk;
        (
            chunk.file,
            chunk.begin + extent.bytes.start as u64..chunk.begin + extent.bytes.end as u64,
        )
    }

    fn add_reads(&mut self, limits: &Limits) {
        for (index, extent) in self.extents.iter().enumerate() {
            let (file, bytes) = self.place(extent);
            if let Some(last) = self.reads.last_mut()
                && last.file == file
                && bytes.end - last.bytes.start <= limits.read as u64
            {
                let between = bytes.start - last.bytes.end;
                let shorter = (last.bytes.end - last.bytes.start).min(bytes.end - bytes.start);
                if between == 0 || between < limits.page as u64 && shorter < limits.long as u64 {
                    self.stats.read += between;
                    last.bytes.end = bytes.end;
                    last.extents.end = index + 1;
                    continue;
                }
            }
            self.reads.push(Read {
                file,
                bytes,
                extents: index..index + 1,
            });
        }
        self.stats.reads = self.reads.len() as u64;
    }

    fn add_spans(&mut self, limits: &Limits) {
        let len = |read: &Read| read.bytes.end - read.bytes.start;
        let total: u64 = self.reads.iter().map(len).sum();
        // Two for each thread, as some are slower than others.
        let most =
            (total / (2 * limits.threads as u64)).clamp(limits.read as u64, limits.span as u64);
        let mut bytes = 0;
        for (index, read) in self.reads.iter().enumerate() {
            bytes += len(read);
            match self.spans.last_mut() {
                Some(span) if bytes <= most && self.reads[span.start].file == read.file => {
                    span.end = index + 1
                }
                _ => {
                    self.spans.push(index..index + 1);
                    bytes = len(read);
                }
            }
        }
    }

    /// Returns the region that has all bytes of the extent next to each other, and the first of
    /// them in its memory, if no other region has any.
    pub fn direct(&self, extent: &Extent) -> Option<(usize, usize)> {
        let sections = &self.sections[extent.sections.clone()];
        let mut copies = sections.iter().filter_map(|section| {
            Some((section, section.copies.each(extent.bytes.clone()).next()?))
        });
        let (section, copy) = copies.next()?;
        (copies.next().is_none() && copy.len == extent.bytes.len())
            .then_some((section.want, copy.to))
    }
}

/// Returns the sections of a region. They are disjoint and cover it.
fn sections<'a>(manifest: &'a Manifest, index: usize, want: &'a Want) -> Vec<Section<'a>> {
    let (key, tensor) = manifest
        .tensors
        .get_key_value(&want.key)
        .expect("the manifest has the wanted tensor");
    let element = tensor.dtype.bytes();
    let parts = tensor
        .chunks
        .iter()
        .filter_map(|chunk| Some((chunk, chunk.region.intersection(&want.region)?)))
        .collect_vec();
    // The memory of a region is written by several threads without locks, so nothing else may
    // ensure this.
    let covered = parts
        .iter()
        .map(|(_, part)| part.num_elements())
        .sum::<usize>()
        == want.region.num_elements();
    let disjoint = Region::are_disjoint(&mut parts.iter().map(|(_, part)| part).collect_vec());
    assert!(
        covered && disjoint,
        "the chunks of `{key}` are not a partition of {}",
        want.region
    );
    let section = |(chunk, part): (&'a ChunkEntry, Region)| Section {
        want: index,
        key,
        chunk,
        len: chunk.region.num_elements() * element,
        copies: Runs::new(&part, &chunk.region, &want.region, element),
        runs: Runs::new(&part, &chunk.region, &chunk.region, element),
    };
    parts.into_iter().map(section).collect()
}

/// Returns the bytes of all ranges, as ranges that do not touch each other.
fn union(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges
        .into_iter()
        .coalesce(|a, b| {
            if b.start <= a.end {
                Ok(a.start..a.end.max(b.end))
            } else {
                Err((a, b))
            }
        })
        .collect()
}

/// Bytes of a region that are next to each other in two regions around it, such as a chunk and a
/// wanted region.
#[derive(Debug, Clone)]
pub(super) struct Runs {
    /// Bytes of each run.
    run: usize,
    /// First byte of the first run in either region.
    first: [usize; 2],
    /// Number of runs along each dimension, and the distance between them in either region. The
    /// innermost comes first.
    dims: SmallVec<[(usize, [usize; 2]); 4]>,
}

/// A run, or the part of it that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CopyRun {
    /// First byte in the first region.
    pub from: usize,
    /// First byte in the second region.
    pub to: usize,
    /// Number of bytes.
    pub len: usize,
}

impl Runs {
    fn new(part: &Region, a: &Region, b: &Region, element: usize) -> Self {
        let first = [a, b].map(|region| region.offset_of(part) * element);
        let mut run = element;
        let mut dims = SmallVec::new();
        let mut strides = [element; 2];
        for (dim, &len) in part.shape.iter().enumerate().rev() {
            if dims.is_empty() && strides == [run; 2] {
                run *= len;
            } else if len > 1 {
                dims.push((len, strides));
            }
            strides = [strides[0] * a.shape[dim], strides[1] * b.shape[dim]];
        }
        Self { run, first, dims }
    }

    fn count(&self) -> usize {
        self.dims.iter().map(|(len, _)| len).product()
    }

    fn bytes(&self) -> usize {
        self.count() * self.run
    }

    fn class(&self, limits: &Limits) -> RunClass {
        match self.dims.is_empty() {
            true => RunClass::Contiguous,
            false if self.run >= limits.long => RunClass::LongRuns,
            false => RunClass::ShortRuns,
        }
    }

    /// Joins runs of one region with what lies between them, by rule 4. Distances grow outwards, so
    /// inner ones are joined first.
    fn joined(mut self, limits: &Limits) -> Self {
        let is_long = self.run >= limits.long;
        let mut needed = self.run;
        while let Some(&(len, [stride, _])) = self.dims.first() {
            let joined = (len - 1) * stride + self.run;
            needed *= len;
            let capped = joined as f64 <= limits.max_over_read * needed as f64;
            let close = !is_long && (stride - self.run < limits.page || self.run < limits.long);
            if !capped && !close {
                break;
            }
            self.run = joined;
            self.dims.remove(0);
        }
        self
    }

    /// Returns the runs in their order, of each the part that is in `bytes` of the first region.
    pub fn each(&self, bytes: Range<usize>) -> impl Iterator<Item = CopyRun> {
        let at = |mut index: usize| {
            let mut position = self.first;
            for &(len, strides) in &self.dims {
                position = [0, 1].map(|side| position[side] + index % len * strides[side]);
                index /= len;
            }
            position
        };
        // The first run that ends in the range or after it.
        let mut index = 0;
        let mut end = self.count();
        while index < end {
            let middle = index + (end - index) / 2;
            if at(middle)[0] + self.run <= bytes.start {
                index = middle + 1
            } else {
                end = middle
            }
        }
        let starts = (index..self.count())
            .map(at)
            .take_while(move |[from, _]| *from < bytes.end);
        starts.map(move |[from, to]| {
            let skipped = bytes.start.saturating_sub(from);
            CopyRun {
                from: from + skipped,
                to: to + skipped,
                len: self.run.min(bytes.end - from) - skipped,
            }
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
