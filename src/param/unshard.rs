//! [`unshard`] and [`reshard`]: gathering a unit ahead of its forward.

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

/// A unit being gathered ahead of its forward; see [`unshard`].
#[must_use = "the all-gather is waited for by `wait`, or by the unit's forward"]
#[derive(Debug)]
pub struct UnshardHandle(SmallVec<[Arc<Unit>; 1]>);

impl UnshardHandle {
    /// Waits until the parameters are gathered. The unit's forward waits by itself.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn wait(self) -> Result<()> {
        Ok(self.0.iter().try_for_each(|unit| unit.wait_unsharded())?)
    }
}

/// Starts gathering the parameters of the unit `module`, for its next forward to use.
///
/// Not recursive: inner units stay as they are. An optimizer step in between makes the gathered
/// values stale; the forward notices and gathers again. Until then, or until [`reshard`], what was
/// gathered stays in memory, stale or not.
///
/// # Collective
/// Every rank of the unit's mesh must call it.
///
/// # Errors
/// [`ParamError`] if `module` is no unit or one of several of a unit, or a parameter of it was replaced. A failing collective
/// shows in [`wait`](UnshardHandle::wait), or in the unit's forward.
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

/// Drops what [`unshard`] gathered for the unit `module`, if no forward has used it.
///
/// Local: no communication.
///
/// # Errors
/// [`ParamError`] if `module` is no unit, or a parameter of it was replaced.
pub fn reshard<M: Module>(module: &M) -> Result<()> {
    units_of(module)?.iter().for_each(|(unit, _)| unit.reshard());
    Ok(())
}

impl Unit {
    /// Starts gathering parameters ahead of their use, unless passes have left them.
    pub(super) fn unshard(&self, shards: LocalShards) {
        let is_there = |unsharded: &Unsharded| unsharded.prefetched.is_of_passes() && unsharded.shards.is_of(&shards);
        if !self.unsharded.lock().as_ref().is_some_and(is_there) {
            let gathering = self.begin_unshard(&shards, Phase::Other, TrainingState::Idle);
            self.keep_unsharded(LocalShardsId::of(&shards), Prefetched::Program(gathering));
        }
    }

    /// Posts the all-gather that the forward that is under way will take from; `false` if there is one, or none to make.
    pub(super) fn post(&self, shards: LocalShards) -> bool {
        let is_there = |unsharded: &Unsharded| unsharded.shards.is_of(&shards);
        if !self.is_gathered() || self.unsharded.lock().as_ref().is_some_and(is_there) {
            return false;
        }
        let posted = self.begin_gather(&shards, Phase::Forward);
        self.keep_unsharded(LocalShardsId::of(&shards), Prefetched::Posted(posted));
        true
    }

    /// Starts gathering what the forward that is under way will need, unless that has been done.
    pub(super) fn prefetch(&self, shards: LocalShards) {
        let is_there = |unsharded: &Unsharded| !unsharded.prefetched.is_posted() && unsharded.shards.is_of(&shards);
        if !self.unsharded.lock().as_ref().is_some_and(is_there) {
            let gathering = self.begin_unshard(&shards, Phase::Forward, TrainingState::Forward);
            self.keep_unsharded(LocalShardsId::of(&shards), Prefetched::Prefetch(gathering));
        }
    }

    /// What was posted of these shards, or an all-gather that is posted now.
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

    /// Keeps parameters for the next forward from these shards.
    pub(super) fn keep_unsharded(&self, shards: LocalShardsId, prefetched: Prefetched) {
        *self.unsharded.lock() = Some(Unsharded { shards, prefetched });
    }

    /// Drops what a forward that is over has gathered ahead in vain.
    pub(super) fn forget_prefetched(&self) {
        self.unsharded.lock().take_if(|unsharded| unsharded.prefetched.is_of_forward());
    }

    /// Drops what passes share: the last of them frees it.
    pub(super) fn forget_shared(&self) {
        self.unsharded.lock().take_if(|unsharded| matches!(unsharded.prefetched, Prefetched::Shared(_)));
    }

    /// Whether passes share what was gathered.
    pub(super) fn is_shared(&self) -> bool {
        matches!(&*self.unsharded.lock(), Some(Unsharded { prefetched: Prefetched::Shared(_), .. }))
    }

    /// Whether parameters gathered ahead are there.
    pub(super) fn is_unsharded(&self) -> bool {
        self.unsharded.lock().as_ref().is_some_and(|unsharded| unsharded.prefetched.is_there())
    }

    /// Waits for [`unshard`](Self::unshard), if one is under way.
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

    /// The parameters gathered ahead, if they were gathered from these shards.
    pub(super) fn take_unsharded(&self, shards: &LocalShards) -> Option<Prefetched> {
        let mut unsharded = self.unsharded.lock();
        if let Some(Unsharded { shards: of, prefetched: Prefetched::Shared(weights) }) = &*unsharded
            && of.is_of(shards)
        {
            return Some(Prefetched::Shared(weights.clone()));
        }
        let taken = unsharded.take_if(|unsharded| unsharded.shards.is_of(shards));
        // What passes have left of other shards nobody waits for.
        unsharded.take_if(|unsharded| unsharded.prefetched.is_of_passes());
        taken.map(|unsharded| unsharded.prefetched)
    }

    /// The pass keeps what forward has gathered.
    pub(super) fn keep(&self, pass: Weak<dyn Keeps>) {
        let mut keeping = self.keeping.lock();
        keeping.retain(|pass| pass.strong_count() > 0);
        keeping.push(pass);
    }

    /// Drops the parameters gathered ahead, and frees those that passes keep.
    pub(super) fn reshard(&self) {
        self.unsharded.lock().take();
        let keeping = mem::take(&mut *self.keeping.lock());
        keeping.iter().filter_map(Weak::upgrade).for_each(|pass| pass.reshard());
    }
}
