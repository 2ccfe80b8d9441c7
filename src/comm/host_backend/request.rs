//! [`HostRequest`]: a collective that a rank has posted, until it has the result. The result is built by the first of two
//! threads: the rank when it waits, or the [`CompletionThread`](super::completion_thread::CompletionThread).
//!
//! Among processes, the contributions of other ranks arrive without action of the rank. But a
//! thread is needed to build a result from them, or to send the contribution that this rank then
//! owes the others. The rank does so when it waits. If it computes for longer, the completion
//! thread does:
//!
//! ```text
//! rank                posts ------------ computes ------------------------ waits: takes the result
//! transport                  ... the other contributions arrive: complete
//! completion thread                                    builds the result
//! ```
//!
//! - Contributions that a rank owes to others are always completed in the background, because the
//!   others wait for them.
//! - Results are completed in the background from [`WORTH`] bytes on, if they are built on the
//!   host. An early result takes memory early. If its rank is alone in the process, the result
//!   replaces its inputs. With several local ranks, results exist in addition to their inputs until
//!   the last of them is built. Results of deferred calls are left to the rank, because their data
//!   has not been requested.
//! - The thread completes one request at a time. A rank that waits completes its own request unless
//!   the thread has taken it. Then it waits for the thread, at most until its deadline.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::tensor::Device;
use parking_lot::{Condvar, Mutex};

use super::HostBackend;
use super::completion_thread::CompletionTask;
use crate::comm::backend::{Backend, Completed, Failure, Request};
use crate::comm::control::match_table::OpHandle;
use crate::comm::control::rendezvous::{LONGEST, Matched};
use crate::comm::data::contribution::Contribution;
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::read_in_order;
use crate::comm::data::result_buffer::{ContiguousLayout, ResultBuffer};
use crate::comm::panic::panic_text;
use crate::comm::transport::SendStamp;
use crate::comm::{CommError, TransferTiming};

/// Minimum number of bytes of a result that is completed in the background. Smaller ones are built
/// faster than a thread is woken.
pub(super) const WORTH: u64 = 1 << 20;

/// A collective that this rank has posted.
pub(super) struct HostRequest<T> {
    /// First phase of an [all-reduce in two phases](super::two_phase_all_reduce), which contributes
    /// to this collective.
    pub before: Option<Box<HostRequest<()>>>,
    shared: Arc<SharedRequest<T>>,
}

/// The request, as the rank and the completion thread see it.
struct SharedRequest<T> {
    backend: Arc<HostBackend>,
    /// Global rank that posted the call.
    rank: usize,
    /// True if other ranks wait for the completion, so that the request is completed even if its
    /// rank drops it.
    is_owed: bool,
    state: Mutex<RequestState<T>>,
    finished: Condvar,
}

enum RequestState<T> {
    /// No thread builds the result yet.
    Posted(PostedCollective<T>),
    /// A thread builds the result, or has taken it.
    Taken,
    /// The completion thread has built the result.
    Finished(Result<Completed<T>, CommError>),
}

/// Builds a result from the contributions of all ranks.
pub(super) type Finish<T> = Box<dyn FnOnce(&CollectiveInputs) -> T + Send>;

/// A collective whose result no thread builds yet.
pub(super) struct PostedCollective<T> {
    pub handle: OpHandleGuard,
    /// True if the contributions of ranks of other processes have not been requested yet.
    pub is_deferred: bool,
    pub own: Option<OwnShards>,
    /// Records when the call was sent to other processes, if there are any.
    pub sent: Option<SendStamp>,
    pub device: Device,
    pub finish: Finish<T>,
}

/// Handle of a collective, which is released when dropped, unless its result was taken.
pub(super) struct OpHandleGuard {
    pub backend: Arc<HostBackend>,
    pub op: Option<OpHandle>,
}

impl Drop for OpHandleGuard {
    fn drop(&mut self) {
        if let Some(op) = self.op.take() {
            self.backend.rendezvous.release(op);
        }
    }
}

/// Shards that a rank writes to its own [`ResultBuffer`], into which remote shards are received.
pub(super) struct OwnShards {
    pub tensors: Vec<DispatchTensor>,
    /// Layouts of the result buffer.
    pub layouts: Vec<ContiguousLayout>,
    pub buffer: Option<Arc<ResultBuffer>>,
}

