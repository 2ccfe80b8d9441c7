//! Device meshes: an array of ranks with named dimensions, and one communicator per dimension.
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
//!
//! # Ranks outside the mesh
//!
//! All ranks of the world create a mesh with the same arguments, even if it covers only some of
//! them. A rank outside the mesh has no [coordinate](DeviceMesh::coordinate). On such a rank, every
//! operation that would communicate or hold a local tensor returns
//! [`NotAMember`](MeshError::NotAMember): slicing, creating a DTensor, `parallelize`,
//! `fully_shard`. Therefore a program checks `mesh.coordinate().is_some()` first. DTensors without
//! a local tensor do not exist.

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
