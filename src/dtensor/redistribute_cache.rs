//! [`RedistributeTarget`] and [`RedistributeCache`]: the target of a redistribution, and the cache
//! of a tensor's earlier redistributions.

use std::sync::{Arc, OnceLock, Weak};

use burn::tensor::Tensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::local::{as_float, is_tracked};
use super::redistribute_plan::{RedistributePlan, SavedForBackward};
use super::vjp::MeshDims;
use super::{DTensorSpec, Kind};
use crate::Result;

/// Target of a redistribution, with the plan that leads to it.
#[derive(Debug)]
pub(super) struct RedistributeTarget {
    pub(super) spec: Arc<DTensorSpec>,
    /// Plan of the steps to `spec`.
    pub(super) plan: Arc<RedistributePlan>,
    /// Mesh dimensions on which ranks compute different things with one replicated value.
    pub(super) varying: MeshDims,
    /// Operator that needs the redistribution, for traces.
    pub(super) operator: &'static str,
}

impl RedistributeTarget {
    /// Returns true if nothing has to be done: the layout stays and the result does not vary.
    pub(super) fn is_here(&self) -> bool {
        self.varying.is_empty() && self.plan.steps().is_empty()
    }

    /// Redistributes a `local` tensor laid out as `from`, and returns the local tensor of the
    /// result. With `handles`, clones of the DTensor share that result.
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
        let varying = if self.varying.is_empty() || !is_tracked(&local) {
            &[]
        } else {
            &self.varying[..]
        };
        let stays = self.plan.steps().is_empty();
        if varying.is_empty() && stays {
            return Ok(local);
        }
        let Some(handles) = handles else {
            return self
                .plan
                .walk(local, from, &self.varying, Weak::new(), self.operator);
        };
        // If the owner's recipe applies, its result is the input of the remaining steps, which run
        // once as for any other tensor.
        let given = handles
            .given
            .as_ref()
            .filter(|given| given.takes(varying, &self.plan));
        let made = given.map(|given| Tensor::from_dispatch((given.make)(varying).into_dispatch()));
        if let Some(made) = made.as_ref().filter(|_| stays) {
            return Ok(made.clone());
        }
        if let Some(known) = handles.find(&self.spec, varying) {
            return Ok(Tensor::from_dispatch(known.into_dispatch()));
        }
        // No lock is held during communication.
        let kept = Arc::new(SavedForBackward::default());
        let (local, summed) = made.map_or((local, &self.varying[..]), |made| (made, &[][..]));
        let tensor = self
            .plan
            .walk(local, from, summed, Arc::downgrade(&kept), self.operator)?;
        // Only floats vary or are cached. Other kinds are small index tensors.
        if tensor.dtype().is_float() {
            *kept.lock() = Some(as_float(tensor.clone()));
            handles.push(RedistributeCacheEntry {
                spec: self.spec.clone(),
                varying: varying.into(),
                kept,
            });
        }
        Ok(tensor)
    }
}

/// The [`RedistributeCache`] that a tensor shares with its clones.
#[derive(Debug)]
pub(super) enum SharedCache<const D: usize> {
    /// Cache of a tensor that is not a clone, created when the tensor is first cloned or varied.
    Own(OnceLock<Arc<RedistributeCache<D>>>),
    /// Cache of a clone, or of a tensor whose owner supplied a recipe. It exists from the start, so
    /// that reading it needs no lock.
    Of(Arc<RedistributeCache<D>>),
}

impl<const D: usize> SharedCache<D> {
    /// Returns the cache, if it exists.
    #[inline]
    pub(super) fn get(&self) -> Option<&Arc<RedistributeCache<D>>> {
        match self {
            Self::Own(made) => made.get(),
            Self::Of(handles) => Some(handles),
        }
    }

    /// Returns the cache, and creates it if necessary.
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

/// Results of earlier redistributions of one tensor. A result stays until its backward has run, or
/// for as long as the tensor or a clone of it lives.
#[derive(Debug, Default)]
pub(super) struct RedistributeCache<const D: usize> {
    pub(super) made: Mutex<SmallVec<[RedistributeCacheEntry<D>; 1]>>,
    /// Recipe for varying versions of the tensor in its present layout, from an owner that sums
    /// their gradients.
    pub(super) given: Option<VaryingRecipe<D>>,
}

/// An owner's function that makes varying versions of a tensor; it is called for each request.
pub(super) struct VaryingRecipe<const D: usize> {
    /// Mesh dimensions over which the owner can sum gradients; a request may name any subset of
    /// them.
    pub(super) varying: MeshDims,
    pub(super) make: Arc<MakeVarying<D>>,
}

/// Function that returns a tensor that varies over the given mesh dimensions.
pub(crate) type MakeVarying<const D: usize> = dyn Fn(&[usize]) -> Tensor<D> + Send + Sync;

impl<const D: usize> VaryingRecipe<D> {
    /// Returns true if the recipe can be applied before `plan`. That requires that the owner knows
    /// the `varying` dimensions and that no step of `plan` is along one of them.
    fn takes(&self, varying: &[usize], plan: &RedistributePlan) -> bool {
        let stays = |dim: &usize| plan.steps().iter().all(|(step, _)| step.mesh_dim() != *dim);
        !varying.is_empty()
            && varying
                .iter()
                .all(|dim| self.varying.contains(dim) && stays(dim))
    }
}

impl<const D: usize> std::fmt::Debug for VaryingRecipe<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VaryingRecipe")
            .field("varying", &self.varying)
            .finish_non_exhaustive()
    }
}

/// One cached result and the layout that it has.
#[derive(Debug)]
pub(super) struct RedistributeCacheEntry<const D: usize> {
    spec: Arc<DTensorSpec>,
    varying: MeshDims,
    pub(super) kept: Arc<SavedForBackward<D>>,
}

impl<const D: usize> RedistributeCache<D> {
    /// Returns the result for this layout and these varying dimensions, if it is cached and its
    /// backward has not run yet.
    fn find(&self, to: &Arc<DTensorSpec>, varying: &[usize]) -> Option<Tensor<D>> {
        let is_there = |handle: &&RedistributeCacheEntry<D>| {
            *handle.varying == *varying
                && (Arc::ptr_eq(&handle.spec, to) || handle.spec.layout() == to.layout())
        };
        self.made
            .lock()
            .iter()
            .filter(is_there)
            .find_map(|handle| handle.kept.lock().clone())
    }

    /// Returns the storage of the plain result in this layout, so that another node can release it
    /// when its backward runs.
    pub(super) fn kept(&self, to: &Arc<DTensorSpec>) -> Weak<SavedForBackward<D>> {
        let made = self.made.lock();
        let there = made
            .iter()
            .filter(|handle| handle.varying.is_empty() && handle.spec.layout() == to.layout());
        there
            .map(|handle| Arc::downgrade(&handle.kept))
            .next_back()
            .unwrap_or_default()
    }

    /// Adds a result, and removes all whose backward has run.
    fn push(&self, handle: RedistributeCacheEntry<D>) {
        let mut made = self.made.lock();
        made.retain(|handle| handle.kept.lock().is_some());
        made.push(handle);
    }
}
