//! [`ProcessJob`]: the processes of a job, and the messages that arrive for its launches.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use burn_dtensor_flight::LaunchId;
use parking_lot::Mutex;

use super::HostBackend;
use super::incoming::PayloadTarget;
use crate::comm::backend::{Backend, ProcessOptions};
use crate::comm::data::contribution::Contribution;
use crate::comm::data::{payload, result_buffer};
use crate::comm::transport::header::{ControlMessage, Header, PayloadDesc};
use crate::comm::transport::peer_processes::PeerProcesses;
use crate::comm::transport::{MessageHandler, RecvBuffer, Transport};
use crate::memory::HostMemoryPool;

/// The processes of a job, as seen from one of them: creates the backends of its launches.
///
/// Every process must make the same launches in the same order, each with the same number of ranks
/// ([`CommError::UnequalRanks`](crate::comm::CommError::UnequalRanks)). In a launch of `t` ranks
/// per process, process `p` has ranks `p * t` to `p * t + t - 1`. A launch fails in all processes
/// if a rank fails in any of them.
/// ```no_run
/// # use std::sync::Arc;
/// use burn_dtensor::comm::transport::Transport;
/// use burn_dtensor::comm::{Launch, ProcessJob, launch};
///
/// # fn run(transport: Arc<dyn Transport>) -> burn_dtensor::Result<()> {
/// // `transport` is the transport that connects the processes.
/// let processes = ProcessJob::new(transport);
/// launch(Launch::on_backend(processes.backend(4)), |world| {
///     // Runs on the ranks of all processes.
///     world.barrier("all are here")
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ProcessJob {
    transport: Arc<dyn Transport>,
    pub(super) state: Mutex<JobState>,
    /// Pool for payloads that are received into separate buffers, whichever thread receives them.
    memory: Arc<HostMemoryPool>,
    this: Weak<Self>,
}

#[derive(Debug, Default)]
pub(super) struct JobState {
    /// Number of launches made in this process. All processes make the same launches.
    made: u64,
    /// Backends of these launches, and of the worlds that `shrink` created from them.
    backends: HashMap<LaunchId, Weak<HostBackend>>,
    /// Headers of launches that have not begun in this process, in order of arrival.
    early: Vec<EarlyHeader>,
    /// Number of headers received so far from each process.
    pub headers: Vec<u64>,
    /// Targets of payloads that have not arrived completely, by sending process and index of their
    /// header.
    pub awaited: HashMap<(usize, u64), Awaited>,
    /// Processes from which no more messages arrive, and the reason.
    pub lost: Vec<(usize, String)>,
    /// Processes that have sent an invalid message, and the problem.
    invalid: Vec<(usize, String)>,
}

/// Describes how to handle the payloads of one header after they have arrived.
#[derive(Debug)]
pub(super) struct Awaited {
    contents: PayloadDesc,
    /// Destination; `None` if the launch has not begun, and the data is kept in [`EarlyHeader`].
    target: Option<(Weak<HostBackend>, PayloadTarget)>,
    /// Time at which the header announced them.
    begun: Instant,
}

/// Header of a launch that has not begun in this process.
#[derive(Debug)]
struct EarlyHeader {
    launch: LaunchId,
    /// Sending process, and index of the header.
    from: (usize, u64),
    message: ControlMessage,
    /// Data of its payloads, once they have arrived.
    contribution: Option<Contribution>,
}

impl ProcessJob {
    /// Creates the job of the processes that `transport` connects, and registers it as the handler
    /// of incoming messages.
    pub fn new(transport: Arc<dyn Transport>) -> Arc<Self> {
        let state = JobState {
            headers: vec![0; transport.processes()],
            ..JobState::default()
        };
        let state = Mutex::new(state);
        let own = transport.clone();
        let memory = Arc::default();
        let this = Arc::new_cyclic(|this: &Weak<Self>| {
            let this = this.clone();
            Self {
                transport: own,
                state,
                memory,
                this,
            }
        });
        transport.set_handler(this.clone());
        this
    }

    /// Returns the number of processes.
    pub fn count(&self) -> usize {
        self.transport.processes()
    }

    /// Returns the index of this process.
    pub fn process_index(&self) -> usize {
        self.transport.process_index()
    }

    /// Returns the backend of the next launch, with `each` ranks in every process, for
    /// [`Launch::on_backend`](crate::comm::Launch::on_backend).
    pub fn backend(&self, each: usize) -> Arc<dyn Backend> {
        self.backend_with_options(each, ProcessOptions::default())
    }

    /// Like [`backend`](Self::backend), with the given options for threading and memory sharing in
    /// each process.
    pub fn backend_with_options(&self, each: usize, options: ProcessOptions) -> Arc<dyn Backend> {
        self.host_backend(each, options)
    }

    /// Like [`backend_with_options`](Self::backend_with_options), with its type.
    pub(in crate::comm) fn host_backend(
        &self,
        each: usize,
        options: ProcessOptions,
    ) -> Arc<HostBackend> {
        let launch = self.state.lock().next_launch();
        let counts = vec![each; self.count()];
        let peers = PeerProcesses::new(self.transport.clone(), launch, &counts);
        peers.announce(each);
        let backend = HostBackend::of_processes(None, peers, self.this.clone(), options);
        self.begin(launch, &backend);
        backend
    }

