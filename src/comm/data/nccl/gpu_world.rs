//! [`GpuWorld`]: the communicators of a world's ranks on one GPU, and the jobs that are not enqueued.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::NAME;
use super::api::{
    Comm, CommStream, CopyArgs, Exported, Gpu, GpuAddress, GpuApi, GpuEvent, ReduceArgs, error,
};
use super::jobs::{ChannelKey, ConnectJob, Enqueued, ExchangeJob, GpuJob, Outcome};
use super::layout::Way;
use super::staging::{Lease, StagingPool};
use crate::comm::data::plane::{DataPlaneError, OnFailure, PlaneResult};

/// A connected channel of a rank.
struct ConnectedChannel {
    rank: usize,
    comm: Comm,
    pool: Arc<StagingPool>,
}

/// A rank whose tensors are on the GPU.
#[derive(Default)]
struct GpuRank {
    /// Set when the rank connects for the first time.
    stream: Option<CommStream>,
    /// Jobs that are not issued.
    queue: VecDeque<GpuJob>,
    /// Job that continues in the background.
    busy: Option<Busy>,
}

impl GpuRank {
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.busy.is_none()
    }
}

enum Busy {
    Connecting(Comm),
    Exchanging {
        comm: Comm,
        exported: Option<Exported>,
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

/// An enqueued operation: the point after which it is done, and the tensors that it reads.
struct Retained {
    rank: usize,
    done: GpuEvent,
    outcome: Arc<Outcome>,
    _exported: Option<Exported>,
}

/// The ranks of a world whose tensors are on a GPU. All its methods are called on the GPU's thread.
pub(super) struct GpuWorld {
    api: Arc<dyn GpuApi>,
    gpu: Gpu,
    failed: OnFailure,
    is_aborted: Arc<AtomicBool>,
    has_aborted: bool,
    /// In the order in which they were connected, which is that of the world.
    channels: BTreeMap<ChannelKey, ConnectedChannel>,
    ranks: BTreeMap<usize, GpuRank>,
    /// Operations that the GPU may still carry out.
    retained: Vec<Retained>,
    /// Tensors and memory of operations that failed in part, until nothing is enqueued.
    abandoned: Vec<(Option<Exported>, Lease)>,
    /// The first failure. No job is issued after it, and after an abort no call is made.
    failure: Option<DataPlaneError>,
}

impl GpuWorld {
    pub fn new(
        api: Arc<dyn GpuApi>,
        gpu: Gpu,
        failed: OnFailure,
        is_aborted: Arc<AtomicBool>,
    ) -> Self {
        Self {
            api,
            gpu,
            failed,
            is_aborted,
            has_aborted: false,
            channels: BTreeMap::new(),
            ranks: BTreeMap::new(),
            retained: Vec::new(),
            abandoned: Vec::new(),
            failure: None,
        }
    }

    /// Does what can be done now. A world that `has_ended` is aborted after a failure, and if it
    /// `must_end`, also if the GPU is not done.
    pub fn run(&mut self, has_ended: bool, must_end: bool) {
        let must_end = must_end || (has_ended && self.failure.is_some());
        if !self.has_aborted && (must_end || self.is_aborted.load(Ordering::Acquire)) {
            self.has_aborted = true;
            self.abort();
        }
        if !self.has_aborted {
            self.advance();
        }
        self.refuse_after_failure();
    }

    /// Returns true if no job is left to issue.
    pub fn is_idle(&self) -> bool {
        self.ranks.values().all(GpuRank::is_idle)
    }

    /// Returns true if the GPU has nothing left to do.
    pub fn is_done(&self) -> bool {
        self.is_idle() && (self.has_aborted || self.retained.is_empty())
    }

    /// Adds a job of a rank.
    pub fn add(&mut self, job: GpuJob) {
        let state = self.ranks.entry(job.rank()).or_default();
        state.queue.push_back(job);
    }

    /// Returns the next job of a rank that has none in the background, and whose thread has recorded
    /// when the tensors are ready. Does not wait for that, so that an abort is noticed.
    fn next(&mut self) -> Option<GpuJob> {
        let api = &self.api;
        let mut ranks = self.ranks.values_mut();
        ranks.find_map(|rank| {
            let is_ready = match rank.queue.front()? {
                GpuJob::Connect(_) => true,
                // A failed check fails again when the job is issued.
                GpuJob::Exchange(job) => job
                    .exported
                    .as_ref()
                    .is_none_or(|exported| api.is_recorded(&exported.ready).unwrap_or(true)),
            };
            let is_free = rank.busy.is_none() && is_ready;
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

    fn issue(&mut self, job: GpuJob) {
        match job {
            GpuJob::Connect(job) => {
                let rank = job.rank;
                if let Err(problem) = self.connect(job) {
                    self.fail(rank, problem);
                }
            }
            GpuJob::Exchange(job) => {
                let rank = job.rank;
                let outcome = job.outcome.clone();
                if let Err(problem) = self.exchange(job) {
                    outcome.set(Err(problem.clone()));
                    self.fail(rank, problem);
                }
            }
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
        self.channels
            .insert(channel, ConnectedChannel { rank, comm, pool });
        state.busy = is_in_progress.then_some(Busy::Connecting(comm));
        Ok(())
    }

    fn exchange(&mut self, job: ExchangeJob) -> PlaneResult<()> {
        let state = self.ranks.entry(job.rank).or_default();
        let (Some(ConnectedChannel { comm, pool, .. }), Some(stream)) =
            (self.channels.get(&job.channel), state.stream)
        else {
            return error("the channel is not connected");
        };
        let comm = *comm;
        let lease = Lease::take(pool, job.layout.bytes, &*self.api, comm, stream)?;
        let enqueued = enqueue(&*self.api, &job, lease.memory(), comm, stream);
        let ExchangeJob {
            exported, outcome, ..
        } = job;
        if let Err(problem) = enqueued {
            self.abandoned.push((exported, lease));
            return Err(problem);
        }
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
                    self.retained.push(Retained {
                        rank: *rank,
                        done: done.clone(),
                        outcome: outcome.clone(),
                        _exported: exported,
                    });
                    outcome.set(Ok(Enqueued { lease, done }));
                }
                Err(problem) => {
                    outcome.set(Err(problem.clone()));
                    self.abandoned.push((exported, lease));
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

    /// Drops tensors that the GPU has read, and looks for operations that take too long.
    fn release(&mut self) {
        // Ranks that share the GPU have streams of their own, so that a later one may be done first.
        let api = &self.api;
        self.retained
            .retain(|operation| !api.is_done(&operation.done).unwrap_or(true));
        // The GPU waits for a rank that does not take part, without an error.
        let mut retained = self.retained.iter();
        let late = retained.find_map(|late| Some((late.rank, late.outcome.expired()?)));
        if let Some((rank, time)) = late {
            let problem = format!(
                "an operation of NCCL was not done within {time:?}. Run with NCCL_DEBUG=WARN to see what it waits for"
            );
            self.fail(rank, DataPlaneError { problem });
        }
    }

    /// Fails the world, which then aborts the plane.
    pub fn fail(&mut self, rank: usize, problem: DataPlaneError) {
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
                if let GpuJob::Exchange(job) = job {
                    job.outcome.set(Err(problem.clone()));
                }
            }
            if let Some(Busy::Exchanging {
                exported,
                lease,
                outcome,
                ..
            }) = state.busy.take()
            {
                outcome.set(Err(problem.clone()));
                self.abandoned.push((exported, lease));
            }
        }
    }

    /// Ends all operations, on this rank only.
    fn abort(&mut self) {
        self.failure.get_or_insert_with(|| DataPlaneError {
            problem: "the exchange was aborted".into(),
        });
        // Together, because each waits for the work on the stream, which may be another's.
        let _ = self.api.group_start();
        for channel in self.channels.values() {
            if let Err(problem) = self.api.abort(channel.comm) {
                log::warn!(
                    "cannot abort a communicator of rank {}: {problem}",
                    channel.rank
                );
            }
        }
        if let Err(problem) = self.api.group_end() {
            log::warn!("cannot abort the communicators of a GPU: {problem}");
        }
    }

    /// Frees communicators, memory and streams, once nothing uses them.
    pub fn close(mut self) {
        if let Err(problem) = self.free() {
            log::warn!(
                "cannot free the communicators of GPU {}: {problem}",
                self.gpu.0
            );
        }
    }

    fn free(&mut self) -> PlaneResult<()> {
        let streams: Vec<_> = self.ranks.values().filter_map(|r| r.stream).collect();
        for stream in &streams {
            let last = self.api.record(*stream)?;
            self.api.synchronize(&last)?;
        }
        self.retained.clear();
        self.abandoned.clear();
        for channel in self.channels.values() {
            let comm = (!self.has_aborted).then_some(channel.comm);
            channel.pool.free(&*self.api, comm)?;
        }
        if !self.has_aborted {
            // Together, because each waits for the other ranks.
            self.api.group_start()?;
            let mut channels = self.channels.values();
            let all = channels.try_for_each(|channel| self.api.destroy(channel.comm));
            let end = self.api.group_end();
            all.and(end)?;
        }
        streams
            .into_iter()
            .for_each(|stream| self.api.destroy_stream(stream));
        Ok(())
    }
}

/// Enqueues the exchange of a job: waits for the tensors, copies them in, and the operation.
fn enqueue(
    api: &dyn GpuApi,
    job: &ExchangeJob,
    memory: GpuAddress,
    comm: Comm,
    stream: CommStream,
) -> PlaneResult<()> {
    let layout = &job.layout;
    if let Some(exported) = &job.exported {
        api.wait(stream, &exported.ready)?;
        for (index, offset) in &job.copied_in {
            api.copy_in(exported, *index, memory.at(*offset), stream)?;
        }
    }
    let transfer = |offset: usize, bytes: usize| CopyArgs {
        memory: memory.at(offset),
        bytes,
        comm,
        stream,
    };
    let reduction = |recv, count, dtype, op| ReduceArgs {
        send: memory,
        recv,
        count,
        dtype,
        op,
        comm,
        stream,
    };
    match &layout.way {
        Way::Nothing => Ok(()),
        Way::AllGather { row } => {
            let own = layout.row_of(*row);
            api.all_gather(transfer(own, *row), memory).map(drop)
        }
        Way::ReduceScatter { count, dtype, op } => {
            let own = memory.at(layout.row_of(count * dtype.size()));
            let args = reduction(own, *count, *dtype, *op);
            api.reduce_scatter(args).map(drop)
        }
        Way::AllReduce { count, dtype, op } => {
            let args = reduction(memory, *count, *dtype, *op);
            api.all_reduce(args).map(drop)
        }
        Way::Broadcast { bytes, root } => api.broadcast(transfer(0, *bytes), *root).map(drop),
        Way::Pairs { sent, received } => {
            api.group_start()?;
            let sends = sent.iter().try_for_each(|span| {
                let args = transfer(span.offset, span.bytes);
                api.send(args, span.peer).map(drop)
            });
            let all = sends.and_then(|()| {
                received.iter().try_for_each(|span| {
                    let args = transfer(span.offset, span.bytes);
                    api.receive(args, span.peer).map(drop)
                })
            });
            // Also after an error, which otherwise leaves the thread in the group.
            let end = api.group_end();
            all.and(end)
        }
    }
}
