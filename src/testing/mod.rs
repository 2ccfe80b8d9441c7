//! Mesh fixtures: a test on a 2 x 2 mesh, as short as a unit test.
//!
//! ```
//! use burn_dtensor::testing::MeshTest;
//!
//! let coordinates = MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| Ok(mesh.coordinate().unwrap().to_vec()));
//! assert_eq!(coordinates, [[0, 0], [0, 1], [1, 0], [1, 1]]);
//! ```
//!
//! A distributed tensor is held to its full value with [`assert_full_close`], an operator to burn's
//! in combinations of layouts with [`prove`]; [`graph_depth`] shows whether ranks are in step, and
//! [`trace_backward`] what backward does with the units of a model.
//!
//! The ranks are threads; those of a `ProcessMeshTest` are in several processes, and [`mesh_test!`](crate::mesh_test) makes
//! a test of each. Collectives run under a deadline, so a test that would hang fails.

mod conformance;
#[doc(hidden)]
pub mod copies;
mod each_engine;
mod full;
mod graph_depth;
mod mesh_test;
#[cfg(feature = "mpi")]
mod process_mesh_test;
#[cfg(feature = "mpi")]
mod process_test;
pub mod prove;

pub use conformance::{Conformance, ConformanceReport};
pub use full::{assert_full_close, assert_full_eq};
pub use graph_depth::{GraphDepth, graph_depth};
pub use mesh_test::MeshTest;
#[cfg(feature = "mpi")]
pub use process_mesh_test::ProcessMeshTest;
#[cfg(feature = "mpi")]
pub use process_test::{ProcessTest, mpirun};

#[doc(hidden)]
pub use crate::memory::counted::{Counter, count_blocks};
pub use crate::param::trace::{RanNode, trace_backward};
