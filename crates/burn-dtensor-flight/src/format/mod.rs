//! Format of a recorder's memory, which is also the format of its file.
//!
//! ```text
//! word 0            512                8704              8704 + 32 * 1024
//! ┌─────────┬───────┬──────────────────┬────────┬────────┬───┐
//! │ header  │ end   │ channels         │ record │ record │ ..│
//! └─────────┴───────┴──────────────────┴────────┴────────┴───┘
//! ```
//!
//! The header is written once, except for two counters. The end is written once, when the rank's
//! program ends. Channels are appended. Records form a ring: operation `i` is in record `i % 1024`.
//! Words are little-endian in a file.
//!
//! A reader may copy the memory at any moment, while the program runs or after it was killed at any
//! moment. Every section therefore has a checksum, and a section with a wrong checksum counts as
//! absent. A single word is never torn, because it is stored atomically.
//!
//! The recorder of a rank writes through [`RecorderMemory`];
//! [`RankTrace::decode`](crate::RankTrace::decode) reads. A change of anything in this module is a
//! new [`VERSION`], also a change of the order in which the variants of an enum are declared.

mod bytes;
mod channels;
mod hash;
mod identity;
mod program_exit;
pub(crate) mod record;
mod shapes;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) use channels::GroupRecord;
pub use hash::StableHasher;
pub use identity::Identity;
pub use program_exit::{ExitKind, FirstFailure, ProgramExit};
pub(crate) use record::FlightRecord;
pub use record::{OpOutcome, Peer, PostedCall, Reduction};
pub use shapes::{ElementType, Tensor};

use header::{CHANNELS as CHANNELS_USED, CHECK, POSTED};
use record::Mark;

/// Version of the format.
pub const VERSION: u64 = 2;

/// Number of operations that are kept.
pub const OPERATIONS: usize = 1024;

/// Total number of words.
pub const WORDS: usize = RECORDS + RECORD_WORDS * OPERATIONS;

/// Magic number, the first word in a file: `bdflight`.
const MAGIC: u64 = u64::from_le_bytes(*b"bdflight");

/// Words of the header.
mod header {
    /// Number of words that are written once: magic, version, rank, number of ranks, three of the
    /// launch's id, pid, start of the process, its wall-clock time and that of the launch's start,
    /// one word each, and then [`HOST`] words.
    pub const FIXED: usize = 11 + HOST;
    /// Number of words of the host's name: its length in bytes, and the bytes.
    pub const HOST: usize = 9;
    /// Index of the checksum of these words.
    pub const CHECK: usize = FIXED;
    /// Index of the number of operations posted.
    pub const POSTED: usize = CHECK + 1;
    /// Index of the number of words used by channels.
    pub const CHANNELS: usize = POSTED + 1;
}

/// Index where the program's end starts.
const END: usize = 64;

/// Number of words of the program's end.
const END_WORDS: usize = CHANNELS - END;

/// Index where the channels start.
const CHANNELS: usize = 512;

/// Number of words of the channels.
const CHANNEL_WORDS: usize = 8192;

/// Index where the records start.
const RECORDS: usize = CHANNELS + CHANNEL_WORDS;

/// Number of words of a record. Twice as many would hold no more of most calls.
const RECORD_WORDS: usize = 32;

/// Memory of a recorder, to which its rank writes. Recording an operation takes no lock and does
/// not allocate.
#[derive(Debug, Clone, Copy)]
pub struct RecorderMemory<'a>(&'a [AtomicU64]);

