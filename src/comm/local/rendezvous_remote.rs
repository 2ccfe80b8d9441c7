//! The [`Rendezvous`] among several processes. Messages of other processes post calls on behalf of their ranks, and
//! local events are sent to the other processes.

use std::sync::Arc;
use std::time::Duration;

use super::super::match_table::{GroupKey, OpHandle, P2pMessage, RemoteMessageHandle, Signature, StalledWait, Wait};
use super::super::sync::{Instant, MutexGuard, yield_now};
use super::{CommError, Failure, LINGER, Rendezvous, RendezvousState, SpinPolicy};
use crate::comm::CollectiveId;

/// Other processes of a launch, as the rendezvous notifies them. Called outside its lock.
pub(crate) trait PeerNotifier: Send + Sync {
    /// Notifies the other processes of `news`. Returns a failure that follows from it, such as a deadlock.
    fn tell(&self, news: PeerEvent) -> Option<Failure>;

    /// Makes progress on the transport with the calling thread, whose rank waits. Returns the result of
    /// [`Transport::progress`](crate::comm::transport::Transport).
    fn help(&self) -> Option<bool>;
}

/// Event of which other processes are notified.
pub(crate) enum PeerEvent {
    /// A failure was found in this process.
    Failed(Failure),
    /// No local rank needs these contributions, which other processes had offered.
    Declined(Vec<OpHandle>),
    /// A local rank is about to sleep until a message arrives.
    Awaited,
    /// A rank has waited for long, which may be a deadlock.
    Waits(StalledWait),
}

/// Number of times that a rank that cannot make progress on the transport yields before it sleeps, above all to the
/// thread of the transport. If no other thread needs the core, this takes some 100 microseconds: more than a small
/// collective, and less than waking an idle core.
const YIELDS: u32 = 300;

/// Makes progress on the transport while `quiet` returns true and messages move, and at most until `until`. Returns
/// false if the transport does not support it.
pub(super) fn help(outside: &dyn PeerNotifier, until: Instant, quiet: impl Fn() -> bool) -> bool {
    let soon = || until.min(Instant::now() + LINGER);
    let mut end = soon();
    while quiet() {
        match outside.help() {
            None => return false,
            Some(true) => end = soon(),
            // The rank that is waited for may need this core.
            Some(false) => yield_now(),
        }
        if Instant::now() >= end {
            break;
        }
    }
    true
}

/// Time that a rank with a failure waits for the decision which failure is the first. After that its process
/// decides by itself.
const GRACE: Duration = Duration::from_secs(5);

impl<F: Signature, P> Rendezvous<F, P> {
    /// Creates the rendezvous of a world of `ranks` ranks in several processes. `decides` is true in the one
    /// process that decides which failure is the first.
    pub fn among_processes(ranks: usize, multithreaded: bool, decides: bool, outside: Arc<dyn PeerNotifier>) -> Self {
        let rendezvous =
            Self { outside: Some(outside), ..Self::new(ranks, SpinPolicy::Yielding(YIELDS, LINGER), multithreaded) };
        if !decides {
            rendezvous.state.lock().board.defer();
        }
        rendezvous
    }

    /// Posts the next collective of `member`, a rank of another process. Its contribution arrives later.
    pub fn post_remote(&self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let mut state = self.state.lock();
        let announced = state.board.post_remote(group, member, print);
        self.notify(state, group, false, announced)
    }

    /// Like [`post_remote`](Self::post_remote), for a contribution that is sent only on demand. Returns true if it
    /// must be requested now.
    pub fn post_remote_on_demand(
        &self,
        group: GroupKey,
        member: usize,
        print: F,
    ) -> Result<(OpHandle, bool), CommError> {
        let mut state = self.state.lock();
        let offered = state.board.post_remote_on_demand(group, member, print);
        self.notify(state, group, false, offered)
    }

    /// Marks the result of `ticket` as needed now. Returns the offers to request.
    pub fn want(&self, ticket: OpHandle) -> Vec<OpHandle> {
        self.state.lock().board.want(ticket)
    }

    /// Like [`want`](Self::want), but also marks the latest deferred call before it, unless the result was marked
    /// before.
    pub fn want_and_next(&self, ticket: OpHandle) -> Vec<OpHandle> {
        self.state.lock().board.want_and_next(ticket)
    }

    /// Returns the signature of a posted call whose contribution has not arrived.
    pub fn print(&self, ticket: OpHandle) -> Option<F>
    where
        F: Clone,
    {
        self.state.lock().board.print(ticket).cloned()
    }

