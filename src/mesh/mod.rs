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
//! 4. Equal meshes have equal ranks, shape, names and roots, and are one rank's of one launch.

mod device_mesh;
mod error;
mod names;
mod reduce;
mod reshape;
mod slice;
#[cfg(test)]
mod tests;

pub use device_mesh::DeviceMesh;
pub use error::MeshError;
pub use names::DimNames;
pub use reduce::Reducible;
