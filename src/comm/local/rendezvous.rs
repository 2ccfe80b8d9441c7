//! [`Rendezvous`]: the [`MatchTable`] behind one lock, with an event count for each group.
//!
//! One lock for all groups makes it simple that all ranks fail together: a failure is set under the lock that every
//! waiter holds when it decides to sleep, so no wake-up can be lost. The lock covers bookkeeping only. Tensors are
//! read and dropped outside it. The ranks of a complete collective are also woken outside it, because they would
//! otherwise have to wait for the lock.
//!
//! Before a waiter sleeps, it [spins or yields](SpinPolicy), because sleeping and waking takes longer than most
//! ranks are late. Among several processes, it makes progress on the transport during this time if it
//! [can](PeerNotifier::help). A message can then complete the wait without waking the thread of the transport or
//! the rank.
//!
//! If a launch has several processes, each of them has a rendezvous, and the messages of the other processes post
//! calls on behalf of their ranks. Such calls never block. A rank that finds a failure does block, until the
//! process that decides has named the first failure.

#[path = "rendezvous_remote.rs"] // needed where the rendezvous model includes this file
mod remote;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use super::match_table::{GroupKey, MatchTable, OpHandle, P2pMessage, Parts, Poll, RecvHandle, Signature, Wait};
use super::sync::{AtomicU64, Condvar, Instant, Mutex, MutexGuard, Ordering, spin_loop, yield_now};
use crate::comm::CommError;
use crate::comm::backend::Failure;

pub(crate) use remote::{PeerEvent, PeerNotifier};

pub(crate) struct Rendezvous<F, P> {
    state: Mutex<RendezvousState<F, P>>,
    lingers: SpinPolicy,
    /// Other processes of the launch, if there are any.
    outside: Option<Arc<dyn PeerNotifier>>,
}

/// Policy by which a waiter passes the time before it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpinPolicy {
    /// Polls at most this many times. For ranks that have a core each.
    Spinning(u32),
    /// Yields the core at most this many times and for at most this long. For ranks that share cores: the rank that
    /// is waited for may need this one.
    Yielding(u32, Duration),
}

impl SpinPolicy {
    /// Spins or yields according to the policy, while `quiet` returns true and at most until `until`.
    pub fn pass(self, until: Instant, quiet: impl Fn() -> bool) {
        match self {
            Self::Spinning(times) => (0..times).take_while(|_| quiet()).for_each(|_| spin_loop()),
            Self::Yielding(times, most) => {
                // A thread that computes keeps the core for long once it has it.
                let end = until.min(Instant::now() + most);
                (0..times).take_while(|_| quiet() && Instant::now() < end).for_each(|_| yield_now());
            }
        }
    }
}

/// Maximum time for which a waiter yields if few ranks share a core, and for which it makes progress on the
/// transport while no message moves.
pub(crate) const LINGER: Duration = Duration::from_millis(1);

/// Maximum number of times that a waiter spins before it sleeps, when each notification was meant for another wait
/// of the group.
const LINGERS: u32 = 64;

/// A complete collective, as [`Rendezvous::wait`] returns it.
pub(crate) struct Matched<P> {
    pub parts: Parts<P>,
    /// Global rank whose contribution arrived last.
    pub last: usize,
}

/// Deadline that stands for "none". It can be added to any instant.
pub(crate) const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Time that a rank waits for ranks of other processes before it asks whether those wait, too.
const PATIENCE: Duration = Duration::from_millis(500);

struct RendezvousState<F, P> {
    board: MatchTable<F, P>,
    bells: Vec<Arc<EventCount>>,
    /// Notified when the world has failed or a rank has returned.
    end: Arc<EventCount>,
}

/// Event count on which the waiters of a group sleep. It is notified whenever they must look again; the new state
/// is set under the lock before.
#[derive(Default)]
struct EventCount {
    condvar: Condvar,
    /// Number of sleepers. Without any, `notify` avoids a system call.
    sleepers: AtomicU64,
    epoch: AtomicU64,
}

