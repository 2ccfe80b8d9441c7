//! Blocking primitives used by this module, re-exported in one place so that a model checker can replace them.

pub(super) use parking_lot::Mutex;
#[cfg(feature = "flex")]
pub(super) use parking_lot::{RwLock, RwLockReadGuard};
#[cfg(feature = "flex")]
pub(super) use std::sync::OnceLock;
#[cfg(feature = "flex")]
pub(super) use std::thread::{self, ThreadId};
