//! Has the communicating thread end with the process: invariant 4 of [`mpi`](super).

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::Shared;

unsafe extern "C" {
    /// Of C's standard library: calls `function` on the thread that ends the process, while all others run.
    safe fn atexit(function: extern "C" fn()) -> c_int;
}

static RUNNING: Mutex<Option<(Arc<Shared>, JoinHandle<()>)>> = Mutex::new(None);

thread_local! {
    /// On the communicating thread, which cannot wait for itself.
    static KEPT_OFF: Cell<bool> = const { Cell::new(false) };
}

/// Has the process wait at exit until `thread` has sent and received everything.
pub(super) fn at_exit(shared: Arc<Shared>, thread: JoinHandle<()>) {
    *RUNNING.lock() = Some((shared, thread));
    assert_eq!(atexit(end), 0, "the C library has room for at least 32 functions called at exit");
}

/// Should the calling thread end the process, it does so at once: `MPI_Abort` may.
pub(super) fn keep_off() {
    KEPT_OFF.set(true);
}

extern "C" fn end() {
    if KEPT_OFF.get() {
        return;
    }
    let running = RUNNING.lock().take();
    if let Some((shared, thread)) = running {
        shared.queue.lock().ended = true;
        thread.thread().unpark();
        // What panics on the thread is caught there.
        drop(thread.join());
    }
}
