//! [`RedistributeTarget`] and [`RedistributeCache`]: what a tensor is redistributed to, and what it already was
//! redistributed to.

use std::sync::{Arc, OnceLock, Weak};

use burn::tensor::Tensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::local::{as_float, is_tracked};
use super::redistribute_plan::{RedistributePlan, SavedForBackward};
use super::vjp::MeshDims;
use super::{DTensorSpec, Kind};
use crate::Result;

/// What a tensor is redistributed to.
#[derive(Debug)]
pub(super) struct RedistributeTarget {
    pub(super) spec: Arc<DTensorSpec>,
    /// The way there.
    pub(super) route: Arc<RedistributePlan>,
    /// Mesh dimensions on which ranks compute different things with one replicated value.
    pub(super) varying: MeshDims,
    /// What asks for it.
    pub(super) operator: &'static str,
}

impl RedistributeTarget {
    /// Whether the tensor is there as it comes.
    pub(super) fn is_here(&self) -> bool {
        self.varying.is_empty() && self.route.steps().is_empty()
    }

    /// The local tensor there, of one laid out as `from`. Clones of it share `handles`, and with them the
    /// result.
    ///
    /// # Collective
    /// In forward and in backward: every rank of the mesh.
    #[track_caller]
    pub(super) fn redistribute<const D: usize, K: Kind>(
        &self,
        local: Tensor<D, K>,
        from: &Arc<DTensorSpec>,
        handles: Option<&RedistributeCache<D>>,
    ) -> Result<Tensor<D, K>> {
        let varying = if self.varying.is_empty() || !is_tracked(&local) { &[] } else { &self.varying[..] };
        let stays = self.route.steps().is_empty();
        if varying.is_empty() && stays {
            return Ok(local);
        }
        let Some(handles) = handles else {
            return self.route.walk(local, from, &self.varying, Weak::new(), self.operator);
        };
        // What an owner makes is the way's first part; the rest is walked once, as any other.
        let given = handles.given.as_ref().filter(|given| given.takes(varying, &self.route));
        let made = given.map(|given| Tensor::from_dispatch((given.make)(varying).into_dispatch()));
        if let Some(made) = made.as_ref().filter(|_| stays) {
            return Ok(made.clone());
        }
        if let Some(known) = handles.find(&self.spec, varying) {
            return Ok(Tensor::from_dispatch(known.into_dispatch()));
        }
        // No lock is held while this communicates.
        let kept = Arc::new(SavedForBackward::default());
        let (local, summed) = made.map_or((local, &self.varying[..]), |made| (made, &[][..]));
        let tensor = self.route.walk(local, from, summed, Arc::downgrade(&kept), self.operator)?;
        // Only floats vary or are cached: what else moves is an index, and small.
        if tensor.dtype().is_float() {
            *kept.lock() = Some(as_float(tensor.clone()));
            handles.push(RedistributeCacheEntry { spec: self.spec.clone(), varying: varying.into(), kept });
        }
        Ok(tensor)
    }
}

/// The [`RedistributeCache`] that a tensor shares with its clones.
#[derive(Debug)]
pub(super) enum SharedCache<const D: usize> {
    /// A tensor that is no clone: made when it is first cloned or varied.
    Own(OnceLock<Arc<RedistributeCache<D>>>),
    /// A clone, or a tensor whose owner gave them: there from the start, without the cost of a lock.
    Of(Arc<RedistributeCache<D>>),
}

impl<const D: usize> SharedCache<D> {
    /// Those that there are.
    #[inline]
    pub(super) fn get(&self) -> Option<&Arc<RedistributeCache<D>>> {
        match self {
            Self::Own(made) => made.get(),
            Self::Of(handles) => Some(handles),
        }
    }

    /// Made if there are none.
    #[inline]
    pub(super) fn get_or_init(&self) -> &Arc<RedistributeCache<D>> {
        match self {
            Self::Own(made) => made.get_or_init(Default::default),
            Self::Of(handles) => handles,
        }
    }
}

impl<const D: usize> Default for SharedCache<D> {
    fn default() -> Self {
        Self::Own(OnceLock::new())
    }
}

impl<const D: usize> Clone for SharedCache<D> {
    #[inline]
    fn clone(&self) -> Self {
        Self::Of(self.get_or_init().clone())
    }
}

/// What one tensor was already redistributed to, kept until backward or while it or a clone of it lives.
#[derive(Debug, Default)]
pub(super) struct RedistributeCache<const D: usize> {
    pub(super) made: Mutex<SmallVec<[RedistributeCacheEntry<D>; 1]>>,
    /// For the tensor as it is laid out, varying: made by an owner who sums its gradient.
    pub(super) given: Option<VaryingRecipe<D>>,
}

/// Made by an owner, each time.
pub(super) struct VaryingRecipe<const D: usize> {
    /// The mesh dimensions, some or all, that the owner knows how to sum gradients over.
    pub(super) varying: MeshDims,
    pub(super) make: Arc<MakeVarying<D>>,
}

/// Makes a tensor that varies over these mesh dimensions.
pub(crate) type MakeVarying<const D: usize> = dyn Fn(&[usize]) -> Tensor<D> + Send + Sync;

impl<const D: usize> VaryingRecipe<D> {
    /// Whether a tensor that goes this way, and then varies, may vary before.
    fn takes(&self, varying: &[usize], route: &RedistributePlan) -> bool {
        let stays = |dim: &usize| route.steps().iter().all(|(step, _)| step.mesh_dim() != *dim);
        !varying.is_empty() && varying.iter().all(|dim| self.varying.contains(dim) && stays(dim))
    }
}

impl<const D: usize> std::fmt::Debug for VaryingRecipe<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VaryingRecipe").field("varying", &self.varying).finish_non_exhaustive()
    }
}

/// One layout that it was redistributed to.
#[derive(Debug)]
pub(super) struct RedistributeCacheEntry<const D: usize> {
    spec: Arc<DTensorSpec>,
    varying: MeshDims,
    pub(super) kept: Arc<SavedForBackward<D>>,
}

impl<const D: usize> RedistributeCache<D> {
    /// What it was redistributed to there, if that is still there.
    fn find(&self, to: &Arc<DTensorSpec>, varying: &[usize]) -> Option<Tensor<D>> {
        let is_there = |handle: &&RedistributeCacheEntry<D>| {
            *handle.varying == *varying && (Arc::ptr_eq(&handle.spec, to) || handle.spec.layout() == to.layout())
        };
        self.made.lock().iter().filter(is_there).find_map(|handle| handle.kept.lock().clone())
    }

    /// Where that is kept: for another node whose backward spends it.
    pub(super) fn kept(&self, to: &Arc<DTensorSpec>) -> Weak<SavedForBackward<D>> {
        let made = self.made.lock();
        let there = made.iter().filter(|handle| handle.varying.is_empty() && handle.spec.layout() == to.layout());
        there.map(|handle| Arc::downgrade(&handle.kept)).next_back().unwrap_or_default()
    }

    /// Adds what was made, in the place of all that is spent.
    fn push(&self, handle: RedistributeCacheEntry<D>) {
        let mut made = self.made.lock();
        made.retain(|handle| handle.kept.lock().is_some());
        made.push(handle);
    }
}
