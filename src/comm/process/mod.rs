//! Ranks in several processes: [`ProcessJob`] connects the engines of each.
//!
//! Every process has the rendezvous of its launch ([`local`](super::local)), which ranks of other processes join by parcel:
//!
//! ```text
//! process 0                                     process 1
//! rank 0 calls: joins here, and  ---header-->   joins there, in the name of rank 0: what differs is found now
//!                                ---payload->   its deposit is there: rank 1 makes its result of all deposits
//! ```
//!
//! A payload is what the ranks of the other process need of this rank's tensors, once, however many they are: a shard that
//! is gathered, the parts of a reduction or an exchange that are theirs. So downstream of the rendezvous all is as among
//! threads: the same kernels, the same tree, the same bits. What ranks of one host gather does not travel: they put it
//! [where all have it](super::local).
//!
//! | file | what it holds |
//! |---|---|
//! | `header`, `agreement`, `told`, `wire` | what is said, and how it is written |
//! | `payload` | tensors that are sent, and where they land |
//! | `layout`, `result_buffer`, `late` | results in which they land at once |
//! | [`transport`](super::transport) | what carries both |
//!
//! # Failures
//!
//! Process 0 decides which failure is the first: others tell it what they find, and go on when it has said what counts.
//! A launch ends in a process when the ranks of all processes have: with the first failure, if one has failed anywhere,
//! and with how each rank has ended, which its process says. Every process then has the same report, and process 0 is the
//! one to print it.

mod agreement;
pub(super) mod contiguous_layout;
pub(super) mod header;
pub(super) mod late;
pub(super) mod payload;
mod remote_error;
pub(super) mod result_buffer;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::backend::{Backend, ProcessOptions};
use super::local::{Contribution, HostBackend, PayloadTarget, PeerProcesses};
use super::transport::{MessageHandler, RecvBuffer, Transport};
use crate::memory::HostMemoryPool;
use crate::memory::shared_memory::SharedMemoryPool;
use header::{ControlMessage, Header, LaunchId, PayloadDesc};
use late::Known;

/// The processes of a job, as one of them sees the others: what makes the engines of its launches.
///
/// Every process makes the same launches in the same order, and has the same number of ranks in each: of `t` ranks
/// each, process `p` has ranks `p * t` to `p * t + t - 1`. A launch fails in all processes if a rank fails in any.
///
/// ```no_run
/// # use std::sync::Arc;
/// use burn_dtensor::comm::transport::Transport;
/// use burn_dtensor::comm::{Launch, ProcessJob, launch};
///
/// # fn run(courier: Arc<dyn Transport>) -> burn_dtensor::Result<()> {
/// // Of whatever connects the processes.
/// let processes = ProcessJob::new(courier);
/// launch(Launch::on_backend(processes.engine(4)), |world| {
///     // The ranks of all processes.
///     world.barrier("all are here")
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ProcessJob {
    courier: Arc<dyn Transport>,
    state: Mutex<JobState>,
    /// Of what lands in memory of its own, whichever thread it lands by.
    memory: Arc<HostMemoryPool>,
    /// What it has in common with others of its host, in its last launch.
    commons: Mutex<Arc<SharedMemoryPool>>,
    this: Weak<Self>,
}

#[derive(Debug, Default)]
struct JobState {
    /// Launches made here. All processes make the same.
    made: u64,
    /// Those, and the worlds in which their ranks have gone on.
    engines: HashMap<LaunchId, Weak<HostBackend>>,
    /// What has come for launches that have not begun here, in order.
    early: Vec<EarlyHeader>,
    /// Headers so far, of each process.
    headers: Vec<u64>,
    /// What payloads are for that are on their way, by process and number of the header.
    awaited: HashMap<(usize, u64), Awaited>,
    /// Processes that nothing more comes from, and why.
    lost: Vec<(usize, String)>,
}

/// What is done with payloads, once they are there.
#[derive(Debug)]
struct Awaited {
    contents: PayloadDesc,
    goal: Goal,
    /// When they were announced.
    begun: Instant,
}

#[derive(Debug)]
enum Goal {
    Place(Weak<HostBackend>, PayloadTarget),
    /// Of a launch that has not begun.
    Early,
}

/// A header of a launch that has not begun.
#[derive(Debug)]
struct EarlyHeader {
    launch: LaunchId,
    /// The process, and the number of the header.
    from: (usize, u64),
    word: ControlMessage,
    /// What its payloads hold, if they are there.
    deposit: Option<Contribution>,
}

