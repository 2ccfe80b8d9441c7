//! [`BackgroundRequest`]: a request that is completed by the first of two threads: its rank when it waits, or the
//! [`CompletionThread`].
//!
//! Among processes, the contributions of other ranks arrive without action of the rank. But a thread is needed to
//! build a result from them, or to send the contribution that this rank then owes the others. The rank does so when
//! it waits. If it computes for longer, the completion thread does:
//!
//! ```text
//! rank                posts ------------ computes ------------------------ waits: takes the result
//! transport                  ... the other contributions arrive: complete
//! completion thread                                    builds the result
//! ```
//!
//! - Contributions that a rank owes to others are always completed in the background, because the others wait for
//!   them.
//! - Results are completed in the background from [`WORTH`] bytes on, if they are built on the host. An early
//!   result takes memory early. If its rank is alone in the process, the result replaces its inputs. With several
//!   local ranks, results exist in addition to their inputs until the last of them is built. Results of deferred
//!   calls are left to the rank, because their data has not been requested.
//! - The thread completes one request at a time. A rank that waits completes its own request unless the thread has
//!   taken it. Then it waits for the thread, at most until its deadline.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};
use std::{io, mem, thread};

use parking_lot::{Condvar, Mutex};

use super::HostBackend;
use crate::comm::CommError;
use crate::comm::backend::{Backend, Completed, Failure, Request};
use crate::comm::control::match_table::{GroupKey, OpHandle};
use crate::comm::control::rendezvous::LONGEST;
use crate::comm::panic::panic_text;

/// Minimum number of bytes of a result that is completed in the background. Smaller ones are built faster than a
/// thread is woken.
pub(super) const WORTH: u64 = 1 << 20;

/// A rank's request that the completion thread may complete.
pub(super) struct BackgroundRequest<T> {
    backend: Arc<HostBackend>,
    shared: Arc<SharedRequest<T>>,
}

/// The request, as both threads see it.
struct SharedRequest<T> {
    /// Global rank that posted the call.
    rank: usize,
    /// True if other ranks wait for the completion, so that the request is completed even if its rank drops it.
    is_owed: bool,
    state: Mutex<RequestState<T>>,
    finished: Condvar,
}

enum RequestState<T> {
    /// No thread completes it yet.
    Open(Box<dyn Request<T>>),
    /// A thread completes it, or has taken the result.
    Taken,
    /// The completion thread has completed it.
    Finished(Result<Completed<T>, CommError>),
}

/// [`SharedRequest`] without its result type.
trait CompletionTask: Send + Sync {
    /// Returns true if no thread has taken the request.
    fn is_open(&self) -> bool;

    /// Returns true if other ranks wait for the completion.
    fn is_owed(&self) -> bool;

    /// Completes the request, unless another thread has taken it. All contributions must have arrived.
    fn complete(&self, backend: &HostBackend);
}

impl<T: Send + 'static> BackgroundRequest<T> {
    /// Creates a request that only its rank completes, until it is passed to
    /// [`complete_when_ready`](Self::complete_when_ready). If `is_owed`, the rank contributes to a collective of other
    /// ranks with it, so that it is completed even if the rank drops it.
    pub fn new(backend: &Arc<HostBackend>, rank: usize, is_owed: bool, request: Box<dyn Request<T>>) -> Self {
        let (state, finished) = (Mutex::new(RequestState::Open(request)), Condvar::new());
        Self { backend: backend.clone(), shared: Arc::new(SharedRequest { rank, is_owed, state, finished }) }
    }

    /// Lets the completion thread complete the request once the collective `op` is complete, unless the rank is
    /// first.
    pub fn complete_when_ready(self, op: OpHandle) -> Self {
        let thread = &self.backend.remote().completion;
        thread.open.lock().entry((op.group, op.seq)).or_default().push(self.shared.clone());
        if self.shared.is_complete() {
            // The collective was complete before.
            thread.complete(op, &self.backend);
        }
        self
    }

    /// Returns the request for this rank to complete, or this handle if the completion thread has taken it.
    pub fn claim(self) -> Box<dyn Request<T>> {
        self.shared.take().unwrap_or_else(|| Box::new(self))
    }
}

impl<T> SharedRequest<T> {
    /// Takes the request for the caller to complete; `None` if another thread has taken it.
    fn take(&self) -> Option<Box<dyn Request<T>>> {
        let mut state = self.state.lock();
        match mem::replace(&mut *state, RequestState::Taken) {
            RequestState::Open(request) => Some(request),
            other => {
                *state = other;
                None
            }
        }
    }

    fn is_complete(&self) -> bool {
        match &*self.state.lock() {
            RequestState::Open(request) => request.is_complete(),
            // The completion thread takes complete requests only.
            RequestState::Taken | RequestState::Finished(_) => true,
        }
    }

