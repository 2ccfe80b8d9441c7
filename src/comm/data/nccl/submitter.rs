//! [`Submitter`]: the one thread that makes NCCL's calls for a GPU.
//!
//! ```text
//! rank             start: sends a job                        take: waits until it is enqueued
//! submitter                           waits for the tensors, copies them in, the operation, an event
//! communication stream                        ...                         runs it, when the GPU gets there
//! ```
//!
//! The jobs of a rank are issued in the order in which they were sent: that of the exchanges of the
//! world. A communicator does not block, so a job may continue in the background. Until it is
//! enqueued, no other job of the rank is issued. Ranks that share the GPU each have a stream, and
//! their jobs do not wait for each other's, which may be what they connect to.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, mem, thread};

use parking_lot::{Condvar, Mutex};

use super::NAME;
use super::api::{
    Comm, Event, Exported, Gpu, GpuApi, Reduction, Stream, Transfer, UniqueId, error,
};
use super::layout::{Layout, Way};
use super::staging::{Lease, StagingPool};
use crate::comm::control::rendezvous::LONGEST;
use crate::comm::data::plane::{DataPlaneError, OnFailure, PlaneResult};

/// Interval at which communicators are asked for errors while nothing else is to do.
const WATCH: Duration = Duration::from_millis(50);

/// Interval at which a call that continues in the background is asked for progress.
const BUSY: Duration = Duration::from_micros(20);

/// Time after which a call that continues in the background is aborted, once the world has ended.
const END: Duration = Duration::from_secs(10);

/// Identifies a rank's membership of a channel in this process.
pub(super) type ChannelKey = usize;

/// Connects a rank to the others of a channel.
#[derive(Debug)]
pub(super) struct ConnectJob {
    pub channel: ChannelKey,
    /// Global rank.
    pub rank: usize,
    pub id: UniqueId,
    pub ranks: usize,
    pub member: usize,
}

/// Exchanges the tensors of one call.
#[derive(Debug)]
pub(super) struct ExchangeJob {
    pub channel: ChannelKey,
    /// Global rank.
    pub rank: usize,
    pub layout: Arc<Layout>,
    pub exported: Exported,
    /// Tensors of `exported` that are copied in, and their offsets.
    pub copied_in: Vec<(usize, usize)>,
    pub outcome: Arc<Outcome>,
}

#[derive(Debug)]
pub(super) enum Job {
    Connect(ConnectJob),
    Exchange(ExchangeJob),
    /// Makes the thread look for an abort.
    Wake,
    Stop,
}

/// An operation that is enqueued, and the memory that has its result afterwards.
#[derive(Debug)]
pub(super) struct Enqueued {
    pub lease: Lease,
    pub done: Event,
}

/// What has become of a job.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    result: Mutex<Option<PlaneResult<Enqueued>>>,
    changed: Condvar,
}

impl Outcome {
    fn set(&self, result: PlaneResult<Enqueued>) {
        *self.result.lock() = Some(result);
        self.changed.notify_all();
    }

    /// Waits until the operation is enqueued, at most for `time`. Does not wait for the GPU.
    pub fn wait(&self, time: Duration) -> PlaneResult<Enqueued> {
        let until = Instant::now() + time.min(LONGEST);
        let mut result = self.result.lock();
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            if self.changed.wait_until(&mut result, until).timed_out() {
                return error(format!("the operation was not enqueued within {time:?}"));
            }
        }
    }
}

