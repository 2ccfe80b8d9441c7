//! [`Route`]: along which mesh dimensions the parts of a parameter come together, and whose those are on the way.

use std::ops::Range;

use burn::tensor::{DType, Device};
use itertools::Itertools;

use crate::Result;
use crate::comm::Communicator;
use crate::dtensor::DTensorSpec;
use crate::mesh::DeviceMesh;
use crate::placement::Placement;

/// Between the ranks that hold a parameter together: its axes are the mesh dimensions that cut it.
///
/// ```text
/// axes of 2 and 3 ranks; whose parts the rank at (0, 0) has
/// at first               00
/// after axis 0           00 10
/// after axis 1           00 10   01 11   02 12
/// ```
pub(super) struct Route {
    mesh: DeviceMesh,
    dtype: DType,
    /// Mesh dimensions, and their ranks.
    axes: Vec<(usize, Communicator)>,
}

impl Route {
    pub(super) fn of(spec: &DTensorSpec) -> Result<Self> {
        let mesh = spec.mesh().clone();
        let axes = cutting(spec).map(|dim| Ok((dim, mesh.communicator(dim)?.clone()))).collect::<Result<_>>()?;
        Ok(Self { axes, mesh, dtype: spec.dtype() })
    }

    /// Whether it is that of a parameter that lies like this.
    pub(super) fn takes(&self, spec: &DTensorSpec) -> bool {
        self.mesh == *spec.mesh()
            && self.dtype == spec.dtype()
            && self.axes.iter().map(|(dim, _)| *dim).eq(cutting(spec))
    }

    pub(super) fn axes(&self) -> usize {
        self.axes.len()
    }

    pub(super) fn ranks(&self) -> usize {
        (0..self.axes()).map(|axis| self.size(axis)).product()
    }

    pub(super) fn size(&self, axis: usize) -> usize {
        self.mesh.shape()[self.axes[axis].0]
    }

    pub(super) fn communicator(&self, axis: usize) -> &Communicator {
        &self.axes[axis].1
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn device(&self) -> &Device {
        self.mesh.device()
    }

    /// Where this rank is along an axis.
    pub(super) fn own(&self, axis: usize) -> usize {
        self.coordinate()[self.axes[axis].0]
    }

    /// Where the rank of this number is along each axis.
    pub(super) fn place(&self, mut rank: usize) -> Vec<usize> {
        let along = |axis| {
            let place = rank % self.size(axis);
            rank /= self.size(axis);
            place
        };
        (0..self.axes()).map(along).collect()
    }

    /// How many ranks' parts have come together before the move along an axis.
    pub(super) fn sources_before(&self, axis: usize) -> usize {
        (0..axis).map(|axis| self.size(axis)).product()
    }

    /// Whose parts those are where the rank at `place` along the axis has them: coordinates on the mesh, those first that
    /// are first along the axes that came last.
    pub(super) fn sources(&self, axis: usize, place: usize) -> impl Iterator<Item = Vec<usize>> {
        let mut coordinate = self.coordinate().to_vec();
        if let Some((dim, _)) = self.axes.get(axis) {
            coordinate[*dim] = place;
        }
        let places = (0..axis).rev().map(|axis| 0..self.size(axis)).multi_cartesian_product();
        places.map(move |places| {
            let mut coordinate = coordinate.clone();
            for ((dim, _), place) in self.axes[..axis].iter().rev().zip(places) {
                coordinate[*dim] = place;
            }
            coordinate
        })
    }

    /// Of all parts that come together, which they are.
    pub(super) fn regions(&self, spec: &DTensorSpec) -> Vec<Vec<Range<usize>>> {
        self.sources(self.axes(), 0).map(|coordinate| spec.layout().local_slices(spec.shape(), &coordinate)).collect()
    }

    fn coordinate(&self) -> &[usize] {
        self.mesh.coordinate().expect("a parameter is on a mesh that its rank is of")
    }
}

/// The mesh dimensions that cut a tensor.
fn cutting(spec: &DTensorSpec) -> impl Iterator<Item = usize> {
    let shardings = |(dim, placement): (usize, &Placement)| placement.shard_dim().map(|_| dim);
    spec.placements().iter().enumerate().filter_map(shardings)
}
