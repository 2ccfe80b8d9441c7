//! [`Recorder`]: records the operations of a rank.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::channels;
use super::file;
use super::identity::Identity;
use super::layout::header::{CHANNELS as CHANNELS_USED, POSTED};
use super::layout::{CHANNEL_WORDS, CHANNELS, END, END_WORDS, OPERATIONS, RECORD_WORDS, RECORDS, WORDS};
use super::program_exit::ProgramExit;
use super::record::{self, Mark, OpOutcome, Posting};
use super::words::Words;
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
    /// Records the current time as the start of launch number `launch` of this process, with `size` ranks.
    pub fn new(size: usize, launch: u64) -> Self {
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
            Some(folder) => file::create(folder, &identity)?,
            None => Words::in_memory(WORDS).expect("anonymous memory can be mapped"),
        };
        identity.write(words.all());
        Ok(Self { words, start: start.at, channels: Mutex::default(), end: Once::new() })
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
        let used = self.word(CHANNELS_USED).load(Ordering::Relaxed) as usize;
        let room = &self.words.all()[CHANNELS..CHANNELS + CHANNEL_WORDS];
        let Some(taken) = channels::write(&room[used..], name, ranks) else { return Sequence::default() };
        self.word(CHANNELS_USED).store((used + taken) as u64, Ordering::Release);
        Sequence { number, at: CHANNELS + used, ..Sequence::default() }
    }

    /// Records an operation. Returns its index among all operations of the rank.
    pub fn posted(&self, at: Instant, posting: &Posting<'_>) -> u64 {
        let index = self.word(POSTED).fetch_add(1, Ordering::Relaxed);
        let after = at.saturating_duration_since(self.start).as_nanos() as u64;
        record::write(self.record(index), index, after, posting);
        index
    }

    /// Records that the backend has accepted a collective, so that the rank counts as having taken part.
    pub fn taken(&self, sequence: &Sequence, op: Op, seq: u64) {
        if sequence.number > 0 && !op.is_message() {
            channels::count(&self.words.all()[sequence.at..], seq + 1);
        }
    }

    /// Records the number under which the ledger counted the operation.
    pub fn counted(&self, index: u64, count: u64) {
        record::mark(self.record(index), index, Mark::Counted, count);
    }

    /// Records that the rank began to wait for the operation, `after` it was posted.
    pub fn waited(&self, index: u64, after: Duration) {
        record::mark(self.record(index), index, Mark::Waited, after.as_nanos() as u64);
    }

    /// Records that the operation ended, `after` it was posted. Only the first call has an effect.
    pub fn over(&self, index: u64, after: Duration, over: OpOutcome) {
        record::mark(self.record(index), index, Mark::Ended, after.as_nanos() as u64);
        record::mark(self.record(index), index, Mark::How, over.value());
    }

    /// Records the end of the rank's program. Only the first call has an effect; the record is complete when it
    /// returns.
    pub fn ended(&self, ending: impl FnOnce(Duration) -> ProgramExit) {
        self.end.call_once(|| ending(self.start.elapsed()).write(&self.words.all()[END..END + END_WORDS]));
    }

    /// Returns a copy of the memory, in the format of a flight file.
    pub fn words(&self) -> Vec<u64> {
        // Records that were never written are left out.
        let used = (self.word(POSTED).load(Ordering::Acquire) as usize).min(OPERATIONS);
        let words = &self.words.all()[..RECORDS + used * RECORD_WORDS];
        words.iter().map(|word| word.load(Ordering::Acquire)).collect()
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words.all()[at]
    }

    fn record(&self, index: u64) -> &[AtomicU64] {
        let at = RECORDS + (index as usize % OPERATIONS) * RECORD_WORDS;
        &self.words.all()[at..at + RECORD_WORDS]
    }
}
