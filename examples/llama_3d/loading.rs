//! Report of a load: bytes read by class of tensors, time, and peak memory.

use std::fmt;
use std::fs;

use burn_dtensor::checkpoint::{ClassStats, ReadStats, RunClass};
use serde::{Deserialize, Serialize};

/// A load on one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Load {
    pub stats: ReadStats,
    pub seconds: f64,
    /// Bytes of the rank's shards.
    pub shards: u64,
    /// Most bytes of memory that the load added to the rank's process; `None` where they are not
    /// known.
    pub added: Option<u64>,
    /// Tensors of the files that were not used.
    pub unused: Vec<String>,
}

/// The load on all ranks.
pub struct Report<'a> {
    pub ranks: &'a [Load],
    /// Number of ranks of each process.
    pub ranks_of_process: usize,
    /// Bytes that each rank may use besides its shards.
    pub memory: u64,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ranks,
            ranks_of_process,
            memory,
        } = *self;
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let sum =
            |part: fn(&ReadStats) -> u64| ranks.iter().map(|load| part(&load.stats)).sum::<u64>();
        let read = mb(sum(|stats| stats.read + stats.block_rounding));
        let reads = sum(|stats| stats.reads);
        let seconds = ranks.iter().map(|load| load.seconds).fold(0.0, f64::max);
        writeln!(
            f,
            "Loaded on {} ranks in {seconds:.2} s: {read:.1} MB in {reads} reads",
            ranks.len()
        )?;
        writeln!(
            f,
            "  {:<26} {:>10} {:>10} {:>11} {:>14}",
            "bytes of a shard", "needed MB", "read MB", "read/needed", "most of a rank"
        )?;
        let classes = [
            (RunClass::Contiguous, "next to each other"),
            (RunClass::LongRuns, "in runs of 16 KiB or more"),
            (RunClass::ShortRuns, "in shorter runs"),
        ];
        for (class, name) in classes {
            let of_ranks: Vec<&ClassStats> = ranks
                .iter()
                .filter_map(|load| load.stats.by_class.get(&class))
                .collect();
            let (needed, read) = of_ranks.iter().fold((0, 0), |(needed, read), class| {
                (needed + class.needed, read + class.read)
            });
            let most = of_ranks
                .iter()
                .map(|class| class.over_read())
                .fold(1.0, f64::max);
            let over = if needed == 0 {
                1.0
            } else {
                read as f64 / needed as f64
            };
            writeln!(
                f,
                "  {name:<26} {:>10.1} {:>10.1} {over:>11.3} {most:>14.3}",
                mb(needed),
                mb(read)
            )?;
        }
        writeln!(
            f,
            "  {:<26} {:>10} {:>10.1}",
            "rounding to blocks",
            "",
            mb(sum(|stats| stats.block_rounding))
        )?;
        let shards = ranks.iter().map(|load| load.shards).max().unwrap_or(0);
        let bound = shards + memory;
        write!(
            f,
            "  memory of a rank: its shards {:.1} MB + --read-memory {:.1} MB = {:.1} MB",
            mb(shards),
            mb(memory),
            mb(bound)
        )?;
        if let Some(added) = ranks.iter().filter_map(|load| load.added).max() {
            // The old shards, which are as large, were there before.
            let peak = shards + added / ranks_of_process as u64;
            let verdict = if peak <= bound { "within it" } else { "MORE" };
            write!(
                f,
                "; measured at most {:.1} MB ({ranks_of_process} ranks a process): {verdict}",
                mb(peak)
            )?;
        }
        match &ranks[0].unused[..] {
            [] => Ok(()),
            unused => write!(f, "\n  not used: {}", unused.join(", ")),
        }
    }
}

/// Returns the bytes of memory of this process, from which on [`peak`] counts. `None` where the
/// system does not tell.
pub fn reset_peak() -> Option<u64> {
    // See proc_pid_clear_refs(5).
    fs::write("/proc/self/clear_refs", "5").ok()?;
    field("VmRSS:")
}

/// Returns the most bytes of memory that this process had since [`reset_peak`].
pub fn peak() -> Option<u64> {
    field("VmHWM:")
}

/// Returns a field of this process's status, in bytes.
fn field(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}
