//! Deferred [shared-memory](super::shared_memory) gathers. A gather starts when its rank or another rank needs the
//! result. Until then it takes no memory, and if no rank needs it, it never starts.

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

/// Deferred gathers that have not started, by collective.
#[derive(Debug, Default)]
pub(super) struct DeferredGathers(Mutex<HashMap<CollectiveKey, Beginning>>);

/// Data with which a deferred gather starts.
#[derive(Debug)]
struct Beginning {
    first: OpHandle,
    outlet: Arc<RemoteGroup>,
    results: Arc<SharedMemoryResult>,
}

impl Beginning {
    /// Starts the gather by sending this rank's message. Neither blocks nor copies.
    fn begin(self, engine: &HostBackend, wanted: bool) {
        let Self { first, outlet, results } = self;
        let word = if wanted { results.wanted(first.member) } else { SharedMemoryMessage::Unwanted {} };
        let (shares, deposit) = said(&outlet, word);
        outlet.bring(first.seq, shares);
        engine.fill_and_finish(first, deposit);
    }
}

/// Returns the message for the other processes, and the local contribution.
pub(super) fn said(outlet: &RemoteGroup, word: SharedMemoryMessage) -> (OutgoingData, Contribution) {
    let common = Some(word);
    let shares = outlet.same_for_all((PayloadDesc { common, ..PayloadDesc::default() }, Vec::new()));
    (shares, Contribution::new(Vec::new()).saying(common).there(None))
}

/// A deferred gather of one rank, which either requests it or drops this.
#[derive(Debug)]
pub(super) struct DeferredGather {
    engine: Arc<HostBackend>,
    first: OpHandle,
    /// Time at which the rank requested the result.
    wanted: OnceLock<Instant>,
}

impl DeferredGather {
    /// Registers the gather of the collective `first`, which the rank has posted without its message. If another
    /// rank has requested the result, starts the gather.
    pub fn new(
        engine: &Arc<HostBackend>,
        first: OpHandle,
        outlet: &Arc<RemoteGroup>,
        results: &Arc<SharedMemoryResult>,
    ) -> Self {
        let (outlet, results) = (outlet.clone(), results.clone());
        engine.deferred_gathers.0.lock().insert((first.group, first.seq), Beginning { first, outlet, results });
        // A rank that requests the result from now on finds the gather in the table.
        if engine.rendezvous.is_asked_for(first) {
            engine.begin_called(first, true);
        }
        Self { engine: engine.clone(), first, wanted: OnceLock::new() }
    }

    /// Starts the gather because the rank needs the result.
    pub fn begin(&self) {
        self.wanted.get_or_init(Instant::now);
        self.engine.begin_called(self.first, true);
    }

    /// Returns the timing as this rank sees it. If the rank requested the result later than others, no timestamp is
    /// earlier than its request.
    pub fn seen(&self, carried: TransferTiming) -> TransferTiming {
        let since = |at: Instant| self.wanted.get().map_or(at, |wanted| at.max(*wanted));
        TransferTiming { begun: since(carried.begun), complete: since(carried.complete), ..carried }
    }

    /// Returns true if the gather has not started and no rank has to be waited for once it does.
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
    /// Starts the gather of `ticket`, if a local rank has deferred it, because another rank has started it.
    pub(super) fn begin_deferred(&self, ticket: OpHandle) {
        self.rendezvous.ask_for(ticket);
        self.begin_called(ticket, true);
    }

    /// Starts a deferred gather, unless it was started before.
    fn begin_called(&self, ticket: OpHandle, wanted: bool) {
        let beginning = self.deferred_gathers.0.lock().remove(&(ticket.group, ticket.seq));
        if let Some(beginning) = beginning {
            beginning.begin(self, wanted);
        }
    }
}
