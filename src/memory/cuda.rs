//! Events and streams of CUDA.
//!
//! cubecl enqueues the work of each thread on a stream of its own, on the device's server thread.
//! Closures that need such a stream run there, in the order in which they were submitted.

use std::cell::Cell;
use std::iter;
use std::sync::Arc;

use cubecl::server::Handle;
use cubecl_server::stream::WriteScoped;
use cudarc::driver::{DriverError, result, sys as cuda};
use parking_lot::{Condvar, Mutex};

use crate::burn_compat::internals::CudaServer;

/// A value that another thread sets.
pub(crate) struct Promise<T> {
    value: Mutex<Option<Result<T, String>>>,
    changed: Condvar,
}

impl<T> Promise<T> {
    pub(crate) fn new() -> Self {
        Self {
            value: Mutex::new(None),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn set(&self, value: Result<T, String>) {
        *self.value.lock() = Some(value);
        self.changed.notify_all();
    }

    /// Waits for the value, and passes it to `read`.
    pub(crate) fn wait<R>(&self, read: impl FnOnce(&T) -> R) -> Result<R, String> {
        let mut value = self.value.lock();
        loop {
            match &*value {
                Some(Ok(value)) => return Ok(read(value)),
                Some(Err(problem)) => return Err(problem.clone()),
                None => self.changed.wait(&mut value),
            }
        }
    }

    #[cfg(feature = "nccl")]
    pub(crate) fn is_set(&self) -> bool {
        self.value.lock().is_some()
    }
}

/// An event, and whether it is recorded: a wait for one that is not does nothing.
pub(crate) struct CudaEvent {
    event: cuda::CUevent,
    is_recorded: Promise<()>,
}

// SAFETY: events may be used on any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Creates an event on the GPU that the thread has [entered](enter).
    pub(crate) fn new() -> Result<Arc<Self>, String> {
        let flags = cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        Ok(Arc::new(Self {
            event: result::event::create(flags).map_err(text_of)?,
            is_recorded: Promise::new(),
        }))
    }

    /// Records the event on a stream of its GPU.
    pub(crate) fn record(&self, stream: cuda::CUstream) -> Result<(), String> {
        // SAFETY: the event and the stream exist, on the same GPU.
        let recorded = unsafe { result::event::record(self.event, stream) }.map_err(text_of);
        self.is_recorded.set(recorded.clone());
        recorded
    }

    /// Makes waits for the event fail, because it will not be recorded.
    pub(crate) fn set_failed(&self, problem: String) {
        self.is_recorded.set(Err(problem));
    }

    /// Makes what is enqueued on the stream from now on run after the event, once it is recorded.
    pub(crate) fn wait(&self, stream: cuda::CUstream) -> Result<(), String> {
        self.is_recorded.wait(|()| ())?;
        let flags = cuda::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event and the stream exist.
        unsafe { result::stream::wait_event(stream, self.event, flags) }.map_err(text_of)
    }

    /// Returns true if it is recorded, or will not be.
    #[cfg(feature = "nccl")]
    pub(crate) fn is_recorded(&self) -> bool {
        self.is_recorded.is_set()
    }

    #[cfg(feature = "nccl")]
    pub(crate) fn is_done(&self) -> Result<bool, String> {
        if !self.is_recorded.is_set() {
            return Ok(false);
        }
        // SAFETY: the event exists.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(cuda::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(problem) => Err(text_of(problem)),
        }
    }

    /// Waits on the host.
    #[cfg(feature = "nccl")]
    pub(crate) fn synchronize(&self) -> Result<(), String> {
        self.is_recorded.wait(|()| ())?;
        // SAFETY: the event exists.
        unsafe { result::event::synchronize(self.event) }.map_err(text_of)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: nothing else has the event. The driver frees it once it is reached.
        if let Err(problem) = unsafe { result::event::destroy(self.event) } {
            log::warn!("cannot free an event of CUDA: {problem}");
        }
    }
}

pub(crate) fn text_of(problem: DriverError) -> String {
    format!("CUDA: {problem}")
}

/// Makes GPU `index` the one of the calling thread.
pub(crate) fn enter(index: usize) -> Result<(), String> {
    thread_local! {
        static ENTERED: Cell<Option<usize>> = const { Cell::new(None) };
    }
    if ENTERED.get() == Some(index) {
        return Ok(());
    }
    result::init().map_err(text_of)?;
    let device = result::device::get(index as i32).map_err(text_of)?;
    // SAFETY: the context is cubecl's, which never releases it.
    unsafe {
        let context = result::primary_ctx::retain(device).map_err(text_of)?;
        result::ctx::set_current(context).map_err(text_of)?;
    }
    ENTERED.set(Some(index));
    Ok(())
}

/// Returns the stream of the thread that has created `own`. Runs on the server thread.
pub(crate) fn stream_of(server: &mut CudaServer, own: &Handle) -> Result<cuda::CUstream, String> {
    let streams = server.write_streams().resolve(own.stream, iter::empty());
    let mut streams = streams.map_err(|problem| problem.to_string())?;
    Ok(streams.current().sys)
}
