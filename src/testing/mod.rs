//! Test fixtures for meshes, with which a test on a 2 x 2 mesh is as short as a unit test.
//!
//! ```
//! use burn_dtensor::testing::MeshTest;
//!
//! let coordinates = MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| Ok(mesh.coordinate().unwrap().to_vec()));
//! assert_eq!(coordinates, [[0, 0], [0, 1], [1, 0], [1, 1]]);
//! ```
//!
//! [`assert_full_close`] compares a distributed tensor with its full value. [`prove`] compares an
//! operator with burn's in combinations of layouts. [`graph_depth`] shows whether an operator adds
//! as many nodes to the autodiff graph on every rank. [`trace_backward`] shows what backward does
//! with the units of a model.
//!
//! The ranks of a [`MeshTest`] are threads, and those of a `ProcessMeshTest` are in several
//! processes. A [`LoopbackJob`] simulates processes in one. [`mesh_test!`](crate::mesh_test)
//! defines one test of each. Collectives run under a deadline, so a test that would hang fails
//! instead.

mod conformance;
#[doc(hidden)]
pub mod copies;
mod each_backend;
mod full;
mod graph_depth;
mod loopback;
mod mesh_test;
#[cfg(feature = "mpi")]
mod process_mesh_test;
#[cfg(feature = "mpi")]
mod process_test;
pub mod prove;

pub use crate::comm::SimulatedGpus;
pub use conformance::{Conformance, ConformanceReport};
pub use full::{assert_full_close, assert_full_eq};
pub use graph_depth::{GraphDepth, graph_depth};
pub use loopback::{LoopbackJob, LoopbackTransport};
pub use mesh_test::MeshTest;
#[cfg(feature = "mpi")]
pub use process_mesh_test::ProcessMeshTest;
#[cfg(feature = "mpi")]
pub use process_test::{ProcessTest, mpirun};

#[doc(hidden)]
pub use crate::memory::counted::{Counter, count_blocks};
#[cfg(feature = "cube")]
pub use crate::memory::gpu::gpu;
pub use crate::mesh_test;
pub use crate::param::trace::{RanNode, trace_backward};
