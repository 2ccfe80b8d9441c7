//! [`RankTrace`]: last operations of a rank, read from its recorder.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::format::{self, DecodeError, Decoded, ProgramExit};
use crate::launch_id::LaunchId;
use crate::op::CollectiveId;
use crate::operation::Operation;
use crate::process_state::ProcessState;

/// Last operations of a rank, whose program may be running, have ended or have been killed.
#[derive(Debug, Clone, PartialEq)]
pub struct RankTrace {
    /// Global rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Identity of the launch, the same in all its processes.
    pub launch: LaunchId,
    /// Name of the rank's host.
    pub host: String,
    /// Process id of the rank's process on that host.
    pub pid: u32,
    /// Start time of that process, which distinguishes it from a later one with the same pid.
    pub(crate) process_start: u64,
    /// Wall-clock time of that process's start, if known.
    pub(crate) process_started: Option<SystemTime>,
    /// Wall-clock time of the launch's start in that process.
    pub started: SystemTime,
    /// End of the rank's program. `None` while the program runs, or if it was killed.
    pub ending: Option<ProgramExit>,
    /// Number of operations that the rank has posted.
    pub posted: u64,
    /// The last operations, oldest first, at most 1024. An operation that was being written is left
    /// out.
    pub operations: Vec<Operation>,
    /// Groups that the rank has used.
    pub channels: Vec<GroupTrace>,
}

/// Largest expected difference between the clocks of two hosts.
const CLOCK_SKEW: Duration = Duration::from_secs(10);

/// A group, as a rank has used it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupTrace {
    /// Global ranks, in group order.
    pub ranks: Arc<[usize]>,
    /// Name of the communicator, if it is a duplicate.
    pub name: Arc<str>,
    /// Number of collectives in which the rank has taken part.
    pub taken: u64,
}

/// Error while reading flight files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlightError {
    /// A file or folder cannot be read.
    #[error("{}: {problem}. Name a folder of flight files that this user may read", .path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The system's error message.
        problem: String,
    },

    /// A folder has no flight files.
    #[error(
        "{} has no flight files. Start the program with `Launch::with_flight_recorder` or BURN_DTENSOR_FLIGHT, and \
         name the same folder here",
        .path.display()
    )]
    Empty {
        /// The folder.
        path: PathBuf,
    },

    /// A file is not a flight file that this version can read.
    #[error("{}: {problem}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: DecodeError,
    },
}

impl RankTrace {
    /// Reads the file of a rank. The rank may write it at the same time.
    ///
    /// # Errors
    /// [`FlightError`] if the file cannot be read, or is not a flight file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, FlightError> {
        let path = path.as_ref();
        let bytes = fs::read(path).map_err(|error| FlightError::Unreadable {
            path: path.into(),
            problem: error.to_string(),
        })?;
        let invalid = |problem| FlightError::Invalid {
            path: path.into(),
            problem,
        };
        // The file has been created.
        if bytes.is_empty() {
            return Err(invalid(DecodeError::NotBegun));
        }
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<_> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        Self::decode(&words).map_err(invalid)
    }

    /// Reads the file of a rank in a folder. Returns `None` if there is none, or if it cannot be
    /// read.
    pub fn of_rank(folder: &Path, launch: LaunchId, rank: usize) -> Option<Self> {
        Self::read(folder.join(launch.file_name(rank))).ok()
    }

    /// Returns the last `count` operations in which the rank took part, oldest first.
    pub fn last(&self, count: usize) -> Vec<CollectiveId> {
        let taken = self
            .operations
            .iter()
            .filter(|operation| operation.is_taken());
        let mut last: Vec<_> = taken
            .rev()
            .take(count)
            .map(|operation| operation.id.clone())
            .collect();
        last.reverse();
        last
    }

    /// Decodes the [memory](format::RecorderMemory) of a recorder.
    ///
    /// # Errors
    /// [`DecodeError`] if it is not valid, or has another [version](format::VERSION).
    pub fn decode(words: &[u64]) -> Result<Self, DecodeError> {
        let Decoded {
            identity,
            exit,
            posted,
            channels,
            records,
        } = format::decode(words)?;
        let channel = |format::GroupRecord {
                           name,
                           ranks,
                           posted,
                       }| GroupTrace {
            ranks: Arc::from(ranks),
            name: Arc::from(name),
            taken: posted,
        };
        let channels: Vec<_> = channels.into_iter().map(channel).collect();
        let operation = |record: format::FlightRecord| {
            let channel = (record.channel as usize)
                .checked_sub(1)
                .and_then(|at| channels.get(at));
            let (name, ranks) =
                channel.map_or_else(Default::default, |of| (of.name.clone(), of.ranks.clone()));
            Operation::new(record, name, ranks)
        };
        let mut operations: Vec<_> = records.into_iter().map(operation).collect();
        operations.sort_unstable_by_key(|operation| operation.index);
        let format::Identity {
            rank,
            size,
            launch,
            pid,
            process_start,
            process_started,
            started,
            host,
        } = identity;
        let time = |nanos| UNIX_EPOCH + Duration::from_nanos(nanos);
        Ok(Self {
            rank,
            size,
            launch,
            host,
            pid,
            process_start,
            process_started: Some(process_started).filter(|nanos| *nanos > 0).map(time),
            started: time(started),
            ending: exit,
            posted,
            operations,
            channels,
        })
    }

    /// Returns the current state of the rank's process.
    pub fn life(&self) -> ProcessState {
        ProcessState::of(&self.host, self.pid, self.process_start)
    }

    /// Returns false if the traces are certainly of two runs of a program, although their launches
    /// have the same id.
    ///
    /// The ranks of a launch of one process are all in that process. A launch of several processes
    /// begins after all of them have started, because they are connected before. A launch that
    /// began before a process started is therefore of an earlier run than that process. The clocks
    /// of two hosts may differ, by at most 10 seconds.
    pub fn is_same_run(&self, other: &Self) -> bool {
        let process = |of: &Self| (of.host.clone(), of.pid, of.process_start);
        let (before, after) = if self.started <= other.started {
            (self, other)
        } else {
            (other, self)
        };
        let skew = if before.host == after.host {
            Duration::ZERO
        } else {
            CLOCK_SKEW
        };
        let is_connected = match self.launch.process {
            Some(_) => process(self) == process(other),
            None => after
                .process_started
                .is_none_or(|process| process <= before.started + skew),
        };
        self.launch == other.launch && self.size == other.size && is_connected
    }

    /// Returns the time of the rank's last recorded activity, since the launch's start.
    pub fn last_sign(&self) -> Duration {
        let times = self.operations.iter().flat_map(|operation| {
            [
                Some(operation.posted),
                operation.waited,
                operation.over.map(|(at, _)| at),
            ]
            .into_iter()
            .flatten()
        });
        times
            .chain(self.ending.iter().map(|ending| ending.at))
            .max()
            .unwrap_or_default()
    }

    /// Returns the number of collectives in which the rank has taken part, on the channel with this
    /// group and name.
    pub(crate) fn taken(&self, ranks: &[usize], name: &str) -> u64 {
        let channel = self
            .channels
            .iter()
            .find(|channel| *channel.ranks == *ranks && *channel.name == *name);
        channel.map_or(0, |channel| channel.taken)
    }
}
