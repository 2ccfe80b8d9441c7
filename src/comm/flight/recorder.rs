//! [`Recorder`]: notes what a rank does.

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

/// Notes a rank's operations in memory, or in a file of the rank. Takes no lock, and allocates nothing, but for a channel.
#[derive(Debug)]
pub(in crate::comm) struct Recorder {
    words: Words,
    start: Instant,
    /// By the group's ranks and the name.
    channels: Mutex<HashMap<Key, Arc<Sequence>>>,
    /// The program's end.
    end: Once,
}

/// Ranks, and a name.
type Key = (Arc<[usize]>, &'static str);

/// When a launch began, and where: the same for its ranks in one process.
#[derive(Debug, Clone)]
pub(in crate::comm) struct LaunchStart {
    at: Instant,
    /// Of the first rank.
    identity: Identity,
}

/// The calls of a rank on one channel so far. Whoever has the channel of this group and name has these.
#[derive(Debug, Default)]
pub(in crate::comm) struct Sequence {
    /// Of the channel, from 1; 0 if the recorder has no room for it.
    number: u32,
    /// Where the channel lies.
    at: usize,
    collectives: AtomicU64,
    messages: AtomicU64,
}

impl LaunchStart {
    /// Now and here, of launch number `launch` of this process, with `size` ranks.
    pub fn new(size: usize, launch: u64) -> Self {
        Self { at: Instant::now(), identity: Identity::here(size, launch) }
    }
}

impl Sequence {
    /// The channel's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The place of the next call among the collectives, or the messages.
    pub fn next(&self, op: Op) -> u64 {
        let calls = if op.is_message() { &self.messages } else { &self.collectives };
        calls.fetch_add(1, Ordering::Relaxed)
    }
}

impl Recorder {
    /// Of a rank of a launch: in a file of the folder, if one is named.
    pub fn new(rank: usize, start: &LaunchStart, folder: Option<&Path>) -> Result<Self, StartError> {
        let identity = Identity { rank, ..start.identity.clone() };
        let words = match folder {
            Some(folder) => file::create(folder, &identity)?,
            None => Words::in_memory(WORDS).expect("a process has memory"),
        };
        identity.write(words.all());
        Ok(Self { words, start: start.at, channels: Mutex::default(), end: Once::new() })
    }

    /// The calls on the channel of this group and name.
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

    /// Notes an operation. Returns its place among all of the rank's.
    pub fn posted(&self, at: Instant, posting: &Posting<'_>) -> u64 {
        let index = self.word(POSTED).fetch_add(1, Ordering::Relaxed);
        let after = at.saturating_duration_since(self.start).as_nanos() as u64;
        record::write(self.record(index), index, after, posting);
        index
    }

    /// The engine has taken a channel's collective: the rank has taken part.
    pub fn taken(&self, sequence: &Sequence, op: Op, seq: u64) {
        if sequence.number > 0 && !op.is_message() {
            channels::count(&self.words.all()[sequence.at..], seq + 1);
        }
    }

    /// The ledger counted the operation, as the how-manieth.
    pub fn counted(&self, index: u64, count: u64) {
        record::mark(self.record(index), index, Mark::Counted, count);
    }

    /// The rank waits for the operation, so long after it was posted.
    pub fn waited(&self, index: u64, after: Duration) {
        record::mark(self.record(index), index, Mark::Waited, after.as_nanos() as u64);
    }

    /// The operation is over, so long after it was posted. The first time counts.
    pub fn over(&self, index: u64, after: Duration, over: OpOutcome) {
        record::mark(self.record(index), index, Mark::Ended, after.as_nanos() as u64);
        record::mark(self.record(index), index, Mark::How, over.value());
    }

    /// The rank's program has ended. The first time counts, and is written when this returns.
    pub fn ended(&self, ending: impl FnOnce(Duration) -> ProgramExit) {
        self.end.call_once(|| ending(self.start.elapsed()).write(&self.words.all()[END..END + END_WORDS]));
    }

    /// All of it at this moment, as a file of it has it.
    pub fn words(&self) -> Vec<u64> {
        // Of records none that nobody has written.
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
