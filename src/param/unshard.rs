//! [`unshard`] and [`reshard`]: gather a unit's parameters before its forward, and free them.

use std::sync::Arc;

use burn::module::Module;
use smallvec::SmallVec;

use super::ParamError;
use super::enter::units_of;
use super::events::{EventKind, ShardedState, TrainingState, happened};
use super::shards::LocalShards;
use super::storage::GatherOrigin;
use super::unit::Unit;
use crate::Result;
use crate::comm::{Call, Phase};

/// Handle of a unit whose parameters are being gathered before its forward; see [`unshard`].
#[must_use = "call `wait`, or let the unit's forward wait for the all-gather"]
#[derive(Debug)]
pub struct UnshardHandle(SmallVec<[Arc<Unit>; 1]>);

impl UnshardHandle {
    /// Waits until the parameters are gathered. Optional: the unit's forward waits as well.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn wait(self) -> Result<()> {
        Ok(self.0.iter().try_for_each(|unit| unit.copies.wait())?)
    }
}

/// Starts gathering the parameters of the unit `module` for its next forward.
///
/// Not recursive: inner units are not gathered. An optimizer step before that forward makes the gathered values
/// stale; the forward detects this and gathers once more. The gathered values, stale or not, stay in memory until
/// then, or until [`reshard`].
///
/// # Collective
/// Every rank of the unit's mesh must call it.
///
/// # Errors
/// [`ParamError`] if `module` is not an FSDP unit, if it is one of several modules of a group unit, or if one of
/// its parameters was replaced. [`wait`](UnshardHandle::wait) or the unit's forward reports a failing collective.
pub fn unshard<M: Module>(module: &M) -> Result<UnshardHandle> {
    let units = units_of(module)?;
    if let Some((unit, _)) = units.iter().find(|(unit, _)| unit.is_group()) {
        return Err(ParamError::UnshardOnGroupUnit { unit: unit.label().to_string() }.into());
    }
    let unshard = |(unit, shards): (Arc<Unit>, LocalShards)| {
        unit.unshard(&shards);
        unit
    };
    Ok(UnshardHandle(units.into_iter().map(unshard).collect()))
}

/// Frees the unsharded parameters of the unit `module`: those that [`unshard`] gathered and no forward has used, and
/// those that a forward keeps for its backward, which gathers them a second time.
///
/// # Collective
/// Every rank must call it if a forward keeps parameters of the unit for a later backward. Otherwise it is local.
///
/// # Errors
/// [`ParamError`] if `module` is not an FSDP unit, or if one of its parameters was replaced.
pub fn reshard<M: Module>(module: &M) -> Result<()> {
    units_of(module)?.iter().for_each(|(unit, _)| unit.copies.reshard());
    Ok(())
}

impl Unit {
    /// Starts gathering parameters before their use, unless earlier passes kept them.
    pub(super) fn unshard(&self, shards: &LocalShards) {
        if !self.copies.has_left(shards) {
            self.begin_gather(shards, GatherOrigin::Program);
        }
    }

    /// Posts the all-gather whose result the running forward will use. Returns false if it was posted before, or if
    /// the unit needs none.
    pub(super) fn post(&self, shards: &LocalShards) -> bool {
        let posts = self.is_gathered() && !self.copies.has(shards, true);
        if posts {
            self.begin_gather(shards, GatherOrigin::Posted);
        }
        posts
    }

    /// Starts gathering the parameters that the running forward will need, unless that has been done.
    pub(super) fn prefetch(&self, shards: &LocalShards) {
        if !self.copies.has(shards, false) {
            self.begin_gather(shards, GatherOrigin::Prefetch);
        }
    }

    /// Uses the all-gather that was posted for these shards, or posts one now.
    fn begin_gather(&self, shards: &LocalShards, origin: GatherOrigin) {
        let (phase, during) = match origin {
            GatherOrigin::Program | GatherOrigin::Retained => (Phase::Other, TrainingState::Idle),
            GatherOrigin::Prefetch | GatherOrigin::Posted => (Phase::Forward, TrainingState::Forward),
        };
        let is_under_way = self.copies.promote(shards, origin).unwrap_or_else(|| {
            let call = Call { model: self.model(shards), ..Call::new(self.label()).with_phase(phase) };
            let sent = self.computed(true, &shards.members, shards.plain());
            let gathering = self.all_gather(call, &shards.members, sent);
            let is_under_way = gathering.is_under_way();
            self.copies.gather(shards, gathering, origin);
            is_under_way
        });
        if is_under_way && origin != GatherOrigin::Posted {
            happened(EventKind::Unshard, || self.label(), during, || ShardedState::Unsharded);
        }
    }
}
