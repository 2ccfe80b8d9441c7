//! Changing a layout: [`redistribute`](DTensor::redistribute) and [`full_tensor`](DTensor::full_tensor).

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
    /// The same tensor under other placements, cut into chunks in the order of the mesh dimensions.
    ///
    /// Differentiable (the table of [this module](super)); placements that do not change cost
    /// nothing. The steps are those of [`plan`](crate::placement::plan); those that follow each other and are of
    /// one kind are one collective, over the ranks of all their mesh dimensions. With other element types, or
    /// not waited for at once: [`RedistributeOptions`](super::RedistributeOptions).
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`PlacementError`](crate::placement::PlacementError) for a wrong number of placements, a
    /// dimension out of range, or a Partial target that cannot be made (only `P(sum)` can, from
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

    /// [`redistribute`](Self::redistribute) to a layout with an order of cuts or lengths of its own.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`redistribute`](Self::redistribute), [`LayoutMesh`](super::DTensorError::LayoutMesh) for a
    /// layout of another mesh shape, and
    /// [`ShardSizeSum`](crate::placement::PlacementError::ShardSizeSum) for lengths that are not the tensor's.
    #[track_caller]
    pub fn redistribute_to(self, layout: &Layout) -> Result<Self> {
        if self.layout() == layout {
            return Ok(self);
        }
        self.redistributed_to(layout, "redistribute")
    }

    /// The whole tensor, on every rank. Its gradient is replicated; see
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

    /// For `operator`.
    #[track_caller]
    fn redistributed_to(self, layout: &Layout, operator: &'static str) -> Result<Self> {
        let spec = self.spec.with_layout(layout.clone())?;
        let route = RedistributePlan::between(self.layout(), layout)?;
        let local = route.walk(self.local, &self.spec, &[], Weak::new(), operator)?;
        Ok(Self::from_parts(local, spec.shared()))
    }

    /// This tensor with what is `wanted` of each mesh dimension, with Replicate for shards that would leave a rank
    /// without elements; once for all clones of it.
    ///
    /// What is only gathered is so once, and its gradient reduce-scattered, by operators that let it
    /// [vary](Self::vary).
    ///
    /// # Collective
    /// As [`redistribute_to`](Self::redistribute_to).
    #[track_caller]
    pub(crate) fn redistribute_each(self, wanted: &[Option<Placement>]) -> Result<Self> {
        let wanted = self.spec.with_elements(wanted.into());
        let layout = self.layout().replaced(|mesh_dim, own| wanted[mesh_dim].unwrap_or(own))?;
        if *self.layout() == layout {
            return Ok(self);
        }
        let to = self.destination(&layout, &[], "style")?;
        let (local, handles) = (self.local.clone(), self.handles.get().map(|handles| &**handles));
        let there = Self::from_parts(to.redistribute(local, &self.spec, handles)?, to.spec);
        let Some(gathering) = to.route.gathering().filter(|_| is_tracked(&self.local)) else { return Ok(there) };
        let mesh_dims = gathering.mesh_dims;
        let (from, route, full) = (self.spec.clone(), to.route.clone(), as_float(there.local.clone()));
        // Its own node may never run: gradients that arrive where it varies are all there are.
        let kept = handles.map(|handles| handles.kept(&there.spec)).unwrap_or_default();
        let (local, known) = (as_float(self.local), Mutex::new(SmallVec::<[(MeshDims, Tensor<D>); 1]>::new()));
        let origin = CallSite::new("style");
        let make = move |varying: &[usize]| {
            let mut known = known.lock();
            if let Some((_, tensor)) = known.iter().find(|(dims, _)| **dims == *varying) {
                return tensor.clone();
            }
            let gathering = route.gathering().expect("it gathered when it was walked");
            let tensor = gathering.varying(local.clone(), &from, full.clone(), varying, kept.clone(), origin.clone());
            let tensor = tensor.or_unwind();
            known.push((varying.into(), tensor.clone()));
            tensor
        };
        Ok(there.with_varied(&mesh_dims, Arc::new(make)))
    }

    /// How to get there, for `operator`.
    pub(super) fn destination(
        &self,
        layout: &Layout,
        varying: &[usize],
        operator: &'static str,
    ) -> Result<RedistributeTarget> {
        let spec =
            if self.layout() == layout { self.spec.clone() } else { self.spec.with_layout(layout.clone())?.shared() };
        Ok(RedistributeTarget {
            spec,
            route: RedistributePlan::between(self.layout(), layout)?,
            varying: varying.into(),
            operator,
        })
    }
}
