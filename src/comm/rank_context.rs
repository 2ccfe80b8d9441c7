//! Which rank the calling thread belongs to.
//!
//! Known of the threads that [`launch`](super::launch) makes. A thread that a rank's program has
//! started is not known, and may speak for any rank.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::sync::Arc;

/// A rank of a launch, as one of its threads knows it.
#[derive(Debug)]
pub(super) struct RankContext {
    pub launch: u64,
    pub rank: usize,
    /// Where the launch was made: its ranks speak for that rank too.
    pub outer: Option<Arc<Self>>,
}

thread_local! {
    static HOME: RefCell<Option<Arc<RankContext>>> = const { RefCell::new(None) };
    /// Of the same home: there while the process ends, too, when what is dropped with its thread is not.
    static LAUNCH_AND_RANK: Cell<Option<(u64, usize)>> = const { Cell::new(None) };
    static IS_RANK: Cell<bool> = const { Cell::new(false) };
    static UNWOUND_AT: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
}

impl RankContext {
    /// Makes this the home of the calling thread, for as long as it lives.
    pub fn settle(self: Arc<Self>) {
        LAUNCH_AND_RANK.set(Some((self.launch, self.rank)));
        HOME.set(Some(self));
    }

    /// The calling thread's home, if `launch` made it.
    pub fn current() -> Option<Arc<Self>> {
        HOME.with_borrow(Clone::clone)
    }

    /// The rank of `launch` that the calling thread belongs to, if that is known.
    pub fn rank_in(launch: u64) -> Option<usize> {
        HOME.with_borrow(|home| {
            let mut home = home.as_ref();
            while let Some(Self { launch: other, rank, outer }) = home.map(AsRef::as_ref) {
                if *other == launch {
                    return Some(*rank);
                }
                home = outer.as_ref();
            }
            None
        })
    }
}

/// The innermost launch that the calling thread belongs to, and the rank there, if that is known.
pub(super) fn launch_and_rank() -> Option<(u64, usize)> {
    LAUNCH_AND_RANK.get()
}

/// Notes that the calling thread runs a rank's program, for as long as it lives.
pub(super) fn become_rank() {
    IS_RANK.set(true);
}

/// Whether the calling thread runs a rank's program: `launch` catches what unwinds from it.
pub(crate) fn is_rank() -> bool {
    IS_RANK.get()
}

/// The rank that the calling thread belongs to, of the innermost launch, if that is known.
pub(crate) fn rank_of_thread() -> Option<usize> {
    RankContext::current().map(|home| home.rank)
}

/// Notes the line that the calling thread unwinds with an error from.
pub(crate) fn note_unwinding(at: Option<&'static Location<'static>>) {
    UNWOUND_AT.set(at);
}

/// The line that was last unwound from.
pub(super) fn unwound_at() -> Option<&'static Location<'static>> {
    UNWOUND_AT.take()
}
