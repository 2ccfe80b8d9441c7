//! Where a rank sits: an array of ranks with named dimensions and one communicator per dimension.
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
//! 3. A slice shares its parent's communicators; it makes none.
//! 4. Equal meshes have equal ranks, shape, names, communicators and roots, and are one rank's of one launch.
//! 5. One set of ranks in one order has one communicator, whichever meshes it is a row of; but for meshes made of
//!    communicators of their own ([`from_groups`](DeviceMesh::from_groups)) or with deadlines of their own.
//!
//! # Outside the mesh
//!
//! A mesh over a part of the world is made on all ranks alike. Where the caller is none of its ranks it has no
//! [coordinate](DeviceMesh::coordinate), and whatever would hold a part of something there, or communicate, is
//! [`NotAMember`](MeshError::NotAMember): slices, every way to make a DTensor, `parallelize`, `fully_shard`. So a
//! program asks `mesh.coordinate().is_some()` first; there are no empty tensors that stand for nothing.

mod array;
mod collectives;
mod current;
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
pub use device_mesh::DeviceMesh;
pub use error::MeshError;
pub use names::DimNames;
pub use reduce::Reducible;
