//! What the rendezvous uses of parking_lot, on shuttle. Time does not pass: no wait times out.

use std::ops::{Deref, DerefMut};

pub(crate) use std::time::Instant;

pub(crate) use shuttle::hint::spin_loop;
pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering};

pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

/// Empty only while its thread sleeps.
pub(crate) struct Guard<'a, T>(Option<shuttle::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> Guard<'_, T> {
        Guard(Some(self.0.lock().expect("no thread panics")))
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("awake")
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("awake")
    }
}

#[derive(Default)]
pub(crate) struct Condvar(shuttle::sync::Condvar);

pub(crate) struct Awake;

impl Awake {
    pub fn timed_out(&self) -> bool {
        false
    }
}

impl Condvar {
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    pub fn wait_until<T>(&self, guard: &mut Guard<'_, T>, _deadline: Instant) -> Awake {
        let asleep = guard.0.take().expect("awake");
        guard.0 = Some(self.0.wait(asleep).expect("no thread panics"));
        Awake
    }
}
