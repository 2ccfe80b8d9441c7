//! [`RankTrace`]: what a rank did last, read from its recorder.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::channels::{self, GroupRecord};
use super::file;
use super::identity::Identity;
use super::layout::header::{CHANNELS as CHANNELS_USED, CHECK, POSTED};
use super::layout::{CHANNEL_WORDS, CHANNELS, END, END_WORDS, MAGIC, OPERATIONS, RECORD_WORDS, RECORDS, VERSION};
use super::operation::Operation;
use super::process_state::ProcessState;
use super::program_exit::ProgramExit;
use super::record;
use crate::comm::CollectiveId;

/// What a rank did last: of a program that runs, has ended or was killed.
#[derive(Debug, Clone, PartialEq)]
pub struct RankTrace {
    /// The rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// The launch's number in its process.
    pub launch: u64,
    /// The name of the rank's host.
    pub host: String,
    /// Its process there.
    pub pid: u32,
    /// Tells that process from a later one with its number.
    pub(super) process_start: u64,
    /// When the launch began there, by the host's wall clock.
    pub started: SystemTime,
    /// How the rank's program has ended; `None` while it runs, and if it was killed.
    pub ending: Option<ProgramExit>,
    /// How many operations it has posted.
    pub posted: u64,
    /// The last of them, oldest first, at most 1024. One that was being written is not among them.
    pub operations: Vec<Operation>,
    /// The rank's groups.
    pub channels: Vec<GroupTrace>,
}

/// A group of ranks, as a rank has used it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupTrace {
    /// Global ranks, in group order.
    pub ranks: Arc<[usize]>,
    /// The name, if it is a [duplicate](crate::comm::Communicator::duplicate).
    pub name: Arc<str>,
    /// Collectives that the rank has taken part in.
    pub taken: u64,
}

/// Flight files could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlightError {
    /// A file or folder cannot be read.
    #[error("{}: {problem}; name a folder of flight files that this user may read", .path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        problem: String,
    },

    /// A folder holds no flight files.
    #[error(
        "{} holds no flight files: name the folder of `Launch::with_flight_recorder` or BURN_DTENSOR_FLIGHT, and start the \
         program with one of them",
        .path.display()
    )]
    Empty {
        /// The folder.
        path: PathBuf,
    },

    /// A program has made a file, and has not begun to write it.
    #[error("{}: its program has not begun to write it; read it again", .path.display())]
    NotBegun {
        /// The file.
        path: PathBuf,
    },

    /// A file is something else, or of another version.
    #[error("{}: {problem}; read it with the version of burn-dtensor that wrote it", .path.display())]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl RankTrace {
    /// Reads a rank's file, also while the rank writes it.
    ///
    /// # Errors
    /// [`FlightError`] if it cannot be read, or is no flight file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, FlightError> {
        let path = path.as_ref();
        let unreadable =
            |error: std::io::Error| FlightError::Unreadable { path: path.into(), problem: error.to_string() };
        let bytes = fs::read(path).map_err(unreadable)?;
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<_> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        match words.get(CHECK) {
            Some(0) => Err(FlightError::NotBegun { path: path.into() }),
            _ => Self::of_words(&words).map_err(|problem| FlightError::Unknown { path: path.into(), problem }),
        }
    }

    /// Of a rank's file in a folder, if it has one.
    pub(in crate::comm) fn of_rank(folder: &Path, launch: u64, rank: usize) -> Option<Self> {
        Self::read(file::path(folder, launch, rank)).ok()
    }

    /// The last `count` operations that it took part in, oldest first.
    pub(in crate::comm) fn last(&self, count: usize) -> Vec<CollectiveId> {
        let taken = self.operations.iter().filter(|operation| operation.is_taken());
        let mut last: Vec<_> = taken.rev().take(count).map(|operation| operation.id.clone()).collect();
        last.reverse();
        last
    }

    /// Of a recorder's memory.
    pub(in crate::comm) fn of_words(words: &[u64]) -> Result<Self, String> {
        match words.get(..2) {
            Some(&[MAGIC, VERSION]) => {}
            Some(&[MAGIC, version]) => return Err(format!("it is of version {version}, not {VERSION}")),
            _ => return Err("it is no flight file".into()),
        }
        let found = Identity::read(words).filter(|_| words.len() >= RECORDS).ok_or("its beginning is incomplete")?;
        let Identity { rank, size, launch, pid, process_start, started, host } = found;
        let used = (words[CHANNELS_USED] as usize).min(CHANNEL_WORDS);
        let channel = |GroupRecord { name, ranks, posted }: GroupRecord| GroupTrace {
            ranks: ranks.into(),
            name: name.into(),
            taken: posted,
        };
        let channels: Vec<_> = channels::read(&words[CHANNELS..CHANNELS + used]).into_iter().map(channel).collect();
        let records = words[RECORDS..].as_chunks::<RECORD_WORDS>().0.iter().take(OPERATIONS);
        let operation = |record: record::FlightRecord| {
            let channel = (record.channel as usize).checked_sub(1).and_then(|at| channels.get(at));
            let (name, ranks) = channel.map_or_else(Default::default, |of| (of.name.clone(), of.ranks.clone()));
            Operation::new(record, name, ranks)
        };
        let mut operations: Vec<_> = records.filter_map(|words| record::read(words)).map(operation).collect();
        operations.sort_unstable_by_key(|operation| operation.index);
        Ok(Self {
            rank,
            size,
            launch,
            host,
            pid,
            process_start,
            started: UNIX_EPOCH + Duration::from_nanos(started),
            ending: ProgramExit::read(&words[END..END + END_WORDS]),
            posted: words[POSTED],
            operations,
            channels,
        })
    }

    /// Whether the rank's process is still there, now.
    pub fn life(&self) -> ProcessState {
        ProcessState::of(&self.host, self.pid, self.process_start)
    }

    /// When the rank wrote last, since the launch's start.
    pub fn last_sign(&self) -> Duration {
        let times = self.operations.iter().flat_map(|operation| {
            [Some(operation.posted), operation.waited, operation.over.map(|(at, _)| at)].into_iter().flatten()
        });
        times.chain(self.ending.iter().map(|ending| ending.at)).max().unwrap_or_default()
    }

    /// Collectives that the rank has taken part in on the channel of this group and name.
    pub(super) fn taken(&self, ranks: &[usize], name: &str) -> u64 {
        let channel = self.channels.iter().find(|channel| *channel.ranks == *ranks && *channel.name == *name);
        channel.map_or(0, |channel| channel.taken)
    }
}
