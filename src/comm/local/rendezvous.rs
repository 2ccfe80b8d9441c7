//! [`Rendezvous`]: the [`MatchTable`] behind one lock, and a condition variable for each group.
//!
//! One lock for the whole world makes the joint failure simple: it is set under the lock that
//! every waiter holds when it decides to sleep, so no wake-up can be lost. The lock covers
//! bookkeeping only; tensors are read, and dropped, outside it, and the ranks of a complete collective
//! are woken outside it, lest they find it taken.
//!
//! Before it sleeps, a waiter [lingers](SpinPolicy): to sleep and to be woken takes longer than most ranks are late. Among
//! several processes it carries meanwhile what there is to carry, if it [may](PeerNotifier::help): so what comes is there
//! without another thread having been woken for it, or waking the rank.
//!
//! Of ranks in several processes each process has a rendezvous, which ranks of the others join by what they send. What is
//! called in their name never waits. A rank that finds a failure does, for the process that decides which one is the first.

#[path = "rendezvous_remote.rs"] // also where the model of the rendezvous includes this file
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
    /// The other processes, if there are any.
    outside: Option<Arc<dyn PeerNotifier>>,
}

/// How a waiter passes the time before it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpinPolicy {
    /// It looks so many times: where every rank has a core of its own.
    Spinning(u32),
    /// It lets others run on its core so many times, for so long at most: who it waits for may be among them.
    Yielding(u32, Duration),
}

impl SpinPolicy {
    /// Passes the time while it is `quiet`, and `until` then at most.
    pub fn pass(self, until: Instant, quiet: impl Fn() -> bool) {
        match self {
            Self::Spinning(times) => (0..times).take_while(|_| quiet()).for_each(|_| spin_loop()),
            Self::Yielding(times, most) => {
                // Who computes on the core keeps it for long, once it has it.
                let end = until.min(Instant::now() + most);
                (0..times).take_while(|_| quiet() && Instant::now() < end).for_each(|_| yield_now());
            }
        }
    }
}

/// How long a waiter of few ranks yields, if it gets its core back at all; and helps while nothing moves.
pub(crate) const LINGER: Duration = Duration::from_millis(1);

/// How often a waiter lingers at most, when what is rung for is not what it waits for.
const LINGERS: u32 = 64;

/// A complete collective.
pub(crate) struct Matched<P> {
    pub parts: Parts<P>,
    /// The global rank that was the last to join.
    pub last: usize,
}

/// Stands for "no deadline", and can be added to any instant.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long a rank waits for ranks of other processes before it asks whether these wait, too.
const PATIENCE: Duration = Duration::from_millis(500);

struct RendezvousState<F, P> {
    board: MatchTable<F, P>,
    bells: Vec<Arc<EventCount>>,
    /// Rung when the world has failed or a rank returned.
    end: Arc<EventCount>,
}

/// Rung whenever a waiter of the group should look again; what it will see is set under the lock before.
#[derive(Default)]
struct EventCount {
    condvar: Condvar,
    /// How many there are: to wake nobody costs a call of the system's.
    sleepers: AtomicU64,
    epoch: AtomicU64,
}

impl EventCount {
    fn notify(&self) {
        self.epoch.fetch_add(1, Ordering::Release);
        // Whoever rings has had the lock since then, under which whoever sleeps was counted.
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.condvar.notify_all();
        }
    }

    /// Sleeps until it rings, or until `deadline`: true, if it has passed.
    fn sleep<'a, T>(&self, guard: MutexGuard<'a, T>, deadline: Instant) -> (MutexGuard<'a, T>, bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let woken = self.condvar.wait_until(guard, deadline);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        woken
    }
}

impl<F: Signature, P> Rendezvous<F, P> {
    /// A world of `ranks` ranks.
    pub fn new(ranks: usize, lingers: SpinPolicy, multithreaded: bool) -> Self {
        let state =
            RendezvousState { board: MatchTable::new(ranks, multithreaded), bells: Vec::new(), end: Arc::default() };
        Self { state: Mutex::new(state), lingers, outside: None }
    }

    /// The group of these ranks in this order and of this name; the same for all its ranks.
    pub fn group(&self, ranks: &[usize], name: impl Into<Cow<'static, str>>) -> GroupKey {
        let mut state = self.state.lock();
        let key = state.board.group(ranks, name);
        if state.bells.len() == key.index() {
            state.bells.push(Arc::default());
        }
        key
    }

    /// Global ranks of a group.
    pub fn ranks(&self, group: GroupKey) -> Arc<[usize]> {
        self.state.lock().board.ranks(group).clone()
    }

