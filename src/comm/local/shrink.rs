//! Ranks [survive](Backend::shrink) a failure: they meet once more, whatever the rendezvous says, and those that
//! come are the ranks of a new engine.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::HostBackend;
use super::membership::{MembershipAgreement, MembershipMessage};
use super::sync::{Condvar, Instant, Mutex};
use crate::comm::CommError;
use crate::comm::backend::{Backend, Failure, ShrunkWorld};

/// Who goes on, and in which world.
pub(super) struct ShrinkState {
    muster: Mutex<MembershipAgreement>,
    /// Rung when somebody comes or is gone, and when it is decided.
    changed: Condvar,
    next: OnceLock<ShrunkWorld>,
}

impl ShrinkState {
    /// Of processes with these ranks, of which this is the one numbered `here`.
    pub fn new(processes: impl IntoIterator<Item = Range<usize>>, here: usize) -> Self {
        let muster = Mutex::new(MembershipAgreement::new(processes, here));
        Self { muster, changed: Condvar::default(), next: OnceLock::new() }
    }

    /// The ranks that go on, if that is decided.
    pub fn roster(&self) -> Option<Arc<[usize]>> {
        self.muster.lock().roster().cloned()
    }

    pub fn next(&self) -> Option<ShrunkWorld> {
        self.next.get().cloned()
    }
}

/// Stands for "no deadline", and can be added to any instant.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

impl HostBackend {
    /// [`shrink`](Backend::shrink)s.
    pub(super) fn go_on(&self, rank: usize, deadline: Duration) -> Result<ShrunkWorld, CommError> {
        self.fail(Failure::Collective(CommError::Revoked { rank }));
        // Nothing is completed any more.
        self.others.iter().for_each(|others| others.hands.forget());
        self.muster(|muster| {
            muster.came(rank);
            Some(MembershipMessage::Came { rank })
        });
        let roster = self.roster(deadline).filter(|ranks| ranks.contains(&rank));
        let ranks = roster.ok_or(CommError::ExcludedFromShrink { rank })?;
        let next = || ShrunkWorld { engine: self.next_engine(&ranks), ranks: ranks.clone() };
        Ok(self.going_on.next.get_or_init(next).clone())
    }

    /// Nobody waits for this rank any more.
    pub(super) fn does_not_go_on(&self, rank: usize) {
        self.muster(|muster| {
            muster.gone(rank);
            None
        });
    }

    /// Nothing more comes from `process`.
    pub(super) fn goes_on_without(&self, process: usize) {
        self.muster(|muster| muster.lost(process).then_some(MembershipMessage::Missed { process }));
    }

    /// What process `from` says of who goes on.
    pub(super) fn hear_of_going_on(&self, from: usize, notice: MembershipMessage) -> Result<(), String> {
        let mut heard = Ok(());
        self.muster(|muster| {
            muster.hear(from, notice).unwrap_or_else(|problem| {
                heard = Err(problem);
                None
            })
        });
        heard
    }

    /// Changes what is known, and decides if that can be. What `change` returns, the others are told.
    fn muster(&self, change: impl FnOnce(&mut MembershipAgreement) -> Option<MembershipMessage>) {
        let mut muster = self.going_on.muster.lock();
        let notices = [change(&mut muster), muster.decide()];
        // Under the lock, without which nobody here goes by it: the others hear of it in the order in which it happens.
        if let Some(others) = &self.others {
            notices.into_iter().flatten().for_each(|notice| others.notify(&notice));
        }
        drop(muster);
        self.going_on.changed.notify_all();
    }

    /// Waits until it is decided who goes on. After `deadline` nobody who has not come does; `None`: it was not decided
    /// for as long again.
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
            self.muster(|muster| {
                let ranks = muster.open();
                ranks.iter().for_each(|rank| muster.gone(*rank));
                Some(MembershipMessage::Gone { ranks })
            });
        }
        unreachable!("the second wait is the last")
    }

    /// The engine of these ranks.
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
