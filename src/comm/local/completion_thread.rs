//! [`CompletionThread`]: a thread that completes requests in the background while their ranks compute.
//!
//! Among processes, the contributions of other ranks arrive without action of the rank. But a thread is needed to
//! build a result from them, or to send the contribution that this rank then owes the others. The rank does so when
//! it waits. If it computes for longer, the completion thread does:
//!
//! ```text
//! rank                posts ------------ computes ------------------------ waits: takes the result
//! transport                  ... the other contributions arrive: complete
//! completion thread                                    builds the result
//! ```
//!
//! - Contributions that a rank owes to others are always completed in the background, because the others wait for
//!   them.
//! - Results are completed in the background from [`WORTH`] bytes on, if they are built on the host. An early
//!   result takes memory early. If its rank is alone in the process, the result replaces its inputs. With several
//!   local ranks, results exist in addition to their inputs until the last of them is built. Results of deferred
//!   calls are left to the rank, because their data has not been requested.
//! - The thread completes one request at a time. A rank that waits completes its own request unless the thread has
//!   taken it.

use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::HostBackend;
use super::match_table::{GroupKey, OpHandle};
use super::shared_request::CompletionTask;

/// Minimum number of bytes of a result that is completed in the background. Smaller ones are built faster than a
/// thread is woken.
pub(super) const WORTH: u64 = 1 << 20;

/// Requests of local ranks, by the group and the sequence number of the collective that must be complete first.
type ByCollective = HashMap<(GroupKey, u64), Vec<Arc<dyn CompletionTask>>>;

/// Requests of local ranks, and the thread that completes them. A separate thread is needed because the rank
/// computes and the thread of the transport must keep communicating. It ends with the backend.
#[derive(Default)]
pub(super) struct CompletionThread {
    open: Mutex<ByCollective>,
    thread: OnceLock<Sender<Arc<dyn CompletionTask>>>,
}

impl CompletionThread {
    /// Keeps `task` until the collective of `ticket` is complete.
    pub fn keep(&self, ticket: OpHandle, task: Arc<dyn CompletionTask>) {
        self.open.lock().entry((ticket.group, ticket.seq)).or_default().push(task);
    }

    /// Completes the requests that no thread has taken, now that the collective of `ticket` is complete.
    pub fn finish(&self, ticket: OpHandle, engine: &Weak<HostBackend>) {
        let all = self.open.lock().remove(&(ticket.group, ticket.seq)).unwrap_or_default();
        for task in all.into_iter().filter(|task| task.is_open()) {
            let thread = self.thread.get_or_init(|| start(engine.clone()));
            thread.send(task).expect("the thread lives as long as the backend");
        }
    }

    /// Drops the requests of collectives that will never be complete.
    pub fn forget(&self) {
        // Dropped outside the lock.
        let forgotten = std::mem::take(&mut *self.open.lock());
        drop(forgotten);
    }
}

fn start(engine: Weak<HostBackend>) -> Sender<Arc<dyn CompletionTask>> {
    let (sender, all) = channel::<Arc<dyn CompletionTask>>();
    std::thread::spawn(move || {
        for task in all {
            let Some(engine) = engine.upgrade() else { return };
            task.finish(&engine);
        }
    });
    sender
}

impl std::fmt::Debug for CompletionThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionThread").field("open", &self.open.lock().len()).finish()
    }
}
