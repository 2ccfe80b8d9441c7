//! [`Route`]: mesh dimensions along which the shards of a parameter are collected on one rank, and the order in
//! which they arrive.

use std::ops::Range;

use burn::tensor::DType;
use itertools::Itertools;

use crate::Result;
use crate::comm::Communicator;
use crate::dtensor::DTensorSpec;
use crate::mesh::DeviceMesh;

/// Route between the ranks that together hold one parameter. Its axes are the mesh dimensions that
/// shard the parameter. Moving shards along one axis after the other collects all of them on one
/// rank.
///
/// ```text
/// axes of 2 and 3 ranks: ranks whose shards the rank at (0, 0) holds
/// at first               00
/// after axis 0           00 10
/// after axis 1           00 10   01 11   02 12
/// ```
pub(super) struct Route {
    mesh: DeviceMesh,
    dtype: DType,
    /// Mesh dimension and communicator of each axis.
    axes: Vec<(usize, Communicator)>,
}

impl Route {
    pub(super) fn of(spec: &DTensorSpec) -> Result<Self> {
        let mesh = spec.mesh().clone();
        let axes = cutting(spec)
            .map(|dim| Ok((dim, mesh.communicator(dim)?.clone())))
            .collect::<Result<_>>()?;
        Ok(Self {
            axes,
            mesh,
            dtype: spec.dtype(),
        })
    }

    /// Returns true if this is the route of a parameter with the given spec.
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

    /// Returns this rank's coordinate along an axis.
    pub(super) fn own(&self, axis: usize) -> usize {
        self.coordinate()[self.axes[axis].0]
    }

    /// Converts the index of a rank of the route to its coordinates along the axes.
    pub(super) fn place(&self, mut rank: usize) -> Vec<usize> {
        (0..self.axes())
            .map(|axis| {
                let place = rank % self.size(axis);
                rank /= self.size(axis);
                place
            })
            .collect()
    }

    /// Returns the number of ranks whose shards a rank holds before the move along an axis.
    pub(super) fn sources_before(&self, axis: usize) -> usize {
        (0..axis).map(|axis| self.size(axis)).product()
    }

    /// Returns the mesh coordinates of the ranks whose shards the rank at `place` along the axis
    /// holds before the move along it. The coordinate along the first axis varies fastest.
    pub(super) fn sources(&self, axis: usize, place: usize) -> impl Iterator<Item = Vec<usize>> {
        let mut coordinate = self.coordinate().to_vec();
        if let Some((dim, _)) = self.axes.get(axis) {
            coordinate[*dim] = place;
        }
        let places = (0..axis)
            .rev()
            .map(|axis| 0..self.size(axis))
            .multi_cartesian_product();
        places.map(move |places| {
            let mut coordinate = coordinate.clone();
            for ((dim, _), place) in self.axes[..axis].iter().rev().zip(places) {
                coordinate[*dim] = place;
            }
            coordinate
        })
    }

    /// Returns the region of the full tensor of each shard, in the order of
    /// [`sources`](Self::sources).
    pub(super) fn regions(&self, spec: &DTensorSpec) -> Vec<Vec<Range<usize>>> {
        self.sources(self.axes(), 0)
            .map(|coordinate| spec.layout().local_slices(spec.shape(), &coordinate))
            .collect()
    }

    fn coordinate(&self) -> &[usize] {
        self.mesh
            .coordinate()
            .expect("a rank holds parameters only of meshes that contain it")
    }
}

/// Returns the mesh dimensions that shard a tensor.
fn cutting(spec: &DTensorSpec) -> impl Iterator<Item = usize> {
    spec.placements()
        .iter()
        .enumerate()
        .filter_map(|(dim, placement)| placement.shard_dim().map(|_| dim))
}