    /// Joins `member`'s next collective of `group` with `part`. Never blocks.
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

    /// Posts `member`'s receive of a message of `from`, or of anybody. Never blocks.
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

    /// Wakes those whom `result` concerns, and unlocks.
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
        // Outside the lock, for which all that wake come.
        if let Some(bell) = bell {
            bell.notify();
        }
        result
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_complete(&self, ticket: OpHandle) -> bool {
        self.state.lock().board.is_complete(ticket)
    }

    /// Whether [`wait_for_message`](Self::wait_for_message) would return at once.
    pub fn has_arrived(&self, claim: RecvHandle) -> bool {
        self.state.lock().board.is_over(Wait::Message(claim))
    }

    /// Blocks until every member has joined, the world has failed, or `deadline` has passed;
    /// then releases the ticket.
    pub fn wait(&self, ticket: OpHandle, deadline: Duration) -> Result<Matched<P>, CommError> {
        let (mut state, result) = self.block(Wait::All(ticket), deadline, |board| board.poll(ticket));
        let result = result.map(|parts| Matched { parts, last: state.board.last(ticket) });
        state.board.release(ticket);
        self.leave(state);
        result
    }

    /// Blocks until the message of `claim` is there, the world has failed, or `deadline` has passed; then there is no
    /// such claim any more.
    pub fn wait_for_message(&self, claim: RecvHandle, deadline: Duration) -> Result<P2pMessage<F, P>, CommError> {
        let (mut state, result) = self.block(Wait::Message(claim), deadline, |board| board.arrival(claim));
        if result.is_err() {
            state.board.give_up(claim);
        }
        self.leave(state);
        result
    }

    /// Blocks until `look` is ready, the world has failed, or `deadline` has passed.
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
                // What it was rung for may be another wait's.
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

    /// Passes the time while it is `quiet`, as long as a waiter does before it sleeps, and `until` then at most.
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

    /// Gives up the result of `ticket`.
    pub fn release(&self, ticket: OpHandle) {
        let mut state = self.state.lock();
        state.board.release(ticket);
        self.leave(state);
    }

    /// Gives up the message of `claim`.
    pub fn give_up(&self, claim: RecvHandle) {
        let mut state = self.state.lock();
        state.board.give_up(claim);
        self.leave(state);
    }

    /// Records the first failure and wakes everyone. Returns the error that counts.
    pub fn fail(&self, failure: Failure) -> CommError {
        let found = self.find(failure);
        let state = self.decided();
        state.board.failure().unwrap_or(&found).error(None)
    }

    /// [`fail`](Self::fail)s, without waiting for the process that decides. Returns the failure that counts, as far as is
    /// known here.
    pub fn find(&self, failure: Failure) -> Failure {
        let mut state = self.state.lock();
        let found = state.board.fail(failure);
        state.ring_all();
        self.leave(state);
        found
    }

    /// The first failure, if any.
    pub fn failure(&self) -> Option<Failure> {
        self.state.lock().board.failure().cloned()
    }

    /// The rank's program is over: wakes those who may be waiting for it. False: it was already.
    pub fn returned(&self, rank: usize) -> bool {
        let mut state = self.state.lock();
        let first = state.board.returned(rank);
        for group in state.board.groups_of(rank) {
            state.bells[group.index()].notify();
        }
        state.end.notify();
        first
    }

    /// Whether the rank's program is over.
    pub fn has_returned(&self, rank: usize) -> bool {
        self.state.lock().board.has_returned(rank)
    }

    /// Whether `rank`, of another process, owes its deposit to a result that a rank here has yet to take.
    pub fn owes(&self, rank: usize) -> bool {
        self.state.lock().board.owes(rank)
    }

    /// Waits until the programs of all ranks are over.
    pub fn finish(&self) {
        let mut state = self.state.lock();
        while !state.board.all_returned() {
            let bell = state.end.clone();
            (state, _) = bell.sleep(state, Instant::now() + LONGEST);
        }
    }

    /// What `rank` was doing at the first failure.
    pub fn doing(&self, rank: usize) -> String {
        self.state.lock().board.doing(rank)
    }

    /// Unlocks, and only then drops what has been freed, and tells others of a failure.
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
        let failure = self.board.failure().expect("polled as failed");
        failure.error(Some(self.board.id(wait)))
    }

    /// The deadline has passed: a failure unless what `wait` is for came just now.
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
#[path = "rendezvous_tests.rs"] // also where the model of the rendezvous includes this file
mod tests;
