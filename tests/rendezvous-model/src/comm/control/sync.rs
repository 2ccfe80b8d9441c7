//! What the rendezvous uses of locks and of the clock, on shuttle.
//!
//! There is no clock: a deadline is either far, and never passes, or near, and passes whenever
//! shuttle likes.

use std::ops::{Add, Deref, DerefMut};
use std::time::Duration;

use shuttle::rand::Rng;

pub(crate) use shuttle::hint::spin_loop;
pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering};
pub(crate) use shuttle::thread::yield_now;

/// From here on a deadline is far.
pub const FAR: Duration = Duration::from_secs(3600);

/// The time from the start, at which it always is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    pub fn now() -> Self {
        Self(Duration::ZERO)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0 + duration)
    }
}

pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    held: shuttle::sync::MutexGuard<'a, T>,
}

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard {
            mutex: self,
            held: self.0.lock().expect("no thread panics"),
        }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.held
    }
}

#[derive(Default)]
pub(crate) struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Until a far deadline, sleeps until notified. Until a near one, looks again and again, in
    /// case time is up: whether it was notified does not matter, so that lost notifications show in
    /// far waits alone.
    pub fn wait_until<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        deadline: Instant,
    ) -> (MutexGuard<'a, T>, bool) {
        let MutexGuard { mutex, held } = guard;
        if deadline.0 >= FAR {
            return (
                MutexGuard {
                    mutex,
                    held: self.0.wait(held).expect("no thread panics"),
                },
                false,
            );
        }
        drop(held);
        shuttle::thread::yield_now();
        (mutex.lock(), shuttle::rand::thread_rng().r#gen())
    }
}
