//! Ranks in several processes: [`ProcessJob`] connects the backends of all processes of a job.
//!
//! Every process has a rendezvous for its launch (see [`local`](super::local)). A call of a rank in another
//! process arrives as a message and is posted in this rendezvous on behalf of that rank:
//!
//! ```text
//! process 0                                     process 1
//! rank 0 calls a collective:    ---header--->   posts the call for rank 0 and compares the signatures
//! posts it locally and sends
//!                               ---payload-->   completes rank 0's contribution; when all contributions
//!                                               are complete, rank 1 computes its result from them
//! ```
//!
//! A payload holds the data of one rank's tensors that the ranks of the receiving process need: the shard of an
//! all-gather, or their blocks of a reduction or an all-to-all. It is sent to each process once, however many
//! ranks the process has. After the rendezvous, ranks in processes use the same code as ranks as threads: the same
//! kernels, the same reduction tree, and bit-identical results.
//!
//! | file | content |
//! |---|---|
//! | `header`, `remote_error` | messages and their encoding |
//! | `payload`, `payload_check` | tensors that are sent, and the memory into which they are received |
//! | `contiguous_layout`, `result_buffer` | results into which payloads are received directly |
//! | [`transport`](super::transport) | interface that carries headers and payloads |
//!
//! # Failures
//!
//! The process of rank 0 decides which failure is the first. The other processes report the failures that they
//! find to it, and continue when they have received its decision. A launch ends in a process when the ranks of all
//! processes have ended, whether they succeeded or failed. By then the process has received the first failure, if
//! any rank failed, and the outcome of each rank from that rank's process. Every process therefore has the same
//! report; process 0 prints it.

pub(super) mod contiguous_layout;
pub(super) mod header;
#[cfg(feature = "testing")]
pub(crate) mod loopback;
pub(super) mod payload;
pub(super) mod payload_check;
pub(super) mod remote_error;
pub(super) mod result_buffer;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use burn_dtensor_flight::LaunchId;
use parking_lot::Mutex;

use super::backend::{Backend, ProcessOptions};
use super::local::{Contribution, HostBackend, PayloadTarget, PeerProcesses};
use super::transport::{MessageHandler, RecvBuffer, Transport};
use crate::memory::HostMemoryPool;
use header::{ControlMessage, Header, PayloadDesc};

/// The processes of a job, as seen from one of them: creates the backends of its launches.
///
/// Every process must make the same launches in the same order, each with the same number of ranks. In a launch of
/// `t` ranks per process, process `p` has ranks `p * t` to `p * t + t - 1`. A launch fails in all processes if a
/// rank fails in any of them.
/// ```no_run
/// # use std::sync::Arc;
/// use burn_dtensor::comm::transport::Transport;
/// use burn_dtensor::comm::{Launch, ProcessJob, launch};
///
/// # fn run(courier: Arc<dyn Transport>) -> burn_dtensor::Result<()> {
/// // `courier` is the transport that connects the processes.
/// let processes = ProcessJob::new(courier);
/// launch(Launch::on_backend(processes.engine(4)), |world| {
///     // Runs on the ranks of all processes.
///     world.barrier("all are here")
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ProcessJob {
    courier: Arc<dyn Transport>,
    state: Mutex<JobState>,
    /// Pool for payloads that are received into separate buffers, whichever thread receives them.
    memory: Arc<HostMemoryPool>,
    this: Weak<Self>,
}

#[derive(Debug, Default)]
struct JobState {
    /// Number of launches made in this process. All processes make the same launches.
    made: u64,
    /// Backends of these launches, and of the worlds that `shrink` created from them.
    engines: HashMap<LaunchId, Weak<HostBackend>>,
    /// Headers of launches that have not begun in this process, in order of arrival.
    early: Vec<EarlyHeader>,
    /// Number of headers received so far from each process.
    headers: Vec<u64>,
    /// Targets of payloads that have not arrived completely, by sending process and index of their header.
    awaited: HashMap<(usize, u64), Awaited>,
    /// Processes from which no more messages arrive, and the reason.
    lost: Vec<(usize, String)>,
    /// Processes that have sent an invalid message, and the problem.
    invalid: Vec<(usize, String)>,
}