    /// Waits for the result of the completion thread, which has taken the request. Returns `None` if there is none at
    /// `until`.
    fn await_thread(&self, until: Instant) -> Option<Result<Completed<T>, CommError>> {
        let (mut state, mut is_late) = (self.state.lock(), false);
        loop {
            match mem::replace(&mut *state, RequestState::Taken) {
                RequestState::Finished(result) => return Some(result),
                _ if is_late => return None,
                _ => is_late = self.finished.wait_until(&mut state, until).timed_out(),
            }
        }
    }
}

impl<T: Send> CompletionTask for SharedRequest<T> {
    fn is_open(&self) -> bool {
        matches!(*self.state.lock(), RequestState::Open(_))
    }

    fn is_owed(&self) -> bool {
        self.is_owed
    }

    fn complete(&self, backend: &HostBackend) {
        let Some(request) = self.take() else { return };
        let result = match catch_unwind(AssertUnwindSafe(|| request.wait(Duration::ZERO))) {
            // No time was spent on the thread that waits.
            Ok(result) => result.map(|waited| Completed { moving: Duration::ZERO, ..waited }),
            Err(panic) => Err(backend.fail(Failure::Panicked { rank: self.rank, message: panic_text(&*panic).into() })),
        };
        *self.state.lock() = RequestState::Finished(result);
        self.finished.notify_all();
    }
}

impl<T: Send + 'static> Request<T> for BackgroundRequest<T> {
    fn is_complete(&self) -> bool {
        self.shared.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        if let Some(request) = self.shared.take() {
            return request.wait(deadline);
        }
        let result = self.shared.await_thread(Instant::now() + deadline.min(LONGEST));
        result.unwrap_or_else(|| {
            let rank = self.shared.rank;
            let message = format!(
                "the completion thread of its process has not built a complete result within {deadline:?}. If the \
                 process only lacks processor time, raise `Launch::with_deadline`"
            );
            Err(self.backend.fail(Failure::Failed { rank, message }))
        })
    }
}

impl<T> Drop for BackgroundRequest<T> {
    /// Gives up the result, unless other ranks wait for it.
    fn drop(&mut self) {
        if !self.shared.is_owed {
            drop(self.shared.take());
        }
    }
}

/// Requests of local ranks, by the group and the sequence number of the collective that must be complete first.
type ByCollective = HashMap<(GroupKey, u64), Vec<Arc<dyn CompletionTask>>>;

/// Starts the thread of a backend, which completes the tasks that are sent to it.
type StartThread = fn(&Arc<HostBackend>) -> io::Result<Sender<Arc<dyn CompletionTask>>>;

/// Requests of local ranks, and the thread that completes them. A separate thread is needed because the rank
/// computes and the thread of the transport must keep communicating. It ends with the backend.
pub(super) struct CompletionThread {
    open: Mutex<ByCollective>,
    thread: Mutex<Option<Sender<Arc<dyn CompletionTask>>>>,
    start: StartThread,
}

impl Default for CompletionThread {
    fn default() -> Self {
        Self { open: Mutex::default(), thread: Mutex::default(), start }
    }
}

impl CompletionThread {
    /// Completes the requests that no thread has taken, now that the collective of `op` is complete. If the
    /// thread does not start, the requests are left to their ranks, except those that other ranks wait for: the
    /// caller completes these.
    pub fn complete(&self, op: OpHandle, backend: &Arc<HostBackend>) {
        let tasks = self.open.lock().remove(&(op.group, op.seq)).unwrap_or_default();
        for task in tasks.into_iter().filter(|task| task.is_open()) {
            if let Err(error) = self.send(task.clone(), backend) {
                log::warn!(
                    "cannot start the completion thread: {error}. Each rank completes its results when it waits"
                );
                if task.is_owed() {
                    task.complete(backend);
                }
            }
        }
    }

    fn send(&self, task: Arc<dyn CompletionTask>, backend: &Arc<HostBackend>) -> io::Result<()> {
        let mut thread = self.thread.lock();
        let sender = match &mut *thread {
            Some(sender) => sender,
            none => none.insert((self.start)(backend)?),
        };
        sender.send(task).map_err(|_| io::Error::other("it has ended"))
    }

    /// Drops the requests of collectives that will never be complete.
    pub fn forget(&self) {
        // Dropped outside the lock.
        let forgotten = mem::take(&mut *self.open.lock());
        drop(forgotten);
    }
}

fn start(backend: &Arc<HostBackend>) -> io::Result<Sender<Arc<dyn CompletionTask>>> {
    let (sender, tasks) = channel::<Arc<dyn CompletionTask>>();
    let backend = Arc::downgrade(backend);
    thread::Builder::new().name("completion".into()).spawn(move || {
        for task in tasks {
            let Some(backend) = backend.upgrade() else { return };
            task.complete(&backend);
        }
    })?;
    Ok(sender)
}

