//! Meshes over communicators that a program has, and dimensions with a deadline of their own.

use std::time::Duration;

use super::array::validate;
use super::{DeviceMesh, DimNames, MeshError};
use crate::Result;
use crate::comm::{Communicator, World};

impl DeviceMesh {
    /// The 1-D mesh of the ranks of `group`, in its order. It communicates over this communicator and makes none.
    ///
    /// Local: only ranks of the group have it.
    ///
    /// # Errors
    /// As [`from_groups`](Self::from_groups).
    pub fn from_group(world: &World, group: Communicator, name: &str) -> Result<Self> {
        let (ranks, size) = (group.group().ranks().to_vec(), group.group().size());
        Self::from_groups(world, [group], ranks, [size], name)
    }

    /// The mesh of `ranks`, row-major, that communicates over these communicators, one per dimension, and makes
    /// none: groups of [`World::group`], [duplicates](Communicator::duplicate) with an order of calls of their
    /// own, or another implementation of [`Communicator`].
    ///
    /// ```
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(4), |world| {
    ///     let (row, column) = (world.rank() / 2 * 2, world.rank() % 2);
    ///     let groups = [world.group(&[column, column + 2])?, world.group(&[row, row + 1])?];
    ///     let mesh = DeviceMesh::from_groups(world, groups, [0, 1, 2, 3], [2, 2], ["dp", "tp"])?;
    ///     assert_eq!(mesh, DeviceMesh::new(world, [2, 2], ["dp", "tp"])?);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// Meshes over other communicators are other meshes, whose tensors do not mix. What several dimensions do
    /// together runs on a group of the world: [`flatten`](Self::flatten), [`all_reduce`](Self::all_reduce), sums of
    /// gradients over several dimensions, and what an operator sends along a tensor dimension that several cut. A
    /// redistribution takes a step for each dimension, where other meshes join steps of one kind.
    ///
    /// Local: ranks outside have no communicator to give.
    ///
    /// # Errors
    /// [`GroupCount`](MeshError::GroupCount) unless there is one communicator per dimension,
    /// [`NotAMember`](MeshError::NotAMember) if the caller is not in `ranks`,
    /// [`GroupRanks`](MeshError::GroupRanks) for a communicator of other ranks than the caller's row along its
    /// dimension, or of another rank; and as [`from_ranks`](Self::from_ranks).
    pub fn from_groups(
        world: &World,
        groups: impl Into<Vec<Communicator>>,
        ranks: impl Into<Vec<usize>>,
        shape: impl AsRef<[usize]>,
        names: impl DimNames,
    ) -> Result<Self> {
        let (groups, ranks, shape) = (groups.into(), ranks.into(), shape.as_ref());
        let names: Vec<String> = names.dim_names().into_iter().map(Into::into).collect();
        if groups.len() != shape.len() {
            return Err(MeshError::GroupCount { groups: groups.len(), shape: shape.to_vec() }.into());
        }
        validate(world.size(), &ranks, shape, &names)?;
        let mesh = Self::over(world, ranks, shape, names, groups, 0, false);
        let coordinate = mesh.member("make it of groups")?;
        for (mesh_dim, name) in mesh.names().iter().enumerate() {
            let (group, row) = (mesh.communicator(mesh_dim)?.group(), mesh.row(coordinate, mesh_dim));
            if (group.ranks(), group.rank()) != (&row[..], coordinate[mesh_dim]) {
                return Err(MeshError::GroupRanks {
                    name: name.clone(),
                    rank: mesh.rank(),
                    row,
                    found: group.ranks().to_vec(),
                    of: group.ranks()[group.rank()],
                }
                .into());
            }
        }
        Ok(mesh)
    }

    /// The same mesh, by itself, where a rank waits this long for the others in a collective along the dimension
    /// `name`, and not [`Launch::with_deadline`](crate::comm::Launch::with_deadline): a pipeline's stages may be further
    /// apart than its tensor-parallel ranks.
    ///
    /// That is the one option that a dimension has. Slices made of it keep it; what several dimensions do
    /// together waits as long as the launch says. Tensors of it do not mix with those of the mesh without.
    ///
    /// Local; every rank sets the same deadlines, on the mesh that it slices then.
    ///
    /// # Errors
    /// [`UnknownName`](MeshError::UnknownName).
    pub fn with_deadline(&self, name: &str, deadline: Duration) -> Result<Self> {
        let dim = self.dim(name)?;
        let mut communicators: Vec<_> =
            (0..self.ndim()).map_while(|dim| self.communicator(dim).ok().cloned()).collect();
        if let Some(communicator) = communicators.get_mut(dim) {
            *communicator = communicator.with_deadline(deadline);
        }
        let (ranks, names) = (self.ranks().to_vec(), self.names().to_vec());
        Ok(Self::over(self.world(), ranks, self.shape(), names, communicators, self.slice_index(), false))
    }
}
