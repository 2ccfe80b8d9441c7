//! [`CompletionThread`]: a thread that finishes what ranks have left open while they do something else.
//!
//! Among processes, what others have sent arrives by itself; to make a result of it, or to bring what this rank owes the
//! others thereupon, takes a thread. The rank does it when it waits. Where it does something else for longer, the hands do:
//!
//! ```text
//! rank     posts ------------ computes ------------------------ waits: takes the result
//! courier        ... the others' parts arrive: complete
//! hands                                       make the result
//! ```
//!
//! - What a rank owes is always left to them: the others wait for it.
//! - Results are, from [`WORTH`] bytes on and where they are made on the host. A result that is made early is there early:
//!   of a rank that is alone in its process in place of what it is made of; of several, the results beside what they are
//!   made of, for as long as one of them is not made. What is called ahead is left to the rank: it is not asked for yet.
//! - They do one thing after another: a rank that comes first does its own.

use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::HostBackend;
use super::match_table::{GroupKey, OpHandle};
use super::shared_request::CompletionTask;

/// Results of fewer bytes are made faster than a thread is woken.
pub(super) const WORTH: u64 = 1 << 20;

/// What ranks here have left open, by the group and the sequence number of what has to be complete.
type ByCollective = HashMap<(GroupKey, u64), Vec<Arc<dyn CompletionTask>>>;

/// What ranks here have left open, and a thread for it: neither a rank's own, which goes on, nor the courier's, which
/// carries. It ends with the engine.
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

    /// Finishes what nobody else sees to, now that the collective of `ticket` is complete.
    pub fn finish(&self, ticket: OpHandle, engine: &Weak<HostBackend>) {
        let all = self.open.lock().remove(&(ticket.group, ticket.seq)).unwrap_or_default();
        for task in all.into_iter().filter(|task| task.is_open()) {
            let thread = self.thread.get_or_init(|| start(engine.clone()));
            thread.send(task).expect("the thread lives as long as the engine");
        }
    }

    /// Forgets what belongs to collectives that will never be complete.
    pub fn forget(&self) {
        // Outside the lock.
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
