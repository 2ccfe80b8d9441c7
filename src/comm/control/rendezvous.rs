//! [`Rendezvous`]: the [`MatchTable`] behind one lock, with an event count for each group.
//!
//! One lock for all groups makes it simple that all ranks fail together: a failure is set under the
//! lock that every waiter holds when it decides to sleep, so no wake-up can be lost. The lock
//! covers bookkeeping only. Tensors are read and dropped outside it. The ranks of a complete
//! collective are also woken outside it, because they would otherwise have to wait for the lock.
//!
//! Before a waiter sleeps, it [spins or yields](SpinPolicy), because sleeping and waking takes
//! longer than most ranks are late. Among several processes, it makes progress on the transport
//! during this time if it [can](PeerNotifier::progress). A message can then complete the wait
//! without waking the thread of the transport or the rank.
//!
//! If a launch has several processes, each of them has a rendezvous, and the messages of the other
//! processes post calls on behalf of their ranks. Such calls never block. A rank that finds a
//! failure does block, until the process that decides has named the first failure.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use super::match_table::{
    CallData, GroupKey, MatchTable, MessageHandle, OpHandle, P2pMessage, Parts, Poll, RecvHandle,
    Signature, StalledWait, Wait,
};
use super::sync::{AtomicU64, Condvar, Instant, Mutex, MutexGuard, Ordering, spin_loop, yield_now};
use crate::comm::CommError;
use crate::comm::backend::Failure;

pub(crate) struct Rendezvous<F, P> {
    state: Mutex<RendezvousState<F, P>>,
    spin: SpinPolicy,
    /// Other processes of the launch, if there are any.
    peers: Option<Arc<dyn PeerNotifier>>,
    /// Called once, when the first failure is known.
    abort: Option<Box<dyn Fn() + Send + Sync>>,
}

/// Other processes of a launch, as the rendezvous notifies them. Called outside its lock.
pub(crate) trait PeerNotifier: Send + Sync {
    /// Notifies the other processes of `event`. Returns a failure that follows from it, such as a
    /// deadlock.
    fn notify(&self, event: PeerEvent) -> Option<Failure>;

    /// Makes progress on the transport with the calling thread, whose rank waits. Returns the
    /// result of [`Transport::progress`](crate::comm::transport::Transport).
    fn progress(&self) -> Option<bool>;
}

/// Event of which other processes are notified.
pub(crate) enum PeerEvent {
    /// A failure was found in this process, which has `decided` that it is the first, or leaves
    /// that to another process.
    Failed { failure: Failure, decided: bool },
    /// No local rank needs these contributions, which other processes had offered.
    Declined(Vec<OpHandle>),
    /// A local rank is about to sleep until a message arrives.
    Awaited,
    /// A rank has waited for long, which may be a deadlock.
    Waits(StalledWait),
}

/// Policy by which a waiter passes the time before it sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpinPolicy {
    /// Polls at most this many times. For ranks that have a core each.
    Spinning(u32),
    /// Yields the core at most this many times and for at most this long. For ranks that share
    /// cores: the rank that is waited for may need this one.
    Yielding(u32, Duration),
}

impl SpinPolicy {
    /// Policy of a rank that cannot make progress on the transport: it yields, above all to the
    /// thread of the transport. If no other thread needs the core, this takes some 100
    /// microseconds: more than a small collective, and less than waking an idle core.
    const AMONG_PROCESSES: Self = Self::Yielding(300, LINGER);

    /// Spins or yields according to the policy, while `quiet` returns true and at most until
    /// `until`.
    pub fn pass(self, until: Instant, quiet: impl Fn() -> bool) {
        match self {
            Self::Spinning(times) => (0..times).take_while(|_| quiet()).for_each(|_| spin_loop()),
            Self::Yielding(times, most) => {
                // A thread that computes keeps the core for long once it has it.
                let end = until.min(Instant::now() + most);
                (0..times)
                    .take_while(|_| quiet() && Instant::now() < end)
                    .for_each(|_| yield_now());
            }
        }
    }
}

/// Maximum time for which a waiter yields if few ranks share a core, and for which it makes
/// progress on the transport while no message moves.
pub(crate) const LINGER: Duration = Duration::from_millis(1);

/// Maximum number of times that a waiter spins before it sleeps, when each notification was meant
/// for another wait of the group.
const SPINS: u32 = 64;

/// Deadline that stands for "none". It can be added to any instant.
pub(crate) const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Time that a rank waits for ranks of other processes before it asks whether those wait, too.
const PATIENCE: Duration = Duration::from_millis(500);