    /// Routes messages of `launch` to `backend` from now on. Passes on the headers and payloads
    /// that arrived earlier, and reports the processes that are already lost.
    pub(super) fn begin(&self, launch: LaunchId, backend: &Arc<HostBackend>) {
        let mut state = self.state.lock();
        let this = Arc::downgrade(backend);
        state.backends.insert(launch, this.clone());
        for EarlyHeader {
            from,
            message,
            contribution,
            ..
        } in state
            .early
            .extract_if(.., |deferred| deferred.launch == launch)
            .collect::<Vec<_>>()
        {
            let target = backend.receive(from.0, message);
            match (target, contribution) {
                (Some(target), Some(contribution)) => backend.deliver(target, contribution),
                (Some(target), None) => {
                    if let Some(awaited) = state.awaited.get_mut(&from) {
                        awaited.target = Some((this.clone(), target));
                    }
                }
                (None, _) => drop(state.awaited.remove(&from)),
            }
        }
        for (process, problem) in &state.invalid {
            backend.reject(*process, problem.clone());
        }
        for (process, problem) in &state.lost {
            backend.lost(*process, problem);
        }
    }
}

/// Returns the processes that MPI connects with this one; the first call connects them. Returns
/// `None` if there is only one.
///
/// # Collective
/// All processes must call it.
///
/// # Errors
/// If the processes could not be connected. Every later call returns the same error.
#[cfg(feature = "mpi")]
pub(in crate::comm) fn mpi_processes() -> Result<Option<Arc<ProcessJob>>, crate::comm::StartError> {
    static PROCESSES: std::sync::OnceLock<Option<Arc<ProcessJob>>> = std::sync::OnceLock::new();
    let transport = crate::comm::transport::mpi::MpiTransport::of_process()?;
    Ok(PROCESSES
        .get_or_init(|| transport.map(|transport| ProcessJob::new(transport)))
        .clone())
}

impl JobState {
    fn next_launch(&mut self) -> LaunchId {
        self.made += 1;
        LaunchId::first(self.made - 1)
    }

    /// Returns the backends that still exist.
    pub fn backends(&self) -> impl Iterator<Item = Arc<HostBackend>> {
        self.backends.values().filter_map(Weak::upgrade)
    }

    /// Handles a header. Returns the buffers for its payloads, or a description of the problem if
    /// the header is invalid.
    fn take(
        &mut self,
        from: (usize, u64),
        header: &[u8],
        lengths: &[usize],
        memory: &Arc<HostMemoryPool>,
    ) -> Result<Vec<Box<dyn RecvBuffer>>, String> {
        let Header { launch, message } = Header::read(header)
            .map_err(|problem| format!("header {} of {} bytes {problem}", from.1, header.len()))?;
        let contents = message.contents().cloned().unwrap_or_default();
        if !payload::are_of(lengths, &contents.tensors) {
            return Err(format!(
                "header {} announces payloads of {lengths:?} bytes, which do not match its tensors {:?}",
                from.1, contents.tensors
            ));
        }
        let Some(backend) = self.backends.get(&launch) else {
            self.early.push(EarlyHeader {
                launch,
                from,
                message,
                contribution: None,
            });
            self.awaited.insert(
                from,
                Awaited {
                    target: None,
                    begun: Instant::now(),
                    contents: contents.clone(),
                },
            );
            return Ok(payload::spaces(&contents.tensors, memory));
        };
        let target = backend
            .upgrade()
            .and_then(|there| Some((there.receive(from.0, message)?, there)));
        let regions = target
            .as_ref()
            .and_then(|(target, there)| there.regions(*target, &contents));
        let buffers = regions.unwrap_or_else(|| payload::spaces(&contents.tensors, memory));
        if let Some((target, _)) = target {
            let target = Some((backend.clone(), target));
            self.awaited.insert(
                from,
                Awaited {
                    target,
                    begun: Instant::now(),
                    contents,
                },
            );
        }
        Ok(buffers)
    }
}

impl MessageHandler for ProcessJob {
    fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
        let mut state = self.state.lock();
        let number = state.headers[from];
        state.headers[from] += 1;
        state
            .take((from, number), &header, lengths, &self.memory)
            .unwrap_or_else(|problem| {
                state
                    .backends()
                    .for_each(|backend| backend.reject(from, problem.clone()));
                state.invalid.push((from, problem));
                payload::waste(lengths)
            })
    }

    unsafe fn arrived(&self, from: usize, number: u64, buffers: Vec<Box<dyn RecvBuffer>>) {
        let mut state = self.state.lock();
        let Some(Awaited {
            contents,
            target,
            begun,
        }) = state.awaited.remove(&(from, number))
        else {
            return;
        };
        let contribution = match result_buffer::of_regions(&buffers) {
            Some(results) => Contribution::of_result_buffer(results),
            None => {
                let PayloadDesc {
                    recipients,
                    tensors,
                } = contents;
                // SAFETY: the caller guarantees that all bytes are written.
                let tensors = unsafe { payload::received(tensors, buffers) };
                Contribution::received(recipients, tensors)
            }
        };
        let contribution = contribution.arrived(Some(begun));
        match target {
            Some((backend, target)) => {
                drop(state);
                if let Some(backend) = backend.upgrade() {
                    backend.deliver(target, contribution);
                }
            }
            None => {
                if let Some(early) = state
                    .early
                    .iter_mut()
                    .find(|early| early.from == (from, number))
                {
                    early.contribution = Some(contribution);
                }
            }
        }
    }

    fn lost(&self, process: Option<usize>, problem: &str) {
        let mut state = self.state.lock();
        let here = self.transport.process_index();
        let all = (0..self.transport.processes()).filter(|other| *other != here);
        for process in process.map_or_else(|| all.collect(), |process| vec![process]) {
            state
                .backends()
                .for_each(|backend| backend.lost(process, problem));
            state.lost.push((process, problem.into()));
        }
    }
}