impl EventCount {
    fn notify(&self) {
        self.epoch.fetch_add(1, Ordering::Release);
        // The caller has held the lock since the change, and a sleeper is counted under the lock.
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.condvar.notify_all();
        }
    }

    /// Sleeps until the next notification or until `deadline`. Returns true if the deadline has passed.
    fn sleep<'a, T>(&self, guard: MutexGuard<'a, T>, deadline: Instant) -> (MutexGuard<'a, T>, bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let woken = self.condvar.wait_until(guard, deadline);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        woken
    }
}

impl<F: Signature, P> Rendezvous<F, P> {
    /// Creates the rendezvous of a world of `ranks` ranks in this process.
    pub fn new(ranks: usize, lingers: SpinPolicy, multithreaded: bool) -> Self {
        let state =
            RendezvousState { board: MatchTable::new(ranks, multithreaded), bells: Vec::new(), end: Arc::default() };
        Self { state: Mutex::new(state), lingers, outside: None }
    }

    /// Returns the key of the group with these ranks, in this order, and this name. All its ranks receive the same
    /// key.
    pub fn group(&self, ranks: &[usize], name: impl Into<Cow<'static, str>>) -> GroupKey {
        let mut state = self.state.lock();
        let key = state.board.group(ranks, name);
        if state.bells.len() == key.index() {
            state.bells.push(Arc::default());
        }
        key
    }

    /// Returns the global ranks of a group.
    pub fn ranks(&self, group: GroupKey) -> Arc<[usize]> {
        self.state.lock().board.ranks(group).clone()
    }

    /// Posts the next collective of `member` on `group`, with its contribution `part`. Never blocks.
    pub fn post(&self, group: GroupKey, member: usize, print: F, part: P) -> Result<OpHandle, CommError> {
        let mut state = self.state.lock();
        let joined = state.board.post(group, member, print, part);
        let complete = matches!(joined, Ok((_, true)));
        let joined = self.notify(state, group, complete, joined).map(|(ticket, _)| ticket);
        joined.map_err(|error| self.counted(group, member, error))
    }

    /// Sends a message to member `to` of the group. Never blocks.
    pub fn send(&self, group: GroupKey, to: usize, letter: P2pMessage<F, P>) -> Result<(), CommError> {
        let (from, mut state) = (letter.from, self.state.lock());
        let sent = state.board.send(group, to, letter);
        let wanted = matches!(sent, Ok(true));
        let sent = self.notify(state, group, wanted, sent).map(|_| ());
        sent.map_err(|error| self.counted(group, from, error))
    }

    /// Posts a receive of `member` for a message from `from`, or from any member if that is `None`. Never blocks.
    pub fn receive(
        &self,
        group: GroupKey,
        member: usize,
        from: Option<usize>,
        tag: u32,
        print: F,
    ) -> Result<RecvHandle, CommError> {
        let mut state = self.state.lock();
        let posted = state.board.receive(group, member, from, tag, print);
        let posted = self.notify(state, group, false, posted);
        posted.map_err(|error| self.counted(group, member, error))
    }

    /// Unlocks, and notifies the waiters that `result` concerns: those of the group if `awaited`, all if it is an
    /// error.
    fn notify<T>(
        &self,
        state: MutexGuard<'_, RendezvousState<F, P>>,
        group: GroupKey,
        awaited: bool,
        result: Result<T, CommError>,
    ) -> Result<T, CommError> {
        let bell = awaited.then(|| state.bells[group.index()].clone());
        if result.is_err() {
            state.ring_all();
        }
        self.leave(state);
        // Outside the lock, which all woken ranks acquire.
        if let Some(bell) = bell {
            bell.notify();
        }
        result
    }

    /// Returns true if [`wait`](Self::wait) would return at once.
    pub fn is_complete(&self, ticket: OpHandle) -> bool {
        self.state.lock().board.is_complete(ticket)
    }

