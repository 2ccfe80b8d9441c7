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

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

use parking_lot::Mutex;

use super::api::{Gpu, GpuApi, error};
use super::gpu_world::GpuWorld;
use super::jobs::GpuJob;
use crate::comm::data::plane::{DataPlaneError, OnFailure, PlaneResult};

/// Interval at which communicators are asked for errors while nothing else is to do.
const WATCH: Duration = Duration::from_millis(50);

/// Interval at which a call that continues in the background is asked for progress.
const BUSY: Duration = Duration::from_micros(20);

/// Interval at which a world that ends is asked whether its GPU is done.
const ENDING: Duration = Duration::from_millis(1);

/// Time after which what a GPU has not done is aborted, once the world has ended.
const END: Duration = Duration::from_secs(60);

/// Number of a world in its process.
type WorldKey = usize;

/// Message to the thread of a GPU.
enum ThreadMessage {
    Begin(WorldKey, Box<GpuWorld>),
    Run(WorldKey, GpuJob),
    /// A world has been aborted.
    Wake,
    End(WorldKey),
    Stop,
}

/// The threads of the GPUs of a process. A world that continues after a failure has the threads of
/// the one before.
#[derive(Debug, Default)]
pub(super) struct GpuThreads {
    threads: Mutex<HashMap<Gpu, Arc<GpuThread>>>,
    worlds: AtomicUsize,
}

/// Handle of the thread of a GPU.
#[derive(Debug)]
struct GpuThread {
    messages: Sender<ThreadMessage>,
    thread: Option<JoinHandle<()>>,
}

impl GpuThreads {
    /// Begins a world on `gpu`, which calls `failed` with the rank whose operation has failed.
    pub fn begin(
        &self,
        api: &Arc<dyn GpuApi>,
        gpu: Gpu,
        failed: OnFailure,
    ) -> PlaneResult<Submitter> {
        let thread = match self.threads.lock().entry(gpu) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(new) => {
                let started = GpuThread::start(api.clone(), gpu);
                let started = started.map_err(|problem| DataPlaneError {
                    problem: format!("cannot start the thread of a GPU: {problem}"),
                })?;
                new.insert(Arc::new(started)).clone()
            }
        };
        let world = self.worlds.fetch_add(1, Ordering::Relaxed);
        let is_aborted = Arc::<AtomicBool>::default();
        let begun = GpuWorld::new(api.clone(), gpu, failed, is_aborted.clone());
        thread.send(ThreadMessage::Begin(world, Box::new(begun)));
        Ok(Submitter {
            thread,
            world,
            is_aborted,
        })
    }
}

/// Handle of a world on the thread of a GPU. The world ends when it is dropped.
#[derive(Debug)]
pub(super) struct Submitter {
    thread: Arc<GpuThread>,
    world: WorldKey,
    is_aborted: Arc<AtomicBool>,
}

impl Submitter {
    /// Sends a job. Does not wait.
    pub fn send(&self, job: GpuJob) {
        self.thread.send(ThreadMessage::Run(self.world, job));
    }

    /// Makes all jobs fail, and ends what is enqueued.
    pub fn abort(&self) {
        self.is_aborted.store(true, Ordering::Release);
        self.thread.send(ThreadMessage::Wake);
    }
}

impl Drop for Submitter {
    fn drop(&mut self) {
        self.thread.send(ThreadMessage::End(self.world));
    }
}

impl GpuThread {
    fn start(api: Arc<dyn GpuApi>, gpu: Gpu) -> io::Result<Self> {
        let (messages, received) = channel();
        let thread = thread::Builder::new()
            .name(format!("nccl {}", gpu.0))
            .spawn(move || run(&*api, gpu, &received))?;
        Ok(Self {
            messages,
            thread: Some(thread),
        })
    }

    fn send(&self, message: ThreadMessage) {
        if let Err(refused) = self.messages.send(message)
            && let ThreadMessage::Run(_, GpuJob::Exchange(job)) = refused.0
        {
            job.outcome.set(error("the thread of the GPU has ended"));
        }
    }
}

impl Drop for GpuThread {
    fn drop(&mut self) {
        self.send(ThreadMessage::Stop);
        // The thread itself drops the world if it reports a failure that nothing else is left to hear.
        let is_own = |thread: &JoinHandle<()>| thread.thread().id() == thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| !is_own(thread))
            && thread.join().is_err()
        {
            log::error!("the thread that makes NCCL's calls has panicked");
        }
    }
}

/// Runs the worlds of a GPU, until the process ends.
fn run(api: &dyn GpuApi, gpu: Gpu, messages: &Receiver<ThreadMessage>) {
    let entered = api.enter(gpu);
    // Worlds, and the time until which one that has ended may continue in the background.
    let mut worlds = BTreeMap::<WorldKey, (Box<GpuWorld>, Option<Instant>)>::new();
    let mut has_stopped = false;
    while !has_stopped || !worlds.is_empty() {
        let is_busy = worlds.values().any(|(world, _)| !world.is_idle());
        let ends = worlds.values().any(|(_, end)| end.is_some());
        let interval = match (is_busy, ends) {
            (true, _) => BUSY,
            (false, true) => ENDING,
            (false, false) => WATCH,
        };
        match messages.recv_timeout(interval) {
            Ok(ThreadMessage::Begin(key, world)) => drop(worlds.insert(key, (world, None))),
            Ok(ThreadMessage::Run(key, job)) => {
                if let Some((world, _)) = worlds.get_mut(&key) {
                    let rank = job.rank();
                    world.add(job);
                    if let Err(problem) = &entered {
                        world.fail(rank, problem.clone());
                    }
                }
            }
            Ok(ThreadMessage::End(key)) => {
                if let Some((_, end)) = worlds.get_mut(&key) {
                    *end = Some(Instant::now() + END);
                }
            }
            Ok(ThreadMessage::Stop) | Err(RecvTimeoutError::Disconnected) => has_stopped = true,
            Ok(ThreadMessage::Wake) | Err(RecvTimeoutError::Timeout) => {}
        }
        for (world, end) in worlds.values_mut() {
            let is_late = end.is_some_and(|end| Instant::now() > end);
            world.run(end.is_some(), is_late);
        }
        let is_over = |world: &GpuWorld, end: Option<Instant>| {
            (end.is_some() || has_stopped) && world.is_done()
        };
        let over = worlds.extract_if(.., |_, (world, end)| is_over(world, *end));
        over.for_each(|(_, (world, _))| world.close());
    }
}
