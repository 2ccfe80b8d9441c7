//! Ends the progress thread when the process exits: invariant 4 of [`mpi`](super).

use std::cell::Cell;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::MpiShared;
use crate::comm::active_launch;

/// The progress thread, until the exit handler has joined it.
static RUNNING: Mutex<Option<(Arc<MpiShared>, JoinHandle<()>)>> = Mutex::new(None);

thread_local! {
    /// True on threads on which the exit handler must not join the progress thread: on that thread
    /// itself, and on a rank that is using the engine, for which the progress thread waits.
    static KEPT_OFF: Cell<bool> = const { Cell::new(false) };
}

/// Makes the process wait at exit until `thread` has sent and received everything.
pub(super) fn at_exit(shared: Arc<MpiShared>, thread: JoinHandle<()>) {
    *RUNNING.lock() = Some((shared, thread));
    active_launch::at_exit(end);
}

/// Excludes the calling thread: if it ends the process, as `MPI_Abort` may, the process exits
/// without waiting.
pub(super) fn keep_off() {
    KEPT_OFF.set(true);
}

/// Like [`keep_off`], but only while the calling thread runs `meanwhile`.
pub(super) fn kept_off<T>(meanwhile: impl FnOnce() -> T) -> T {
    KEPT_OFF.set(true);
    let value = meanwhile();
    KEPT_OFF.set(false);
    value
}

/// Exit handler: makes the progress thread end, and waits for it.
extern "C" fn end() {
    if KEPT_OFF.get() {
        return;
    }
    active_launch::note();
    let running = RUNNING.lock().take();
    if let Some((shared, thread)) = running {
        shared.queue.lock().ended = true;
        thread.thread().unpark();
        // The thread catches its own panics.
        drop(thread.join());
    }
}
