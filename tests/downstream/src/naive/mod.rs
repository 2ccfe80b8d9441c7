//! [`Naive`]: a backend written against the public items of burn-dtensor alone, as another crate writes one.
//!
//! The ranks are threads of one process, or of several that a [`Transport`] connects
//! ([`NaiveJob`]). Every rank has an inbox. A call sends one `Envelope` with host data to each rank
//! of the group, also to the caller itself, so that results share memory with nothing. A rank that
//! waits looks through its inbox until everything is there. The backend is slow in every way, and
//! keeps envelopes that no rank waits for until it is dropped.
//!
//! | file | content |
//! |---|---|
//! | `mod` | [`Backend`]: waits, failures, exits |
//! | `channel` | [`GroupBackend`]: collectives and messages |
//! | `inbox` | envelopes and the receives that they match |
//! | `job` | what processes send each other, and the launch that it belongs to |
//! | `host` | tensors as bytes and numbers of the host |
//! | `broken` | the same backend with a bit error, for tests of what finds it |
//!
//! # Failures
//!
//! Process 0 decides which failure is the first, and sends it to the others; a rank elsewhere that
//! fails waits for the decision. If process 0 is lost, every process decides for itself: the loss
//! is the failure then.
//!
//! [`Transport`]: burn_dtensor::comm::transport::Transport

pub mod broken;
mod channel;
pub mod host;
mod inbox;
mod job;

use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use burn_dtensor::Error;
use burn_dtensor::comm::backend::{
    Backend, Failure, GroupBackend, GroupMember, RemoteOutcome, launch_number,
};
use burn_dtensor::comm::flight::LaunchId;
use burn_dtensor::comm::{CollectiveId, CommError, RankReport};
use parking_lot::{Condvar, Mutex};

use channel::NaiveChannel;
use inbox::{Desk, Envelope, Inbox, Seen};
pub use job::NaiveJob;
use job::{PeerMessage, Peers};

/// Ranks with inboxes.
#[derive(Debug)]
pub struct Naive {
    launch: u64,
    /// The processes that have the other ranks, if this one does not have all of them.
    peers: Option<Peers>,
    /// The ranks of this process.
    here: Range<usize>,
    /// One for each rank of this process.
    inboxes: Vec<Inbox>,
    /// One for each rank of the world.
    exited: Vec<AtomicBool>,
    /// Activity of each rank, as far as this process knows it.
    doing: Mutex<Vec<String>>,
    /// The first failure, and the activity of every rank at that moment.
    end: OnceLock<(Failure, Vec<String>)>,
    /// Reports of the ranks of other processes that have exited.
    reports: Mutex<Vec<RankReport>>,
    /// True once process 0 is lost.
    is_alone: AtomicBool,
    /// Notified when the world fails, and when a report arrives.
    news: Condvar,
}

impl Naive {
    /// Returns a backend for `ranks` threads of this process.
    pub fn new(ranks: usize) -> Arc<Self> {
        Self::of(None, ranks, 0..ranks)
    }

    fn of(peers: Option<Peers>, size: usize, here: Range<usize>) -> Arc<Self> {
        Arc::new(Self {
            launch: launch_number(),
            peers,
            inboxes: here.clone().map(|_| Inbox::default()).collect(),
            here,
            exited: (0..size).map(|_| AtomicBool::new(false)).collect(),
            doing: Mutex::new(vec!["computing, before any collective".into(); size]),
            end: OnceLock::new(),
            reports: Mutex::default(),
            is_alone: AtomicBool::new(false),
            news: Condvar::new(),
        })
    }

    fn inbox(&self, rank: usize) -> &Inbox {
        &self.inboxes[rank - self.here.start]
    }

    /// Returns the error that ends `id`, if the world has failed.
    fn over(&self, id: &CollectiveId) -> Result<(), CommError> {
        self.end
            .get()
            .map_or(Ok(()), |(failure, _)| Err(failure.error(Some(id.clone()))))
    }

    /// Notes a call of `rank`, which is an error once the world has failed.
    fn enter(&self, rank: usize, id: &CollectiveId) -> Result<(), CommError> {
        self.now(rank, format!("computing since {id}"));
        self.over(id)
    }

    fn now(&self, rank: usize, doing: String) {
        self.doing.lock()[rank] = doing;
    }