impl OwnShards {
    /// Creates the result buffer of the collective `op`, so that remote data is received into it
    /// from now on.
    pub fn create_buffer(&mut self, backend: &HostBackend, op: OpHandle) {
        self.buffer = backend.result_buffer(op, || Some(self.layouts.clone()));
    }

    /// Writes these shards to the result buffer of the collective `op`, and returns it.
    fn put(mut self, backend: &HostBackend, op: OpHandle) -> Option<Arc<ResultBuffer>> {
        if self.buffer.is_none() {
            self.create_buffer(backend, op);
        }
        let buffer = self.buffer?;
        // Makes progress during the copy, so that messages posted before are sent first and remote
        // data is received meanwhile. SAFETY: the region is in memory, and no other thread uses it.
        unsafe { buffer.put(op.member, &self.tensors, || backend.progress()) };
        Some(buffer)
    }
}

impl<T> PostedCollective<T> {
    /// Requests the contributions of ranks of other processes, which was deferred.
    fn request(&mut self) {
        self.is_deferred = false;
        let OpHandleGuard { backend, op } = &self.handle;
        backend.pull(
            op.map(|op| backend.rendezvous.read(|table| table.request(op)))
                .unwrap_or_default(),
        );
    }

    /// Waits for the contributions of all ranks and builds the result.
    fn complete(mut self, deadline: Duration) -> Result<Completed<T>, CommError> {
        if self.is_deferred {
            self.request();
        }
        let Self {
            mut handle,
            own,
            sent,
            device,
            finish,
            ..
        } = self;
        let op = handle.op.take().expect("a posted collective has a handle");
        let backend = &handle.backend;
        // While the remote shards are in flight.
        let put = Completed::timed(|| own.and_then(|own| own.put(backend, op)));
        let Matched { parts, last } = backend.rendezvous.wait(op, deadline)?;
        let inputs = CollectiveInputs {
            result_buffer: put.value.as_deref(),
            ..backend.inputs(&parts, op, &device)
        };
        let finished =
            Completed::timed(|| read_in_order(&parts, Some(op.member), || finish(&inputs)));
        let local_work = put.local_work + finished.local_work.saturating_sub(inputs.waited.get());
        // Without other processes, every rank would search all contributions for nothing.
        let transfer = backend
            .remote
            .as_ref()
            .and_then(|_| Contribution::timing(&parts, sent.as_ref()));
        Ok(Completed {
            local_work,
            last: Some(last),
            transfer,
            ..finished
        })
    }
}

impl<T: Send + 'static> HostRequest<T> {
    /// Creates a request that only its rank completes, until it is passed to
    /// [`complete_when_ready`](Self::complete_when_ready). If `is_owed`, `rank` contributes to a
    /// collective of other ranks with it, so that it is completed even if the rank drops it.
    pub fn new(rank: usize, is_owed: bool, collective: PostedCollective<T>) -> Self {
        let backend = collective.handle.backend.clone();
        let finished = Condvar::new();
        let state = Mutex::new(RequestState::Posted(collective));
        Self {
            before: None,
            shared: Arc::new(SharedRequest {
                backend,
                rank,
                is_owed,
                state,
                finished,
            }),
        }
    }

    /// Lets the completion thread complete the request once the collective `op` is complete, unless
    /// the rank is first.
    pub fn complete_when_ready(self, op: OpHandle) -> Self {
        let backend = &self.shared.backend;
        backend.completion.add(op, self.shared.clone());
        if self.shared.is_complete() {
            // The collective was complete before.
            backend.completion.complete(op);
        }
        self
    }

    /// Returns the request, without the type of its result.
    pub fn task(&self) -> Arc<dyn CompletionTask> {
        self.shared.clone()
    }
}

impl<T> SharedRequest<T> {
    /// Takes the collective for the caller to complete; `None` if another thread has taken it.
    fn take(&self) -> Option<PostedCollective<T>> {
        let mut state = self.state.lock();
        match mem::replace(&mut *state, RequestState::Taken) {
            RequestState::Posted(collective) => Some(collective),
            other => {
                *state = other;
                None
            }
        }
    }

    fn is_complete(&self) -> bool {
        match &*self.state.lock() {
            RequestState::Posted(PostedCollective {
                handle: OpHandleGuard { op, .. },
                ..
            }) => op.is_none_or(|op| self.backend.rendezvous.read(|table| table.is_complete(op))),
            // The completion thread takes complete requests only.
            RequestState::Taken | RequestState::Finished(_) => true,
        }
    }