/// Handle of the thread.
#[derive(Debug)]
pub(super) struct Submitter {
    jobs: Sender<Job>,
    is_aborted: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Submitter {
    /// Starts the thread of `gpu`, which calls `failed` with the rank whose operation has failed.
    pub fn start(api: Arc<dyn GpuApi>, gpu: Gpu, failed: OnFailure) -> io::Result<Self> {
        let (jobs, received) = channel();
        let is_aborted = Arc::<AtomicBool>::default();
        let worker = Worker {
            api,
            gpu,
            failed,
            is_aborted: is_aborted.clone(),
            channels: HashMap::new(),
            ranks: BTreeMap::new(),
            retained: VecDeque::new(),
            failure: None,
        };
        let thread = thread::Builder::new()
            .name(format!("nccl {}", gpu.0))
            .spawn(move || worker.run(&received))?;
        Ok(Self {
            jobs,
            is_aborted,
            thread: Some(thread),
        })
    }

    /// Sends a job. Does not wait.
    pub fn send(&self, job: Job) {
        if let Err(refused) = self.jobs.send(job)
            && let Job::Exchange(job) = refused.0
        {
            job.outcome.set(error("the thread of the GPU has ended"));
        }
    }

    /// Makes all jobs fail, and ends what is enqueued.
    pub fn abort(&self) {
        self.is_aborted.store(true, Ordering::Release);
        self.send(Job::Wake);
    }
}

impl Drop for Submitter {
    fn drop(&mut self) {
        self.send(Job::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that makes NCCL's calls has panicked");
        }
    }
}

/// A connected channel of a rank.
struct Channel {
    rank: usize,
    comm: Comm,
    pool: Arc<StagingPool>,
}

/// A rank whose tensors are on the GPU.
#[derive(Default)]
struct RankState {
    /// Set when the rank connects for the first time.
    stream: Option<Stream>,
    /// Jobs that are not issued.
    queue: VecDeque<Job>,
    /// Job that continues in the background.
    busy: Option<Busy>,
}

impl RankState {
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.busy.is_none()
    }
}

enum Busy {
    Connecting(Comm),
    Exchanging {
        comm: Comm,
        exported: Exported,
        lease: Lease,
        outcome: Arc<Outcome>,
    },
}

impl Busy {
    fn comm(&self) -> Comm {
        match self {
            Self::Connecting(comm) | Self::Exchanging { comm, .. } => *comm,
        }
    }
}

struct Worker {
    api: Arc<dyn GpuApi>,
    gpu: Gpu,
    failed: OnFailure,
    is_aborted: Arc<AtomicBool>,
    channels: HashMap<ChannelKey, Channel>,
    ranks: BTreeMap<usize, RankState>,
    /// Tensors that the GPU may still read, and the point after which it has.
    retained: VecDeque<(Event, Exported)>,
    /// The first failure. No job is issued after it, and after an abort no call is made.
    failure: Option<DataPlaneError>,
}

impl Worker {
    fn run(mut self, jobs: &Receiver<Job>) {
        if let Err(problem) = self.api.enter(self.gpu) {
            self.failure = Some(problem);
        }
        let mut has_aborted = false;
        let mut end: Option<Instant> = None;
        loop {
            let is_busy = !self.is_idle();
            match jobs.recv_timeout(if is_busy { BUSY } else { WATCH }) {
                Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    end.get_or_insert_with(|| Instant::now() + END);
                }
                Ok(Job::Wake) => {}
                Ok(Job::Connect(job)) => self.add(job.rank, Job::Connect(job)),
                Ok(Job::Exchange(job)) => self.add(job.rank, Job::Exchange(job)),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let is_late = end.is_some_and(|end| is_busy && Instant::now() > end);
            if !has_aborted && (is_late || self.is_aborted.load(Ordering::Acquire)) {
                has_aborted = true;
                self.abort();
            }
            if !has_aborted {
                self.advance();
            }
            self.refuse_after_failure();
            if end.is_some() && self.is_idle() {
                break;
            }
        }
        let gpu = self.gpu.0;
        if let Err(problem) = self.close(has_aborted) {
            log::warn!("cannot free the communicators of GPU {gpu}: {problem}");
        }
    }

    fn is_idle(&self) -> bool {
        self.ranks.values().all(RankState::is_idle)
    }

