//! [`NaiveJob`]: connects the backends that several processes make for their launches.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Arc, Weak};

use burn_dtensor::comm::RankReport;
use burn_dtensor::comm::backend::Failure;
use burn_dtensor::comm::transport::{Message, MessageHandler, RecvBuffer, Transport};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::Naive;
use super::inbox::Envelope;

/// Message of one process to another about a launch.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum PeerMessage {
    /// An envelope for a global rank.
    Envelope(usize, Envelope),
    /// A failure that a rank has found, for process 0 to decide.
    Found(Failure),
    /// The first failure, as process 0 has decided.
    Failed(Failure),
    /// The program of a rank is over.
    Exited(RankReport),
}

/// The processes of one launch, as seen from one of them.
#[derive(Debug)]
pub(super) struct Peers {
    transport: Arc<dyn Transport>,
    /// Number of ranks in each process: process `p` has those from `p * each`.
    each: usize,
    launch: u64,
}

impl Peers {
    pub fn here(&self) -> usize {
        self.transport.process_index()
    }

    /// Returns the number of the launch, which is the same in all processes.
    pub fn launch(&self) -> u64 {
        self.launch
    }

    pub fn process_of(&self, rank: usize) -> usize {
        rank / self.each
    }

    pub fn ranks_of(&self, process: usize) -> Range<usize> {
        process * self.each..(process + 1) * self.each
    }

    /// Queues a message, whose header is everything: the tensors of an envelope are among it.
    pub fn send(&self, to: usize, message: &PeerMessage) {
        let header =
            postcard::to_stdvec(&(self.launch, message)).expect("every message can be encoded");
        self.transport.send(
            to,
            Message {
                header,
                payloads: Vec::new(),
                taken: None,
            },
        );
    }

    pub fn send_to_all(&self, message: &PeerMessage) {
        let others = (0..self.transport.processes()).filter(|process| *process != self.here());
        others.for_each(|process| self.send(process, message));
    }
}

/// The processes of a job, as seen from one of them: makes the backends of its launches.
///
/// Every process makes the same launches in the same order, each with the same number of ranks.
pub struct NaiveJob {
    transport: Arc<dyn Transport>,
    state: Mutex<JobState>,
}

#[derive(Default)]
struct JobState {
    /// The backend of each launch, as long as it exists.
    launches: Vec<Weak<Naive>>,
    /// Messages about launches that this process has not made yet, with their senders.
    early: Vec<(u64, usize, PeerMessage)>,
    /// Processes that are lost, and why.
    lost: Vec<(usize, String)>,
}

impl NaiveJob {
    /// Connects this process with those of `transport`, of which it becomes the handler.
    pub fn new(transport: Arc<dyn Transport>) -> Arc<Self> {
        let job = Arc::new(Self {
            transport: transport.clone(),
            state: Mutex::default(),
        });
        transport.set_handler(job.clone());
        job
    }

    /// Returns the backend of the next launch, which has `each` ranks in every process.
    pub fn backend(&self, each: usize) -> Arc<Naive> {
        let mut state = self.state.lock();
        let launch = state.launches.len() as u64;
        let peers = Peers {
            transport: self.transport.clone(),
            each,
            launch,
        };
        let (size, here) = (
            each * self.transport.processes(),
            peers.ranks_of(peers.here()),
        );
        let backend = Naive::of(Some(peers), size, here);
        state.launches.push(Arc::downgrade(&backend));
        let early: Vec<_> = state
            .early
            .extract_if(.., |(number, ..)| *number == launch)
            .collect();
        early
            .into_iter()
            .for_each(|(_, from, message)| backend.handle(from, message));
        state
            .lost
            .iter()
            .for_each(|(process, problem)| backend.lost(*process, problem));
        backend
    }
}

impl JobState {
    fn backends(&self) -> impl Iterator<Item = Arc<Naive>> {
        self.launches.iter().filter_map(Weak::upgrade)
    }
}

impl MessageHandler for NaiveJob {
    fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
        let mut state = self.state.lock();
        match postcard::from_bytes::<(u64, PeerMessage)>(&header) {
            Ok((launch, message)) if lengths.is_empty() => {
                match state.launches.get(launch as usize) {
                    Some(backend) => {
                        if let Some(backend) = backend.upgrade() {
                            backend.handle(from, message);
                        }
                    }
                    None => state.early.push((launch, from, message)),
                }
            }
            Ok(_) => state
                .backends()
                .for_each(|backend| backend.misunderstood(from, "payloads without meaning".into())),
            Err(error) => state
                .backends()
                .for_each(|backend| backend.misunderstood(from, error.to_string())),
        }
        lengths
            .iter()
            .map(|length| Box::new(Ignored(vec![MaybeUninit::uninit(); *length])) as _)
            .collect()
    }

    unsafe fn arrived(&self, _: usize, _: u64, _: Vec<Box<dyn RecvBuffer>>) {}

    fn lost(&self, process: Option<usize>, problem: &str) {
        let mut state = self.state.lock();
        let others = (0..self.transport.processes())
            .filter(|other| *other != self.transport.process_index());
        for process in others.filter(|other| process.is_none_or(|process| process == *other)) {
            state
                .backends()
                .for_each(|backend| backend.lost(process, problem));
            state.lost.push((process, problem.into()));
        }
    }
}

/// Memory for bytes that the job ignores.
struct Ignored(Vec<MaybeUninit<u8>>);

impl RecvBuffer for Ignored {
    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        &mut self.0
    }
}

impl fmt::Debug for NaiveJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NaiveJob")
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}
