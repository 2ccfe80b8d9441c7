//! Has the communicating thread end with the process: invariant 4 of [`mpi`](super).

use std::cell::Cell;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::MpiShared;
use crate::comm::active_launch;

static RUNNING: Mutex<Option<(Arc<MpiShared>, JoinHandle<()>)>> = Mutex::new(None);

thread_local! {
    /// On the communicating thread, which cannot wait for itself, and on one that helps it: that waits for the other.
    static KEPT_OFF: Cell<bool> = const { Cell::new(false) };
}

/// Has the process wait at exit until `thread` has sent and received everything.
pub(super) fn at_exit(shared: Arc<MpiShared>, thread: JoinHandle<()>) {
    *RUNNING.lock() = Some((shared, thread));
    active_launch::at_exit(end);
}

/// Should the calling thread end the process, it does so at once: `MPI_Abort` may.
pub(super) fn keep_off() {
    KEPT_OFF.set(true);
}

/// The same, while the calling thread does this.
pub(super) fn kept_off<T>(meanwhile: impl FnOnce() -> T) -> T {
    KEPT_OFF.set(true);
    let value = meanwhile();
    KEPT_OFF.set(false);
    value
}

extern "C" fn end() {
    if KEPT_OFF.get() {
        return;
    }
    active_launch::note();
    let running = RUNNING.lock().take();
    if let Some((shared, thread)) = running {
        shared.queue.lock().ended = true;
        thread.thread().unpark();
        // What panics on the thread is caught there.
        drop(thread.join());
    }
}
