//! Meshes over existing communicators, and dimensions with their own deadline.

use std::time::Duration;

use super::array::validate;
use super::{DeviceMesh, DimNames, MeshError};
use crate::Result;
use crate::comm::{Communicator, World};

impl DeviceMesh {
    /// Creates a 1-D mesh of the ranks of `group`, in its order. It uses this communicator and
    /// creates none.
    ///
    /// Local: only ranks of the group call it.
    ///
    /// # Errors
    /// As [`from_groups`](Self::from_groups).
    pub fn from_group(world: &World, group: Communicator, name: &str) -> Result<Self> {
        let ranks = group.group().ranks().to_vec();
        let size = group.group().size();
        Self::from_groups(world, [group], ranks, [size], name)
    }

    /// Creates a mesh of `ranks`, row-major, that uses these communicators, one per dimension, and
    /// creates none. They can be groups of [`World::group`], [duplicates](Communicator::duplicate)
    /// with a separate order of calls, or another implementation of [`Communicator`].
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
    /// Meshes with other communicators are not equal, and their tensors cannot be combined.
    /// Collectives over several dimensions use a group of the world: [`flatten`](Self::flatten),
    /// [`all_reduce`](Self::all_reduce), sums of gradients over several dimensions, and operators
    /// along a tensor dimension that several mesh dimensions shard. A redistribution executes a
    /// separate step for each dimension, whereas other meshes fuse steps of the same kind.
    ///
    /// Local: ranks outside the mesh have no communicators to pass.
    ///
    /// # Errors
    /// [`GroupCount`](MeshError::GroupCount) unless there is one communicator per dimension,
    /// [`NotAMember`](MeshError::NotAMember) if the caller is not in `ranks`,
    /// [`GroupRanks`](MeshError::GroupRanks) for a communicator of other ranks than the caller's
    /// row along its dimension, or of another rank; and as [`from_ranks`](Self::from_ranks).
    pub fn from_groups(
        world: &World,
        groups: impl Into<Vec<Communicator>>,
        ranks: impl Into<Vec<usize>>,
        shape: impl AsRef<[usize]>,
        names: impl DimNames,
    ) -> Result<Self> {
        let groups = groups.into();
        let ranks = ranks.into();
        let shape = shape.as_ref();
        let names: Vec<String> = names.dim_names().into_iter().map(Into::into).collect();
        if groups.len() != shape.len() {
            return Err(MeshError::GroupCount {
                groups: groups.len(),
                shape: shape.to_vec(),
            }
            .into());
        }
        validate(world.size(), &ranks, shape, &names)?;
        let mesh = Self::over(world, ranks, shape, names, groups, 0, false);
        let coordinate = mesh.member("create it from groups")?;
        for (mesh_dim, name) in mesh.names().iter().enumerate() {
            let group = mesh.communicator(mesh_dim)?.group();
            let row = mesh.row(coordinate, mesh_dim);
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

    /// Returns a copy of the mesh, as a root, with a separate deadline for collectives along the
    /// dimension `name`. It replaces [`Launch::with_deadline`](crate::comm::Launch::with_deadline),
    /// because the stages of a pipeline may be further apart in time than tensor-parallel ranks.
    ///
    /// The deadline is the only option of a dimension. Slices of the new mesh keep it, and so does
    /// [`unflatten`](Self::unflatten) of other dimensions; collectives over several dimensions use
    /// the deadline of the launch. Tensors on the new mesh cannot be combined with those on the old
    /// one.
    ///
    /// Local. Every rank must set the same deadlines, before it slices the mesh.
    ///
    /// # Errors
    /// [`UnknownName`](MeshError::UnknownName).
    pub fn with_deadline(&self, name: &str, deadline: Duration) -> Result<Self> {
        let dim = self.dim(name)?;
        let mut communicators: Vec<_> = (0..self.ndim())
            .map_while(|dim| self.communicator(dim).ok().cloned())
            .collect();
        if let Some(communicator) = communicators.get_mut(dim) {
            *communicator = communicator.with_deadline(deadline);
        }
        let ranks = self.ranks().to_vec();
        let names = self.names().to_vec();
        Ok(Self::over(
            self.world(),
            ranks,
            self.shape(),
            names,
            communicators,
            self.slice_index(),
            false,
        ))
    }
}
