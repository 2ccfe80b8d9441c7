//! [`Recorder`]: records the operations of a rank.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use burn_dtensor_flight::LaunchId;
use burn_dtensor_flight::format::{Identity, RecorderMemory};
use parking_lot::Mutex;

use super::super::event::{CallEvent, CallInfo, Posting};
use super::call;
use super::words::Words;
use super::{OpOutcome, ProgramExit, RankTrace};
use crate::comm::{Group, Op, StartError};

/// Records a rank's operations in memory, or in a file. Recording an operation takes no lock and
/// does not allocate; only adding a channel does.
#[derive(Debug)]
pub(in crate::comm) struct Recorder {
    words: Words,
    start: Instant,
    /// Call counters of each channel.
    channels: Mutex<HashMap<Key, Arc<Sequence>>>,
    /// Number of operations that the ledger has counted.
    counted: AtomicU64,
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

/// Counters of a rank's calls on one channel, shared by all communicators with the same group and
/// name.
#[derive(Debug, Default)]
pub(in crate::comm) struct Sequence {
    /// Number of the channel, from 1; 0 if the recorder has no capacity for it.
    number: u32,
    /// Index of the channel's first word.
    at: usize,
    collectives: AtomicU64,
    messages: AtomicU64,
}

/// The record of a call, by which its events find it.
#[derive(Debug)]
pub(in crate::comm) struct RecordedCall {
    /// Time when the call was posted.
    pub posted: Instant,
    pub sequence: Arc<Sequence>,
    /// Index among all operations of the rank, once it is recorded.
    pub index: u64,
}

impl LaunchStart {
    /// Records the current time as the start of `launch`, with `size` ranks.
    pub fn new(size: usize, launch: LaunchId) -> Self {
        Self {
            at: Instant::now(),
            identity: Identity::here(size, launch),
        }
    }
}

impl Sequence {
    /// Returns the number of the channel.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the index of the channel's first word.
    #[cfg(test)]
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Returns the sequence number of the next collective, or of the next message, and increments
    /// it.
    pub fn next(&self, op: Op) -> u64 {
        let calls = if op.is_message() {
            &self.messages
        } else {
            &self.collectives
        };
        calls.fetch_add(1, Ordering::Relaxed)
    }
}

impl Recorder {
    /// Creates the recorder of a rank, in a file in `folder` if it is given.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn new(
        rank: usize,
        start: &LaunchStart,
        folder: Option<&Path>,
    ) -> Result<Self, StartError> {
        let identity = Identity {
            rank,
            ..start.identity.clone()
        };
        let words = match folder {
            Some(folder) => {
                let path = folder.join(identity.launch.file_name(rank));
                Words::in_file(&path).map_err(|error| StartError::Flight {
                    rank,
                    path: path.clone(),
                    problem: error.to_string(),
                })?
            }
            None => Words::in_memory().expect("anonymous memory can be mapped"),
        };
        let recorder = Self {
            words,
            start: start.at,
            channels: Mutex::default(),
            counted: AtomicU64::default(),
            end: Once::new(),
        };
        recorder.memory().begin(&identity);
        Ok(recorder)
    }

    /// Returns the counters of the channel with this group and name, which is added if it is new.
    pub fn sequence(&self, group: &Group, name: &'static str) -> Arc<Sequence> {
        let mut channels = self.channels.lock();
        let key = (group.shared_ranks(), name);
        if let Some(sequence) = channels.get(&key) {
            return sequence.clone();
        }
        // Those for which there was no capacity are not in the record.
        let recorded = channels
            .values()
            .filter(|sequence| sequence.number > 0)
            .count() as u32;
        let sequence = Arc::new(self.add(recorded + 1, name, group.ranks()));
        channels.insert(key, sequence.clone());
        sequence
    }

    fn add(&self, number: u32, name: &str, ranks: &[usize]) -> Sequence {
        let channel = self.memory().add_channel(name, ranks);
        channel.map_or_else(Sequence::default, |at| Sequence {
            number,
            at,
            ..Sequence::default()
        })
    }

    /// Consumes an event of a call.
    pub fn observe(
        &self,
        call: &mut RecordedCall,
        info: &CallInfo,
        at: Instant,
        event: &CallEvent<'_>,
    ) {
        let memory = self.memory();
        let after = at.saturating_duration_since(call.posted);
        let index = call.index;
        let over = |outcome| memory.over(index, after, outcome);
        match *event {
            CallEvent::Posted(posting) => call.index = self.post(at, posting),
            CallEvent::Counted => {
                memory.counted(index, self.counted.fetch_add(1, Ordering::Relaxed))
            }
            CallEvent::Accepted if info.op.is_message() || call.sequence.number == 0 => {}
            CallEvent::Accepted => memory.count(call.sequence.at, info.seq + 1),
            CallEvent::Refused => over(OpOutcome::Refused),
            CallEvent::Waiting => memory.waited(index, after),
            CallEvent::Completed { last, .. } => over(OpOutcome::Done(last)),
            CallEvent::Failed => over(OpOutcome::Failed),
            CallEvent::Dropped => over(OpOutcome::Dropped),
        }
    }

    /// Records an operation. Returns its index among all operations of the rank.
    pub(super) fn post(&self, at: Instant, posting: &Posting<'_>) -> u64 {
        let after = at.saturating_duration_since(self.start);
        self.memory().post(
            after,
            &call::describe(posting),
            call::tensors(posting.signature),
        )
    }

    /// Returns the number of operations that the ledger has counted.
    pub fn count(&self) -> u64 {
        self.counted.load(Ordering::Relaxed)
    }

    /// Records the end of the rank's program. Only the first call has an effect; the record is
    /// complete when it returns.
    pub fn ended(&self, ending: impl FnOnce(Duration) -> ProgramExit) {
        self.end
            .call_once(|| self.memory().end(&ending(self.start.elapsed())));
    }

    /// Returns the trace of what is recorded.
    pub fn trace(&self) -> RankTrace {
        RankTrace::decode(&self.memory().copy())
            .expect("a recorder's memory has the format of its file")
    }

    pub(super) fn memory(&self) -> RecorderMemory<'_> {
        RecorderMemory::new(self.words.all())
    }
}