/// Time that a rank with a failure waits for the decision which failure is the first. After that
/// its process decides by itself.
const GRACE: Duration = Duration::from_secs(5);

/// A complete collective, as [`Rendezvous::wait`] returns it.
pub(crate) struct Matched<P> {
    pub parts: Parts<P>,
    /// Global rank whose contribution arrived last.
    pub last: usize,
}

struct RendezvousState<F, P> {
    table: MatchTable<F, P>,
    /// Event count of each group.
    events: Vec<Arc<EventCount>>,
    /// Notified when the world has failed or a rank has returned.
    end: Arc<EventCount>,
    /// True once `abort` has been or is about to be called.
    is_aborted: bool,
}

/// Event count on which the waiters of a group sleep. It is notified whenever they must look again;
/// the new state is set under the lock before.
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

    /// Sleeps until the next notification or until `deadline`. Returns true if the deadline has
    /// passed.
    fn sleep<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        deadline: Instant,
    ) -> (MutexGuard<'a, T>, bool) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        let woken = self.condvar.wait_until(guard, deadline);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        woken
    }
}

type Guard<'a, F, P> = MutexGuard<'a, RendezvousState<F, P>>;

impl<F: Signature, P> Rendezvous<F, P> {
    /// Creates the rendezvous of a world of `ranks` ranks in this process.
    pub fn new(ranks: usize, spin: SpinPolicy, multithreaded: bool) -> Self {
        let events = Vec::new();
        let end = Arc::default();
        let state = RendezvousState {
            table: MatchTable::new(ranks, multithreaded),
            events,
            end,
            is_aborted: false,
        };
        Self {
            state: Mutex::new(state),
            spin,
            peers: None,
            abort: None,
        }
    }

