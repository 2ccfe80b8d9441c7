//! [`LaunchTrace`]: the ranks of a launch, put together.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use itertools::Itertools;

use super::file;
use super::operation::Operation;
use super::process_state::ProcessState;
use super::read::{FlightError, RankTrace};
use super::record::OpOutcome;
use crate::comm::Op;

/// What the ranks of a launch did last, put together.
///
/// Displays as what a person wants to know: who is at fault and why, who waits for whom, what each rank did last.
#[derive(Debug, Clone)]
pub struct LaunchTrace {
    /// The launch's number in its process.
    pub launch: u64,
    /// Number of ranks.
    pub size: usize,
    /// Those that have a file, ascending.
    pub ranks: Vec<RankTrace>,
    /// Whether the process of each of these was there when this was read.
    pub lives: Vec<ProcessState>,
}

/// One collective, as the ranks of its group have called it.
#[derive(Debug, Clone)]
pub struct CollectiveTrace<'a> {
    /// Each rank that has called it, in the order in which they did.
    pub called: Vec<(usize, &'a Operation)>,
    /// The ranks that have not taken part in it, in group order.
    pub absent: Vec<usize>,
}

/// What a rank waits for, or waited for until it failed.
#[derive(Debug, Clone)]
pub struct BlockedWait<'a> {
    /// The rank that waits.
    pub rank: usize,
    /// In what.
    pub operation: &'a Operation,
    /// Since when, from the launch's start on the host that began first.
    pub since: Duration,
    /// The ranks that have not come; none if all have.
    pub missing: Vec<usize>,
    /// One of them is enough: a receive of anybody's message.
    pub is_for_any: bool,
}

impl LaunchTrace {
    /// Reads a folder's files, by launch. Also while their programs run.
    ///
    /// # Errors
    /// [`FlightError`] if a file cannot be read, or there is none.
    pub fn read(folder: impl AsRef<Path>) -> Result<Vec<Self>, FlightError> {
        let folder = folder.as_ref();
        let unreadable = |error: std::io::Error| {
            let (path, problem) = (folder.to_path_buf(), error.to_string());
            FlightError::Unreadable { path, problem }
        };
        let entries: Vec<_> = fs::read_dir(folder).and_then(Iterator::collect).map_err(unreadable)?;
        let paths = entries.into_iter().map(|entry: fs::DirEntry| entry.path());
        let paths: Vec<PathBuf> = paths.filter(|path| file::is_flight(path)).collect();
        if paths.is_empty() {
            return Err(FlightError::Empty { path: folder.into() });
        }
        let begun = |read: &Result<RankTrace, FlightError>| !matches!(read, Err(FlightError::NotBegun { .. }));
        let flights: Vec<_> = paths.iter().map(RankTrace::read).filter(begun).try_collect()?;
        Ok(Self::of(flights))
    }

    /// Puts the ranks of each launch together. Of ranks of an earlier launch of another size nothing is kept.
    pub fn of(flights: Vec<RankTrace>) -> Vec<Self> {
        let mut launches: BTreeMap<u64, Vec<RankTrace>> = BTreeMap::new();
        for flight in flights {
            launches.entry(flight.launch).or_default().push(flight);
        }
        let launched = |(launch, mut ranks): (u64, Vec<RankTrace>)| {
            let size = ranks.iter().max_by_key(|flight| flight.started).map_or(0, |newest| newest.size);
            ranks.retain(|flight| flight.size == size);
            ranks.sort_by_key(|flight| flight.rank);
            let lives = ranks.iter().map(RankTrace::life).collect();
            Self { launch, size, ranks, lives }
        };
        launches.into_iter().map(launched).collect()
    }

    /// The last operations of a rank, if it has a file.
    pub fn rank(&self, rank: usize) -> Option<&RankTrace> {
        self.ranks.iter().find(|flight| flight.rank == rank)
    }

    /// Whether the process of a rank is still there.
    pub fn life(&self, rank: usize) -> ProcessState {
        let at = self.ranks.iter().position(|flight| flight.rank == rank);
        at.map_or(ProcessState::Unknown, |at| self.lives[at])
    }

    /// When the launch began, on the host that began first.
    pub fn started(&self) -> Option<SystemTime> {
        self.ranks.iter().map(|flight| flight.started).min()
    }

