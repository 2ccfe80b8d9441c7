//! [`unshard`] and [`reshard`]: gather a unit's parameters before its forward, and free them.

use std::mem;
use std::sync::{Arc, Weak};

use burn::module::Module;
use smallvec::SmallVec;

use super::ParamError;
use super::enter::units_of;
use super::events::{EventKind, ShardedState, TrainingState, happened};
use super::pending_all_gather::{Keeps, PendingAllGather, Prefetched, Unsharded};
use super::shards::{LocalShards, LocalShardsId};
use super::unit::Unit;
use crate::Result;
use crate::comm::{Call, CommError, Phase};

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
        Ok(self.0.iter().try_for_each(|unit| unit.wait_unsharded())?)
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
        unit.unshard(shards);
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
    units_of(module)?.iter().for_each(|(unit, _)| unit.reshard());
    Ok(())
}

impl Unit {
    /// Starts gathering parameters before their use, unless earlier passes kept them.
    pub(super) fn unshard(&self, shards: LocalShards) {
        let is_there = |unsharded: &Unsharded| unsharded.prefetched.is_of_passes() && unsharded.shards.is_of(&shards);
        if !self.unsharded.lock().as_ref().is_some_and(is_there) {
            let gathering = self.begin_unshard(&shards, Phase::Other, TrainingState::Idle);
            self.keep_unsharded(LocalShardsId::of(&shards), Prefetched::Program(gathering));
        }
    }

    /// Posts the all-gather whose result the running forward will use. Returns false if it was posted before, or if
    /// the unit needs none.
    pub(super) fn post(&self, shards: LocalShards) -> bool {
        let is_there = |unsharded: &Unsharded| unsharded.shards.is_of(&shards);
        if !self.is_gathered() || self.unsharded.lock().as_ref().is_some_and(is_there) {
            return false;
        }
        let posted = self.begin_gather(&shards, Phase::Forward);
        self.keep_unsharded(LocalShardsId::of(&shards), Prefetched::Posted(posted));
        true
    }

    /// Starts gathering the parameters that the running forward will need, unless that has been done.
    pub(super) fn prefetch(&self, shards: LocalShards) {
        let is_there = |unsharded: &Unsharded| !unsharded.prefetched.is_posted() && unsharded.shards.is_of(&shards);
        if !self.unsharded.lock().as_ref().is_some_and(is_there) {
            let gathering = self.begin_unshard(&shards, Phase::Forward, TrainingState::Forward);
            self.keep_unsharded(LocalShardsId::of(&shards), Prefetched::Prefetch(gathering));
        }
    }

    /// Returns the all-gather that was posted for these shards, or posts one now.
    fn begin_gather(&self, shards: &LocalShards, phase: Phase) -> PendingAllGather {
        let is_posted = |unsharded: &mut Unsharded| unsharded.prefetched.is_posted() && unsharded.shards.is_of(shards);
        if let Some(Unsharded { prefetched: Prefetched::Posted(posted), .. }) = self.unsharded.lock().take_if(is_posted)
        {
            return posted;
        }
        let call = Call { model: self.model(shards), ..Call::new(self.label()).with_phase(phase) };
        let sent = self.computed(true, &shards.members, shards.plain());
        self.all_gather(call, &shards.members, sent)
    }

    fn begin_unshard(&self, shards: &LocalShards, phase: Phase, during: TrainingState) -> PendingAllGather {
        let gathering = self.begin_gather(shards, phase);
        if let PendingAllGather::UnderWay(..) = gathering {
            happened(EventKind::Unshard, || self.label(), during, || ShardedState::Unsharded);
        }
        gathering
    }

    /// Stores parameters for the next forward with these shards.
    pub(super) fn keep_unsharded(&self, shards: LocalShardsId, prefetched: Prefetched) {
        *self.unsharded.lock() = Some(Unsharded { shards, prefetched });
    }

    /// Drops parameters that a completed forward prefetched and did not use.
    pub(super) fn forget_prefetched(&self) {
        self.unsharded.lock().take_if(|unsharded| unsharded.prefetched.is_of_forward());
    }

    /// Drops the unit's reference to parameters that passes share. The last of these passes frees them.
    pub(super) fn forget_shared(&self) {
        self.unsharded.lock().take_if(|unsharded| matches!(unsharded.prefetched, Prefetched::Shared(_)));
    }

    /// Returns true if passes share the gathered parameters.
    pub(super) fn is_shared(&self) -> bool {
        matches!(&*self.unsharded.lock(), Some(Unsharded { prefetched: Prefetched::Shared(_), .. }))
    }

    /// Returns true if prefetched or retained parameters are available.
    pub(super) fn is_unsharded(&self) -> bool {
        self.unsharded.lock().as_ref().is_some_and(|unsharded| unsharded.prefetched.is_there())
    }

    /// Waits for the all-gather that [`unshard`](Self::unshard) or a prefetch started, if one is in flight.
    pub(super) fn wait_unsharded(&self) -> Result<(), CommError> {
        let mut unsharded = self.unsharded.lock();
        let Some(Unsharded { prefetched: Prefetched::Program(gathering) | Prefetched::Prefetch(gathering), .. }) =
            &mut *unsharded
        else {
            return Ok(());
        };
        let waited = mem::replace(gathering, PendingAllGather::Done((Vec::new(), None))).wait();
        match waited {
            Ok(gathered) => *gathering = PendingAllGather::Done(gathered),
            Err(error) => {
                *unsharded = None;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes the prefetched or retained parameters, if they were gathered from these shards.
    pub(super) fn take_unsharded(&self, shards: &LocalShards) -> Option<Prefetched> {
        let mut unsharded = self.unsharded.lock();
        if let Some(Unsharded { shards: of, prefetched: Prefetched::Shared(weights) }) = &*unsharded
            && of.is_of(shards)
        {
            return Some(Prefetched::Shared(weights.clone()));
        }
        let taken = unsharded.take_if(|unsharded| unsharded.shards.is_of(shards));
        // Drops parameters that passes kept for other shards, because no rank waits for them.
        unsharded.take_if(|unsharded| unsharded.prefetched.is_of_passes());
        taken.map(|unsharded| unsharded.prefetched)
    }

    /// Registers a pass that keeps what forward has gathered.
    pub(super) fn keep(&self, pass: Weak<dyn Keeps>) {
        let mut keeping = self.keeping.lock();
        keeping.retain(|pass| pass.strong_count() > 0);
        keeping.push(pass);
    }

    /// Drops the prefetched parameters, and frees those that passes keep.
    pub(super) fn reshard(&self) {
        self.unsharded.lock().take();
        let keeping = mem::take(&mut *self.keeping.lock());
        keeping.iter().filter_map(Weak::upgrade).for_each(|pass| pass.reshard());
    }
}
