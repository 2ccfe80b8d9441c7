//! Gathers [in common](super::shared_memory) that were called ahead of need: each begins when its rank wants it, or
//! another does. Until then there is no memory for it, and if none does, never.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;

use super::HostBackend;
use super::contribution::Contribution;
use super::match_table::OpHandle;
use super::peer_processes::CollectiveKey;
use super::remote_group::{OutgoingData, RemoteGroup};
use super::shared_memory::SharedMemoryResult;
use crate::comm::TransferTiming;
use crate::comm::process::header::{PayloadDesc, SharedMemoryMessage};

/// Calls that were made ahead, and have not begun.
#[derive(Debug, Default)]
pub(super) struct DeferredGathers(Mutex<HashMap<CollectiveKey, Beginning>>);

/// How one begins.
#[derive(Debug)]
struct Beginning {
    first: OpHandle,
    outlet: Arc<RemoteGroup>,
    results: Arc<SharedMemoryResult>,
}

impl Beginning {
    /// Neither waits nor copies.
    fn begin(self, engine: &HostBackend, wanted: bool) {
        let Self { first, outlet, results } = self;
        let word = if wanted { results.wanted(first.member) } else { SharedMemoryMessage::Unwanted {} };
        let (shares, deposit) = said(&outlet, word);
        outlet.bring(first.seq, shares);
        engine.fill_and_finish(first, deposit);
    }
}

/// What others get of a word, and what is deposited here.
pub(super) fn said(outlet: &RemoteGroup, word: SharedMemoryMessage) -> (OutgoingData, Contribution) {
    let common = Some(word);
    let shares = outlet.same_for_all((PayloadDesc { common, ..PayloadDesc::default() }, Vec::new()));
    (shares, Contribution::new(Vec::new()).saying(common).there(None))
}

/// A call that was made ahead, and its rank: which wants it, or drops this.
#[derive(Debug)]
pub(super) struct DeferredGather {
    engine: Arc<HostBackend>,
    first: OpHandle,
    /// Since when the rank itself wants it.
    wanted: OnceLock<Instant>,
}

impl DeferredGather {
    /// A rank has called the collective of `first`, to which it has yet to bring that it begins. If another has asked for
    /// it, it does.
    pub fn new(
        engine: &Arc<HostBackend>,
        first: OpHandle,
        outlet: &Arc<RemoteGroup>,
        results: &Arc<SharedMemoryResult>,
    ) -> Self {
        let (outlet, results) = (outlet.clone(), results.clone());
        engine.deferred_gathers.0.lock().insert((first.group, first.seq), Beginning { first, outlet, results });
        // Who asks from now on finds it there.
        if engine.rendezvous.is_asked_for(first) {
            engine.begin_called(first, true);
        }
        Self { engine: engine.clone(), first, wanted: OnceLock::new() }
    }

    /// The rank wants it.
    pub fn begin(&self) {
        self.wanted.get_or_init(Instant::now);
        self.engine.begin_called(self.first, true);
    }

    /// How it was carried, as the rank sees it, who may have wanted it later than others: to it nothing has moved before.
    pub fn seen(&self, carried: TransferTiming) -> TransferTiming {
        let since = |at: Instant| self.wanted.get().map_or(at, |wanted| at.max(*wanted));
        TransferTiming { begun: since(carried.begun), complete: since(carried.complete), ..carried }
    }

    /// Whether it has not begun, and no rank has to be waited for once it does.
    pub fn is_all(&self) -> bool {
        let has_begun = !self.engine.deferred_gathers.0.lock().contains_key(&(self.first.group, self.first.seq));
        !has_begun && self.engine.rendezvous.have_all_called(self.first)
    }
}

impl Drop for DeferredGather {
    fn drop(&mut self) {
        self.engine.begin_called(self.first, false);
    }
}

impl HostBackend {
    /// Another rank has begun the collective of `ticket`, which one here may have called ahead.
    pub(super) fn begin_deferred(&self, ticket: OpHandle) {
        self.rendezvous.ask_for(ticket);
        self.begin_called(ticket, true);
    }

    /// Begins what was called ahead, if nothing has begun it before.
    fn begin_called(&self, ticket: OpHandle, wanted: bool) {
        let beginning = self.deferred_gathers.0.lock().remove(&(ticket.group, ticket.seq));
        if let Some(beginning) = beginning {
            beginning.begin(self, wanted);
        }
    }
}