/// Describes how to handle the payloads of one header after they have arrived.
#[derive(Debug)]
struct Awaited {
    contents: PayloadDesc,
    goal: Goal,
    /// Time at which the header announced them.
    begun: Instant,
}

#[derive(Debug)]
/// Destination of received payloads.
enum Goal {
    Place(Weak<HostBackend>, PayloadTarget),
    /// The launch has not begun; the data is kept in [`EarlyHeader`].
    Early,
}

/// Header of a launch that has not begun in this process.
#[derive(Debug)]
struct EarlyHeader {
    launch: LaunchId,
    /// Sending process, and index of the header.
    from: (usize, u64),
    word: ControlMessage,
    /// Data of its payloads, once they have arrived.
    deposit: Option<Contribution>,
}

impl ProcessJob {
    /// Creates the job of the processes that `courier` connects, and registers it as the handler of incoming
    /// messages.
    pub fn new(courier: Arc<dyn Transport>) -> Arc<Self> {
        let state = JobState { headers: vec![0; courier.processes()], ..JobState::default() };
        let state = Mutex::new(state);
        let (carrier, memory) = (courier.clone(), Arc::default());
        let this = Arc::new_cyclic(|this: &Weak<Self>| {
            let this = this.clone();
            Self { courier: carrier, state, memory, this }
        });
        courier.set_handler(this.clone());
        this
    }

    /// Returns the number of processes.
    pub fn count(&self) -> usize {
        self.courier.processes()
    }

    /// Returns the index of this process.
    pub fn here(&self) -> usize {
        self.courier.process_index()
    }

    /// Returns the backend of the next launch, with `each` ranks in every process, for
    /// [`Launch::on_backend`](super::Launch::on_backend).
    pub fn engine(&self, each: usize) -> Arc<dyn Backend> {
        self.engine_of(each, ProcessOptions::default())
    }

    /// Like [`engine`](Self::engine), with the given options for threading and memory sharing in each process.
    pub fn engine_of(&self, each: usize, manner: ProcessOptions) -> Arc<dyn Backend> {
        let launch = self.state.lock().next_launch();
        let processes = self.this.clone();
        let begin = Arc::new(move |launch, engine: &Arc<HostBackend>| {
            processes.upgrade().expect("the transport's handler keeps the job alive").begin(launch, engine);
        });
        let counts = vec![each; self.count()];
        let others = PeerProcesses::new(self.courier.clone(), launch, &counts, begin);
        let engine = HostBackend::of_processes(None, others, manner);
        self.begin(launch, &engine);
        engine
    }

    /// Routes messages of `launch` to `engine` from now on. Passes on the headers and payloads that arrived
    /// earlier, and reports the processes that are already lost.
    fn begin(&self, launch: LaunchId, engine: &Arc<HostBackend>) {
        let mut state = self.state.lock();
        let this = Arc::downgrade(engine);
        state.engines.insert(launch, this.clone());
        for EarlyHeader { from, word, deposit, .. } in
            state.early.extract_if(.., |deferred| deferred.launch == launch).collect::<Vec<_>>()
        {
            let place = engine.hear(from.0, word);
            match (place, deposit) {
                (Some(place), Some(deposit)) => engine.fill(place, deposit),
                (Some(place), None) => {
                    if let Some(awaited) = state.awaited.get_mut(&from) {
                        awaited.goal = Goal::Place(this.clone(), place);
                    }
                }
                (None, _) => drop(state.awaited.remove(&from)),
            }
        }
        for (process, problem) in &state.invalid {
            engine.misunderstood(*process, problem.clone());
        }
        for (process, problem) in &state.lost {
            engine.lost(*process, problem);
        }
    }
}

