//! Which ranks survive a failure, and the worlds in which they continue
//! ([`World::shrink`](super::World::shrink)).
//!
//! ```text
//! world of 4 ranks          rank 2 is lost           the survivors
//! 0 1 2 3   --failure-->    0 1 . 3   --shrink-->    0 1 2           a new backend, with ranks 0, 1 and 3
//! ```
//!
//! [`MembershipAgreement`] is the agreement of processes on the survivors, as pure state;
//! [`Membership`] lets ranks wait for it.
//!
//! The worlds of which a rank was a member are in `comm::rank_worlds`. Collectives know nothing of
//! it: a shrunk world is an ordinary world with a backend of its own. A backend holds a
//! [`Membership`], to which it passes the ends of ranks, the losses of processes and the messages
//! of other processes.

mod agreement;

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::comm::CommError;
use crate::comm::backend::ShrunkWorld;
use crate::comm::control::rendezvous::LONGEST;
use agreement::MembershipAgreement;

pub(in crate::comm) use agreement::MembershipMessage;

/// Agreement on the survivors of a world, and the world in which they continue.
pub(in crate::comm) struct Membership {
    agreement: Mutex<MembershipAgreement>,
    /// Notified when a rank has come or is gone, and when the roster is decided.
    changed: Condvar,
    next: OnceLock<ShrunkWorld>,
    /// Other processes of the world, if there are any.
    peers: Option<Arc<dyn MembershipPeers>>,
}

/// Other processes of a world, as the agreement notifies them.
pub(in crate::comm) trait MembershipPeers: Send + Sync {
    /// Sends a message to all of them, without blocking.
    fn notify(&self, message: &MembershipMessage);

    /// Lets this process end without the processes of `ranks`, for which the survivors do not wait
    /// any longer.
    fn leave_behind(&self, ranks: &[usize]);
}

impl Membership {
    /// Creates the agreement of the `size` ranks of one process.
    pub fn of_threads(size: usize) -> Self {
        Self::new(std::iter::once(0..size), 0, None)
    }

    /// Creates the agreement of processes with these ranks. `here` is the index of this process.
    pub fn of_processes(
        ranks: &[Range<usize>],
        here: usize,
        peers: Arc<dyn MembershipPeers>,
    ) -> Self {
        Self::new(ranks.iter().cloned(), here, Some(peers))
    }

    fn new(
        processes: impl IntoIterator<Item = Range<usize>>,
        here: usize,
        peers: Option<Arc<dyn MembershipPeers>>,
    ) -> Self {
        let agreement = Mutex::new(MembershipAgreement::new(processes, here));
        Self {
            agreement,
            changed: Condvar::new(),
            next: OnceLock::new(),
            peers,
        }
    }

    /// Returns the surviving ranks, once they are decided.
    pub fn roster(&self) -> Option<Arc<[usize]>> {
        self.agreement.lock().roster().cloned()
    }

    /// Returns the world in which local ranks continue, if there is one.
    pub fn next(&self) -> Option<ShrunkWorld> {
        self.next.get().cloned()
    }

    /// Returns the world in which the survivors continue. The first local rank that needs it
    /// creates its backend with `create`.
    pub fn next_or(&self, create: impl FnOnce() -> ShrunkWorld) -> ShrunkWorld {
        self.next.get_or_init(create).clone()
    }

    /// Announces that `rank` continues, and waits until it is decided which other ranks do, twice
    /// `deadline` at most. Returns all of them.
    pub fn survivors(&self, rank: usize, deadline: Duration) -> Result<Arc<[usize]>, CommError> {
        self.change(|agreement| {
            agreement.came(rank);
            Some(MembershipMessage::Came { rank })
        });
        let roster = self
            .await_roster(deadline)
            .filter(|ranks| ranks.contains(&rank));
        roster.ok_or(CommError::ExcludedFromShrink { rank })
    }

    /// Records that the program of the rank has ended, so that it is not waited for.
    pub fn exited(&self, rank: usize) {
        self.change(|agreement| {
            agreement.gone(rank);
            None
        });
    }

    /// Records that `process` is lost.
    pub fn lost(&self, process: usize) {
        self.change(|agreement| {
            agreement
                .lost(process)
                .then_some(MembershipMessage::Missed { process })
        });
    }

    /// Handles a message of process `from`.
    ///
    /// # Errors
    /// An invalid message.
    pub fn hear(&self, from: usize, message: MembershipMessage) -> Result<(), String> {
        let left_behind = if let MembershipMessage::Gone { ranks } = &message {
            ranks.clone()
        } else {
            Vec::new()
        };
        let mut heard = Ok(());
        self.change(|agreement| {
            agreement.hear(from, message).unwrap_or_else(|problem| {
                heard = Err(problem);
                None
            })
        });
        if heard.is_ok() {
            self.leave_behind(&left_behind);
        }
        heard
    }

    /// Changes the agreement and decides it, if possible. Sends the messages of `change` and of the
    /// decision to all other processes.
    fn change(&self, change: impl FnOnce(&mut MembershipAgreement) -> Option<MembershipMessage>) {
        let mut agreement = self.agreement.lock();
        let messages = [change(&mut agreement), agreement.decide()];
        // Under the lock, so that no local rank uses the roster before it is sent, and all messages
        // are sent in order.
        if let Some(peers) = &self.peers {
            messages
                .iter()
                .flatten()
                .for_each(|message| peers.notify(message));
        }
        drop(agreement);
        self.changed.notify_all();
    }

    /// Waits for the decision. After `deadline`, ranks that have not come are gone. Returns `None`
    /// if there is no decision after another `deadline`.
    fn await_roster(&self, deadline: Duration) -> Option<Arc<[usize]>> {
        if let Some(roster) = self.await_roster_until(Instant::now() + deadline.min(LONGEST)) {
            return Some(roster);
        }
        let mut ranks = Vec::new();
        self.change(|agreement| {
            ranks = agreement.open();
            ranks.iter().for_each(|rank| agreement.gone(*rank));
            Some(MembershipMessage::Gone {
                ranks: ranks.clone(),
            })
        });
        self.leave_behind(&ranks);
        self.await_roster_until(Instant::now() + deadline.min(LONGEST))
    }

    fn await_roster_until(&self, until: Instant) -> Option<Arc<[usize]>> {
        let mut agreement = self.agreement.lock();
        let mut is_late = false;
        while !is_late && agreement.roster().is_none() {
            is_late = self.changed.wait_until(&mut agreement, until).timed_out();
        }
        agreement.roster().cloned()
    }

    fn leave_behind(&self, ranks: &[usize]) {
        self.peers
            .iter()
            .for_each(|peers| peers.leave_behind(ranks));
    }
}
