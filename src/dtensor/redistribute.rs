//! Changes of layout: [`redistribute`](DTensor::redistribute) and
//! [`full_tensor`](DTensor::full_tensor).

use std::sync::{Arc, Weak};

use burn::tensor::Tensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::local::{as_float, is_tracked};
use super::redistribute_cache::RedistributeTarget;
use super::redistribute_plan::RedistributePlan;
use super::{DTensor, Kind, MeshDims};
use crate::Result;
use crate::error::OrUnwind;
use crate::placement::{Layout, Placement};
use crate::watch::CallSite;

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Changes the placements of the tensor. Shards have the sizes of `torch.chunk`, and mesh
    /// dimensions shard in ascending order.
    ///
    /// The operation is differentiable (see the table of [this module](super)), and placements that
    /// do not change cost nothing. The steps are those of [`plan`](crate::placement::plan);
    /// consecutive steps of the same kind are fused into one collective over the ranks of all their
    /// mesh dimensions. For other element types, or to redistribute in the background, use
    /// [`RedistributeOptions`](super::RedistributeOptions).
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`PlacementError`](crate::placement::PlacementError) for a wrong number of placements, a
    /// dimension out of range, or a Partial target that cannot be created (only `P(sum)` can, from
    /// `R` or `S(d)`); [`CommError`](crate::comm::CommError) if a collective fails.
    ///
    /// # Panics
    /// A collective that fails in backward unwinds the rank with its error; see
    /// [`Error::unwind`](crate::Error::unwind).
    #[track_caller]
    pub fn redistribute(self, placements: &[Placement]) -> Result<Self> {
        if self.placements() == placements && self.layout().has_default_shard_sizes() {
            return Ok(self);
        }
        let layout = Layout::new(self.mesh().shape(), placements)?;
        self.redistribute_to(&layout)
    }

    /// Like [`redistribute`](Self::redistribute), but to a [`Layout`], which may have its own shard
    /// order or uneven shard sizes.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`redistribute`](Self::redistribute), [`LayoutMesh`](super::DTensorError::LayoutMesh) for
    /// a layout of another mesh shape, and
    /// [`ShardSizeSum`](crate::placement::PlacementError::ShardSizeSum) for uneven shard sizes that
    /// do not add up to the tensor's.
    #[track_caller]
    pub fn redistribute_to(self, layout: &Layout) -> Result<Self> {
        if self.layout() == layout {
            return Ok(self);
        }
        self.redistributed_to(layout, "redistribute")
    }

    /// Returns the full tensor on every rank. Its gradient is replicated; see
    /// [`redistribute`](Self::redistribute).
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`CommError`](crate::comm::CommError) if a collective fails.
    #[track_caller]
    pub fn full_tensor(self) -> Result<Tensor<D, K>> {
        let replicate = Layout::replicate(self.mesh().shape())?;
        Ok(self.redistributed_to(&replicate, "full_tensor")?.local)
    }

    /// Redistributes to `layout`. `operator` is the name of the method that the caller of this
    /// crate called, for traces.
    #[track_caller]
    fn redistributed_to(self, layout: &Layout, operator: &'static str) -> Result<Self> {
        let spec = self.spec.with_layout(layout.clone())?;
        let plan = RedistributePlan::between(self.layout(), layout)?;
        let local = plan.walk(self.local, &self.spec, &[], Weak::new(), operator)?;
        Ok(Self::from_parts(local, spec.shared()))
    }

    /// Redistributes the tensor to the `wanted` placements; `None` keeps that of the mesh
    /// dimension. A shard that would leave a rank without elements becomes Replicate. All clones of
    /// the tensor share the result.
    ///
    /// If the redistribution consists of all-gathers only, an operator that lets the result
    /// [vary](Self::vary) reuses the gathered tensor and reduce-scatters its gradient.
    ///
    /// # Collective
    /// As [`redistribute_to`](Self::redistribute_to).
    #[track_caller]
    pub(crate) fn redistribute_each(self, wanted: &[Option<Placement>]) -> Result<Self> {
        let wanted = self.spec.with_elements(wanted.into());
        let layout = self
            .layout()
            .replaced(|mesh_dim, own| wanted[mesh_dim].unwrap_or(own))?;
        if *self.layout() == layout {
            return Ok(self);
        }
        let to = self.destination(&layout, &[], "style")?;
        let local = self.local.clone();
        let handles = self.handles.get().map(|handles| &**handles);
        let there = Self::from_parts(to.redistribute(local, &self.spec, handles)?, to.spec);
        let Some(gathering) = to.plan.gathering().filter(|_| is_tracked(&self.local)) else {
            return Ok(there);
        };
        let mesh_dims = gathering.mesh_dims;
        let from = self.spec.clone();
        let plan = to.plan.clone();
        let full = as_float(there.local.clone());
        // The node of the plain redistribution may never run, because all gradients may arrive
        // through `vary`. So its saved tensor is also released by the varying nodes.
        let kept = handles
            .map(|handles| handles.kept(&there.spec))
            .unwrap_or_default();
        let local = as_float(self.local);
        let known = Mutex::new(SmallVec::<[(MeshDims, Tensor<D>); 1]>::new());
        let origin = CallSite::new("style");
        let make = move |varying: &[usize]| {
            let mut known = known.lock();
            if let Some((_, tensor)) = known.iter().find(|(dims, _)| **dims == *varying) {
                return tensor.clone();
            }
            let gathering = plan
                .gathering()
                .expect("the plan was a gather when it was executed");
            let tensor = gathering.varying(
                local.clone(),
                &from,
                full.clone(),
                varying,
                kept.clone(),
                origin.clone(),
            );
            let tensor = tensor.or_unwind();
            known.push((varying.into(), tensor.clone()));
            tensor
        };
        Ok(there.with_varied(&mesh_dims, Arc::new(make)))
    }

    /// Returns the target and the plan of a redistribution to `layout`, for `operator`.
    pub(super) fn destination(
        &self,
        layout: &Layout,
        varying: &[usize],
        operator: &'static str,
    ) -> Result<RedistributeTarget> {
        let spec = if self.layout() == layout {
            self.spec.clone()
        } else {
            self.spec.with_layout(layout.clone())?.shared()
        };
        Ok(RedistributeTarget {
            spec,
            plan: RedistributePlan::between(self.layout(), layout)?,
            varying: varying.into(),
            operator,
        })
    }
}
