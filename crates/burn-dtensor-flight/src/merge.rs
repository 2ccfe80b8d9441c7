//! [`LaunchTrace`]: combines the traces of all ranks of a launch.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use itertools::Itertools;

use crate::format::{self, DecodeError, OpOutcome};
use crate::launch_id::LaunchId;
use crate::op::Op;
use crate::operation::Operation;
use crate::process_state::ProcessState;
use crate::read::{FlightError, RankTrace};

/// Last operations of the ranks of a launch.
///
/// Displays as a summary: the rank at fault and the reason, which ranks wait for which, and the
/// last operations of each rank.
#[derive(Debug, Clone)]
pub struct LaunchTrace {
    /// Identity of the launch, the same in all its processes.
    pub launch: LaunchId,
    /// Number of ranks.
    pub size: usize,
    /// Traces of the ranks that have a file, ascending by rank.
    pub ranks: Vec<RankTrace>,
    /// State of the process of each rank in `ranks`, when the trace was read.
    pub lives: Vec<ProcessState>,
}

/// A collective, as the ranks of its group have called it.
#[derive(Debug, Clone)]
pub struct CollectiveTrace<'a> {
    /// Each rank that has called it, with its call, in order of time.
    pub called: Vec<(usize, &'a Operation)>,
    /// Ranks that have not taken part, in group order.
    pub absent: Vec<usize>,
}

/// A wait of a rank that has not ended, or that ended with a failure.
#[derive(Debug, Clone)]
pub struct BlockedWait<'a> {
    /// The waiting rank.
    pub rank: usize,
    /// Operation that the rank waits for.
    pub operation: &'a Operation,
    /// Time at which the wait began, since the launch's start on the host that began first.
    pub since: Duration,
    /// Ranks that have not called; empty if all have.
    pub missing: Vec<usize>,
    /// True if one of the missing ranks is enough, because the operation is a receive from any
    /// rank.
    pub is_for_any: bool,
}

impl LaunchTrace {
    /// Reads the files of a folder, grouped by launch. The programs may still be running.
    ///
    /// # Errors
    /// [`FlightError`] if a file cannot be read, or if there is none.
    pub fn read(folder: impl AsRef<Path>) -> Result<Vec<Self>, FlightError> {
        let folder = folder.as_ref();
        let unreadable = |error: std::io::Error| {
            let path = folder.to_path_buf();
            let problem = error.to_string();
            FlightError::Unreadable { path, problem }
        };
        let entries: Vec<_> = fs::read_dir(folder)
            .and_then(Iterator::collect)
            .map_err(unreadable)?;
        let paths = entries.into_iter().map(|entry: fs::DirEntry| entry.path());
        let paths: Vec<PathBuf> = paths.filter(|path| format::is_flight_file(path)).collect();
        if paths.is_empty() {
            return Err(FlightError::Empty {
                path: folder.into(),
            });
        }
        let flights: Vec<_> = paths
            .iter()
            .map(RankTrace::read)
            .filter(|read| {
                !matches!(
                    read,
                    Err(FlightError::Invalid {
                        problem: DecodeError::NotBegun,
                        ..
                    })
                )
            })
            .try_collect()?;
        Ok(Self::of(flights))
    }

    /// Groups traces by launch. If a launch of two runs has the same id, those of the older run are
    /// dropped. They stay in a folder where a rank of the newer run has not begun.
    pub fn of(flights: Vec<RankTrace>) -> Vec<Self> {
        let mut launches: BTreeMap<LaunchId, Vec<RankTrace>> = BTreeMap::new();
        for flight in flights {
            launches.entry(flight.launch).or_default().push(flight);
        }
        let launched = |(launch, mut ranks): (LaunchId, Vec<RankTrace>)| {
            ranks.sort_by_key(|flight| flight.started);
            let newest = ranks.pop().expect("a launch has a trace");
            let size = newest.size;
            ranks.retain(|flight| flight.is_same_run(&newest));
            ranks.push(newest);
            ranks.sort_by_key(|flight| flight.rank);
            let lives = ranks.iter().map(RankTrace::life).collect();
            Self {
                launch,
                size,
                ranks,
                lives,
            }
        };
        launches.into_iter().map(launched).collect()
    }

    /// Returns the trace of a rank, if it has a file.
    pub fn rank(&self, rank: usize) -> Option<&RankTrace> {
        self.ranks.iter().find(|flight| flight.rank == rank)
    }

    /// Returns the state of a rank's process when the trace was read.
    pub fn life(&self, rank: usize) -> ProcessState {
        let at = self.ranks.iter().position(|flight| flight.rank == rank);
        at.map_or(ProcessState::Unknown, |at| self.lives[at])
    }

    /// Returns the wall-clock time at which the launch began, on the host that began first.
    pub fn started(&self) -> Option<SystemTime> {
        self.ranks.iter().map(|flight| flight.started).min()
    }

