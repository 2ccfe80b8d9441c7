//! [`SharedRequest`]: a request that is completed by the first of two threads: the rank when it waits, or the
//! backend's [`CompletionThread`](super::completion_thread::CompletionThread).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::HostBackend;
use crate::comm::CommError;
use crate::comm::backend::{Backend, Completed, Failure, Request};
use crate::comm::panic::panic_text;

/// A rank's request that another thread may complete.
pub(super) struct SharedRequest<T> {
    /// Global rank that posted the call.
    rank: usize,
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
pub(super) trait CompletionTask: Send + Sync {
    /// Returns true if no thread has taken the request.
    fn is_open(&self) -> bool;

    /// Completes the request, unless another thread has taken it. All contributions must have arrived.
    fn finish(&self, engine: &HostBackend);
}

impl<T> SharedRequest<T> {
    /// Creates the request of the global rank `rank`.
    pub fn new(rank: usize, pending: Box<dyn Request<T>>) -> Arc<Self> {
        Arc::new(Self { rank, state: Mutex::new(RequestState::Open(pending)), finished: Condvar::new() })
    }

    /// Takes the request for the caller to complete; `None` if another thread has taken it.
    pub fn take(&self) -> Option<Box<dyn Request<T>>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, RequestState::Taken) {
            RequestState::Open(pending) => Some(pending),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Returns true if no other rank has to be waited for.
    pub fn is_complete(&self) -> bool {
        match &*self.state.lock() {
            RequestState::Open(pending) => pending.is_complete(),
            // The completion thread takes complete requests only. It waits only for threads that build the result
            // with it.
            RequestState::Taken | RequestState::Finished(_) => true,
        }
    }

    /// Completes the request on this thread, or waits for the completion thread if that has taken it.
    pub fn wait(&self, deadline: Duration) -> Result<Completed<T>, CommError> {
        self.take().map_or_else(|| self.taken_by_hands(), |pending| pending.wait(deadline))
    }

    /// Waits for the result of the completion thread, which has taken the request.
    pub fn taken_by_hands(&self) -> Result<Completed<T>, CommError> {
        let mut state = self.state.lock();
        loop {
            if let RequestState::Finished(result) = std::mem::replace(&mut *state, RequestState::Taken) {
                return result;
            }
            self.finished.wait(&mut state);
        }
    }
}

impl<T: Send> CompletionTask for SharedRequest<T> {
    fn is_open(&self) -> bool {
        matches!(*self.state.lock(), RequestState::Open(_))
    }

    fn finish(&self, engine: &HostBackend) {
        let Some(pending) = self.take() else { return };
        let result = match catch_unwind(AssertUnwindSafe(|| pending.wait(Duration::ZERO))) {
            // No time was spent on the thread that waits.
            Ok(result) => result.map(|waited| Completed { moving: Duration::ZERO, ..waited }),
            Err(panic) => Err(engine.fail(Failure::Panicked { rank: self.rank, message: panic_text(&*panic).into() })),
        };
        *self.state.lock() = RequestState::Finished(result);
        self.finished.notify_all();
    }
}

/// Request of the rank for a [`SharedRequest`]. Dropping it gives up the result.
pub(super) struct Left<T>(pub Arc<SharedRequest<T>>);

impl<T: Send> Request<T> for Left<T> {
    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        self.0.wait(deadline)
    }
}

impl<T> Drop for Left<T> {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

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

    fn open<T>(make: impl FnOnce() -> T + Send + 'static) -> Arc<SharedRequest<T>>
    where
        T: 'static,
    {
        SharedRequest::new(0, Box::new(Complete(make)))
    }

    #[test]
    fn a_rank_that_comes_while_the_hands_are_at_it_waits_for_them() {
        let engine = HostBackend::new(1, ProcessOptions::default());
        let ((tell, begun), (go, told)) = (mpsc::channel(), mpsc::channel());
        let open = open(move || {
            tell.send(()).unwrap();
            told.recv().unwrap();
            5
        });
        thread::scope(|scope| {
            scope.spawn(|| open.finish(&engine));
            begun.recv().unwrap();
            let seen = (open.is_open(), open.is_complete());
            let rank = scope.spawn(|| open.wait(Duration::ZERO).unwrap());
            go.send(()).unwrap();
            assert_eq!(seen, (false, true));
            let Completed { value, moving, .. } = rank.join().unwrap();
            assert_eq!((value, moving), (5, Duration::ZERO));
        });
    }

    #[test]
    fn what_the_rank_has_taken_the_hands_leave() {
        let (engine, open) = (HostBackend::new(1, ProcessOptions::default()), open(|| 5));
        let own = open.take().unwrap();
        open.finish(&engine);
        assert!(!open.is_open());
        assert_eq!(own.wait(Duration::ZERO).unwrap().value, 5);
    }

    #[test]
    fn what_a_rank_drops_is_dropped_at_once() {
        let held = Arc::new(());
        let handle = held.clone();
        let open = open(move || drop(handle));
        drop(Left(open.clone()));
        assert_eq!((Arc::strong_count(&held), open.is_open()), (1, false));
    }

    #[test]
    fn a_panic_of_the_hands_is_the_ranks() {
        let engine = HostBackend::new(1, ProcessOptions::default());
        let open = open(|| panic!("boom"));
        open.finish(&engine);
        let error = open.wait(Duration::ZERO).map(|waited: Completed<()>| waited.value).unwrap_err();
        assert!(matches!(&error, CommError::RankPanicked { rank: 0, message, .. } if message == "boom"), "{error}");
        assert!(engine.failure().is_some());
    }
}