    /// A time of a rank as one since [`started`](Self::started): as exact as the hosts' clocks agree.
    pub(super) fn since(&self, flight: &RankTrace, at: Duration) -> Duration {
        let late = self.started().and_then(|first| flight.started.duration_since(first).ok());
        late.unwrap_or_default() + at
    }

    /// Each collective that the ranks still remember, in the order in which their first callers came.
    pub fn meetings(&self) -> Vec<CollectiveTrace<'_>> {
        let mut meetings: BTreeMap<_, Vec<(Duration, usize, &Operation)>> = BTreeMap::new();
        for flight in &self.ranks {
            for operation in flight.operations.iter().filter(|operation| !operation.id.op.is_message()) {
                let id = &operation.id;
                // Of a channel that did not fit nothing is known.
                if !id.ranks.is_empty() {
                    let called = (self.since(flight, operation.posted), flight.rank, operation);
                    meetings.entry((&id.ranks, &operation.channel, id.seq)).or_default().push(called);
                }
            }
        }
        let mut meetings: Vec<_> = meetings.into_values().collect();
        meetings.iter_mut().for_each(|called| called.sort_by_key(|(at, rank, _)| (*at, *rank)));
        meetings.sort_by_key(|called| (called[0].0, called[0].1));
        meetings.into_iter().map(|called| self.meeting(called)).collect()
    }

    fn meeting<'a>(&'a self, called: Vec<(Duration, usize, &'a Operation)>) -> CollectiveTrace<'a> {
        let absent = self.absent(called[0].2);
        CollectiveTrace { called: called.into_iter().map(|(_, rank, operation)| (rank, operation)).collect(), absent }
    }

    /// The ranks that have not taken part in a collective.
    fn absent(&self, operation: &Operation) -> Vec<usize> {
        let taken = |rank: usize| {
            self.rank(rank)
                .is_some_and(|flight| flight.taken(&operation.id.ranks, &operation.channel) > operation.id.seq)
        };
        operation.id.ranks.iter().copied().filter(|rank| !taken(*rank)).collect()
    }

    /// Who waits, or waited until the launch failed, longest first.
    pub fn waits(&self) -> Vec<BlockedWait<'_>> {
        let mut waits: Vec<_> = self.ranks.iter().flat_map(|flight| self.waits_of(flight)).collect();
        waits.sort_by_key(|waiting| (waiting.since, waiting.rank));
        waits
    }

    fn waits_of<'a>(&'a self, flight: &'a RankTrace) -> impl Iterator<Item = BlockedWait<'a>> {
        let awaited = flight.operations.iter().filter(|operation| operation.is_awaited());
        awaited.map(|operation| {
            let rank = flight.rank;
            let (missing, is_for_any) = match operation.message {
                Some((Some(partner), _)) if operation.id.op == Op::Receive => (vec![partner], false),
                Some(_) if operation.id.op == Op::Receive => {
                    (operation.id.ranks.iter().copied().filter(|other| *other != rank).collect(), true)
                }
                Some(_) => (Vec::new(), false),
                None => (self.absent(operation), false),
            };
            let since = self.since(flight, operation.waited.unwrap_or(operation.posted));
            BlockedWait { rank, operation, since, missing, is_for_any }
        })
    }

    /// When the first wait of a rank failed.
    pub(super) fn failed(&self) -> Option<Duration> {
        let failed = self.ranks.iter().flat_map(|flight| {
            let over = flight.operations.iter().filter_map(|operation| operation.over);
            over.filter(|(_, over)| *over == OpOutcome::Failed).map(|(at, _)| self.since(flight, at))
        });
        failed.min()
    }
}

impl<'a> CollectiveTrace<'a> {
    /// The call of most ranks, of as many the first.
    pub fn agreed(&self) -> (usize, &'a Operation) {
        let same = |of: &Operation| self.called.iter().filter(|(_, other)| of.difference(other).is_none()).count();
        // Of several that are as many, `max_by_key` takes the last.
        *self.called.iter().rev().max_by_key(|(_, operation)| same(operation)).expect("somebody has called")
    }

    /// Each rank that calls otherwise than most, and what differs, its value first.
    pub fn differences(&self) -> Vec<(usize, String)> {
        let (_, agreed) = self.agreed();
        let differs = |(rank, operation): &(usize, &Operation)| Some((*rank, operation.difference(agreed)?));
        self.called.iter().filter_map(differs).collect()
    }
}