    /// Puts an envelope into the inbox of `rank`, whichever process has it.
    fn deliver(&self, rank: usize, envelope: Envelope) {
        match &self.peers {
            Some(peers) if !self.here.contains(&rank) => {
                peers.send(
                    peers.process_of(rank),
                    &PeerMessage::Envelope(rank, envelope),
                );
            }
            _ => {
                let inbox = self.inbox(rank);
                inbox.desk.lock().put(envelope);
                inbox.bell.notify_all();
            }
        }
    }

    /// Waits until `look` finds its envelopes in the inbox of `rank`, and returns them.
    fn wait<T>(
        &self,
        rank: usize,
        id: &CollectiveId,
        deadline: Duration,
        mut look: impl FnMut(&mut Desk) -> Seen<T>,
    ) -> Result<T, CommError> {
        self.now(rank, format!("waiting in {id}"));
        let (inbox, end) = (self.inbox(rank), Instant::now().checked_add(deadline));
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
                break CommError::RankReturned {
                    rank,
                    during: id.clone(),
                };
            }
            match end {
                Some(end) if end <= Instant::now() => {
                    break CommError::DeadlineExceeded {
                        rank,
                        missing,
                        during: id.clone(),
                        deadline,
                    };
                }
                Some(end) => drop(inbox.bell.wait_until(&mut desk, end)),
                None => inbox.bell.wait(&mut desk),
            }
        };
        drop(desk);
        Err(self.fail(Failure::Collective(error)))
    }

    /// Returns one of `missing` that has exited, if `rank` waits in vain: a collective needs all of
    /// them, a message one.
    fn in_vain(&self, rank: usize, id: &CollectiveId, missing: &[usize]) -> Option<usize> {
        let others: Vec<_> = missing
            .iter()
            .copied()
            .filter(|other| *other != rank)
            .collect();
        let exited: Vec<_> = others
            .iter()
            .copied()
            .filter(|other| self.has_exited(*other))
            .collect();
        exited
            .first()
            .copied()
            .filter(|_| !id.op.is_message() || exited == others)
    }

    fn has_exited(&self, rank: usize) -> bool {
        self.exited[rank].load(Ordering::SeqCst)
    }

    /// Makes every rank look into its inbox again, and every thread that waits for the end of the
    /// world look again.
    fn ring(&self) {
        for inbox in &self.inboxes {
            // A rank that has looked and does not sleep yet holds the lock.
            drop(inbox.desk.lock());
            inbox.bell.notify_all();
        }
        drop(self.reports.lock());
        self.news.notify_all();
    }

    /// Returns true if this process decides for itself which failure is the first.
    fn is_alone(&self) -> bool {
        self.is_alone.load(Ordering::SeqCst)
            || self.peers.as_ref().is_none_or(|peers| peers.here() == 0)
    }

    /// Reports `failure` to the process that decides, without waiting for the decision.
    fn find(&self, failure: Failure) {
        match &self.peers {
            Some(peers) if !self.is_alone() => peers.send(0, &PeerMessage::Found(failure)),
            _ => self.decide(failure),
        }
    }

    /// Handles a message of process `from`, on the thread of the transport.
    fn handle(&self, from: usize, message: PeerMessage) {
        match message {
            PeerMessage::Envelope(to, envelope)
                if self.here.contains(&to) && envelope.fits(self.size()) =>
            {
                self.deliver(to, envelope);
            }
            PeerMessage::Envelope(to, envelope) => {
                self.misunderstood(
                    from,
                    format!("{:?} does not fit rank {to}", envelope.signature),
                );
            }
            PeerMessage::Found(failure) | PeerMessage::Failed(failure) => self.decide(failure),
            PeerMessage::Exited(report) => {
                let rank = report.rank;
                self.reports.lock().push(report);
                self.exit(rank);
            }
        }
    }

    fn misunderstood(&self, from: usize, problem: String) {
        let Some(peers) = &self.peers else { return };
        self.find(Failure::Collective(CommError::Protocol {
            rank: peers.ranks_of(from).start,
            problem,
        }));
    }

    /// Handles the loss of a process, which is a failure if a rank of it has not exited.
    fn lost(&self, process: usize, problem: &str) {
        let Some(peers) = &self.peers else { return };
        if process == 0 {
            self.is_alone.store(true, Ordering::SeqCst);
        }
        let disconnected = |rank| CommError::Disconnected {
            rank,
            problem: problem.into(),
        };
        let running: Vec<_> = peers
            .ranks_of(process)
            .filter(|rank| !self.has_exited(*rank))
            .collect();
        if let Some(first) = running.first() {
            self.find(Failure::Collective(disconnected(*first)));
        }
        for rank in running {
            let (activity, error) = (
                "in a process that was lost".into(),
                Some(disconnected(rank).into()),
            );
            self.reports.lock().push(RankReport {
                rank,
                activity,
                error,
                at: None,
            });
            self.exit(rank);
        }
    }

    /// Ends the world with `failure`, unless it has failed before. In process 0 this is the
    /// decision for all.
    fn decide(&self, failure: Failure) {
        let mut is_first = false;
        self.end.get_or_init(|| {
            is_first = true;
            (failure.clone(), self.doing.lock().clone())
        });
        if is_first {
            if let Some(peers) = &self.peers
                && peers.here() == 0
            {
                peers.send_to_all(&PeerMessage::Failed(failure));
            }
            self.ring();
        }
    }

    fn exit(&self, rank: usize) {
        self.exited[rank].store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Waits until `is_over` returns true for the reports of other processes, at most until `end`.
    fn await_news(&self, end: Option<Instant>, is_over: impl Fn(&[RankReport]) -> bool) {
        let mut reports = self.reports.lock();
        while !is_over(&reports) {
            match end {
                Some(end) if end <= Instant::now() => return,
                Some(end) => drop(self.news.wait_until(&mut reports, end)),
                None => self.news.wait(&mut reports),
            }
        }
    }
}

