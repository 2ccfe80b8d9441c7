//! [`MeshTest`]: runs the body of a test on every rank of a mesh.

use std::time::Duration;

use burn::tensor::Device;

use crate::Result;
use crate::comm::{Launch, LaunchError, launch};
use crate::mesh::{DeviceMesh, DimNames};

/// A test on a mesh of ranks as threads.
///
/// Each [`run`](Self::run) launches a world with exactly the ranks of the mesh.
/// `mesh.world().ledger()` contains their communication.
#[derive(Debug, Clone)]
pub struct MeshTest {
    shape: Vec<usize>,
    names: Vec<String>,
    deadline: Duration,
    device: Option<Device>,
}

impl MeshTest {
    /// Creates a test on a mesh of this shape with these dimension names.
    pub fn new(shape: impl AsRef<[usize]>, names: impl DimNames) -> Self {
        let names = names.dim_names().into_iter().map(Into::into).collect();
        Self {
            shape: shape.as_ref().to_vec(),
            names,
            deadline: Duration::from_secs(30),
            device: None,
        }
    }

    /// Sets how long a rank waits for the others in one collective. Default: 30 s.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the device of all ranks. Default: the CPU.
    pub fn with_device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.shape.iter().product()
    }

    /// Runs `body` on every rank and returns the results in the order of ranks.
    ///
    /// # Panics
    /// If any rank fails or panics. The message is that of the [`LaunchError`]: the first failure,
    /// and what every other rank was doing.
    pub fn run<T: Send>(&self, body: impl Fn(&DeviceMesh) -> Result<T> + Sync) -> Vec<T> {
        self.run_on(Launch::threads(self.ranks()), body)
    }

    /// Runs `body` on every rank, of which at least one must fail, and returns the failure.
    ///
    /// # Panics
    /// If every rank succeeds.
    pub fn run_failing<T: Send>(
        &self,
        body: impl Fn(&DeviceMesh) -> Result<T> + Sync,
    ) -> LaunchError {
        self.launch(Launch::threads(self.ranks()), body)
            .err()
            .unwrap_or_else(|| panic!("on {self}: every rank succeeded, a failure was expected"))
    }

    /// Runs `body` on the ranks of `config` that are in this process. Panics like
    /// [`run`](Self::run).
    pub(super) fn run_on<T: Send>(
        &self,
        config: Launch,
        body: impl Fn(&DeviceMesh) -> Result<T> + Sync,
    ) -> Vec<T> {
        self.launch(config, body)
            .unwrap_or_else(|error| panic!("on {self}: {error}"))
    }

    #[expect(clippy::result_large_err, reason = "created once per test")]
    fn launch<T: Send>(
        &self,
        config: Launch,
        body: impl Fn(&DeviceMesh) -> Result<T> + Sync,
    ) -> Result<Vec<T>, LaunchError> {
        let config = config.with_deadline(self.deadline);
        let config = match &self.device {
            Some(device) => config.with_device(device.clone()),
            None => config,
        };
        let returned = launch(config, |world| {
            body(&DeviceMesh::new(world, &self.shape, &self.names)?)
        })?;
        Ok(returned.into_iter().map(|(_, returned)| returned).collect())
    }
}

/// Formats as `mesh replicate=2, shard=2`.
impl std::fmt::Display for MeshTest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("mesh ")?;
        for (at, (name, size)) in self.names.iter().zip(&self.shape).enumerate() {
            write!(f, "{}{name}={size}", if at == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
