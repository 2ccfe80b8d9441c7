//! [`Hands`]: a thread that brings what ranks owe others while they do something else.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::LocalEngine;
use super::board::{GroupKey, Ticket};
use crate::comm::end::panic_text;
use crate::comm::engine::{Engine, Failure};

/// What a rank owes others once a collective is complete.
pub(super) trait Owed: Send + Sync {
    /// The rank.
    fn rank(&self, engine: &LocalEngine) -> usize;

    /// Whether nobody sees to it yet.
    fn is_open(&self) -> bool;

    /// Brings it, unless somebody sees to it.
    fn bring(&self, engine: &LocalEngine);
}

/// What ranks here owe, by the group and the sequence number of what has to be complete.
type ByCollective = HashMap<(GroupKey, u64), Vec<Arc<dyn Owed>>>;

/// What ranks here owe, and a thread for it: neither a rank's own, which goes on, nor the courier's, which carries. It ends
/// with the engine.
#[derive(Default)]
pub(super) struct Hands {
    owed: Mutex<ByCollective>,
    thread: OnceLock<Sender<Arc<dyn Owed>>>,
}

impl Hands {
    /// Keeps what is owed until the collective of `ticket` is complete.
    pub fn keep(&self, ticket: Ticket, owed: Arc<dyn Owed>) {
        self.owed.lock().entry((ticket.group, ticket.seq)).or_default().push(owed);
    }

    /// Brings what nobody else sees to, now that the collective of `ticket` is complete.
    pub fn bring(&self, ticket: Ticket, engine: &Weak<LocalEngine>) {
        let all = self.owed.lock().remove(&(ticket.group, ticket.seq)).unwrap_or_default();
        for owed in all.into_iter().filter(|owed| owed.is_open()) {
            let thread = self.thread.get_or_init(|| start(engine.clone()));
            thread.send(owed).expect("the thread lives as long as the engine");
        }
    }

    /// Forgets what belongs to collectives that will never be complete.
    pub fn forget(&self) {
        // Outside the lock.
        let forgotten = std::mem::take(&mut *self.owed.lock());
        drop(forgotten);
    }
}

fn start(engine: Weak<LocalEngine>) -> Sender<Arc<dyn Owed>> {
    let (sender, all) = channel::<Arc<dyn Owed>>();
    std::thread::spawn(move || {
        for owed in all {
            let Some(engine) = engine.upgrade() else { return };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| owed.bring(&engine))) {
                let (rank, message) = (owed.rank(&engine), panic_text(&*panic).into());
                engine.fail(Failure::Panicked { rank, message });
            }
        }
    });
    sender
}

impl std::fmt::Debug for Hands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hands").field("owed", &self.owed.lock().len()).finish()
    }
}