impl JobState {
    fn next_launch(&mut self) -> LaunchId {
        self.made += 1;
        LaunchId::first(self.made - 1)
    }

    /// Returns the backends that still exist.
    fn engines(&self) -> impl Iterator<Item = Arc<HostBackend>> {
        self.engines.values().filter_map(Weak::upgrade)
    }

    /// Handles a header. Returns the buffers for its payloads, or a description of the problem if the header is
    /// invalid.
    fn take(
        &mut self,
        from: (usize, u64),
        header: &[u8],
        lengths: &[usize],
        memory: &Arc<HostMemoryPool>,
    ) -> Result<Vec<Box<dyn RecvBuffer>>, String> {
        let Header { launch, word } =
            Header::read(header).map_err(|problem| format!("header {} of {} bytes {problem}", from.1, header.len()))?;
        let contents = word.contents();
        if !payload::are_of(lengths, &contents.tensors) {
            return Err(format!(
                "header {} announces payloads of {lengths:?} bytes, which do not match its tensors {:?}",
                from.1, contents.tensors
            ));
        }
        let goal = match self.engines.get(&launch) {
            None => {
                self.early.push(EarlyHeader { launch, from, word, deposit: None });
                Some(Goal::Early)
            }
            Some(engine) => {
                let place = engine.upgrade().and_then(|there| there.hear(from.0, word));
                place.map(|place| Goal::Place(engine.clone(), place))
            }
        };
        let placed = match &goal {
            Some(Goal::Place(engine, place)) => engine.upgrade().and_then(|engine| engine.regions(*place, &contents)),
            Some(Goal::Early) | None => None,
        };
        let landings = placed.unwrap_or_else(|| payload::spaces(&contents.tensors, memory));
        if let Some(goal) = goal {
            self.awaited.insert(from, Awaited { contents, goal, begun: Instant::now() });
        }
        Ok(landings)
    }
}

impl MessageHandler for ProcessJob {
    fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
        let mut state = self.state.lock();
        let number = state.headers[from];
        state.headers[from] += 1;
        state.take((from, number), &header, lengths, &self.memory).unwrap_or_else(|problem| {
            state.engines().for_each(|engine| engine.misunderstood(from, problem.clone()));
            state.invalid.push((from, problem));
            payload::waste(lengths)
        })
    }

    unsafe fn arrived(&self, from: usize, number: u64, landings: Vec<Box<dyn RecvBuffer>>) {
        let mut state = self.state.lock();
        let Some(Awaited { contents, goal, begun }) = state.awaited.remove(&(from, number)) else { return };
        let deposit = match result_buffer::of_landings(&landings) {
            Some(results) => Contribution::of_result_buffer(results),
            None => {
                let PayloadDesc { addressees, tensors } = contents;
                // SAFETY: the caller guarantees that all bytes are written.
                let tensors = unsafe { payload::landed(tensors, landings) };
                Contribution::landed(addressees, tensors)
            }
        };
        let deposit = deposit.there(Some(begun));
        match goal {
            Goal::Place(engine, place) => {
                drop(state);
                if let Some(engine) = engine.upgrade() {
                    engine.fill(place, deposit);
                }
            }
            Goal::Early => {
                if let Some(deferred) = state.early.iter_mut().find(|deferred| deferred.from == (from, number)) {
                    deferred.deposit = Some(deposit);
                }
            }
        }
    }

    fn lost(&self, process: Option<usize>, problem: &str) {
        let mut state = self.state.lock();
        let here = self.courier.process_index();
        let all = (0..self.courier.processes()).filter(|other| *other != here);
        for process in process.map_or_else(|| all.collect(), |process| vec![process]) {
            state.engines().for_each(|engine| engine.lost(process, problem));
            state.lost.push((process, problem.into()));
        }
    }
}
