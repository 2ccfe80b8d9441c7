//! [`Recorder`]: records the operations of a rank.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use burn_dtensor_flight::LaunchId;
use burn_dtensor_flight::format::{Identity, RecorderMemory};
use parking_lot::Mutex;

use super::call::Posting;
use super::words::Words;
use super::{OpOutcome, ProgramExit, RankTrace};
use crate::comm::{Group, Op, StartError};

/// Records a rank's operations in memory, or in a file. Recording an operation takes no lock and does not
/// allocate; only adding a channel does.
#[derive(Debug)]
pub(in crate::comm) struct Recorder {
    words: Words,
    start: Instant,
    /// Call counters of each channel.
    channels: Mutex<HashMap<Key, Arc<Sequence>>>,
    /// Guards that the end of the program is recorded only once.
    end: Once,
}

/// Key of a channel: the global ranks of its group, and its name.
type Key = (Arc<[usize]>, &'static str);

/// Start of a launch in one process, shared by the process's ranks.
#[derive(Debug, Clone)]
pub(in crate::comm) struct LaunchStart {
    at: Instant,
    /// Identity with rank 0, from which those of the other ranks are made.
    identity: Identity,
}

/// Counters of a rank's calls on one channel, shared by all communicators with the same group and name.
#[derive(Debug, Default)]
pub(in crate::comm) struct Sequence {
    /// Number of the channel, from 1; 0 if the recorder has no capacity for it.
    number: u32,
    /// Index of the channel's first word.
    at: usize,
    collectives: AtomicU64,
    messages: AtomicU64,
}

impl LaunchStart {
    /// Records the current time as the start of `launch`, with `size` ranks.
    pub fn new(size: usize, launch: LaunchId) -> Self {
        Self { at: Instant::now(), identity: Identity::here(size, launch) }
    }
}

impl Sequence {
    /// Returns the number of the channel.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the sequence number of the next collective, or of the next message, and increments it.
    pub fn next(&self, op: Op) -> u64 {
        let calls = if op.is_message() { &self.messages } else { &self.collectives };
        calls.fetch_add(1, Ordering::Relaxed)
    }
}

impl Recorder {
    /// Creates the recorder of a rank, in a file in `folder` if it is given.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn new(rank: usize, start: &LaunchStart, folder: Option<&Path>) -> Result<Self, StartError> {
        let identity = Identity { rank, ..start.identity.clone() };
        let words = match folder {
            Some(folder) => {
                let path = folder.join(identity.launch.file_name(rank));
                let failed =
                    |error: io::Error| StartError::Flight { rank, path: path.clone(), problem: error.to_string() };
                Words::in_file(&path).map_err(failed)?
            }
            None => Words::in_memory().expect("anonymous memory can be mapped"),
        };
        let recorder = Self { words, start: start.at, channels: Mutex::default(), end: Once::new() };
        recorder.memory().begin(&identity);
        Ok(recorder)
    }

    /// Returns the counters of the channel with this group and name, which is added if it is new.
    pub fn sequence(&self, group: &Group, name: &'static str) -> Arc<Sequence> {
        let mut channels = self.channels.lock();
        let number = channels.len() as u32 + 1;
        let key = (group.shared_ranks(), name);
        let sequence = channels.entry(key).or_insert_with(|| Arc::new(self.add(number, name, group.ranks())));
        sequence.clone()
    }

    fn add(&self, number: u32, name: &str, ranks: &[usize]) -> Sequence {
        let channel = self.memory().add_channel(name, ranks);
        channel.map_or_else(Sequence::default, |at| Sequence { number, at, ..Sequence::default() })
    }

    /// Records an operation. Returns its index among all operations of the rank.
    pub fn posted(&self, at: Instant, posting: &Posting<'_>) -> u64 {
        self.memory().post(at.saturating_duration_since(self.start), &posting.call(), posting.tensors())
    }

    /// Records that the backend has accepted a collective, so that the rank counts as having taken part.
    pub fn taken(&self, sequence: &Sequence, op: Op, seq: u64) {
        if sequence.number > 0 && !op.is_message() {
            self.memory().count(sequence.at, seq + 1);
        }
    }

    /// Records the number under which the ledger counted the operation.
    pub fn counted(&self, index: u64, count: u64) {
        self.memory().counted(index, count);
    }

    /// Records that the rank began to wait for the operation, `after` it was posted.
    pub fn waited(&self, index: u64, after: Duration) {
        self.memory().waited(index, after);
    }

    /// Records that the operation ended, `after` it was posted. Only the first call has an effect.
    pub fn over(&self, index: u64, after: Duration, over: OpOutcome) {
        self.memory().over(index, after, over);
    }

    /// Records the end of the rank's program. Only the first call has an effect; the record is complete when it
    /// returns.
    pub fn ended(&self, ending: impl FnOnce(Duration) -> ProgramExit) {
        self.end.call_once(|| self.memory().end(&ending(self.start.elapsed())));
    }

    /// Returns the trace of what is recorded.
    pub fn trace(&self) -> RankTrace {
        RankTrace::decode(&self.words()).expect("a recorder's memory has the format of its file")
    }

    /// Returns a copy of the memory, in the format of a flight file.
    pub fn words(&self) -> Vec<u64> {
        self.memory().copy()
    }

    fn memory(&self) -> RecorderMemory<'_> {
        RecorderMemory::new(self.words.all())
    }
}
