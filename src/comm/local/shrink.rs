//! [`shrink`](Backend::shrink): after a failure, the ranks agree on the survivors independently of the rendezvous.
//! The survivors are the ranks of a new backend.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::HostBackend;
use super::membership::{MembershipAgreement, MembershipMessage};
use super::sync::{Condvar, Instant, Mutex};
use crate::comm::CommError;
use crate::comm::backend::{Backend, Failure, ShrunkWorld};

/// State of a `shrink`: the agreement on the survivors, and the next world.
pub(super) struct ShrinkState {
    muster: Mutex<MembershipAgreement>,
    /// Notified when a rank has come or is gone, and when the roster is decided.
    changed: Condvar,
    next: OnceLock<ShrunkWorld>,
}

impl ShrinkState {
    /// Creates the state for processes with these ranks. `here` is the index of this process.
    pub fn new(processes: impl IntoIterator<Item = Range<usize>>, here: usize) -> Self {
        let muster = Mutex::new(MembershipAgreement::new(processes, here));
        Self { muster, changed: Condvar::default(), next: OnceLock::new() }
    }

    /// Returns the surviving ranks, once they are decided.
    pub fn roster(&self) -> Option<Arc<[usize]>> {
        self.muster.lock().roster().cloned()
    }

    pub fn next(&self) -> Option<ShrunkWorld> {
        self.next.get().cloned()
    }
}

/// Deadline that stands for "none". It can be added to any instant.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

impl HostBackend {
    /// Implements [`shrink`](Backend::shrink).
    pub(super) fn go_on(&self, rank: usize, deadline: Duration) -> Result<ShrunkWorld, CommError> {
        self.fail(Failure::Collective(CommError::Revoked { rank }));
        // No collective completes any more.
        self.others.iter().for_each(|others| others.completion.forget());
        self.muster(|muster| {
            muster.came(rank);
            Some(MembershipMessage::Came { rank })
        });
        let roster = self.roster(deadline).filter(|ranks| ranks.contains(&rank));
        let ranks = roster.ok_or(CommError::ExcludedFromShrink { rank })?;
        let next = || ShrunkWorld { engine: self.next_engine(&ranks), ranks: ranks.clone() };
        Ok(self.going_on.next.get_or_init(next).clone())
    }

    /// Records that the others no longer wait for this rank.
    pub(super) fn does_not_go_on(&self, rank: usize) {
        self.muster(|muster| {
            muster.gone(rank);
            None
        });
    }

    /// Records that `process` is lost.
    pub(super) fn goes_on_without(&self, process: usize) {
        self.muster(|muster| muster.lost(process).then_some(MembershipMessage::Missed { process }));
    }

    /// Handles a membership message of process `from`.
    pub(super) fn hear_of_going_on(&self, from: usize, notice: MembershipMessage) -> Result<(), String> {
        let mut heard = Ok(());
        let left_behind = if let MembershipMessage::Gone { ranks } = &notice { ranks.clone() } else { Vec::new() };
        self.muster(|muster| {
            muster.hear(from, notice).unwrap_or_else(|problem| {
                heard = Err(problem);
                None
            })
        });
        if heard.is_ok() {
            self.others().leave_behind(&left_behind);
        }
        heard
    }

    /// Changes the agreement and decides it, if possible. Sends the messages of `change` and of the decision to all
    /// other processes.
    fn muster(&self, change: impl FnOnce(&mut MembershipAgreement) -> Option<MembershipMessage>) {
        let mut muster = self.going_on.muster.lock();
        let notices = [change(&mut muster), muster.decide()];
        // Under the lock, so that no local rank uses the roster before it is sent, and all messages are sent in
        // order.
        if let Some(others) = &self.others {
            notices.into_iter().flatten().for_each(|notice| others.notify(&notice));
        }
        drop(muster);
        self.going_on.changed.notify_all();
    }

    /// Waits for the decision. After `deadline`, ranks that have not come are gone. Returns `None` if there is no
    /// decision after another `deadline`.
    fn roster(&self, deadline: Duration) -> Option<Arc<[usize]>> {
        for is_last in [false, true] {
            let until = Instant::now() + deadline.min(LONGEST);
            let (mut muster, mut late) = (self.going_on.muster.lock(), false);
            while !late && muster.roster().is_none() {
                (muster, late) = self.going_on.changed.wait_until(muster, until);
            }
            if is_last || muster.roster().is_some() {
                return muster.roster().cloned();
            }
            drop(muster);
            let mut ranks = Vec::new();
            self.muster(|muster| {
                ranks = muster.open();
                ranks.iter().for_each(|rank| muster.gone(*rank));
                Some(MembershipMessage::Gone { ranks: ranks.clone() })
            });
            self.others.iter().for_each(|others| others.leave_behind(&ranks));
        }
        unreachable!("the second wait is the last")
    }

    /// Creates the backend of the surviving `ranks`.
    fn next_engine(&self, ranks: &[usize]) -> Arc<Self> {
        match &self.others {
            None => Self::after(Some(self), ranks.len(), self.manner),
            Some(others) => {
                let engine = Self::of_processes(Some(self), others.of_those(ranks), self.manner);
                others.begin(&engine);
                engine
            }
        }
    }
}