    /// Sets a function that is called once, when the first failure is known, outside the lock.
    pub fn with_abort(self, abort: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            abort: Some(Box::new(abort)),
            ..self
        }
    }

    /// Creates the rendezvous of a world of `ranks` ranks in several processes. `decides` is true
    /// in the one process that decides which failure is the first.
    pub fn among_processes(
        ranks: usize,
        multithreaded: bool,
        decides: bool,
        peers: Arc<dyn PeerNotifier>,
    ) -> Self {
        let rendezvous = Self {
            peers: Some(peers),
            ..Self::new(ranks, SpinPolicy::AMONG_PROCESSES, multithreaded)
        };
        if !decides {
            rendezvous.state.lock().table.arbiter.defer();
        }
        rendezvous
    }

    /// Returns the key of the group with these ranks, in this order, and this name. All its ranks
    /// receive the same key.
    pub fn group(&self, ranks: &[usize], name: impl Into<Cow<'static, str>>) -> GroupKey {
        let mut state = self.state.lock();
        let key = state.table.group(ranks, name);
        if state.events.len() == key.index() {
            state.events.push(Arc::default());
        }
        key
    }

    /// Passes the match table to `read`, under the lock.
    pub fn read<T>(&self, read: impl FnOnce(&mut MatchTable<F, P>) -> T) -> T {
        read(&mut self.state.lock().table)
    }

    /// Posts the next collective of `member` on `group`. Never blocks, unless a local rank's call
    /// fails. Returns true if the collective is now complete, or the contribution that is offered
    /// on demand must be requested.
    pub fn post(
        &self,
        group: GroupKey,
        member: usize,
        signature: F,
        data: impl Into<CallData<P>>,
    ) -> Result<(OpHandle, bool), CommError> {
        let data = data.into();
        let is_local = matches!(data, CallData::Local(_));
        let change = |table: &mut MatchTable<F, P>| {
            let posted = table.post(group, member, signature, data);
            let is_complete = is_local && matches!(posted, Ok((_, true)));
            (posted, is_complete)
        };
        self.change(group, is_local.then_some(member), change)
    }

    /// Adds the contribution of a call that was posted without one. Returns true if the collective
    /// is now complete.
    pub fn provide_data(&self, op: OpHandle, part: P) -> bool {
        let provide = |table: &mut MatchTable<F, P>| {
            let is_complete = table.provide_data(op, part);
            (Ok(is_complete), is_complete)
        };
        self.change(op.group, None, provide)
            .is_ok_and(|is_complete| is_complete)
    }

    /// Sends a message to member `to` of the group, with its data if a local rank sends it. Never
    /// blocks, unless a local rank's call fails.
    pub fn send(
        &self,
        group: GroupKey,
        to: usize,
        message: P2pMessage<F, Option<P>>,
    ) -> Result<MessageHandle, CommError> {
        let caller = message.part.is_some().then_some(message.from);
        self.send_by(caller, group, to, message)
    }

    /// Sends a message of a local rank whose data follows. Never blocks, unless it fails.
    pub fn announce(
        &self,
        group: GroupKey,
        to: usize,
        message: P2pMessage<F, Option<P>>,
    ) -> Result<MessageHandle, CommError> {
        self.send_by(Some(message.from), group, to, message)
    }

    fn send_by(
        &self,
        caller: Option<usize>,
        group: GroupKey,
        to: usize,
        message: P2pMessage<F, Option<P>>,
    ) -> Result<MessageHandle, CommError> {
        let send = |table: &mut MatchTable<F, P>| match table.send(group, to, message) {
            Ok((message, is_awaited)) => (Ok(message), is_awaited),
            Err(error) => (Err(error), false),
        };
        self.change(group, caller, send)
    }

    /// Counts a message that a rank here sends to another process. Fails as if it were sent to a
    /// rank here.
    pub fn send_elsewhere(
        &self,
        group: GroupKey,
        from: usize,
        signature: &F,
    ) -> Result<(), CommError> {
        self.change(group, Some(from), |table| {
            (table.send_elsewhere(group, from, signature), false)
        })
    }

    /// Adds the data of a message that was sent without.
    pub fn provide_message(&self, message: MessageHandle, part: P) {
        let _ = self.change(message.group, None, |table| {
            (Ok(()), table.provide_message(message, part))
        });
    }

    /// Posts a receive of `member` for a message from `from`, or from any member if that is `None`.
    /// Never blocks, unless it fails.
    pub fn receive(
        &self,
        group: GroupKey,
        member: usize,
        from: Option<usize>,
        tag: u32,
        signature: F,
    ) -> Result<RecvHandle, CommError> {
        self.change(group, Some(member), |table| {
            (table.receive(group, member, from, tag, signature), false)
        })
    }

    /// Changes the table by a call on `group`, and notifies the waiters that the result concerns:
    /// those of the group if `change` returns true, all if it returns an error. For a local
    /// `caller`, the error is the one that counts.
    fn change<T>(
        &self,
        group: GroupKey,
        caller: Option<usize>,
        change: impl FnOnce(&mut MatchTable<F, P>) -> (Result<T, CommError>, bool),
    ) -> Result<T, CommError> {
        let mut state = self.state.lock();
        let (result, is_awaited) = change(&mut state.table);
        let event = is_awaited.then(|| state.events[group.index()].clone());
        if result.is_err() {
            state.notify_all();
        }
        self.unlock(state);
        // Outside the lock, which all woken ranks acquire.
        if let Some(event) = event {
            event.notify();
        }
        match (result, caller) {
            (Err(error), Some(member)) => Err(self.counted(group, member, error)),
            (result, _) => result,
        }
    }

    /// Blocks until every member has contributed, the world has failed, or `deadline` has passed.
    /// Then releases the handle.
    pub fn wait(&self, op: OpHandle, deadline: Duration) -> Result<Matched<P>, CommError> {
        let (mut state, result) = self.block(Wait::All(op), deadline, |table| table.poll(op));
        let result = result.map(|parts| Matched {
            parts,
            last: state.table.last(op),
        });
        state.table.release(op);
        self.unlock(state);
        result
    }

    /// Like [`wait`](Self::wait), but keeps the handle.
    pub fn wait_until_complete(&self, op: OpHandle, deadline: Duration) -> Result<(), CommError> {
        let (state, result) = self.block(Wait::All(op), deadline, |table| table.poll(op));
        self.unlock(state);
        result.map(drop)
    }

    /// Blocks until the message of `receive` has arrived, the world has failed, or `deadline` has
    /// passed. Afterwards the handle is no longer valid.
    pub fn wait_for_message(
        &self,
        receive: RecvHandle,
        deadline: Duration,
    ) -> Result<P2pMessage<F, P>, CommError> {
        let (mut state, result) = self.block(Wait::Message(receive), deadline, |table| {
            table.poll_message(receive)
        });
        if result.is_err() {
            state.table.release_receive(receive);
        }
        self.unlock(state);
        result
    }

    /// Blocks until `poll` returns a value, the world has failed, or `deadline` has passed.
    fn block<T>(
        &self,
        wait: Wait,
        deadline: Duration,
        poll: impl Fn(&mut MatchTable<F, P>) -> Poll<T>,
    ) -> (Guard<'_, F, P>, Result<T, CommError>) {
        let mut state = self.state.lock();
        let rank = state.table.rank(wait);
        let mut until = None;
        let mut spins = SPINS;
        let result = loop {
            match poll(&mut state.table) {
                Poll::Ready(value) => break Ok(value),
                Poll::Failed => break Err(state.error(wait)),
                Poll::Pending => {}
            }
            let until = match until {
                None => {
                    state.table.begin_wait(wait);
                    *until.insert(Instant::now() + deadline.min(LONGEST))
                }
                Some(until) => {
                    state.table.check_returned(wait);
                    until
                }
            };
            if state.table.failure().is_some() {
                state.notify_all();
                continue;
            }
            if state.table.arbiter.is_undecided() {
                state.notify_all();
                self.unlock(state);
                state = self.decided();
                continue;
            }
            let event = state.events[wait.group().index()].clone();
            if spins > 0 {
                let epoch = event.epoch.load(Ordering::Relaxed);
                let is_quiet = || event.epoch.load(Ordering::Acquire) == epoch;
                drop(state);
                self.spin(until, is_quiet);
                // The notification may have been meant for another wait.
                spins = if is_quiet() { 0 } else { spins - 1 };
                state = self.state.lock();
            } else {
                let look = if self.peers.is_some() {
                    until.min(Instant::now() + PATIENCE)
                } else {
                    until
                };
                let is_late;
                (state, is_late) = event.sleep(state, look);
                if is_late && look == until {
                    state.expire(wait, deadline);
                } else if is_late {
                    state = self.ask_about(state, wait);
                }
            }
        };
        if until.is_some() {
            state.table.end_wait(rank, wait);
        }
        (state, result)
    }

    /// Makes progress, spins or yields before the caller sleeps, while `quiet` returns true and at
    /// most until `until`.
    fn spin(&self, until: Instant, quiet: impl Fn() -> bool) {
        let Some(peers) = &self.peers else {
            return self.spin.pass(until, quiet);
        };
        let soon = || until.min(Instant::now() + LINGER);
        let mut end = soon();
        let mut makes_progress = true;
        while quiet() && makes_progress && Instant::now() < end {
            match peers.progress() {
                None => makes_progress = false,
                Some(true) => end = soon(),
                // The rank that is waited for may need this core.
                Some(false) => yield_now(),
            }
        }
        if makes_progress && !quiet() {
            return;
        }
        peers.notify(PeerEvent::Awaited);
        if !makes_progress {
            self.spin.pass(until, quiet);
        }
    }

    /// Asks other processes whether a stalled wait is part of a deadlock.
    fn ask_about<'a>(&'a self, state: Guard<'a, F, P>, wait: Wait) -> Guard<'a, F, P> {
        let stalled = state.table.stalled(wait);
        self.unlock(state);
        if let Some((peers, stalled)) = self.peers.as_ref().zip(stalled)
            && let Some(failure) = peers.notify(PeerEvent::Waits(stalled))
        {
            self.find(failure);
        }
        self.state.lock()
    }

    /// Releases the handle of a collective whose result the rank does not need.
    pub fn release(&self, op: OpHandle) {
        let mut state = self.state.lock();
        state.table.release(op);
        self.unlock(state);
    }

    /// Releases the handle of a receive whose message the rank does not need.
    pub fn release_receive(&self, receive: RecvHandle) {
        let mut state = self.state.lock();
        state.table.release_receive(receive);
        self.unlock(state);
    }

    /// Records the first failure and wakes all waiters. Waits for the process that decides which
    /// failure is the first, and returns the error of that one.
    pub fn fail(&self, failure: Failure) -> CommError {
        let found = self.find(failure);
        let state = self.decided();
        state.table.failure().unwrap_or(&found).error(None)
    }

    /// Like [`fail`](Self::fail), but does not wait for the process that decides. Returns the first
    /// failure as far as this process knows it.
    pub fn find(&self, failure: Failure) -> Failure {
        self.change_failure(|table| table.fail(failure))
    }

    /// Records a failure that the process that decides has named as the first.
    pub fn decide(&self, failure: Failure) {
        self.change_failure(|table| table.decide(failure));
    }

    /// Makes this process decide by itself which failure is the first, from now on.
    pub fn decide_here(&self) {
        self.change_failure(MatchTable::decide_here);
    }

    fn change_failure<T>(&self, change: impl FnOnce(&mut MatchTable<F, P>) -> T) -> T {
        let mut state = self.state.lock();
        let value = change(&mut state.table);
        state.notify_all();
        self.unlock(state);
        value
    }

    /// Returns the first failure, if there was one.
    pub fn failure(&self) -> Option<Failure> {
        self.read(|table| table.failure().cloned())
    }

    /// Returns the error that counts for a call of `member` that was refused with `error`. If
    /// another process decides, that is the error of the failure that it named as the first.
    fn counted(&self, group: GroupKey, member: usize, error: CommError) -> CommError {
        if self.peers.is_none() {
            return error;
        }
        let state = self.decided();
        match state.table.failure() {
            Some(failure) if error.without_notice() != failure.error(None) => {
                failure.error(state.table.last_call(group, member))
            }
            _ => error,
        }
    }

    /// Blocks while it is undecided which failure is the first. If the process that decides does
    /// not answer in time, this process decides.
    fn decided(&self) -> Guard<'_, F, P> {
        let (mut state, is_late) = self.sleep_while(GRACE, |table| table.arbiter.is_undecided());
        if is_late {
            state.table.decide_here();
            state.notify_all();
            self.unlock(state);
            state = self.state.lock();
        }
        state
    }

    /// Waits a short time for the message about a failure that is known to have occurred. Returns
    /// the first failure.
    pub fn await_failure(&self) -> Option<Failure> {
        let (state, _) = self.sleep_while(GRACE, |table| table.failure().is_none());
        state.table.failure().cloned()
    }

    /// Sleeps while `is_pending` returns true. Returns true if that takes longer than `time`.
    fn sleep_while(
        &self,
        time: Duration,
        is_pending: impl Fn(&MatchTable<F, P>) -> bool,
    ) -> (Guard<'_, F, P>, bool) {
        let mut state = self.state.lock();
        let until = Instant::now() + time;
        let mut is_late = false;
        while is_pending(&state.table) {
            if is_late {
                return (state, true);
            }
            let end = state.end.clone();
            (state, is_late) = end.sleep(state, until);
        }
        (state, false)
    }

    /// Records that the program of a rank has ended, and wakes all ranks that may be waiting for
    /// it. Returns false if that was recorded before.
    pub fn returned(&self, rank: usize) -> bool {
        let mut state = self.state.lock();
        let is_first = state.table.returned(rank);
        for group in state.table.groups_of(rank) {
            state.events[group.index()].notify();
        }
        state.end.notify();
        is_first
    }

    /// Blocks until the programs of all ranks have ended or, if the world has failed, `deadline`
    /// has passed. Returns the ranks whose programs have not ended.
    pub fn finish(&self, deadline: Duration) -> Vec<usize> {
        let is_running = |table: &MatchTable<F, P>| !table.running().is_empty();
        let (state, _) = self.sleep_while(LONGEST, |table| {
            is_running(table) && table.failure().is_none()
        });
        drop(state);
        let (state, _) = self.sleep_while(deadline.min(LONGEST), is_running);
        state.table.running()
    }

    /// Unlocks, then drops the freed contributions, notifies other processes of a failure and of
    /// declined offers, and aborts the data planes after a failure.
    fn unlock(&self, mut state: Guard<'_, F, P>) {
        let freed = state.table.take_freed();
        let aborts = !state.is_aborted && state.table.arbiter.known().is_some();
        state.is_aborted |= aborts;
        let events = self.peers.as_ref().map(|peers| {
            let declined =
                Some(state.table.take_declined()).filter(|declined| !declined.is_empty());
            (
                peers,
                [
                    state
                        .table
                        .arbiter
                        .take_unsent()
                        .map(|(failure, decided)| PeerEvent::Failed { failure, decided }),
                    declined.map(PeerEvent::Declined),
                ],
            )
        });
        drop(state);
        drop(freed);
        if let Some((peers, events)) = events {
            events
                .into_iter()
                .flatten()
                .for_each(|event| drop(peers.notify(event)));
        }
        // Afterwards, because an abort may be an error in other processes, which is not the first.
        if let Some(abort) = self.abort.as_ref().filter(|_| aborts) {
            abort();
        }
    }
}

impl<F: Signature, P> RendezvousState<F, P> {
    fn notify_all(&self) {
        self.events
            .iter()
            .chain([&self.end])
            .for_each(|event| event.notify());
    }

    fn error(&self, wait: Wait) -> CommError {
        let failure = self.table.failure().expect("`poll` returned `Failed`");
        failure.error(Some(self.table.id(wait)))
    }

    /// Fails the world because the deadline of `wait` has passed, unless the wait is over by now.
    fn expire(&mut self, wait: Wait, deadline: Duration) {
        if self.table.is_over(wait) {
            return;
        }
        let rank = self.table.rank(wait);
        let missing = self.table.missing(wait);
        let during = self.table.id(wait);
        let error = CommError::DeadlineExceeded {
            rank,
            missing,
            during,
            deadline,
        };
        self.table.fail(Failure::Collective(error));
        self.notify_all();
    }
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"] // needed where the rendezvous model includes this file
mod tests;
