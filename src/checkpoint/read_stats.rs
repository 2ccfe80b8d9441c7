//! [`ReadStats`]: bytes that a load read.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Order in which the wanted bytes of a tensor lie in a stored chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RunClass {
    /// Next to each other, as those of a tensor that is sharded in its first dimension.
    Contiguous,
    /// In runs of at least 16 KiB, as rows of a large matrix that is sharded in its last dimension.
    LongRuns,
    /// In shorter runs.
    ShortRuns,
}

/// Bytes read of the tensors of one class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of the wanted regions.
    pub needed: u64,
    /// Bytes that were read for them, without `block_rounding`.
    pub read: u64,
    /// Bytes that were read to verify complete blocks.
    pub block_rounding: u64,
}

/// Bytes that a rank read from files, and reads that it took.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReadStats {
    /// Bytes of the wanted regions.
    pub needed: u64,
    /// Bytes that were read for them, without `block_rounding`: also what lies between runs that
    /// are read together.
    pub read: u64,
    /// Bytes that were read because checksums are those of complete blocks of 1 MiB.
    pub block_rounding: u64,
    /// Number of reads.
    pub reads: u64,
    /// Most bytes of memory that were in use for reading at once: regions that were not handed over
    /// yet, and buffers.
    pub peak_memory: u64,
    /// Part of each class of tensors.
    pub by_class: BTreeMap<RunClass, ClassStats>,
}

impl ReadStats {
    /// Returns `read / needed`, or 1 if nothing was needed.
    pub fn over_read(&self) -> f64 {
        ratio(self.read, self.needed)
    }

    /// Adds what another plan reads.
    pub(super) fn add(&mut self, other: &Self) {
        self.needed += other.needed;
        self.read += other.read;
        self.block_rounding += other.block_rounding;
        self.reads += other.reads;
        self.peak_memory = self.peak_memory.max(other.peak_memory);
        for (class, stats) in &other.by_class {
            self.by_class.entry(*class).or_default().add(stats);
        }
    }
}

impl ClassStats {
    /// Returns `read / needed`, or 1 if nothing was needed.
    pub fn over_read(&self) -> f64 {
        ratio(self.read, self.needed)
    }

    fn add(&mut self, other: &Self) {
        self.needed += other.needed;
        self.read += other.read;
        self.block_rounding += other.block_rounding;
    }
}

fn ratio(read: u64, needed: u64) -> f64 {
    if needed == 0 {
        1.0
    } else {
        read as f64 / needed as f64
    }
}

impl fmt::Display for ReadStats {
    /// Writes one line, and one for each class.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let Self {
            needed,
            read,
            block_rounding,
            reads,
            peak_memory,
            by_class,
        } = self;
        write!(
            f,
            "{:.1} MiB needed, {:.1} MiB read ({:.3}x), {:.1} MiB more for complete blocks, in {reads} reads with at most {:.1} MiB \
             of memory",
            mib(*needed),
            mib(*read),
            self.over_read(),
            mib(*block_rounding),
            mib(*peak_memory),
        )?;
        by_class.iter().try_for_each(|(class, stats)| {
            let ClassStats { needed, block_rounding, .. } = stats;
            let over = stats.over_read();
let needed = mib(*needed);
let rounding = mib(*block_rounding);
            write!(
                f,
                "\n  {class:?}: {needed:.1} MiB needed, {over:.3}x read, {rounding:.1} MiB more for complete blocks"
            )
        })
    }
}
