//! [`ProcessMeshTest`]: a test on a mesh whose ranks are in several processes.

use std::time::Duration;

use super::{MeshTest, ProcessTest};
use crate::Result;
use crate::comm::Launch;
use crate::mesh::DeviceMesh;

/// A [`MeshTest`] in several processes, each with an equal number of the ranks. The body of the
/// test runs on every rank and makes its assertions there.
///
/// The processes are those of a [`ProcessTest`]: started for this test only, and ended with it
/// however it ends. Their files are deleted.
///
/// ```no_run
/// use burn::tensor::Tensor;
/// use burn_dtensor::comm::ReduceOp;
/// use burn_dtensor::testing::MeshTest;
///
/// // In a test: two processes of two ranks each.
/// MeshTest::new([4], ["dp"]).with_processes(2).run(|mesh| {
///     let sum = mesh.all_reduce(Tensor::<1>::ones([3], mesh.device()), ReduceOp::Sum)?;
///     assert_eq!(sum.into_data().try_to_vec::<f32>()?, [4.0; 3]);
///     Ok(())
/// });
/// ```
#[derive(Debug, Clone)]
pub struct ProcessMeshTest {
    mesh: MeshTest,
    processes: ProcessTest,
}

impl MeshTest {
    /// Runs the same test with the ranks in `count` processes, an equal number in each.
    pub fn with_processes(self, count: usize) -> ProcessMeshTest {
        ProcessMeshTest {
            mesh: self,
            processes: ProcessTest::new(count),
        }
    }
}

impl ProcessMeshTest {
    /// Sets how long the processes may take. Default: one minute. [`MeshTest::with_deadline`]
    /// limits one collective instead.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.processes = self.processes.with_deadline(deadline);
        self
    }

    /// Runs `body` on every rank. In the process that starts the others it returns the output of
    /// all processes, like [`ProcessTest::run`]. In the started processes it returns `None`.
    ///
    /// # Panics
    /// If a rank fails or panics, or a process is lost. The message is the output of all processes,
    /// which contains the text of the [`LaunchError`](crate::comm::LaunchError).
    pub fn run(&self, body: impl Fn(&DeviceMesh) -> Result<()> + Sync) -> Option<String> {
        self.processes.run(|| self.on_ranks(body))
    }

    /// Runs `body` on every rank, of which at least one must fail. Returns like [`run`](Self::run).
    ///
    /// # Panics
    /// If every rank succeeds.
    pub fn run_failing(&self, body: impl Fn(&DeviceMesh) -> Result<()> + Sync) -> Option<String> {
        self.processes.run_failing(|| self.on_ranks(body))
    }

    fn on_ranks(&self, body: impl Fn(&DeviceMesh) -> Result<()> + Sync) {
        let config = Launch::from_env(self.mesh.ranks())
            .unwrap_or_else(|error| panic!("on {}: {error}", self.mesh));
        self.mesh.run_on(config, body);
    }
}