impl Backend for Naive {
    fn size(&self) -> usize {
        self.exited.len()
    }

    fn local_ranks(&self) -> Vec<usize> {
        self.here.clone().collect()
    }

    fn launch(&self) -> u64 {
        self.launch
    }

    fn launch_id(&self) -> LaunchId {
        self.peers
            .as_ref()
            .map_or(LaunchId::of_process(0, self.launch), |peers| {
                LaunchId::first(peers.launch())
            })
    }

    fn channel(self: Arc<Self>, member: GroupMember, name: &'static str) -> Arc<dyn GroupBackend> {
        Arc::new(NaiveChannel::new(self, member, name))
    }

    fn fail(&self, failure: Failure) -> CommError {
        self.find(failure.clone());
        self.await_news(None, |_| self.end.get().is_some() || self.is_alone());
        self.decide(failure);
        self.end.get().expect("it is decided").0.error(None)
    }

    fn failure(&self) -> Option<Failure> {
        self.end.get().map(|(failure, _)| failure.clone())
    }

    fn rank_exited(
        &self,
        rank: usize,
        error: Option<Error>,
        at: Option<&'static Location<'static>>,
    ) {
        self.now(rank, "finished".into());
        if let Some(peers) = &self.peers {
            let (activity, at) = (self.activity(rank), at.map(ToString::to_string));
            peers.send_to_all(&PeerMessage::Exited(RankReport {
                rank,
                activity,
                error,
                at,
            }));
        }
        self.exit(rank);
    }

    fn activity(&self, rank: usize) -> String {
        self.end.get().map_or_else(
            || self.doing.lock()[rank].clone(),
            |(_, doing)| doing[rank].clone(),
        )
    }

    fn is_finished(&self) -> bool {
        (0..self.size()).all(|rank| self.has_exited(rank))
    }

    fn finish(&self, deadline: Duration) -> RemoteOutcome {
        let Some(peers) = &self.peers else {
            return RemoteOutcome::default();
        };
        let has_failed = || self.end.get().is_some();
        // The report of a rank that has failed may arrive before the decision of process 0.
        let is_over = |reports: &[RankReport]| {
            self.is_finished()
                && (has_failed() || reports.iter().all(|report| report.error.is_none()))
        };
        self.await_news(None, |reports| is_over(reports) || has_failed());
        self.await_news(Instant::now().checked_add(deadline), is_over);
        let Some(failure) = self.failure() else {
            return RemoteOutcome::default();
        };
        let mut reports = self.reports.lock().clone();
        let elsewhere = (0..self.size()).filter(|rank| !self.here.contains(rank));
        for rank in elsewhere.filter(|rank| !self.has_exited(*rank)) {
            let error = Some(CommError::StillRunning { rank, deadline }.into());
            reports.push(RankReport {
                rank,
                activity: "running its program".into(),
                error,
                at: None,
            });
        }
        RemoteOutcome {
            failure: Some(failure),
            reports,
            is_reported_by_other_process: peers.here() != 0,
        }
    }
}