    /// Converts a time of a rank to one since [`started`](Self::started). The result is as exact as
    /// the hosts' clocks agree.
    pub(crate) fn since(&self, flight: &RankTrace, at: Duration) -> Duration {
        let late = self
            .started()
            .and_then(|first| flight.started.duration_since(first).ok());
        late.unwrap_or_default() + at
    }

    /// Returns each collective that is still recorded, in the order of the first calls.
    pub fn meetings(&self) -> Vec<CollectiveTrace<'_>> {
        let mut meetings: BTreeMap<_, Vec<(Duration, usize, &Operation)>> = BTreeMap::new();
        for flight in &self.ranks {
            for operation in flight
                .operations
                .iter()
                .filter(|operation| !operation.id.op.is_message())
            {
                let id = &operation.id;
                // The ranks are unknown if the recorder had no capacity for the channel.
                if !id.ranks.is_empty() {
                    let called = (self.since(flight, operation.posted), flight.rank, operation);
                    meetings
                        .entry((&id.ranks, &operation.channel, id.seq))
                        .or_default()
                        .push(called);
                }
            }
        }
        let mut meetings: Vec<_> = meetings.into_values().collect();
        meetings
            .iter_mut()
            .for_each(|called| called.sort_by_key(|(at, rank, _)| (*at, *rank)));
        meetings.sort_by_key(|called| (called[0].0, called[0].1));
        meetings
            .into_iter()
            .map(|called| self.meeting(called))
            .collect()
    }

    fn meeting<'a>(&'a self, called: Vec<(Duration, usize, &'a Operation)>) -> CollectiveTrace<'a> {
        let absent = self.absent(called[0].2);
        CollectiveTrace {
            called: called
                .into_iter()
                .map(|(_, rank, operation)| (rank, operation))
                .collect(),
            absent,
        }
    }

    /// Returns the ranks that have not taken part in a collective.
    fn absent(&self, operation: &Operation) -> Vec<usize> {
        let taken = |rank: usize| {
            self.rank(rank).is_some_and(|flight| {
                flight.taken(&operation.id.ranks, &operation.channel) > operation.id.seq
            })
        };
        operation
            .id
            .ranks
            .iter()
            .copied()
            .filter(|rank| !taken(*rank))
            .collect()
    }

    /// Returns the waits that have not ended, or ended with a failure, longest first.
    pub fn waits(&self) -> Vec<BlockedWait<'_>> {
        let mut waits: Vec<_> = self
            .ranks
            .iter()
            .flat_map(|flight| self.waits_of(flight))
            .collect();
        waits.sort_by_key(|waiting| (waiting.since, waiting.rank));
        waits
    }

    fn waits_of<'a>(&'a self, flight: &'a RankTrace) -> impl Iterator<Item = BlockedWait<'a>> {
        let awaited = flight
            .operations
            .iter()
            .filter(|operation| operation.is_awaited());
        awaited.map(|operation| {
            let rank = flight.rank;
            let (missing, is_for_any) = match operation.message {
                Some((Some(partner), _)) if operation.id.op == Op::Receive => {
                    (vec![partner], false)
                }
                Some(_) if operation.id.op == Op::Receive => (
                    operation
                        .id
                        .ranks
                        .iter()
                        .copied()
                        .filter(|other| *other != rank)
                        .collect(),
                    true,
                ),
                Some(_) => (Vec::new(), false),
                None => (self.absent(operation), false),
            };
            let since = self.since(flight, operation.waited.unwrap_or(operation.posted));
            BlockedWait {
                rank,
                operation,
                since,
                missing,
                is_for_any,
            }
        })
    }

    /// Returns the time at which the first wait of a rank failed.
    pub(crate) fn failed(&self) -> Option<Duration> {
        let failed = self.ranks.iter().flat_map(|flight| {
            let over = flight
                .operations
                .iter()
                .filter_map(|operation| operation.over);
            over.filter(|(_, over)| *over == OpOutcome::Failed)
                .map(|(at, _)| self.since(flight, at))
        });
        failed.min()
    }
}

impl<'a> CollectiveTrace<'a> {
    /// Returns the call on which most ranks agree, with a rank that made it. If there is a tie, the
    /// first call wins.
    pub fn agreed(&self) -> (usize, &'a Operation) {
        let same = |of: &Operation| {
            self.called
                .iter()
                .filter(|(_, other)| of.difference(other).is_none())
                .count()
        };
        // `max_by_key` returns the last of several maxima, hence `rev`.
        *self
            .called
            .iter()
            .rev()
            .max_by_key(|(_, operation)| same(operation))
            .expect("at least one rank has called")
    }

    /// Returns each rank whose call differs from that of most ranks, with the difference, its own
    /// value first.
    pub fn differences(&self) -> Vec<(usize, String)> {
        let (_, agreed) = self.agreed();
        self.called
            .iter()
            .filter_map(|(rank, operation)| Some((*rank, operation.difference(agreed)?)))
            .collect()
    }
}
