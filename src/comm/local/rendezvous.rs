//! [`Rendezvous`]: the [`Board`] behind one lock, and a condition variable for each group.
//!
//! One lock for the whole world makes the joint failure simple: it is set under the lock that
//! every waiter holds when it decides to sleep, so no wake-up can be lost. The lock covers
//! bookkeeping only; tensors are read, and dropped, outside it.

use std::sync::Arc;
use std::time::Duration;

use super::board::{Board, Failure, Fingerprint, GroupKey, Parts, Poll, Ticket};
use super::sync::{Condvar, Instant, Mutex};
use crate::comm::CommError;

pub(crate) struct Rendezvous<F, P>(Mutex<State<F, P>>);

struct State<F, P> {
    board: Board<F, P>,
    bells: Vec<Arc<Condvar>>,
}

impl<F: Fingerprint, P> Rendezvous<F, P> {
    /// A world of `ranks` ranks.
    pub fn new(ranks: usize) -> Self {
        Self(Mutex::new(State { board: Board::new(ranks), bells: Vec::new() }))
    }

    /// The group of these ranks in this order; the same for all its ranks.
    pub fn group(&self, ranks: &[usize]) -> GroupKey {
        let mut state = self.0.lock();
        let key = state.board.group(ranks);
        if state.bells.len() == key.index() {
            state.bells.push(Arc::default());
        }
        key
    }

    /// Joins `member`'s next collective of `group` with `part`. Never blocks.
    pub fn join(&self, group: GroupKey, member: usize, print: F, part: P) -> Result<Ticket, CommError> {
        let mut state = self.0.lock();
        match state.board.join(group, member, print, part) {
            Ok((ticket, complete)) => {
                if complete {
                    state.bells[group.index()].notify_all();
                }
                Ok(ticket)
            }
            Err(error) => {
                state.ring_all();
                Err(error)
            }
        }
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_complete(&self, ticket: Ticket) -> bool {
        !matches!(self.0.lock().board.poll(ticket), Poll::Pending)
    }

    /// Blocks until every member has joined, the world has failed, or `deadline` has passed;
    /// then releases the ticket.
    pub fn wait(&self, ticket: Ticket, deadline: Duration) -> Result<Parts<P>, CommError> {
        let mut state = self.0.lock();
        let mut until = None;
        let result = loop {
            match state.board.poll(ticket) {
                Poll::Ready(parts) => break Ok(parts),
                Poll::Failed => break Err(state.error(ticket)),
                Poll::Pending => {}
            }
            let until = match until {
                None => {
                    state.board.begin_wait(ticket);
                    *until.insert(Instant::now() + deadline)
                }
                Some(until) => {
                    state.board.check_left(ticket);
                    until
                }
            };
            if state.board.failure().is_some() {
                state.ring_all();
                continue;
            }
            let bell = state.bells[ticket.group.index()].clone();
            if bell.wait_until(&mut state, until).timed_out() {
                state.expire(ticket, deadline);
            }
        };
        if until.is_some() {
            state.board.end_wait(ticket);
        }
        let freed = state.board.release(ticket);
        drop(state);
        drop(freed);
        result
    }

    /// Gives up the result of `ticket`.
    pub fn release(&self, ticket: Ticket) {
        let freed = self.0.lock().board.release(ticket);
        drop(freed);
    }

    /// Records the first failure and wakes everyone. Returns the error that counts.
    pub fn fail(&self, failure: Failure) -> CommError {
        let mut state = self.0.lock();
        let failure = state.board.fail(failure);
        state.ring_all();
        failure.error(None)
    }

    /// The first failure, if any.
    pub fn failure(&self) -> Option<Failure> {
        self.0.lock().board.failure().cloned()
    }

    /// The rank's program is over: wakes those who may be waiting for it.
    pub fn returned(&self, rank: usize) {
        let mut state = self.0.lock();
        state.board.returned(rank);
        for group in state.board.groups_of(rank) {
            state.bells[group.index()].notify_all();
        }
    }

    /// Collectives of `rank` come from more than one thread.
    pub fn threaded(&self, rank: usize) {
        self.0.lock().board.threaded(rank);
    }

    /// What `rank` was doing at the first failure.
    pub fn doing(&self, rank: usize) -> String {
        self.0.lock().board.doing(rank)
    }
}

impl<F: Fingerprint, P> State<F, P> {
    fn ring_all(&self) {
        for bell in &self.bells {
            bell.notify_all();
        }
    }

    fn error(&self, ticket: Ticket) -> CommError {
        let failure = self.board.failure().expect("polled as failed");
        failure.error(Some(self.board.id(ticket)))
    }

    /// The deadline has passed: a failure unless the last rank came just now.
    fn expire(&mut self, ticket: Ticket, deadline: Duration) {
        if !matches!(self.board.poll(ticket), Poll::Pending) {
            return;
        }
        let error = CommError::DeadlineExceeded {
            rank: self.board.rank(ticket),
            missing: self.board.missing(ticket),
            during: self.board.id(ticket),
            deadline,
        };
        self.board.fail(Failure::Collective(error));
        self.ring_all();
    }
}
