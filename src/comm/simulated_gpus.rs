//! [`SimulatedGpus`]: ranks that exchange tensors by NCCL's data plane, without GPUs.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::backend::ProcessOptions;
use super::data::nccl::fake::FakeGpus;
use super::host_backend::{HostBackend, ProcessJob};
use super::{Launch, NcclReductions};

/// GPUs and NCCL that are simulated in host memory, one GPU for each rank. The tensors of the ranks
/// are on the CPU, and their collectives are those of ranks on several GPUs, except for the GPUs.
///
/// The simulation checks what real GPUs would answer with a hang or wrong values: the order of
/// streams, the order of calls on all ranks, memory and its registrations, calls after an abort.
/// ```
/// use burn_dtensor::comm::{NcclReductions, launch};
/// use burn_dtensor::testing::SimulatedGpus;
///
/// let gpus = SimulatedGpus::new();
/// launch(gpus.threads(4, NcclReductions::Native), |world| world.barrier("connected"))?;
/// assert_eq!(gpus.violations(), Vec::<String>::new());
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SimulatedGpus {
    gpus: Arc<FakeGpus>,
}

impl Default for SimulatedGpus {
    fn default() -> Self {
        Self::new()
    }
}

impl SimulatedGpus {
    /// Creates GPUs, for one launch.
    pub fn new() -> Self {
        Self::of(FakeGpus::new())
    }

    pub(in crate::comm) fn of(gpus: FakeGpus) -> Self {
        Self {
            gpus: Arc::new(gpus),
        }
    }

    /// Returns the configuration of `ranks` ranks as threads of this process.
    ///
    /// # Panics
    /// If `ranks` is 0.
    pub fn threads(&self, ranks: usize, reductions: NcclReductions) -> Launch {
        assert!(ranks > 0, "cannot launch 0 ranks. Pass at least 1");
        let backend = HostBackend::new(ranks, ProcessOptions::default());
        self.launch(backend, 0, reductions)
    }

    /// Returns the configuration of `each` ranks in every process of `job`.
    pub fn processes(&self, job: &ProcessJob, each: usize, reductions: NcclReductions) -> Launch {
        let backend = job.host_backend(each, ProcessOptions::default());
        self.launch(backend, job.process_index(), reductions)
    }

    fn launch(
        &self,
        backend: Arc<HostBackend>,
        process: usize,
        reductions: NcclReductions,
    ) -> Launch {
        let in_tree = reductions == NcclReductions::FixedTree;
        backend.simulate_gpus(self.gpus.plane(process, in_tree));
        Launch::on_backend(backend)
    }

    /// Returns the rules that were broken, and what was not freed. To be called after the launch,
    /// whose threads are given time to end.
    pub fn violations(&self) -> Vec<String> {
        let is_clean = |_| {
            let is_clean = self.gpus.violations().is_empty();
            if !is_clean {
                thread::sleep(Duration::from_millis(1));
            }
            is_clean
        };
        let _ = (0..2000).any(is_clean);
        self.gpus.violations()
    }

    /// Returns how often a thread of the host has waited for a GPU so far.
    pub fn host_waits(&self) -> usize {
        self.gpus.host_waits()
    }

    #[cfg(test)]
    pub(in crate::comm) fn gpus(&self) -> &FakeGpus {
        &self.gpus
    }
}
