//! [`MembershipAgreement`]: who goes on after a failure. Pure state: no locks, no clock.
//!
//! A rank comes when it asks for the world of those that go on, and is gone when its program is over, its process is lost,
//! or the others have waited long enough. Once no rank is open, those that have come are the roster: the ranks of the world
//! that follows.
//!
//! Among processes the first decides that is not lost. Invariants, cited by number in the tests:
//! 1. Every process tells all others which of its ranks come, and which are gone, so any of them can decide.
//! 2. A process passes a roster on to all others before it goes by it: if any that is left does, all hear of it.
//! 3. What a lost process has said last may have reached some and not others. So each tells the others that it has missed
//!    it, behind all that it has passed on; who decides in its place waits for that word of everybody, and then knows of
//!    every roster that is gone by.
//! 4. The first roster is the only one, and is final.
//! 5. A process without ranks, as one is from whose world the others have gone on, takes no part: nobody waits for it.

use std::ops::Range;
use std::sync::Arc;

/// What a process tells all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) enum MembershipMessage {
    /// A rank has come.
    Came { rank: usize },
    /// These are waited for no longer, if they have not come.
    Gone { ranks: Vec<usize> },
    /// It has missed a process.
    Missed { process: usize },
    /// Those that go on.
    Roster { ranks: Vec<usize> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemberState {
    Open,
    Came,
    Gone,
}

pub(super) struct MembershipAgreement {
    here: usize,
    standing: Vec<MemberState>,
    processes: Vec<Process>,
    roster: Option<Arc<[usize]>>,
}

struct Process {
    ranks: Range<usize>,
    lost: bool,
    /// Whether it has said that it has missed these.
    missed: Vec<bool>,
}

impl MembershipAgreement {
    /// Of processes with these ranks, of which this is the one numbered `here`.
    pub fn new(processes: impl IntoIterator<Item = Range<usize>>, here: usize) -> Self {
        let ranges: Vec<_> = processes.into_iter().collect();
        let (size, count) = (ranges.iter().map(Range::len).sum(), ranges.len());
        let process = |ranks| Process { ranks, lost: false, missed: vec![false; count] };
        let processes = ranges.into_iter().map(process).collect();
        Self { here, standing: vec![MemberState::Open; size], processes, roster: None }
    }

    /// The ranks that go on, once that is decided.
    pub fn roster(&self) -> Option<&Arc<[usize]>> {
        self.roster.as_ref()
    }

    /// Ranks that have neither come nor gone.
    pub fn open(&self) -> Vec<usize> {
        self.standing
            .iter()
            .enumerate()
            .filter(|(_, standing)| **standing == MemberState::Open)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// The rank asks for the world of those that go on.
    pub fn came(&mut self, rank: usize) {
        self.stand(rank, MemberState::Came);
    }

    /// The rank is waited for no longer.
    pub fn gone(&mut self, rank: usize) {
        self.stand(rank, MemberState::Gone);
    }

    /// Nothing more comes from `process`. False: that is known.
    pub fn lost(&mut self, process: usize) -> bool {
        if std::mem::replace(&mut self.processes[process].lost, true) {
            return false;
        }
        // Also of ranks that have come.
        let ranks = self.processes[process].ranks.clone();
        self.standing[ranks].fill(MemberState::Gone);
        self.processes[self.here].missed[process] = true;
        true
    }

    /// What process `from` has said. Returns what is to be passed on to all others.
    ///
    /// # Errors
    /// What cannot be right.
    pub fn hear(&mut self, from: usize, notice: MembershipMessage) -> Result<Option<MembershipMessage>, String> {
        let is_known = |rank: &usize| *rank < self.standing.len();
        if self.processes[from].lost {
            return Ok(None);
        }
        match notice {
            MembershipMessage::Came { rank } if self.processes[from].ranks.contains(&rank) => self.came(rank),
            MembershipMessage::Gone { ranks } if ranks.iter().all(is_known) => {
                ranks.into_iter().for_each(|rank| self.gone(rank))
            }
            MembershipMessage::Missed { process } if process < self.processes.len() => {
                self.processes[from].missed[process] = true
            }
            MembershipMessage::Roster { ranks }
                if !ranks.is_empty() && ranks.is_sorted() && ranks.iter().all(is_known) =>
            {
                if self.roster.is_none() {
                    self.roster = Some(ranks.clone().into());
                    return Ok(Some(MembershipMessage::Roster { ranks }));
                }
            }
            notice => return Err(format!("it says of those that go on: {notice:?}")),
        }
        Ok(None)
    }

    /// Decides who goes on, if that is this process's to say and can be said. Returns what all others are to be told.
    pub fn decide(&mut self) -> Option<MembershipMessage> {
        let members = || self.processes.iter().enumerate().filter(|(_, process)| !process.ranks.is_empty());
        let left = || members().filter(|(_, process)| !process.lost);
        let decides = left().next().is_some_and(|(first, _)| first == self.here);
        if !decides || self.roster.is_some() || self.standing.contains(&MemberState::Open) {
            return None;
        }
        let has_missed =
            |process: &Process| members().filter(|(_, other)| other.lost).all(|(lost, _)| process.missed[lost]);
        if !left().all(|(_, process)| has_missed(process)) {
            return None;
        }
        let came = self.standing.iter().enumerate().filter(|(_, standing)| **standing == MemberState::Came);
        let ranks: Vec<_> = came.map(|(rank, _)| rank).collect();
        if ranks.is_empty() {
            return None;
        }
        self.roster = Some(ranks.clone().into());
        Some(MembershipMessage::Roster { ranks })
    }

    fn stand(&mut self, rank: usize, standing: MemberState) {
        if self.standing[rank] == MemberState::Open {
            self.standing[rank] = standing;
        }
    }
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
