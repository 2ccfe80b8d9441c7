//! Device meshes: arrays of ranks with named dimensions.
//!
//! A [`DeviceMesh`] gives each rank a coordinate and one communicator per dimension. DTensors and
//! distributed models are placed on a mesh, or on a slice of one.
//!
//! ```
//! use burn_dtensor::prelude::*;
//!
//! launch(Launch::threads(4), |world| {
//!     let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
//!     let tp = mesh.slice("tp")?; // ranks 0 and 1, or ranks 2 and 3
//!
//!     // Collectives of numbers and plain tensors: over all ranks, or along one dimension.
//!     assert_eq!(mesh.all_reduce(1.0, ReduceOp::Sum)?, 4.0);
//!     assert_eq!(tp.all_reduce(world.rank() as f64, ReduceOp::Sum)?, [1.0, 5.0][world.rank() / 2]);
//!
//!     // Ranks that differ only along `tp` read the same rows of a dataset.
//!     let shard = mesh.data_shard("dp")?;
//!     assert_eq!((shard.index, shard.count), (world.rank() / 2, 2));
//!
//!     // One placement per mesh dimension.
//!     let x = DTensor::<2>::ones([8, 6], &mesh, &[Placement::Shard(0), Placement::Shard(1)], mesh.device())?;
//!     assert_eq!(x.local().dims(), [4, 3]);
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! | purpose | function |
//! |---|---|
//! | create a mesh of the first ranks, or of given ranks | [`new`](DeviceMesh::new), [`from_ranks`](DeviceMesh::from_ranks) |
//! | run on one device, without a launch | [`single_device`](DeviceMesh::single_device) |
//! | use some dimensions only | [`slice`](DeviceMesh::slice); [`concatenate`](DeviceMesh::concatenate) joins slices, and [`root`](DeviceMesh::root) returns the mesh from which a slice was taken |
//! | use several dimensions as one, or one as several | [`flatten`](DeviceMesh::flatten), [`unflatten`](DeviceMesh::unflatten) |
//! | find the position of this rank | [`coordinate`](DeviceMesh::coordinate), [`slice_index`](DeviceMesh::slice_index) |
//! | choose the rows of a dataset that this rank reads | [`data_shard`](DeviceMesh::data_shard), for a [`DistributedSampler`](crate::data::DistributedSampler) |
//! | communicate numbers and plain tensors | [`all_reduce`](DeviceMesh::all_reduce), [`broadcast`](DeviceMesh::broadcast), [`scatter`](DeviceMesh::scatter), [`all_gather`](DeviceMesh::all_gather), [`reduce_scatter`](DeviceMesh::reduce_scatter), [`all_to_all`](DeviceMesh::all_to_all) |
//! | call other collectives along a dimension | [`communicator`](DeviceMesh::communicator) |
//! | read the mesh in deeply nested code | [`with_mesh`], [`current`](DeviceMesh::current) |
//! | use existing communicators, or a deadline for one dimension | [`from_group`](DeviceMesh::from_group), [`from_groups`](DeviceMesh::from_groups), [`with_deadline`](DeviceMesh::with_deadline) |
//! | continue after ranks have failed | [`survivors`](DeviceMesh::survivors) |
//!
//! ```text
//! DeviceMesh::new(&world, [2, 4], ["dp", "tp"])
//!
//!            tp 0  1  2  3
//!     dp 0      0  1  2  3      rank 6: coordinate (1, 2)
//!     dp 1      4  5  6  7              group of "dp": 2, 6
//!                                       group of "tp": 4, 5, 6, 7
//! ```
//!
//! # What is collective
//!
//! Only functions that exchange numbers and tensors are collective: `all_reduce`, `broadcast`,
//! `scatter`, `all_gather`, `reduce_scatter`, `all_to_all`, and the calls on a
//! [`communicator`](DeviceMesh::communicator). Every rank of the mesh must call them, in the same
//! order.
//!
//! All other functions are local: they send nothing, and no rank waits for another. This includes
//! [`survivors`](DeviceMesh::survivors) and the functions that create, slice, flatten or split a
//! mesh. They compute which ranks belong together; the ranks first meet in a collective. So the
//! ranks of a mesh must create it with the same arguments, but nothing compares these when the mesh
//! is created.
//!
//! # Ranks outside the mesh
//!
//! A mesh may cover only some ranks of the world. The other ranks may create it too, as the same
//! program does on all ranks: their mesh has no [coordinate](DeviceMesh::coordinate). On such a
//! rank, every operation that would communicate or hold a local tensor returns
//! [`NotAMember`](MeshError::NotAMember): creating a slice of fewer dimensions or a DTensor,
//! `parallelize`, `fully_shard`. Therefore a program checks `mesh.coordinate().is_some()` first.
//! DTensors without a local tensor do not exist.
//!
//! # Invariants
//!
//! 1. Ranks are row-major: the last dimension varies fastest.
//! 2. In the group of a dimension, a rank's group rank is its coordinate along that dimension.
//! 3. A slice shares its parent's communicators; it creates none.
//! 4. Equal meshes have equal ranks, shapes, names, communicators and roots, and belong to the same
//!    rank of the same launch.
//! 5. A list of ranks has one communicator, whichever meshes have a row of these ranks. Exceptions
//!    are meshes with their own communicators ([`from_groups`](DeviceMesh::from_groups)) or their
//!    own deadlines.

mod array;
mod collectives;
mod current;
mod data_shard;
mod device_mesh;
mod display;
mod error;
mod groups;
mod names;
mod reduce;
mod reshape;
mod slice;
#[cfg(test)]
mod tests;

pub use current::with_mesh;
pub use data_shard::DataShard;
pub use device_mesh::DeviceMesh;
pub use error::MeshError;
pub use names::DimNames;
pub use reduce::Reducible;