    /// Returns true if [`wait_for_message`](Self::wait_for_message) would return at once.
    pub fn has_arrived(&self, claim: RecvHandle) -> bool {
        self.state.lock().board.is_over(Wait::Message(claim))
    }

    /// Blocks until every member has contributed, the world has failed, or `deadline` has passed. Then releases the
    /// handle.
    pub fn wait(&self, ticket: OpHandle, deadline: Duration) -> Result<Matched<P>, CommError> {
        let (mut state, result) = self.block(Wait::All(ticket), deadline, |board| board.poll(ticket));
        let result = result.map(|parts| Matched { parts, last: state.board.last(ticket) });
        state.board.release(ticket);
        self.leave(state);
        result
    }

    /// Blocks until the message of `claim` has arrived, the world has failed, or `deadline` has passed. Afterwards
    /// the handle is no longer valid.
    pub fn wait_for_message(&self, claim: RecvHandle, deadline: Duration) -> Result<P2pMessage<F, P>, CommError> {
        let (mut state, result) = self.block(Wait::Message(claim), deadline, |board| board.arrival(claim));
        if result.is_err() {
            state.board.give_up(claim);
        }
        self.leave(state);
        result
    }

    /// Blocks until `look` returns a value, the world has failed, or `deadline` has passed.
    fn block<T>(
        &self,
        wait: Wait,
        deadline: Duration,
        look: impl Fn(&mut MatchTable<F, P>) -> Poll<T>,
    ) -> (MutexGuard<'_, RendezvousState<F, P>>, Result<T, CommError>) {
        let mut state = self.state.lock();
        let rank = state.board.rank(wait);
        let (mut until, mut lingers) = (None, LINGERS);
        let result = loop {
            match look(&mut state.board) {
                Poll::Ready(value) => break Ok(value),
                Poll::Failed => break Err(state.error(wait)),
                Poll::Pending => {}
            }
            let until = match until {
                None => {
                    state.board.begin_wait(wait);
                    *until.insert(Instant::now() + deadline.min(LONGEST))
                }
                Some(until) => {
                    state.board.check_left(wait);
                    until
                }
            };
            if state.board.failure().is_some() {
                state.ring_all();
                continue;
            }
            if state.board.is_undecided() {
                state.ring_all();
                self.leave(state);
                state = self.decided();
                continue;
            }
            let bell = state.bells[wait.group().index()].clone();
            if lingers > 0 {
                let rung = bell.epoch.load(Ordering::Relaxed);
                let is_quiet = || bell.epoch.load(Ordering::Acquire) == rung;
                drop(state);
                self.linger(until, is_quiet);
                // The notification may have been meant for another wait.
                lingers = if is_quiet() { 0 } else { lingers - 1 };
                state = self.state.lock();
            } else {
                let look = if self.outside.is_some() { until.min(Instant::now() + PATIENCE) } else { until };
                let late;
                (state, late) = bell.sleep(state, look);
                if late && look == until {
                    state.expire(wait, deadline);
                } else if late {
                    state = self.ask_about(state, wait);
                }
            }
        };
        if until.is_some() {
            state.board.end_wait(rank, wait);
        }
        (state, result)
    }

    /// Makes progress, spins or yields before the caller sleeps, while `quiet` returns true and at most until
    /// `until`.
    fn linger(&self, until: Instant, quiet: impl Fn() -> bool) {
        if let Some(outside) = &self.outside {
            let helped = remote::help(&**outside, until, &quiet);
            if helped && !quiet() {
                return;
            }
            outside.tell(PeerEvent::Awaited);
            if helped {
                return;
            }
        }
        self.lingers.pass(until, quiet);
    }

    /// Releases the handle of a collective whose result the rank does not need.
    pub fn release(&self, ticket: OpHandle) {
        let mut state = self.state.lock();
        state.board.release(ticket);
        self.leave(state);
    }

    /// Releases the handle of a receive whose message the rank does not need.
    pub fn give_up(&self, claim: RecvHandle) {
        let mut state = self.state.lock();
        state.board.give_up(claim);
        self.leave(state);
    }

