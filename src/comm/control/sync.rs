//! Blocking primitives of the rendezvous, and of other data on which many ranks wait at once. They
//! are in one module so that a model checker can replace them.
//!
//! They are those of std: all sleepers of a condition variable sleep on one address and wake at
//! once. parking_lot would wake them one after another, each after the previous one has released
//! the lock. With many ranks on few cores that takes 1.5 times as long.

use std::sync::PoisonError;

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::MutexGuard;
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
pub(crate) use std::thread::yield_now;
pub(crate) use std::time::Instant;

/// A mutex without poisoning.
#[derive(Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
pub(crate) struct Condvar(std::sync::Condvar);

impl Condvar {
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Sleeps until notified or until `deadline`. Returns true if the deadline has passed.
    pub fn wait_until<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        deadline: Instant,
    ) -> (MutexGuard<'a, T>, bool) {
        let left = deadline.saturating_duration_since(Instant::now());
        let (guard, result) = self
            .0
            .wait_timeout(guard, left)
            .unwrap_or_else(PoisonError::into_inner);
        (guard, result.timed_out())
    }
}
