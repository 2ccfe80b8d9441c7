//! [`Naive`]: another engine for ranks that are threads, of which it asks no more than an engine must.
//!
//! Every rank has an inbox. A call is one envelope to each rank of the group, its own among them, with host data: what a
//! rank gets shares nothing with what another has. Whoever waits looks through the inbox until all is there. It is slow
//! in every way, and keeps what nobody waits for until it goes.

pub mod broken;
mod channel;
pub mod host;
mod inbox;

use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use burn_dtensor::Error;
use burn_dtensor::comm::backend::{Backend, Failure, GroupBackend, GroupMember, launch_number};
use burn_dtensor::comm::{CollectiveId, CommError};
use parking_lot::Mutex;

use channel::NaiveChannel;
use inbox::{Desk, Envelope, Inbox, Seen};

/// Ranks with inboxes.
#[derive(Debug)]
pub struct Naive {
    launch: u64,
    inboxes: Vec<Inbox>,
    left: Vec<AtomicBool>,
    /// A few words of each rank.
    doing: Mutex<Vec<String>>,
    /// The first failure, and what every rank was doing.
    end: OnceLock<(Failure, Vec<String>)>,
    this: Weak<Self>,
}

impl Naive {
    pub fn new(ranks: usize) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            launch: launch_number(),
            inboxes: (0..ranks).map(|_| Inbox::default()).collect(),
            left: (0..ranks).map(|_| AtomicBool::new(false)).collect(),
            doing: Mutex::new(vec!["computing, before any collective".into(); ranks]),
            end: OnceLock::new(),
            this: this.clone(),
        })
    }

    /// The error that ends `id`, if the world has failed.
    fn over(&self, id: &CollectiveId) -> Result<(), CommError> {
        self.end.get().map_or(Ok(()), |(failure, _)| Err(failure.error(Some(id.clone()))))
    }

    /// Notes that `rank` calls, which it may until the world has failed.
    fn enter(&self, rank: usize, id: &CollectiveId) -> Result<(), CommError> {
        self.now(rank, format!("computing since {id}"));
        self.over(id)
    }

    fn now(&self, rank: usize, doing: String) {
        self.doing.lock()[rank] = doing;
    }

    fn deliver(&self, rank: usize, envelope: Envelope) {
        let inbox = &self.inboxes[rank];
        inbox.desk.lock().put(envelope);
        inbox.bell.notify_all();
    }

    /// What `look` finds in the inbox of `rank`, once it is there.
    fn wait<T>(
        &self,
        rank: usize,
        id: &CollectiveId,
        deadline: Duration,
        mut look: impl FnMut(&mut Desk) -> Seen<T>,
    ) -> Result<T, CommError> {
        self.now(rank, format!("waiting in {id}"));
        let (inbox, end) = (&self.inboxes[rank], Instant::now().checked_add(deadline));
        let mut desk = inbox.desk.lock();
        let error = loop {
            let missing = match look(&mut desk) {
                Seen::There(found) => {
                    self.now(rank, format!("computing since {id}"));
                    return Ok(found);
                }
                Seen::Wrong(error) => break error,
                Seen::Awaited(missing) => missing,
            };
            self.over(id)?;
            if let Some(rank) = self.in_vain(rank, id, &missing) {
                break CommError::RankReturned { rank, during: id.clone() };
            }
            match end {
                Some(end) if end <= Instant::now() => {
                    break CommError::DeadlineExceeded { rank, missing, during: id.clone(), deadline };
                }
                Some(end) => drop(inbox.bell.wait_until(&mut desk, end)),
                None => inbox.bell.wait(&mut desk),
            }
        };
        drop(desk);
        Err(self.fail(Failure::Collective(error)))
    }

    /// One of `missing` that has left, if `rank` waits in vain: a collective needs all of them, a message one.
    fn in_vain(&self, rank: usize, id: &CollectiveId, missing: &[usize]) -> Option<usize> {
        let others: Vec<_> = missing.iter().copied().filter(|other| *other != rank).collect();
        let left: Vec<_> = others.iter().copied().filter(|other| self.left[*other].load(Ordering::SeqCst)).collect();
        left.first().copied().filter(|_| !id.op.is_message() || left == others)
    }

    /// Has every rank look again.
    fn ring(&self) {
        for inbox in &self.inboxes {
            // Whoever has looked, and does not sleep yet, holds the lock.
            drop(inbox.desk.lock());
            inbox.bell.notify_all();
        }
    }
}

impl Backend for Naive {
    fn size(&self) -> usize {
        self.inboxes.len()
    }

    fn local_ranks(&self) -> Vec<usize> {
        (0..self.size()).collect()
    }

    fn launch(&self) -> u64 {
        self.launch
    }

    fn channel(&self, member: GroupMember, name: &'static str) -> Arc<dyn GroupBackend> {
        Arc::new(NaiveChannel::new(self.this.upgrade().expect("whoever calls has it"), member, name))
    }

    fn fail(&self, failure: Failure) -> CommError {
        let (first, _) = self.end.get_or_init(|| (failure, self.doing.lock().clone()));
        self.ring();
        first.error(None)
    }

    fn failure(&self) -> Option<Failure> {
        self.end.get().map(|(failure, _)| failure.clone())
    }

    fn rank_exited(&self, rank: usize, _: Option<Error>, _: Option<&'static Location<'static>>) {
        self.now(rank, "finished".into());
        self.left[rank].store(true, Ordering::SeqCst);
        self.ring();
    }

    fn activity(&self, rank: usize) -> String {
        self.end.get().map_or_else(|| self.doing.lock()[rank].clone(), |(_, doing)| doing[rank].clone())
    }

    fn is_finished(&self) -> bool {
        self.left.iter().all(|left| left.load(Ordering::SeqCst))
    }
}
