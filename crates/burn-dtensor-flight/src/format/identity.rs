//! [`Identity`]: identifies the launch, rank and process of a flight recorder.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::bytes::{pack, truncate, unpack};
use super::hash::StableHasher;
use super::header::{CHECK, FIXED, HOST};
use super::{MAGIC, VERSION};
use crate::{LaunchId, process_state};

/// Rank of a launch, and its process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Global rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Identity of the launch, the same in all its processes.
    pub launch: LaunchId,
    /// Process id.
    pub pid: u32,
    /// Start time of the process, in the system's unit, or 0 if unknown. It distinguishes the
    /// process from a later one with the same pid.
    pub process_start: u64,
    /// Wall-clock time of the process's start, in nanoseconds since 1970, or 0 if unknown. It
    /// distinguishes the runs of a program.
    pub process_started: u64,
    /// Wall-clock time of the launch's start, in nanoseconds since 1970.
    pub started: u64,
    /// Name of the host.
    pub host: String,
}

impl Identity {
    /// Returns the identity of rank 0 of a launch that begins now in this process.
    pub fn here(size: usize, launch: LaunchId) -> Self {
        let pid = std::process::id();
        let process_start = process_state::process_start(pid).unwrap_or(0);
        let started = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let age = process_state::age(process_start);
        let process_started = age
            .and_then(|age| started.checked_sub(age))
            .unwrap_or_default();
        let [process_started, started] =
            [process_started, started].map(|time| time.as_nanos() as u64);
        Self {
            rank: 0,
            size,
            launch,
            pid,
            process_start,
            process_started,
            started,
            host: process_state::host(),
        }
    }

    /// Writes the identity and its checksum to the header.
    pub(super) fn write(&self, words: &[AtomicU64]) {
        let host = truncate(&self.host, (HOST - 1) * 8);
        let numbers = [
            MAGIC,
            VERSION,
            self.rank as u64,
            self.size as u64,
            self.launch.number,
            self.launch.shrunk,
            self.launch.process.map_or(0, |process| process + 1),
            u64::from(self.pid),
            self.process_start,
            self.process_started,
            self.started,
            host.len() as u64,
        ];
        let mut fixed = [0; FIXED];
        fixed
            .iter_mut()
            .zip(numbers.into_iter().chain(pack(host.as_bytes())))
            .for_each(|(to, word)| *to = word);
        for (at, word) in fixed.into_iter().enumerate() {
            words[at].store(word, Ordering::Relaxed);
        }
        words[CHECK].store(StableHasher::of(fixed), Ordering::Release);
    }

    /// Reads the identity. Returns `None` if it is incomplete.
    pub(super) fn read(words: &[u64]) -> Option<Self> {
        let fixed = words.get(..FIXED)?;
        let check = *words.get(CHECK)?;
        if check != StableHasher::of(fixed.iter().copied()) {
            return None;
        }
        let &[
            _,
            _,
            rank,
            size,
            number,
            shrunk,
            process,
            pid,
            process_start,
            process_started,
            started,
            length,
        ] = fixed.first_chunk()?;
        let launch = LaunchId {
            number,
            shrunk,
            process: process.checked_sub(1),
        };
        let host = unpack(&fixed[FIXED + 1 - HOST..], length as usize);
        let rank = rank as usize;
        let size = size as usize;
        let host = String::from_utf8_lossy(&host).into_owned();
        Some(Self {
            rank,
            size,
            launch,
            pid: pid as u32,
            process_start,
            process_started,
            started,
            host,
        })
    }
}
