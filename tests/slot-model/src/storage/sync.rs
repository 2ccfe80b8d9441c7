//! What slots use of parking_lot and of std, on shuttle.

use std::sync::atomic::Ordering::SeqCst;

use shuttle::sync::atomic::AtomicBool;

pub use shuttle::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};
pub use shuttle::thread::{self, ThreadId};

#[derive(Debug)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("no thread panics")
    }
}

pub struct RwLock<T>(shuttle::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::RwLock::new(value))
    }

    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().expect("no thread panics")
    }

    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().expect("no thread panics")
    }
}

/// Shuttle has none: one of std, and a step before each look.
pub struct OnceLock<T> {
    value: std::sync::OnceLock<T>,
    step: AtomicBool,
}

impl<T> OnceLock<T> {
    pub fn new() -> Self {
        Self {
            value: std::sync::OnceLock::new(),
            step: AtomicBool::new(false),
        }
    }

    pub fn get(&self) -> Option<&T> {
        self.step.load(SeqCst);
        self.value.get()
    }

    pub fn get_mut(&mut self) -> Option<&mut T> {
        self.value.get_mut()
    }

    pub fn set(&self, value: T) -> Result<(), T> {
        self.step.load(SeqCst);
        self.value.set(value)
    }
}
