//! Changing a layout: [`redistribute`](DTensor::redistribute) and [`full_tensor`](DTensor::full_tensor).

use std::sync::Weak;

use burn::tensor::Tensor;

use super::handles::Destination;
use super::route::Route;
use super::{DTensor, Kind};
use crate::Result;
use crate::placement::{Layout, Placement, Placements};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The same tensor under other placements, cut into chunks in the order of the mesh dimensions.
    ///
    /// Differentiable (the table of [this module](super)); placements that do not change cost
    /// nothing. The steps are those of [`plan`](crate::placement::plan); those that follow each other and are of
    /// one kind are one collective, over the ranks of all their mesh dimensions. With other element types, or
    /// not waited for at once: [`Redistribute`](super::Redistribute).
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
        if self.placements() == placements && self.layout().has_default_cuts() {
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
    /// [`LengthSum`](crate::placement::PlacementError::LengthSum) for lengths that are not the tensor's.
    #[track_caller]
    pub fn redistribute_to(self, layout: &Layout) -> Result<Self> {
        if self.layout() == layout {
            return Ok(self);
        }
        self.brought_to(layout, "redistribute")
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
        Ok(self.brought_to(&replicate, "full_tensor")?.local)
    }

    /// For `operator`.
    #[track_caller]
    fn brought_to(self, layout: &Layout, operator: &'static str) -> Result<Self> {
        let spec = self.spec.with_layout(layout.clone())?;
        let route = Route::between(self.layout(), layout)?;
        let local = route.walk(self.local, &self.spec, &[], Weak::new(), operator)?;
        Ok(Self::from_parts(local, spec.shared()))
    }

    /// This tensor with `placement` on every mesh dimension, or Replicate if that would leave a rank without
    /// elements; once for all clones of it.
    ///
    /// # Collective
    /// As [`redistribute_to`](Self::redistribute_to).
    #[track_caller]
    pub(crate) fn redistribute_all(self, placement: Placement) -> Result<Self> {
        let placement = self.spec.with_elements(placement);
        let placements: Placements = self.mesh().shape().iter().map(|_| placement).collect();
        let layout = Layout::new(self.mesh().shape(), &placements)?;
        if *self.layout() == layout {
            return Ok(self);
        }
        let to = self.destination(&layout, &[], "style")?;
        let local = to.redistribute(self.local, &self.spec, self.handles.get().map(|handles| &**handles))?;
        Ok(Self::from_parts(local, to.spec))
    }

    /// How to get there, for `operator`.
    pub(super) fn destination(
        &self,
        layout: &Layout,
        varying: &[usize],
        operator: &'static str,
    ) -> Result<Destination> {
        let spec =
            if self.layout() == layout { self.spec.clone() } else { self.spec.with_layout(layout.clone())?.shared() };
        Ok(Destination { spec, route: Route::between(self.layout(), layout)?, varying: varying.into(), operator })
    }
}
