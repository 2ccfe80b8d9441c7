//! [`MembershipAgreement`]: agreement on the ranks that survive a failure. Pure state: no locks, no clock.
//!
//! A rank has *come* when it has called `shrink`. It is *gone* when its program has ended, its
//! process is lost, or the others have waited long enough. Otherwise it is *open*. Once no rank is
//! open, the ranks that have come are the roster: the ranks of the next world.
//!
//! Among processes, the first process that is not lost decides. Invariants, cited by number in the
//! tests:
//! 1. Every process sends to all others which of its ranks come and which are gone, so any of them
//!    can decide.
//! 2. A process forwards a roster to all others before it uses it. If any surviving process uses
//!    it, all receive it.
//! 3. The last messages of a lost process may have reached only some processes. Therefore each
//!    process notifies the others when it has noticed the loss
//!    ([`Missed`](MembershipMessage::Missed)), after everything that it has forwarded. The process
//!    that decides instead waits for these notifications of all processes, and then knows every
//!    roster that is in use.
//! 4. The first roster is the only one, and is final.
//! 5. A process without ranks does not take part, and no process waits for it. This is the case for
//!    a process whose ranks did not survive an earlier `shrink`.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Message of the agreement, sent to all other processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) enum MembershipMessage {
    /// A rank has called `shrink`.
    Came { rank: usize },
    /// These ranks are not waited for any longer, unless they have called `shrink`.
    Gone { ranks: Vec<usize> },
    /// The sender has noticed that a process is lost, and receives nothing more from it.
    Missed { process: usize },
    /// Roster: the surviving ranks.
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
    /// For each process, true if this one has reported that it is lost.
    missed: Vec<bool>,
}

impl MembershipAgreement {
    /// Creates the agreement of processes with these ranks. `here` is the index of this process.
    pub fn new(processes: impl IntoIterator<Item = Range<usize>>, here: usize) -> Self {
        let ranges: Vec<_> = processes.into_iter().collect();
        let size = ranges.iter().map(Range::len).sum();
        let count = ranges.len();
        let processes = ranges
            .into_iter()
            .map(|ranks| Process {
                ranks,
                lost: false,
                missed: vec![false; count],
            })
            .collect();
        Self {
            here,
            standing: vec![MemberState::Open; size],
            processes,
            roster: None,
        }
    }

    /// Returns the surviving ranks, once they are decided.
    pub fn roster(&self) -> Option<&Arc<[usize]>> {
        self.roster.as_ref()
    }

    /// Returns the ranks that have neither come nor gone.
    pub fn open(&self) -> Vec<usize> {
        self.standing
            .iter()
            .enumerate()
            .filter(|(_, standing)| **standing == MemberState::Open)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Records that the rank has called `shrink`.
    pub fn came(&mut self, rank: usize) {
        self.stand(rank, MemberState::Came);
    }

    /// Records that the rank is not waited for any longer.
    pub fn gone(&mut self, rank: usize) {
        self.stand(rank, MemberState::Gone);
    }

    /// Records that `process` is lost. Returns false if that was recorded before.
    pub fn lost(&mut self, process: usize) -> bool {
        if std::mem::replace(&mut self.processes[process].lost, true) {
            return false;
        }
        // Includes ranks that have come.
        let ranks = self.processes[process].ranks.clone();
        self.standing[ranks].fill(MemberState::Gone);
        self.processes[self.here].missed[process] = true;
        true
    }

    /// Handles a message of process `from`. Returns a message to forward to all others.
    ///
    /// # Errors
    /// An invalid message.
    pub fn hear(
        &mut self,
        from: usize,
        notice: MembershipMessage,
    ) -> Result<Option<MembershipMessage>, String> {
        let is_known = |rank: &usize| *rank < self.standing.len();
        if self.processes[from].lost {
            return Ok(None);
        }
        match notice {
            MembershipMessage::Came { rank } if self.processes[from].ranks.contains(&rank) => {
                self.came(rank)
            }
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
            notice => return Err(format!("it sent an invalid membership message: {notice:?}")),
        }
        Ok(None)
    }

    /// Decides the roster, if this process decides and all necessary messages have arrived. Returns
    /// the message for all other processes.
    pub fn decide(&mut self) -> Option<MembershipMessage> {
        let members = || {
            self.processes
                .iter()
                .enumerate()
                .filter(|(_, process)| !process.ranks.is_empty())
        };
        let left = || members().filter(|(_, process)| !process.lost);
        let decides = left().next().is_some_and(|(first, _)| first == self.here);
        if !decides || self.roster.is_some() || self.standing.contains(&MemberState::Open) {
            return None;
        }
        let has_missed = |process: &Process| {
            members()
                .filter(|(_, other)| other.lost)
                .all(|(lost, _)| process.missed[lost])
        };
        if !left().all(|(_, process)| has_missed(process)) {
            return None;
        }
        let came = self
            .standing
            .iter()
            .enumerate()
            .filter(|(_, standing)| **standing == MemberState::Came);
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
#[path = "agreement_tests.rs"]
mod tests;
