//! The [`Rendezvous`] of ranks in several processes: what others send joins it in the name of their ranks, and what is
//! found here is told to them.

use std::sync::Arc;
use std::time::Duration;

use super::super::match_table::{GroupKey, OpHandle, P2pMessage, RemoteMessageHandle, Signature, StalledWait, Wait};
use super::super::sync::{Instant, MutexGuard, yield_now};
use super::{CommError, Failure, LINGER, Rendezvous, RendezvousState, SpinPolicy};
use crate::comm::CollectiveId;

/// The other processes, as a rendezvous sees them. Called outside its lock.
pub(crate) trait PeerNotifier: Send + Sync {
    /// Tells them what they must know. Returns a failure that is known by it.
    fn tell(&self, news: PeerEvent) -> Option<Failure>;

    /// Lends the calling thread, whose rank waits, to whoever communicates:
    /// [`Transport::progress`](crate::comm::transport::Transport).
    fn help(&self) -> Option<bool>;
}

/// What other processes must know.
pub(crate) enum PeerEvent {
    /// A failure was found here.
    Failed(Failure),
    /// Nobody here needs these deposits any more, which were offered.
    Declined(Vec<OpHandle>),
    /// A rank here sleeps until something comes.
    Awaited,
    /// A rank has waited for long.
    Waits(StalledWait),
}

/// How often a rank that cannot help lets others have its core before it sleeps: the thread that communicates, above all.
/// Where nobody wants it that is some 100 microseconds, more than a small collective takes, and less than a core takes that
/// has to be woken.
const YIELDS: u32 = 300;

/// Helps while it is `quiet`, something moves, and `until` then at most. False: cannot.
pub(super) fn help(outside: &dyn PeerNotifier, until: Instant, quiet: impl Fn() -> bool) -> bool {
    let soon = || until.min(Instant::now() + LINGER);
    let mut end = soon();
    while quiet() {
        match outside.help() {
            None => return false,
            Some(true) => end = soon(),
            // Who it waits for may be on this core.
            Some(false) => yield_now(),
        }
        if Instant::now() >= end {
            break;
        }
    }
    true
}

/// How long a rank that has found a failure waits to hear whether it is the first. Its process then decides by itself.
const GRACE: Duration = Duration::from_secs(5);

impl<F: Signature, P> Rendezvous<F, P> {
    /// A world of `ranks` ranks in several processes, one of which `decides` which failure is the first.
    pub fn among_processes(ranks: usize, multithreaded: bool, decides: bool, outside: Arc<dyn PeerNotifier>) -> Self {
        let rendezvous =
            Self { outside: Some(outside), ..Self::new(ranks, SpinPolicy::Yielding(YIELDS, LINGER), multithreaded) };
        if !decides {
            rendezvous.state.lock().board.defer();
        }
        rendezvous
    }

    /// Joins the next collective of `member`, a rank of another process, whose deposit comes later.
    pub fn post_remote(&self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let mut state = self.state.lock();
        let announced = state.board.post_remote(group, member, print);
        self.notify(state, group, false, announced)
    }

    /// The same of one whose deposit comes only if it is asked for. True: it is.
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

    /// The result of `ticket` is wanted now. Returns the offers to ask for.
    pub fn want(&self, ticket: OpHandle) -> Vec<OpHandle> {
        self.state.lock().board.want(ticket)
    }

    /// The same; once, also of the call before it that is not wanted yet.
    pub fn want_and_next(&self, ticket: OpHandle) -> Vec<OpHandle> {
        self.state.lock().board.want_and_next(ticket)
    }

    /// What a rank that was announced has called, while its deposit is awaited.
    pub fn print(&self, ticket: OpHandle) -> Option<F>
    where
        F: Clone,
    {
        self.state.lock().board.print(ticket).cloned()
    }

    /// Whether the member of `ticket`, a rank here, has made the call, which others have.
    pub fn has_joined(&self, ticket: OpHandle) -> bool {
        self.state.lock().board.has_joined(ticket)
    }

    /// Adds the deposit of a rank that was announced, or joined for later. True: now complete.
    pub fn provide_data(&self, ticket: OpHandle, part: P) -> bool {
        let mut state = self.state.lock();
        let complete = state.board.provide_data(ticket, part);
        let rung = self.notify(state, ticket.group, complete, Ok(()));
        rung.expect("nothing has failed");
        complete
    }

    /// Asks others about a wait that takes long.
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

    /// The number of the wait that a rank here is in.
    pub fn wait_of(&self, rank: usize) -> Option<u64> {
        self.state.lock().board.wait_of(rank)
    }

    /// What a rank here waits in, if it is still in its wait of this number, and needs `other`.
    pub fn still_needs(&self, rank: usize, number: u64, other: usize) -> Option<CollectiveId> {
        self.state.lock().board.still_needs(rank, number, other)
    }

    /// [`join`](Self::post)s for a rank that is here, whose deposit comes later.
    pub fn join_late(&self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let mut state = self.state.lock();
        let joined = state.board.join_late(group, member, print);
        self.notify(state, group, false, joined).map_err(|error| self.counted(group, member, error))
    }

    /// [`join`](Self::post)s for a rank that is here, whose deposit comes once its result is wanted.
    pub fn post_deferred(&self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let mut state = self.state.lock();
        let joined = state.board.post_deferred(group, member, print);
        self.notify(state, group, false, joined).map_err(|error| self.counted(group, member, error))
    }

    /// A rank of another process wants the result of `ticket`.
    pub fn ask_for(&self, ticket: OpHandle) {
        self.state.lock().board.ask_for(ticket);
    }

    /// Whether one [does](Self::ask_for), or has.
    pub fn is_asked_for(&self, ticket: OpHandle) -> bool {
        self.state.lock().board.is_asked_for(ticket)
    }

    /// Whether all ranks have called the collective of `ticket`, whatever they have brought.
    pub fn have_all_called(&self, ticket: OpHandle) -> bool {
        self.state.lock().board.have_all_called(ticket)
    }

    /// Sends a message of another process, whose contents come later.
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

    /// Adds the contents of a message that was announced in `group`.
    pub fn fill_letter(&self, announced: RemoteMessageHandle, part: P) {
        let mut state = self.state.lock();
        let wanted = state.board.fill_letter(announced, part);
        let rung = self.notify(state, announced.group, wanted, Ok(()));
        rung.expect("nothing has failed");
    }

    /// What counts of an `error` that `member` was refused with: where another process decides, that of the failure which
    /// it says was the first.
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

    /// Waits while it is open which failure is the first. Another process decides; none does for long.
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

    /// Another process has found a failure, or, if `decided`, said that it was the first.
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

    /// From now on this process decides by itself which failure is the first.
    pub fn decide_here(&self) {
        let mut state = self.state.lock();
        state.board.decide_here();
        state.ring_all();
        self.leave(state);
    }

    /// Waits for word of a failure, which there was, and not for long. Returns the first.
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
