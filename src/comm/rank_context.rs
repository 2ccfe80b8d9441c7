//! Thread-local identity of the rank to which the calling thread belongs.
//!
//! It is known for the threads that [`launch`](super::launch) creates. A thread that a rank's
//! program has started is unknown, and may act for any rank.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::sync::Arc;

/// Identity of a rank of a launch, stored on each of its threads.
#[derive(Debug)]
pub(super) struct RankContext {
    pub launch: u64,
    pub rank: usize,
    /// Rank that called the launch, if the launch is nested. Threads of the inner ranks also act
    /// for that rank.
    pub outer: Option<Arc<Self>>,
}

thread_local! {
    static HOME: RefCell<Option<Arc<RankContext>>> = const { RefCell::new(None) };
    /// Launch and rank of `HOME`. It has no destructor, so it can still be read while the process
    /// exits and thread-local values with destructors are gone.
    static LAUNCH_AND_RANK: Cell<Option<(u64, usize)>> = const { Cell::new(None) };
    static IS_RANK: Cell<bool> = const { Cell::new(false) };
    static UNWOUND_AT: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

impl RankContext {
    /// Makes this the identity of the calling thread, until the thread ends.
    pub fn install(self: Arc<Self>) {
        LAUNCH_AND_RANK.set(Some((self.launch, self.rank)));
        HOME.set(Some(self));
    }

    /// Returns the identity of the calling thread, if `launch` created the thread.
    pub fn current() -> Option<Arc<Self>> {
        HOME.with_borrow(Clone::clone)
    }

    /// Returns the rank of `launch` to which the calling thread belongs, if that is known. Outer
    /// launches are included.
    pub fn rank_in(launch: u64) -> Option<usize> {
        HOME.with_borrow(|home| {
            let mut home = home.as_ref();
            while let Some(Self {
                launch: other,
                rank,
                outer,
            }) = home.map(AsRef::as_ref)
            {
                if *other == launch {
                    return Some(*rank);
                }
                home = outer.as_ref();
            }
            None
        })
    }
}

/// Returns the innermost launch to which the calling thread belongs, and its rank there, if that is
/// known.
pub(super) fn launch_and_rank() -> Option<(u64, usize)> {
    LAUNCH_AND_RANK.get()
}

/// Records that the calling thread runs a rank's program, until the thread ends.
pub(super) fn become_rank() {
    IS_RANK.set(true);
}

/// Returns true if the calling thread runs a rank's program, so that `launch` catches an unwind
/// from it.
pub(crate) fn is_rank() -> bool {
    IS_RANK.get()
}

/// Returns the rank of the innermost launch to which the calling thread belongs, if that is known.
pub(crate) fn rank_of_thread() -> Option<usize> {
    RankContext::current().map(|home| home.rank)
}

/// Records the program line from which the calling thread unwinds with an error.
pub(crate) fn note_unwinding(at: Option<&'static Location<'static>>) {
    UNWOUND_AT.set(at);
}

/// Returns the recorded line of the last unwind, and clears it.
pub(super) fn unwound_at() -> Option<&'static Location<'static>> {
    UNWOUND_AT.take()
}