    fn add(&mut self, rank: usize, job: Job) {
        let state = self.ranks.entry(rank).or_default();
        state.queue.push_back(job);
    }

    /// Returns the next job of a rank that has none in the background.
    fn next(&mut self) -> Option<Job> {
        let mut ranks = self.ranks.values_mut();
        ranks.find_map(|rank| {
            let is_free = rank.busy.is_none();
            is_free.then(|| rank.queue.pop_front()).flatten()
        })
    }

    /// Completes what continues in the background, issues the next jobs, and looks for errors.
    fn advance(&mut self) {
        self.settle();
        while self.failure.is_none()
            && let Some(job) = self.next()
        {
            self.issue(job);
            self.settle();
        }
        self.watch();
        self.release();
    }

    fn issue(&mut self, job: Job) {
        match job {
            Job::Connect(job) => {
                let rank = job.rank;
                if let Err(problem) = self.connect(job) {
                    self.fail(rank, problem);
                }
            }
            Job::Exchange(job) => {
                let rank = job.rank;
                let outcome = job.outcome.clone();
                if let Err(problem) = self.exchange(job) {
                    outcome.set(Err(problem.clone()));
                    self.fail(rank, problem);
                }
            }
            Job::Wake | Job::Stop => {}
        }
    }

    fn connect(&mut self, job: ConnectJob) -> PlaneResult<()> {
        let ConnectJob {
            channel,
            rank,
            id,
            ranks,
            member,
        } = job;
        let state = self.ranks.entry(rank).or_default();
        if state.stream.is_none() {
            state.stream = Some(self.api.create_stream(self.gpu)?);
        }
        let (comm, is_in_progress) = self.api.connect(&id, ranks, member)?;
        let pool = Arc::default();
        self.channels.insert(channel, Channel { rank, comm, pool });
        state.busy = is_in_progress.then_some(Busy::Connecting(comm));
        Ok(())
    }

    fn exchange(&mut self, job: ExchangeJob) -> PlaneResult<()> {
        let ExchangeJob {
            channel,
            rank,
            layout,
            exported,
            copied_in,
            outcome,
        } = job;
        let api = &*self.api;
        let state = self.ranks.entry(rank).or_default();
        let (Some(Channel { comm, pool, .. }), Some(stream)) =
            (self.channels.get(&channel), state.stream)
        else {
            return error("the channel is not connected");
        };
        let comm = *comm;
        let lease = Lease::take(pool, layout.bytes, api, comm, stream)?;
        api.wait(stream, &exported.ready)?;
        let memory = lease.memory();
        for (index, offset) in copied_in {
            api.copy_in(&exported, index, memory.at(offset), stream)?;
        }
        let transfer = |offset: usize, bytes: usize| Transfer {
            memory: memory.at(offset),
            bytes,
            comm,
            stream,
        };
        let reduction = |recv, count, dtype, op| Reduction {
            send: memory,
            recv,
            count,
            dtype,
            op,
            comm,
            stream,
        };
        match &layout.way {
            Way::Nothing => false,
            Way::AllGather { row } => {
                let own = layout.row_of(*row);
                api.all_gather(transfer(own, *row), memory)?
            }
            Way::ReduceScatter { count, dtype, op } => {
                let own = memory.at(layout.row_of(count * dtype.size()));
                api.reduce_scatter(reduction(own, *count, *dtype, *op))?
            }
            Way::AllReduce { count, dtype, op } => {
                api.all_reduce(reduction(memory, *count, *dtype, *op))?
            }
            Way::Broadcast { bytes, root } => api.broadcast(transfer(0, *bytes), *root)?,
            Way::Pairs { sent, received } => {
                api.group_start()?;
                let all = sent
                    .iter()
                    .try_for_each(|span| {
                        api.send(transfer(span.offset, span.bytes), span.peer)
                            .map(drop)
                    })
                    .and_then(|()| {
                        received.iter().try_for_each(|span| {
                            api.receive(transfer(span.offset, span.bytes), span.peer)
                                .map(drop)
                        })
                    });
                // Also after an error, which otherwise leaves the thread in the group.
                let end = api.group_end();
                all.and(end)?;
                true
            }
        };
        state.busy = Some(Busy::Exchanging {
            comm,
            exported,
            lease,
            outcome,
        });
        Ok(())
    }