impl ProcessJob {
    /// Those that `courier` connects.
    pub fn new(courier: Arc<dyn Transport>) -> Arc<Self> {
        let state = JobState { headers: vec![0; courier.processes()], ..JobState::default() };
        let state = Mutex::new(state);
        let (carrier, memory, commons) = (courier.clone(), Arc::default(), Mutex::default());
        let this = Arc::new_cyclic(|this: &Weak<Self>| {
            let this = this.clone();
            Self { courier: carrier, state, memory, commons, this }
        });
        courier.set_handler(this.clone());
        this
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.courier.processes()
    }

    /// Which of them this is.
    pub fn here(&self) -> usize {
        self.courier.process_index()
    }

    /// The engine of the next launch, with `each` ranks in every process, for
    /// [`Launch::on_backend`](super::Launch::on_backend).
    pub fn engine(&self, each: usize) -> Arc<dyn Backend> {
        self.engine_of(each, ProcessOptions::default())
    }

    /// The same, of ranks that live together in this manner in each process.
    pub fn engine_of(&self, each: usize, manner: ProcessOptions) -> Arc<dyn Backend> {
        let launch = self.state.lock().next_launch();
        let processes = self.this.clone();
        let begin = Arc::new(move |launch, engine: &Arc<HostBackend>| {
            processes.upgrade().expect("whoever communicates has them").begin(launch, engine);
        });
        let counts = vec![each; self.count()];
        let commons = {
            let mut commons = self.commons.lock();
            *commons = Arc::new(commons.reset());
            commons.clone()
        };
        let others = PeerProcesses::new(self.courier.clone(), commons, launch, &counts, begin);
        let engine = HostBackend::of_processes(None, others, manner);
        self.begin(launch, &engine);
        engine
    }

    /// What others say of `launch` is for `engine` from now on.
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

    /// The engines that are still there.
    fn engines(&self) -> impl Iterator<Item = Arc<HostBackend>> {
        self.engines.values().filter_map(Weak::upgrade)
    }

    /// Takes a header. Returns where its payloads go; what is wrong with it, if it cannot be right.
    fn take(
        &mut self,
        from: (usize, u64),
        header: &[u8],
        lengths: &[usize],
        memory: &Arc<HostMemoryPool>,
    ) -> Result<Vec<Box<dyn RecvBuffer>>, String> {
        let Some(Header { launch, mut word }) = Header::read(header) else {
            return Err(format!("header {} of {} bytes cannot be read", from.1, header.len()));
        };
        let contents = word.contents();
        if !payload::are_of(lengths, &contents.tensors) {
            return Err(format!(
                "header {} announces payloads of {lengths:?} bytes for {:?}",
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
        let known = match &goal {
            Some(Goal::Place(engine, place)) => known_of(engine, *place, &contents),
            _ => Known::Nowhere,
        };
        let landings = match (known, &goal) {
            (Known::Placed(landings), _) => landings,
            (Known::NotYet, Some(Goal::Place(engine, place))) => {
                let (engine, place, asked, tensors) =
                    (engine.clone(), *place, contents.clone(), contents.tensors.clone());
                let (ask, memory) = (move || known_of(&engine, place, &asked), memory.clone());
                late::landings(lengths.len(), lengths.iter().sum(), ask, move || payload::spaces(&tensors, &memory))
            }
            _ => payload::spaces(&contents.tensors, memory),
        };
        if let Some(goal) = goal {
            self.awaited.insert(from, Awaited { contents, goal, begun: Instant::now() });
        }
        Ok(landings)
    }
}

/// Where payloads of these contents land that are awaited at `place`.
fn known_of(engine: &Weak<HostBackend>, place: PayloadTarget, contents: &PayloadDesc) -> Known {
    engine.upgrade().map_or(Known::Nowhere, |engine| engine.regions(place, contents))
}

impl MessageHandler for ProcessJob {
    fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
        let mut state = self.state.lock();
        let number = state.headers[from];
        state.headers[from] += 1;
        state.take((from, number), &header, lengths, &self.memory).unwrap_or_else(|problem| {
            state.engines().for_each(|engine| engine.misunderstood(from, problem.clone()));
            payload::waste(lengths)
        })
    }

    unsafe fn arrived(&self, from: usize, number: u64, landings: Vec<Box<dyn RecvBuffer>>) {
        let landings: Vec<_> = landings.into_iter().map(late::settled).collect();
        let mut state = self.state.lock();
        let Some(Awaited { contents, goal, begun }) = state.awaited.remove(&(from, number)) else { return };
        let deposit = match result_buffer::of_landings(&landings) {
            Some(results) => Contribution::of_result_buffer(results),
            None => {
                let PayloadDesc { addressees, tensors, common } = contents;
                // SAFETY: the caller has written them all.
                let tensors = unsafe { payload::landed(tensors, landings) };
                Contribution::landed(addressees, tensors).saying(common)
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
