//! [`Source`]: where the weights of one pass come from, in forward and again in backward.

use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::gathered::Gathered;
use super::slots::{Refill, Slot};
use crate::Error;
use crate::comm::{Call, Phase};
use crate::param::unit::{Gathering, Unit};
use crate::param::verifier::Due;

/// The shards that a pass started from, and what is gathered of them.
///
/// The all-gather for backward is issued when forward leaves the unit (rule 9 of [`graph`](crate::param::graph)): so
/// backward may take results in any order, or never. Nothing moves until a result is taken.
///
/// Views of a slot hold the source: a weight that outlives its pass can still be read.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) unit: Arc<Unit>,
    /// The unit's parameters that take part, as indices into the unit.
    pub(super) members: Vec<usize>,
    pub(super) shards: Vec<DispatchTensor>,
    /// What the pass's collectives are called.
    call: Call,
    /// If what is alike on several ranks is compared.
    pub(super) due: Option<Due>,
    pub(super) gathered: Gathered<Gathering, dyn Slot, DispatchTensor>,
}

impl Source {
    pub(super) fn new(
        unit: Arc<Unit>,
        members: Vec<usize>,
        shards: Vec<DispatchTensor>,
        call: Call,
        due: Option<Due>,
    ) -> Arc<Self> {
        Arc::new(Self { unit, members, shards, call, due, gathered: Gathered::new() })
    }

    pub(super) fn call(&self, phase: Phase) -> Call {
        self.call.clone().in_phase(phase)
    }

    /// The weights for forward.
    pub(super) fn gather(&self) -> Vec<DispatchTensor> {
        self.wholes(self.unit.all_gather(self.call(Phase::Forward), &self.members, self.shards.clone()))
    }

    /// Every weight of the pass, once `gathering` is there.
    pub(super) fn wholes(&self, gathering: Gathering) -> Vec<DispatchTensor> {
        let gathered = gathering.wait().unwrap_or_else(|error| Error::from(error).unwind());
        self.unit.wholes(&self.members, gathered, &self.shards)
    }

    /// Issues the all-gather for backward: of `parts`, the shards over a few ranks, or else of the
    /// shards over all.
    pub(super) fn gather_ahead(&self, parts: Option<Vec<DispatchTensor>>) -> Gathering {
        let call = self.call(Phase::Backward).ahead();
        match parts {
            Some(parts) => self.unit.all_gather_parts(call, &self.members, parts),
            None => self.unit.all_gather_again(call, &self.members, self.shards.clone()),
        }
    }

    /// The weight at `position`, gathered for backward: see [`Gathered::again`].
    pub(super) fn again(&self, position: usize, shared: bool) -> Option<DispatchTensor> {
        self.gathered.again(position, shared, |issued| self.wholes(issued), Slot::fill)
    }
}

impl Refill for Source {
    fn refill(&self) {
        self.gathered.refill(|issued| self.wholes(issued), Slot::fill);
    }
}