impl std::fmt::Debug for CompletionThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionThread").field("open", &self.open.lock().len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::comm::backend::ProcessOptions;

    /// A complete request whose result is that of the closure.
    struct Complete<F>(F);

    impl<T, F: FnOnce() -> T + Send> Request<T> for Complete<F> {
        fn is_complete(&self) -> bool {
            true
        }

        fn wait(self: Box<Self>, _deadline: Duration) -> Result<Completed<T>, CommError> {
            Ok(Completed::timed(self.0))
        }
    }

    fn backend() -> Arc<HostBackend> {
        HostBackend::new(1, ProcessOptions::default())
    }

    fn open<T: Send + 'static>(make: impl FnOnce() -> T + Send + 'static) -> BackgroundRequest<T> {
        BackgroundRequest::new(&backend(), 0, false, Box::new(Complete(make)))
    }

    /// Returns a request that the completion thread has taken and completes when `go` is dropped.
    fn taken(go: mpsc::Receiver<()>) -> BackgroundRequest<u32> {
        let (tell, begun) = mpsc::channel();
        let request = open(move || {
            tell.send(()).unwrap();
            // Bounded, so that a wait without a deadline ends, too.
            let _ = go.recv_timeout(Duration::from_secs(60));
            5
        });
        let (shared, backend) = (request.shared.clone(), request.backend.clone());
        thread::spawn(move || shared.complete(&backend));
        begun.recv().unwrap();
        request
    }

    #[test]
    fn a_rank_waits_for_the_thread_that_has_taken_its_request() {
        let (go, told) = mpsc::channel();
        let request = taken(told);
        assert_eq!((request.shared.is_open(), request.is_complete()), (false, true));
        let rank = thread::spawn(move || Box::new(request).wait(LONGEST).unwrap());
        drop(go);
        let Completed { value, moving, .. } = rank.join().unwrap();
        assert_eq!((value, moving), (5, Duration::ZERO));
    }

    #[test]
    fn a_rank_waits_for_the_thread_until_its_deadline() {
        let (go, told) = mpsc::channel();
        let request = taken(told);
        let backend = request.backend.clone();
        let error = Box::new(request).wait(Duration::ZERO).map(|waited| waited.value).unwrap_err();
        let CommError::RankFailed { rank: 0, message, .. } = &error else { panic!("{error}") };
        assert!(message.contains("completion thread") && backend.failure().is_some(), "{error}");
        drop(go);
    }

    #[test]
    fn a_request_that_its_rank_has_taken_is_not_completed_by_the_thread() {
        let request = open(|| 5);
        let (shared, backend) = (request.shared.clone(), request.backend.clone());
        let own = request.claim();
        shared.complete(&backend);
        assert!(!shared.is_open());
        assert_eq!(own.wait(Duration::ZERO).unwrap().value, 5);
    }

    #[test]
    fn a_dropped_request_is_dropped_at_once_unless_others_wait_for_it() {
        let held = Arc::new(());
        for is_owed in [false, true] {
            let handle = held.clone();
            let make = Box::new(Complete(move || drop(handle)));
            let request = BackgroundRequest::new(&backend(), 0, is_owed, make);
            let shared = request.shared.clone();
            drop(request);
            assert_eq!((Arc::strong_count(&held), shared.is_open()), (1 + usize::from(is_owed), is_owed));
        }
    }

    #[test]
    fn a_panic_of_the_thread_is_that_of_the_rank() {
        let request = open(|| panic!("boom"));
        let backend = request.backend.clone();
        request.shared.complete(&backend);
        let error = Box::new(request).wait(Duration::ZERO).map(|waited: Completed<()>| waited.value).unwrap_err();
        assert!(matches!(&error, CommError::RankPanicked { rank: 0, message, .. } if message == "boom"), "{error}");
        assert!(backend.failure().is_some());
    }

    #[test]
    fn without_a_thread_ranks_complete_their_requests_and_owed_ones_are_completed_at_once() {
        let refused: StartThread = |_| Err(io::Error::other("the system refuses to start a thread"));
        let backend = backend();
        let group = backend.rendezvous.group(&[0], "");
        let thread = CompletionThread { start: refused, ..CompletionThread::default() };
        let op = OpHandle { group, member: 0, seq: 0 };
        let [own, owed] =
            [false, true].map(|is_owed| BackgroundRequest::new(&backend, 0, is_owed, Box::new(Complete(|| 5))));
        let tasks: Vec<Arc<dyn CompletionTask>> = vec![own.shared.clone(), owed.shared.clone()];
        thread.open.lock().insert((group, 0), tasks);
        thread.complete(op, &backend);
        assert_eq!([&own, &owed].map(|request| request.shared.is_open()), [true, false]);
        for request in [own, owed] {
            assert_eq!(Box::new(request).wait(Duration::ZERO).unwrap().value, 5);
        }
        assert!(backend.failure().is_none());
    }
}