    /// Waits for the result of the completion thread, which has taken the request. Fails the world
    /// if there is none after `deadline`.
    fn await_thread(&self, deadline: Duration) -> Result<Completed<T>, CommError> {
        let mut state = self.state.lock();
        let until = Instant::now() + deadline.min(LONGEST);
        let mut is_late = false;
        loop {
            match mem::replace(&mut *state, RequestState::Taken) {
                RequestState::Finished(result) => return result,
                _ if is_late => break,
                _ => is_late = self.finished.wait_until(&mut state, until).timed_out(),
            }
        }
        drop(state);
        let message = format!(
            "the completion thread of its process has not built a complete result within {deadline:?}. If the process \
             only lacks processor time, raise `Launch::with_deadline`"
        );
        Err(self.backend.fail(Failure::Failed {
            rank: self.rank,
            message,
        }))
    }
}

impl<T: Send + 'static> Request<T> for HostRequest<T> {
    fn is_complete(&self) -> bool {
        self.shared.is_complete()
    }

    fn start(&mut self) {
        if let RequestState::Posted(
            collective @ PostedCollective {
                is_deferred: true, ..
            },
        ) = &mut *self.shared.state.lock()
        {
            collective.request();
        }
    }

    fn wait(mut self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        let start = Instant::now();
        // Taken before the first phase is complete, so that the thread that completes it wakes no
        // other thread.
        let own = self.shared.take();
        let first = self
            .before
            .take()
            .map(|first| first.wait(deadline))
            .transpose()?;
        let deadline = if first.is_some() {
            deadline.saturating_sub(start.elapsed())
        } else {
            deadline
        };
        let result = own.map_or_else(
            || self.shared.await_thread(deadline),
            |own| own.complete(deadline),
        )?;
        let Some(first) = first else {
            return Ok(result);
        };
        let transfer = first
            .transfer
            .zip(result.transfer)
            .map(|(first, second)| TransferTiming {
                completed: second.completed,
                ..first
            });
        Ok(Completed {
            local_work: first.local_work + result.local_work,
            last: first.last,
            transfer,
            ..result
        })
    }
}

impl<T> Drop for HostRequest<T> {
    /// Gives up the result, unless other ranks wait for it.
    fn drop(&mut self) {
        if self.shared.is_owed {
            return;
        }
        let given_up = self.shared.take();
        let handle = given_up.as_ref().map(|collective| &collective.handle);
        if let Some(OpHandleGuard {
            backend,
            op: Some(op),
        }) = handle
            && backend.remote.is_some()
        {
            backend.completion.discard(*op);
        }
    }
}

impl<T: Send> CompletionTask for SharedRequest<T> {
    fn is_open(&self) -> bool {
        matches!(*self.state.lock(), RequestState::Posted(_))
    }

    fn is_owed(&self) -> bool {
        self.is_owed
    }

    fn complete(&self) {
        let Some(collective) = self.take() else {
            return;
        };
        let result = match catch_unwind(AssertUnwindSafe(|| collective.complete(Duration::ZERO))) {
            // No time was spent on the thread that waits.
            Ok(result) => result.map(|waited| Completed {
                local_work: Duration::ZERO,
                ..waited
            }),
            Err(panic) => {
                let message = panic_text(&*panic).into();
                Err(self.backend.fail(Failure::Panicked {
                    rank: self.rank,
                    message,
                }))
            }
        };
        *self.state.lock() = RequestState::Finished(result);
        self.finished.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::{io, thread};

    use super::super::completion_thread::{CompletionThread, StartThread};
    use super::*;
    use crate::comm::Op;
    use crate::comm::backend::{CallSignature, ProcessOptions};

    fn backend() -> Arc<HostBackend> {
        HostBackend::new(1, ProcessOptions::default())
    }

    /// Posts a barrier of one rank, which is complete at once. Its result is that of `make`.
    fn post<T: Send + 'static>(
        backend: &Arc<HostBackend>,
        is_owed: bool,
        make: impl FnOnce() -> T + Send + 'static,
    ) -> HostRequest<T> {
        let group = backend.rendezvous.group(&[0], "");
        let signature = CallSignature::new(Op::Barrier, &"".into(), Vec::new());
        let (op, _) = backend
            .rendezvous
            .post(
                group,
                0,
                signature,
                Contribution::received(Vec::new(), Vec::new()),
            )
            .unwrap();
        let handle = OpHandleGuard {
            backend: backend.clone(),
            op: Some(op),
        };
        let finish = Box::new(move |_: &CollectiveInputs| make());
        let device = crate::memory::host();
        let collective = PostedCollective {
            handle,
            is_deferred: false,
            own: None,
            sent: None,
            device,
            finish,
        };
        HostRequest::new(0, is_owed, collective)
    }

