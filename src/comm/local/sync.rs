//! The blocking primitives of the rendezvous, in one place so that a model checker can replace them.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
pub(crate) use std::time::Instant;

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
