//! What the rendezvous uses of parking_lot and of the clock, on shuttle.
//!
//! There is no clock: a deadline is either far, and never passes, or near, and passes whenever shuttle
//! likes.

use std::ops::{Add, Deref, DerefMut};
use std::time::Duration;

use shuttle::rand::Rng;

pub(crate) use shuttle::hint::spin_loop;
pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering};

/// From here on a deadline is far.
pub const FAR: Duration = Duration::from_secs(3600);

/// The time from the start, at which it always is.
#[derive(Clone, Copy)]
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
    /// Empty only while its thread sleeps.
    held: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: self, held: Some(self.0.lock().expect("no thread panics")) }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_ref().expect("awake")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect("awake")
    }
}

#[derive(Default)]
pub(crate) struct Condvar(shuttle::sync::Condvar);

pub(crate) struct Awake {
    timed_out: bool,
}

impl Awake {
    pub fn timed_out(&self) -> bool {
        self.timed_out
    }
}

impl Condvar {
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Until a far deadline, sleeps until notified. Until a near one, looks again and again, in case time
    /// is up: whether it was notified does not matter, so that lost notifications show in far waits alone.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> Awake {
        let held = guard.held.take().expect("awake");
        if deadline.0 >= FAR {
            guard.held = Some(self.0.wait(held).expect("no thread panics"));
            return Awake { timed_out: false };
        }
        drop(held);
        shuttle::thread::yield_now();
        *guard = guard.mutex.lock();
        Awake { timed_out: shuttle::rand::thread_rng().r#gen() }
    }
}
