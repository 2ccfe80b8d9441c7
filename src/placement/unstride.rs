//! Conversion of strided shards to a layout: which shards are undone, and how the gathered elements
//! are reordered.
//!
//! A strided shard is not an interval, so the table of transitions does not cover it. It is undone
//! by one all-gather along its mesh dimension and a permutation of the result:
//!
//! ```text
//! 6 elements as SS(0,3) over 2 ranks     rank 0: 0 2 4      rank 1: 1 3 5
//! all-gathered                           0 2 4 1 3 5
//! positions of 0, 1, 2, ..               0 3 1 4 2 5
//! ```

use std::ops::Range;

use itertools::Itertools;

use super::strided::dealt;
use super::{Layout, Placement, PlacementError, StridedLayout};

/// Division of an interval of a tensor dimension among the ranks along one mesh dimension. The
/// outer mesh dimensions leave that interval.
pub(crate) struct Dealt {
    /// Tensor dimension that is divided.
    pub(crate) dim: usize,
    /// Number of elements of each rank.
    pub(crate) lengths: Vec<usize>,
    /// Position of each element in the concatenation of the ranks' shards.
    pub(crate) places: Vec<usize>,
}

impl StridedLayout {
    /// Returns the layout that has the same elements on every rank for a tensor of shape `global`,
    /// if there is one.
    ///
    /// # Panics
    /// As [`local_runs`](Self::local_runs).
    pub(crate) fn same(&self, global: &[usize]) -> Option<Layout> {
        let layout = self.decode().ok()?;
        let one = |slice: Range<usize>| {
            if slice.is_empty() {
                Vec::new()
            } else {
                vec![slice]
            }
        };
        let mut coordinates = self
            .mesh_shape()
            .iter()
            .map(|&size| 0..size)
            .multi_cartesian_product();
        let same = coordinates.all(|coordinate| {
            let slices = layout.local_slices(global, &coordinate).into_iter();
            slices
                .zip(self.local_runs(global, &coordinate))
                .all(|(slice, runs)| one(slice)[..] == runs[..])
        });
        same.then_some(layout)
    }

    /// Checks that a tensor of `ndim` dimensions can have this layout.
    ///
    /// # Errors
    /// As [`Layout::check`].
    pub(crate) fn check(&self, ndim: usize) -> Result<(), PlacementError> {
        Layout::new(self.mesh_shape(), &self.without_strides())?.check(ndim)
    }

    /// Returns the layout that remains when strided shards and the shards inside them are undone,
    /// and the mesh dimensions of those shards in the order in which to undo them.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub(crate) fn undone(&self) -> Result<(Layout, Vec<usize>), PlacementError> {
        let shard = |mesh_dim: usize| self.placements()[mesh_dim].shard();
        let strided_inside = |dim: usize, mesh_dim: usize| {
            (0..=mesh_dim)
                .any(|outer| shard(outer).is_some_and(|(other, factor)| other == dim && factor > 1))
        };
        let undone = (0..self.placements().len()).rev();
        let undone: Vec<usize> = undone
            .filter(|&mesh_dim| {
                shard(mesh_dim).is_some_and(|(dim, _)| strided_inside(dim, mesh_dim))
            })
            .collect();
        let mut placements = self.without_strides();
        undone
            .iter()
            .for_each(|&mesh_dim| placements[mesh_dim] = Placement::Replicate);
        Ok((Layout::new(self.mesh_shape(), &placements)?, undone))
    }

    /// Returns how the ranks along `mesh_dim` divide their interval, for the rank at `coordinate`.
    ///
    /// # Panics
    /// If `mesh_dim` does not shard, and as [`local_runs`](Self::local_runs).
    pub(crate) fn dealt(&self, global: &[usize], coordinate: &[usize], mesh_dim: usize) -> Dealt {
        let (dim, split_factor) = self.placements()[mesh_dim]
            .shard()
            .expect("only a shard is undone");
        let outside = Self::new(
            &self.mesh_shape()[..mesh_dim],
            &self.placements()[..mesh_dim],
        )
        .expect("the outer dimensions of a valid layout are valid");
        let len = outside.local_runs(global, &coordinate[..mesh_dim])[dim]
            .iter()
            .map(ExactSizeIterator::len)
            .sum();
        let ranks = self.mesh_shape()[mesh_dim];
        let parts = (0..ranks)
            .map(|rank| dealt(len, split_factor, ranks, rank).flatten().collect())
            .collect::<Vec<Vec<_>>>();
        let mut places = vec![0; len];
        parts
            .iter()
            .flatten()
            .enumerate()
            .for_each(|(place, &element)| places[element] = place);
        Dealt {
            dim,
            lengths: parts.iter().map(Vec::len).collect(),
            places,
        }
    }
}
