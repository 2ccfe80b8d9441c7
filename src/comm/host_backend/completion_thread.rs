//! [`CompletionThread`]: completes requests while their ranks compute.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::mpsc::{SendError, Sender, channel};
use std::{io, mem, thread};

use parking_lot::Mutex;

use crate::comm::control::match_table::{GroupKey, OpHandle};

/// A request of a rank, without the type of its result.
pub(super) trait CompletionTask: Send + Sync {
    /// Returns true if no thread has taken the request.
    fn is_open(&self) -> bool;

    /// Returns true if other ranks wait for the completion.
    fn is_owed(&self) -> bool;

    /// Completes the request, unless another thread has taken it. All contributions must have
    /// arrived.
    fn complete(&self);
}

/// Requests of local ranks, by the group and the sequence number of the collective that must be
/// complete first.
pub(super) type ByCollective = HashMap<(GroupKey, u64), Vec<Arc<dyn CompletionTask>>>;

pub(super) type QueuedTask = Box<dyn FnOnce() + Send>;

/// Starts a thread that runs the tasks that are sent to it.
pub(super) type StartThread = fn() -> io::Result<Sender<QueuedTask>>;

/// Requests of local ranks, and the thread that completes them and reads data of devices for other
/// processes. A separate thread is needed because the rank computes and the thread of the transport
/// must keep communicating. It ends with the backend.
pub(super) struct CompletionThread {
    pub(super) open: Mutex<ByCollective>,
    pub(super) thread: Mutex<Option<Sender<QueuedTask>>>,
    pub(super) start: StartThread,
}

impl Default for CompletionThread {
    fn default() -> Self {
        Self {
            open: Mutex::default(),
            thread: Mutex::default(),
            start,
        }
    }
}

impl CompletionThread {
    /// Adds a task that is completed once the collective of `op` is.
    pub fn add(&self, op: OpHandle, task: Arc<dyn CompletionTask>) {
        let mut open = self.open.lock();
        open.entry((op.group, op.seq)).or_default().push(task);
    }

    /// Completes the requests that no thread has taken, now that the collective of `op` is
    /// complete. If the thread does not start, the requests are left to their ranks, except those
    /// that other ranks wait for: the caller completes these.
    pub fn complete(&self, op: OpHandle) {
        let tasks = self
            .open
            .lock()
            .remove(&(op.group, op.seq))
            .unwrap_or_default();
        for task in tasks.into_iter().filter(|task| task.is_open()) {
            let is_owed = task.is_owed();
            if let Err(refused) = self.run(Box::new(move || task.complete()))
                && is_owed
            {
                refused();
            }
        }
    }

    /// Runs `task` after those before. Returns it if the thread does not start.
    pub fn run(&self, task: QueuedTask) -> Result<(), QueuedTask> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let started = (self.start)().inspect_err(|error| {
                log::warn!(
                    "cannot start the completion thread: {error}. Each rank completes its results when it waits"
                );
            });
            *thread = started.ok();
        }
        let Some(sender) = &*thread else {
            return Err(task);
        };
        sender.send(task).map_err(|SendError(task)| task)
    }

    /// Drops the requests for the collective of `op` that a thread has taken, or a rank given up:
    /// if all ranks give it up, nothing completes it.
    pub fn discard(&self, op: OpHandle) {
        let mut open = self.open.lock();
        if let Entry::Occupied(mut tasks) = open.entry((op.group, op.seq)) {
            tasks.get_mut().retain(|task| task.is_open());
            if tasks.get().is_empty() {
                tasks.remove();
            }
        }
    }

    /// Returns the number of collectives for whose completion requests wait.
    #[cfg(test)]
    pub fn open(&self) -> usize {
        self.open.lock().len()
    }

    /// Drops the requests of collectives that will never be complete.
    pub fn forget(&self) {
        // Dropped outside the lock.
        let forgotten = mem::take(&mut *self.open.lock());
        drop(forgotten);
    }
}

fn start() -> io::Result<Sender<QueuedTask>> {
    let (sender, tasks) = channel::<QueuedTask>();
    thread::Builder::new()
        .name("completion".into())
        .spawn(move || tasks.into_iter().for_each(|task| task()))?;
    Ok(sender)
}