impl<'a> RecorderMemory<'a> {
    /// Wraps [`WORDS`] words.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn new(words: &'a [AtomicU64]) -> Self {
        assert!(
            words.len() >= WORDS,
            "a recorder needs {WORDS} words, but got {}",
            words.len()
        );
        Self(words)
    }

    /// Writes the header. Must be called once, before anything else is written.
    pub fn begin(self, identity: &Identity) {
        identity.write(self.0);
    }

    /// Adds a channel, for which only one thread may call this at a time. Returns the index of its
    /// first word, or `None` if the capacity is too small.
    pub fn add_channel(self, name: &str, ranks: &[usize]) -> Option<usize> {
        let used = self.0[CHANNELS_USED].load(Ordering::Relaxed) as usize;
        let taken = channels::write(
            &self.0[CHANNELS + used..CHANNELS + CHANNEL_WORDS],
            name,
            ranks,
        )?;
        self.0[CHANNELS_USED].store((used + taken) as u64, Ordering::Release);
        Some(CHANNELS + used)
    }

    /// Records that the rank has taken part in `count` collectives of the channel at this index.
    pub fn count(self, channel: usize, count: u64) {
        channels::count(&self.0[channel..], count);
    }

    /// Records an operation, `after` the launch's start. `tensors` are the shapes and types of its
    /// tensors; `None` stands for a rank to which no tensor is sent. Returns the index of the
    /// operation among all of the rank.
    pub fn post<'b>(
        self,
        after: Duration,
        call: &PostedCall<'_>,
        tensors: impl Iterator<Item = Option<(&'b [usize], ElementType)>>,
    ) -> u64 {
        let index = self.0[POSTED].fetch_add(1, Ordering::Relaxed);
        record::write(
            self.record(index),
            index,
            after.as_nanos() as u64,
            call,
            tensors,
        );
        index
    }

    /// Records the number under which the ledger counted the operation.
    pub fn counted(self, index: u64, count: u64) {
        record::mark(self.record(index), index, Mark::Counted, count);
    }

    /// Records that the rank began to wait for the operation, `after` it was posted.
    pub fn waited(self, index: u64, after: Duration) {
        record::mark(
            self.record(index),
            index,
            Mark::Waited,
            after.as_nanos() as u64,
        );
    }

    /// Records that the operation ended, `after` it was posted. Only the first call has an effect.
    pub fn over(self, index: u64, after: Duration, over: OpOutcome) {
        record::mark(
            self.record(index),
            index,
            Mark::Ended,
            after.as_nanos() as u64,
        );
        record::mark(self.record(index), index, Mark::How, over.value());
    }

    /// Records the end of the rank's program. Must be called once.
    pub fn end(self, exit: &ProgramExit) {
        exit.write(&self.0[END..END + END_WORDS]);
    }

    /// Returns a copy of the memory, as a file holds it, without the records that were never
    /// written.
    pub fn copy(self) -> Vec<u64> {
        let used = (self.0[POSTED].load(Ordering::Acquire) as usize).min(OPERATIONS);
        self.0[..RECORDS + used * RECORD_WORDS]
            .iter()
            .map(|word| word.load(Ordering::Acquire))
            .collect()
    }

    fn record(self, index: u64) -> &'a [AtomicU64] {
        &self.0[record_at(index)..][..RECORD_WORDS]
    }
}

/// Returns the index at which an operation's record begins.
fn record_at(index: u64) -> usize {
    RECORDS + (index as usize % OPERATIONS) * RECORD_WORDS
}

/// Returns true if a file has the extension of flight files.
pub(crate) fn is_flight_file(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "flight")
}

/// Reason why bytes are not a rank's memory that this version can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes begin differently.
    #[error("this is not a flight file. Name a file that a flight recorder wrote")]
    NotFlight,

    /// Another version of the format.
    #[error(
        "the file has format version {found}, but this program reads version {VERSION}. Read it with the program \
         `flight` of the version of burn-dtensor that wrote it"
    )]
    Version {
        /// Version of the file.
        found: u64,
    },

    /// The header has not been written yet: the program has just created the file.
    #[error("the program has not written the header yet. Read the file again")]
    NotBegun,

    /// The header does not have its checksum, or words are missing.
    #[error("the header is incomplete. The file was damaged or truncated after it was written")]
    Header,
}

/// A rank's memory as it is read.
pub(crate) struct Decoded {
    pub identity: Identity,
    pub exit: Option<ProgramExit>,
    /// Number of operations that the rank has posted.
    pub posted: u64,
    pub channels: Vec<GroupRecord>,
    /// Records in the order of the ring.
    pub records: Vec<FlightRecord>,
}

/// Decodes the memory of a recorder.
pub(crate) fn decode(words: &[u64]) -> Result<Decoded, DecodeError> {
    match *words {
        [MAGIC, found, ..] if ![0, VERSION].contains(&found) => {
            return Err(DecodeError::Version { found });
        }
        // The checksum is written last.
        _ if words.get(CHECK) == Some(&0) => return Err(DecodeError::NotBegun),
        [MAGIC, ..] => {}
        _ => return Err(DecodeError::NotFlight),
    }
    let identity = Identity::read(words)
        .filter(|_| words.len() >= RECORDS)
        .ok_or(DecodeError::Header)?;
    let used = (words[CHANNELS_USED] as usize).min(CHANNEL_WORDS);
    let records = words[RECORDS..]
        .as_chunks::<RECORD_WORDS>()
        .0
        .iter()
        .take(OPERATIONS);
    Ok(Decoded {
        identity,
        exit: ProgramExit::read(&words[END..END + END_WORDS]),
        posted: words[POSTED],
        channels: channels::read(&words[CHANNELS..CHANNELS + used]),
        records: records.filter_map(|words| record::read(words)).collect(),
    })
}
