//! [`SharedRequest`]: a call that its rank has left open, and that whoever comes first finishes: the rank when it
//! waits, or the engine's [`CompletionThread`](super::completion_thread::CompletionThread).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::HostBackend;
use crate::comm::CommError;
use crate::comm::backend::{Backend, Completed, Failure, Request};
use crate::comm::panic::panic_text;

/// A call of a rank's, which may be finished by another thread.
pub(super) struct SharedRequest<T> {
    /// Whose it is.
    rank: usize,
    state: Mutex<RequestState<T>>,
    finished: Condvar,
}

enum RequestState<T> {
    /// Nobody finishes it yet.
    Open(Box<dyn Request<T>>),
    /// Somebody does, or has taken what it has become.
    Taken,
    /// By the hands.
    Finished(Result<Completed<T>, CommError>),
}

/// An [`SharedRequest`] call, of whatever result.
pub(super) trait CompletionTask: Send + Sync {
    /// Whether nobody sees to it yet.
    fn is_open(&self) -> bool;

    /// Finishes it, now that all it would wait for is there, unless somebody sees to it.
    fn finish(&self, engine: &HostBackend);
}

impl<T> SharedRequest<T> {
    /// Of the global rank `rank`.
    pub fn new(rank: usize, pending: Box<dyn Request<T>>) -> Arc<Self> {
        Arc::new(Self { rank, state: Mutex::new(RequestState::Open(pending)), finished: Condvar::new() })
    }

    /// The call, for the caller to finish; `None` if somebody else does.
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

    /// Whether other ranks need not be waited for any more.
    pub fn is_complete(&self) -> bool {
        match &*self.state.lock() {
            RequestState::Open(pending) => pending.is_complete(),
            // The hands are at what is complete, and wait for nobody but who makes it with them.
            RequestState::Taken | RequestState::Finished(_) => true,
        }
    }

    /// What it becomes: made on this thread, or by the hands, where they were first.
    pub fn wait(&self, deadline: Duration) -> Result<Completed<T>, CommError> {
        self.take().map_or_else(|| self.taken_by_hands(), |pending| pending.wait(deadline))
    }

    /// What the hands make, or have made, of what they have taken.
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
            // Nothing was moved on the thread that waits.
            Ok(result) => result.map(|waited| Completed { moving: Duration::ZERO, ..waited }),
            Err(panic) => Err(engine.fail(Failure::Panicked { rank: self.rank, message: panic_text(&*panic).into() })),
        };
        *self.state.lock() = RequestState::Finished(result);
        self.finished.notify_all();
    }
}

/// The result of an [`SharedRequest`] call, which its rank gives up by dropping this.
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

    /// A call that is complete, and becomes what `make` returns.
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