    /// Adds the contribution of a call that was posted without one. Returns true if the collective is now complete.
    pub fn provide_data(&self, ticket: OpHandle, part: P) -> bool {
        let mut state = self.state.lock();
        let complete = state.board.provide_data(ticket, part);
        let rung = self.notify(state, ticket.group, complete, Ok(()));
        rung.expect("the result is `Ok`");
        complete
    }

    /// Asks other processes whether a stalled wait is part of a deadlock.
    pub(super) fn ask_about<'a>(
        &'a self,
        state: MutexGuard<'a, RendezvousState<F, P>>,
        wait: Wait,
    ) -> MutexGuard<'a, RendezvousState<F, P>> {
        let long = state.board.long_wait(wait);
        self.leave(state);
        if let Some((outside, long)) = self.outside.as_ref().zip(long)
            && let Some(failure) = outside.tell(PeerEvent::Waits(long))
        {
            self.find(failure);
        }
        self.state.lock()
    }

    /// Returns the number of the wait that a local rank is in.
    pub fn wait_of(&self, rank: usize) -> Option<u64> {
        self.state.lock().board.wait_of(rank)
    }

    /// Returns the call that a local rank waits in, if it is still in wait `number` and needs `other`.
    pub fn still_needs(&self, rank: usize, number: u64, other: usize) -> Option<CollectiveId> {
        self.state.lock().board.still_needs(rank, number, other)
    }

    /// Posts a collective for a local rank that contributes later.
    pub fn join_late(&self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let mut state = self.state.lock();
        let joined = state.board.join_late(group, member, print);
        self.notify(state, group, false, joined).map_err(|error| self.counted(group, member, error))
    }

    /// Posts a message of another process, whose data arrives later.
    pub fn announce_letter(
        &self,
        group: GroupKey,
        to: usize,
        letter: P2pMessage<F, ()>,
    ) -> Result<RemoteMessageHandle, CommError> {
        let mut state = self.state.lock();
        let announced = state.board.announce_letter(group, to, letter);
        self.notify(state, group, false, announced)
    }

    /// Adds the data of a message of another process.
    pub fn fill_letter(&self, announced: RemoteMessageHandle, part: P) {
        let mut state = self.state.lock();
        let wanted = state.board.fill_letter(announced, part);
        let rung = self.notify(state, announced.group, wanted, Ok(()));
        rung.expect("the result is `Ok`");
    }

    /// Returns the error that counts for a call of `member` that was refused with `error`. If another process
    /// decides, that is the error of the failure that it named as the first.
    pub(super) fn counted(&self, group: GroupKey, member: usize, error: CommError) -> CommError {
        if self.outside.is_none() {
            return error;
        }
        let state = self.decided();
        match state.board.failure() {
            Some(failure) if error.without_notice() != failure.error(None) => {
                failure.error(state.board.last_call(group, member))
            }
            _ => error,
        }
    }

    /// Blocks while it is undecided which failure is the first. If the process that decides does not answer in
    /// time, this process decides.
    pub(super) fn decided(&self) -> MutexGuard<'_, RendezvousState<F, P>> {
        let (mut state, until) = (self.state.lock(), Instant::now() + GRACE);
        while state.board.is_undecided() {
            let bell = state.end.clone();
            let late;
            (state, late) = bell.sleep(state, until);
            if late {
                state.board.decide_here();
                state.ring_all();
            }
        }
        state
    }

    /// Records a failure of another process. `decided` is true if that failure is the first.
    pub fn hear(&self, failure: Failure, decided: bool) {
        let mut state = self.state.lock();
        if decided {
            state.board.decide(failure);
        } else {
            state.board.fail(failure);
        }
        state.ring_all();
        self.leave(state);
    }

    /// Makes this process decide by itself which failure is the first, from now on.
    pub fn decide_here(&self) {
        let mut state = self.state.lock();
        state.board.decide_here();
        state.ring_all();
        self.leave(state);
    }

    /// Waits a short time for the message about a failure that is known to have occurred. Returns the first
    /// failure.
    pub fn await_failure(&self) -> Option<Failure> {
        let (mut state, until) = (self.state.lock(), Instant::now() + GRACE);
        let mut late = false;
        while !late && state.board.failure().is_none() {
            let bell = state.end.clone();
            (state, late) = bell.sleep(state, until);
        }
        state.board.failure().cloned()
    }
}
