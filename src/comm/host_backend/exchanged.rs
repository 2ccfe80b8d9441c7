//! [`ExchangedRequest`]: a collective whose tensors the ranks exchange by their data plane.
//!
//! ```text
//! rank                posts; the plane stages its tensors --- computes --- waits: takes what the others sent
//! completion thread            all have posted: starts the exchange
//! ```
//!
//! The exchange is started on every rank, also on one that drops its request, since the others
//! cannot complete theirs without it. A rank's exchanges on a channel are started in the order of
//! its calls ([`ExchangeQueue`]): by the completion thread, or by the rank if it waits first.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use parking_lot::{Condvar, Mutex};

use super::HostBackend;
use super::completion_thread::CompletionTask;
use super::request::{Finish, HostRequest};
use crate::comm::CommError;
use crate::comm::backend::{Backend, Completed, Failure, Request};
use crate::comm::control::match_table::OpHandle;
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::plane::{DataPlane, DataPlaneError, PlaneResult, TakeExchanged};

/// Builds a result with the plane of the call.
type FinishExchanged<T> = Box<dyn FnOnce(&dyn DataPlane, &CollectiveInputs) -> T + Send>;

/// The exchanges of a rank on a channel that are not started, in the order of its calls.
pub(super) struct ExchangeQueue {
    backend: Arc<HostBackend>,
    calls: Mutex<UnstartedCalls>,
    /// Notified when no thread waits for the first call any more.
    changed: Condvar,
}

#[derive(Default)]
struct UnstartedCalls {
    queue: VecDeque<(OpHandle, Arc<dyn CompletionTask>)>,
    /// True while a thread of the rank waits for agreement on the first call. Only that thread
    /// starts it then, because the call's handle is released when it is started.
    is_awaited: bool,
}

impl UnstartedCalls {
    /// Starts the exchanges on which all ranks have agreed, up to the first on which they have not.
    fn start_agreed(&mut self, backend: &HostBackend) {
        while let Some((op, task)) = self.queue.front()
            && backend.rendezvous.read(|table| table.is_complete(*op))
        {
            task.complete();
            self.queue.pop_front();
        }
    }
}

impl ExchangeQueue {
    pub fn new(backend: Arc<HostBackend>) -> Arc<Self> {
        Arc::new(Self {
            backend,
            calls: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Adds the next call. `task` starts its exchange.
    pub fn add(self: &Arc<Self>, op: OpHandle, task: Arc<dyn CompletionTask>) {
        let thread = &self.backend.completion;
        let queue = self.clone();
        thread.add(
            op,
            Arc::new(StartInOrder {
                queue,
                task: task.clone(),
            }),
        );
        let mut calls = self.calls.lock();
        calls.queue.push_back((op, task));
        // No thread starts the call while the queue is locked.
        let is_agreed = self.backend.rendezvous.read(|table| table.is_complete(op));
        drop(calls);
        if is_agreed {
            // The other ranks of this process may wait for it, and so does this call if its task was
            // completed before it was in the queue.
            thread.complete(op);
            let queue = self.clone();
            if let Err(refused) = thread.run(Box::new(move || queue.start_agreed())) {
                refused();
            }
        }
    }

    /// Starts the exchanges on which all ranks have agreed, unless a thread that waits does so.
    fn start_agreed(&self) {
        let mut calls = self.calls.lock();
        if !calls.is_awaited {
            calls.start_agreed(&self.backend);
        }
    }

    /// Waits for agreement on `last` and the calls before it, and starts those that are not started.
    fn start_until(&self, last: OpHandle, deadline: Duration) -> Result<(), CommError> {
        let start = Instant::now();
        let mut calls = self.calls.lock();
        while let Some((first, _)) = calls.queue.front().filter(|(op, _)| op.seq <= last.seq) {
            if calls.is_awaited {
                self.changed.wait(&mut calls);
                continue;
            }
            let first = *first;
            calls.is_awaited = true;
            drop(calls);
            let left = deadline.saturating_sub(start.elapsed());
            let waited = self.backend.rendezvous.wait_until_complete(first, left);
            calls = self.calls.lock();
            calls.is_awaited = false;
            self.changed.notify_all();
            waited?;
            calls.start_agreed(&self.backend);
        }
        Ok(())
    }
}

impl fmt::Debug for ExchangeQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExchangeQueue")
            .field("calls", &self.calls.lock().queue.len())
            .finish()
    }
}

/// Starts the exchange of a call, after those before it.
struct StartInOrder {
    queue: Arc<ExchangeQueue>,
    task: Arc<dyn CompletionTask>,
}

impl CompletionTask for StartInOrder {
    fn is_open(&self) -> bool {
        self.task.is_open()
    }

    fn is_owed(&self) -> bool {
        true
    }

    fn complete(&self) {
        self.queue.start_agreed();
    }
}

/// A collective that this rank has posted, until it has the result.
pub(super) struct ExchangedRequest<T> {
    pub started: HostRequest<PlaneResult<TakeExchanged>>,
    pub queue: Arc<ExchangeQueue>,
    pub backend: Arc<HostBackend>,
    pub plane: Arc<dyn DataPlane>,
    /// Global rank that posted the call.
    pub rank: usize,
    pub op: OpHandle,
    pub device: Device,
    pub finish: FinishExchanged<T>,
}

impl<T> ExchangedRequest<T> {
    /// Returns the function that starts an exchange, once all ranks have agreed on it. If that
    /// fails, the world fails, because no rank may wait for this one.
    pub fn start(
        rank: usize,
        plane: Arc<dyn DataPlane>,
        backend: Arc<HostBackend>,
    ) -> Finish<PlaneResult<TakeExchanged>> {
        Box::new(move |inputs| {
            plane.start(inputs).inspect_err(|error| {
                backend.rendezvous.find(failure(rank, &*plane, error));
            })
        })
    }
}

impl<T: Send + 'static> Request<T> for ExchangedRequest<T> {
    /// Returns true once all ranks have agreed: results that are usable in stream order need no more.
    fn is_complete(&self) -> bool {
        self.started.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        let Self {
            started,
            queue,
            backend,
            plane,
            rank,
            op,
            device,
            finish,
        } = *self;
        let start = Instant::now();
        queue.start_until(op, deadline)?;
        let started = Box::new(started).wait(deadline)?;
        let left = deadline.saturating_sub(start.elapsed());
        let all = started
            .value
            .and_then(|take| take(left))
            .map_err(|error| backend.fail(failure(rank, &*plane, &error)))?;
        let inputs = CollectiveInputs {
            is_distributed: true,
            ..backend.inputs(&all, op, &device)
        };
        let finished = Completed::timed(|| finish(&*plane, &inputs));
        Ok(Completed {
            local_work: started.local_work + finished.local_work,
            last: started.last,
            transfer: started.transfer,
            ..finished
        })
    }
}

fn failure(rank: usize, plane: &dyn DataPlane, error: &DataPlaneError) -> Failure {
    Failure::Collective(CommError::DataPlane {
        rank,
        plane: plane.name().into(),
        problem: error.problem.clone(),
    })
}