    /// Completes jobs whose calls no longer continue in the background.
    fn settle(&mut self) {
        let mut failures = Vec::new();
        for (rank, state) in &mut self.ranks {
            let Some(busy) = &state.busy else { continue };
            match self.api.progress(busy.comm()) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(problem) => {
                    failures.push((*rank, problem));
                    continue;
                }
            }
            let Some(Busy::Exchanging {
                exported,
                lease,
                outcome,
                ..
            }) = state.busy.take()
            else {
                continue;
            };
            let stream = state.stream.expect("the rank is connected");
            match self.api.record(stream) {
                Ok(done) => {
                    self.retained.push_back((done.clone(), exported));
                    outcome.set(Ok(Enqueued { lease, done }));
                }
                Err(problem) => {
                    outcome.set(Err(problem.clone()));
                    failures.push((*rank, problem));
                }
            }
        }
        for (rank, problem) in failures {
            self.fail(rank, problem);
        }
    }

    /// Asks communicators whether an operation has failed.
    fn watch(&mut self) {
        if self.failure.is_some() {
            return;
        }
        let failed = self.channels.values().find_map(|channel| {
            let problem = self.api.progress(channel.comm).err()?;
            Some((channel.rank, problem))
        });
        if let Some((rank, problem)) = failed {
            self.fail(rank, problem);
        }
    }

    /// Drops tensors that the GPU has read.
    fn release(&mut self) {
        while let Some((done, _)) = self.retained.front()
            && self.api.is_done(done).unwrap_or(true)
        {
            self.retained.pop_front();
        }
    }

    /// Fails the world, which then aborts the plane.
    fn fail(&mut self, rank: usize, problem: DataPlaneError) {
        if self.failure.is_none() {
            self.failure = Some(problem.clone());
            (self.failed)(rank, NAME, problem);
        }
    }

    /// Makes jobs fail that are not issued any more.
    fn refuse_after_failure(&mut self) {
        let Some(problem) = &self.failure else { return };
        for state in self.ranks.values_mut() {
            for job in mem::take(&mut state.queue) {
                if let Job::Exchange(job) = job {
                    job.outcome.set(Err(problem.clone()));
                }
            }
            if let Some(Busy::Exchanging { outcome, .. }) = state.busy.take() {
                outcome.set(Err(problem.clone()));
            }
        }
    }

    /// Ends all operations, on this rank only.
    fn abort(&mut self) {
        self.failure.get_or_insert_with(|| DataPlaneError {
            problem: "the exchange was aborted".into(),
        });
        for channel in self.channels.values() {
            if let Err(problem) = self.api.abort(channel.comm) {
                log::warn!(
                    "cannot abort a communicator of rank {}: {problem}",
                    channel.rank
                );
            }
        }
    }

    /// Frees communicators, memory and streams, once nothing uses them.
    fn close(mut self, has_aborted: bool) -> PlaneResult<()> {
        let streams: Vec<_> = self.ranks.values().filter_map(|r| r.stream).collect();
        for stream in &streams {
            let last = self.api.record(*stream)?;
            self.api.synchronize(&last)?;
        }
        self.retained.clear();
        for channel in self.channels.values() {
            let comm = (!has_aborted).then_some(channel.comm);
            channel.pool.free(&*self.api, comm)?;
            comm.map_or(Ok(()), |comm| self.api.destroy(comm))?;
        }
        streams
            .into_iter()
            .for_each(|stream| self.api.destroy_stream(stream));
        Ok(())
    }
}