    /// Records the first failure and wakes all waiters. Waits for the process that decides which failure is the
    /// first, and returns the error of that one.
    pub fn fail(&self, failure: Failure) -> CommError {
        let found = self.find(failure);
        let state = self.decided();
        state.board.failure().unwrap_or(&found).error(None)
    }

    /// Like [`fail`](Self::fail), but does not wait for the process that decides. Returns the first failure as far
    /// as this process knows it.
    pub fn find(&self, failure: Failure) -> Failure {
        let mut state = self.state.lock();
        let found = state.board.fail(failure);
        state.ring_all();
        self.leave(state);
        found
    }

    /// Returns the first failure, if there was one.
    pub fn failure(&self) -> Option<Failure> {
        self.state.lock().board.failure().cloned()
    }

    /// Records that the program of a rank has ended, and wakes all ranks that may be waiting for it. Returns false
    /// if that was recorded before.
    pub fn returned(&self, rank: usize) -> bool {
        let mut state = self.state.lock();
        let first = state.board.returned(rank);
        for group in state.board.groups_of(rank) {
            state.bells[group.index()].notify();
        }
        state.end.notify();
        first
    }

    /// Returns true if the program of the rank has ended.
    pub fn has_returned(&self, rank: usize) -> bool {
        self.state.lock().board.has_returned(rank)
    }

    /// Returns true if `rank`, of another process, still has to contribute to a collective whose result a local
    /// rank has not taken.
    pub fn owes(&self, rank: usize) -> bool {
        self.state.lock().board.owes(rank)
    }

    /// Blocks until the programs of all ranks have ended or, if the world has failed, `deadline` has passed. Returns
    /// the ranks whose programs have not ended.
    pub fn finish(&self, deadline: Duration) -> Vec<usize> {
        let (mut state, mut until, mut is_late) = (self.state.lock(), None, false);
        loop {
            let running = state.board.running();
            if running.is_empty() || is_late {
                return running;
            }
            if state.board.failure().is_some() {
                until.get_or_insert_with(|| Instant::now() + deadline.min(LONGEST));
            }
            let bell = state.end.clone();
            (state, is_late) = bell.sleep(state, until.unwrap_or_else(|| Instant::now() + LONGEST));
        }
    }

    /// Describes the activity of `rank` at the first failure, or now if there was none.
    pub fn doing(&self, rank: usize) -> String {
        self.state.lock().board.doing(rank)
    }

    /// Unlocks, then drops the freed contributions and notifies other processes of a failure and of declined
    /// offers.
    fn leave(&self, mut state: MutexGuard<'_, RendezvousState<F, P>>) {
        let freed = state.board.take_freed();
        let news = self.outside.as_ref().map(|outside| (outside, state.board.untold(), state.board.take_declined()));
        drop(state);
        drop(freed);
        let Some((outside, untold, declined)) = news else { return };
        let declined = Some(declined).filter(|declined| !declined.is_empty());
        for news in [untold.map(PeerEvent::Failed), declined.map(PeerEvent::Declined)].into_iter().flatten() {
            outside.tell(news);
        }
    }
}

impl<F: Signature, P> RendezvousState<F, P> {
    fn ring_all(&self) {
        for bell in &self.bells {
            bell.notify();
        }
        self.end.notify();
    }

    fn error(&self, wait: Wait) -> CommError {
        let failure = self.board.failure().expect("`poll` returned `Failed`");
        failure.error(Some(self.board.id(wait)))
    }

    /// Fails the world because the deadline of `wait` has passed, unless the wait is over by now.
    fn expire(&mut self, wait: Wait, deadline: Duration) {
        if self.board.is_over(wait) {
            return;
        }
        let error = CommError::DeadlineExceeded {
            rank: self.board.rank(wait),
            missing: self.board.missing(wait),
            during: self.board.id(wait),
            deadline,
        };
        self.board.fail(Failure::Collective(error));
        self.ring_all();
    }
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"] // needed where the rendezvous model includes this file
mod tests;