    fn open<T: Send + 'static>(make: impl FnOnce() -> T + Send + 'static) -> HostRequest<T> {
        post(&backend(), false, make)
    }

    /// Returns a request that the completion thread has taken and completes when `go` is dropped.
    fn taken(go: mpsc::Receiver<()>) -> HostRequest<u32> {
        let (tell, begun) = mpsc::channel();
        let request = open(move || {
            tell.send(()).unwrap();
            // Bounded, so that a wait without a deadline ends, too.
            let _ = go.recv_timeout(Duration::from_secs(60));
            5
        });
        let shared = request.shared.clone();
        thread::spawn(move || shared.complete());
        begun.recv().unwrap();
        request
    }

    #[test]
    fn a_rank_waits_for_the_thread_that_has_taken_its_request() {
        let (go, told) = mpsc::channel();
        let request = taken(told);
        assert_eq!(
            (request.shared.is_open(), request.is_complete()),
            (false, true)
        );
        let rank = thread::spawn(move || Box::new(request).wait(LONGEST).unwrap());
        drop(go);
        let Completed {
            value, local_work, ..
        } = rank.join().unwrap();
        assert_eq!((value, local_work), (5, Duration::ZERO));
    }

    #[test]
    fn a_rank_waits_for_the_thread_until_its_deadline() {
        let (go, told) = mpsc::channel();
        let request = taken(told);
        let backend = request.shared.backend.clone();
        let error = Box::new(request)
            .wait(Duration::ZERO)
            .map(|waited| waited.value)
            .unwrap_err();
        let CommError::RankFailed {
            rank: 0, message, ..
        } = &error
        else {
            panic!("{error}")
        };
        assert!(
            message.contains("completion thread") && backend.failure().is_some(),
            "{error}"
        );
        drop(go);
    }

    #[test]
    fn a_request_that_its_rank_has_taken_is_not_completed_by_the_thread() {
        let request = open(|| 5);
        let own = request.shared.take().unwrap();
        request.shared.complete();
        assert!(!request.shared.is_open());
        assert_eq!(own.complete(Duration::ZERO).unwrap().value, 5);
    }

    #[test]
    fn a_dropped_request_is_dropped_at_once_unless_others_wait_for_it() {
        let held = Arc::new(());
        for is_owed in [false, true] {
            let handle = held.clone();
            let request = post(&backend(), is_owed, move || drop(handle));
            let shared = request.shared.clone();
            drop(request);
            assert_eq!(
                (Arc::strong_count(&held), shared.is_open()),
                (1 + usize::from(is_owed), is_owed)
            );
        }
    }

    #[test]
    fn a_panic_of_the_thread_is_that_of_the_rank() {
        let request = open(|| panic!("boom"));
        let backend = request.shared.backend.clone();
        request.shared.complete();
        let error = Box::new(request)
            .wait(Duration::ZERO)
            .map(|waited: Completed<()>| waited.value)
            .unwrap_err();
        assert!(
            matches!(&error, CommError::RankPanicked { rank: 0, message, .. } if message == "boom"),
            "{error}"
        );
        assert!(backend.failure().is_some());
    }

    #[test]
    fn without_a_thread_ranks_complete_their_requests_and_owed_ones_are_completed_at_once() {
        let refused: StartThread = || Err(io::Error::other("the system refuses to start a thread"));
        let backend = backend();
        let thread = CompletionThread {
            start: refused,
            ..CompletionThread::default()
        };
        let [own, owed] = [false, true].map(|is_owed| post(&backend, is_owed, || 5));
        let tasks: Vec<Arc<dyn CompletionTask>> = vec![own.shared.clone(), owed.shared.clone()];
        let op = OpHandle {
            group: backend.rendezvous.group(&[0], ""),
            member: 0,
            seq: 0,
        };
        thread.open.lock().insert((op.group, op.seq), tasks);
        thread.complete(op);
        assert_eq!(
            [&own, &owed].map(|request| request.shared.is_open()),
            [true, false]
        );
        for request in [own, owed] {
            assert_eq!(Box::new(request).wait(Duration::ZERO).unwrap().value, 5);
        }
        assert!(backend.failure().is_none());
    }
}
