//! [`launch`]: runs one program on every rank.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;

use super::backend::{Backend, ProcessOptions};
#[cfg(feature = "nccl")]
use super::data::nccl::NcclLoader;
use super::host_backend::HostBackend;
#[cfg(feature = "mpi")]
use super::host_backend::ProcessJob;
use super::launched_ranks::{LaunchedRanks, RankSettings};
#[cfg(not(feature = "mpi"))]
use super::launcher;
use super::world::DEADLINE;
use super::{LaunchError, StartError, World};
#[cfg(doc)]
use crate::Error;
use crate::{Result, memory};

/// Configuration of a [`launch`]: the ranks of a program, their devices and their deadline.
#[derive(Debug, Clone)]
pub struct Launch {
    ranks: RankBackend,
    deadline: Duration,
    devices: Devices,
    stack_size: usize,
    process_options: ProcessOptions,
    flight: Option<PathBuf>,
    checks_replicas: bool,
    /// Creates the plane of the GPUs.
    #[cfg(feature = "nccl")]
    nccl: Option<NcclLoader>,
}

/// Order in which ranks on GPUs reduce tensors that they exchange by NCCL: see `Launch::with_nccl`.
#[cfg(any(feature = "nccl", feature = "testing"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NcclReductions {
    /// By NCCL's algorithms, which add in an order of their own: results are equal on all ranks, but
    /// may differ from those on other backends in the last bits. f16 and bf16 are rounded after
    /// every rank. Reductions that NCCL lacks are done as below.
    #[default]
    Native,
    /// In the fixed tree, as on all other backends: each rank receives the operands of all ranks,
    /// and adds them. Bit-identical to threads on the CPU. An all-reduce receives as many times the
    /// data as there are ranks, so this is for tests.
    FixedTree,
}

/// Environment variable with the folder of flight files, used if [`Launch::with_flight_recorder`]
/// does not set one.
const FLIGHT: &str = "BURN_DTENSOR_FLIGHT";

/// Devices of the ranks' tensors.
#[derive(Debug, Clone)]
enum Devices {
    /// One device for all ranks; `None` is the default.
    All(Option<Device>),
    /// One device for each rank, in order of ranks.
    Each(Vec<Device>),
}

impl Devices {
    /// Returns the device of the rank at `index` among the ranks of this process.
    fn of(&self, index: usize) -> Device {
        match self {
            Self::All(Some(device)) => device.clone(),
            Self::All(None) => memory::host(),
            Self::Each(devices) => devices[index].clone(),
        }
    }
}

/// Backend that connects the ranks.
#[derive(Debug, Clone)]
enum RankBackend {
    /// Threads of this process, which pass tensors to each other by reference.
    Threads(usize),
    /// Several processes, each with the given number of ranks as threads.
    #[cfg(feature = "mpi")]
    Processes(Arc<ProcessJob>, usize),
    On(Arc<dyn Backend>),
}

impl Launch {
    /// Runs `ranks` ranks as threads of this process.
    ///
    /// # Panics
    /// If `ranks` is 0.
    pub fn threads(ranks: usize) -> Self {
        assert!(ranks > 0, "cannot launch 0 ranks. Pass at least 1");
        Self::new(RankBackend::Threads(ranks))
    }

    /// Runs `ranks` ranks in the way the program was started. If a launcher has started several
    /// processes, each process runs an equal share of the ranks as threads, and MPI connects the
    /// processes. Otherwise all ranks are threads of this process.
    ///
    /// ```console
    /// program                  # 4 threads
    /// mpirun -n 4 program      # 4 processes, one rank in each
    /// mpirun -n 2 program      # 2 processes, two ranks in each: process 0 has ranks 0 and 1
    /// ```
    ///
    /// The results are bit-identical if the processors are the same and each rank has the same
    /// number of cores. Launchers are recognized by the environment: Open MPI's `mpirun`, `mpiexec`
    /// of MPICH and others that use PMI, MVAPICH's launcher, and Slurm's `srun`. Several processes
    /// require the feature `mpi`.
    ///
    /// # Collective
    /// If there are several processes, all of them must make the same launches.
    ///
    /// # Errors
    /// [`StartError`] if the processes cannot be connected, or if their number does not divide
    /// `ranks`.
    ///
    /// # Panics
    /// If `ranks` is 0.
    pub fn from_env(ranks: usize) -> Result<Self, StartError> {
        #[cfg(feature = "mpi")]
        if let Some(connected) = super::host_backend::mpi_processes()? {
            let processes = connected.count();
            if !ranks.is_multiple_of(processes) {
                return Err(StartError::Uneven {
                    ranks,
                    processes,
                    here: connected.process_index(),
                });
            }
            return Ok(Self::new(RankBackend::Processes(
                connected,
                ranks / processes,
            )));
        }
        #[cfg(not(feature = "mpi"))]
        if let Some(launcher::ProcessRank { processes, here }) = launcher::place()? {
            return Err(StartError::NoMpi { processes, here });
        }
        Ok(Self::threads(ranks))
    }

    /// Runs the ranks of `backend` that belong to this process, each as a thread.
    pub fn on_backend(backend: Arc<dyn Backend>) -> Self {
        Self::new(RankBackend::On(backend))
    }

    fn new(ranks: RankBackend) -> Self {
        Self {
            ranks,
            deadline: DEADLINE,
            devices: Devices::All(None),
            stack_size: 8 << 20,
            process_options: ProcessOptions::default(),
            flight: None,
            checks_replicas: false,
            #[cfg(feature = "nccl")]
            nccl: None,
        }
    }

    /// Lets ranks exchange tensors between their GPUs by NCCL, which is loaded now. Local. Each rank
    /// needs a GPU of its own, of CUDA: [`with_devices`](Self::with_devices) or, with one rank in each
    /// process, [`with_device`](Self::with_device). Default: ranks of one process read each other's
    /// tensors, and tensors for ranks of other processes are copied through host memory.
    ///
    /// All processes must pass the same. NCCL connects the ranks of a group in their first
    /// collective. It carries point-to-point messages whose sender has the result of a collective on
    /// the same communicator; earlier ones travel through host memory among processes.
    ///
    /// ```no_run
    /// use burn_dtensor::comm::{Launch, NcclReductions, cuda_devices, launch};
    ///
    /// let devices = cuda_devices()?;
    /// let ranks = Launch::threads(devices.len()).with_devices(devices);
    /// launch(ranks.with_nccl(NcclReductions::Native)?, |world| world.barrier("connected"))?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`StartError::NoGpu`] if CUDA reports no GPU, and [`StartError::NoNccl`] if NCCL is not found, is older than 2.28, or lacks
    /// a function. In collectives and receives, [`CommError::DataPlane`](super::CommError::DataPlane) if NCCL
    /// fails, or if ranks share a GPU and NCCL is older than 2.30. Later versions allow that if the
    /// environment variable `NCCL_MULTI_RANK_GPU_ENABLE` is 1.
    ///
    /// # Panics
    /// If the backend is one that was passed to [`on_backend`](Self::on_backend).
    #[cfg(feature = "nccl")]
    pub fn with_nccl(mut self, reductions: NcclReductions) -> Result<Self, StartError> {
        assert!(
            !matches!(self.ranks, RankBackend::On(_)),
            "a backend that was passed to `Launch::on_backend` exchanges tensors by itself"
        );
        super::cuda_devices()?;
        let in_tree = reductions == NcclReductions::FixedTree;
        let loaded = super::data::nccl::load(in_tree);
        self.nccl = Some(loaded.map_err(|error| StartError::NoNccl {
            problem: error.to_string(),
        })?);
        Ok(self)
    }

    /// Sets the maximum time that a rank waits for the others in one collective. Default: 10
    /// minutes.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the device of all ranks. Default: the CPU.
    pub fn with_device(mut self, device: Device) -> Self {
        self.devices = Devices::All(Some(device.inner()));
        self
    }

    /// Sets the device of each rank of this process, in order of ranks. Each rank may have a GPU of
    /// its own, or several ranks may share one.
    ///
    /// The tensors that a rank passes to a collective must be on its own device or on the CPU, and
    /// the results are on the same device.
    ///
    /// # Panics
    /// If the number of devices is not the number of ranks in this process.
    pub fn with_devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        let devices: Vec<_> = devices.into_iter().map(Device::inner).collect();
        let ranks = self.local_ranks();
        assert_eq!(
            devices.len(),
            ranks,
            "{} devices for {ranks} ranks. Pass one device per rank",
            devices.len()
        );
        self.devices = Devices::Each(devices);
        self
    }

    /// Returns the number of ranks that this process runs.
    pub fn local_ranks(&self) -> usize {
        match &self.ranks {
            RankBackend::Threads(ranks) => *ranks,
            #[cfg(feature = "mpi")]
            RankBackend::Processes(_, ranks) => *ranks,
            RankBackend::On(backend) => backend.local_ranks().len(),
        }
    }

    /// Sets the stack size of a rank's program in bytes. Only what the program uses takes memory.
    /// Default: 8 MiB, the usual size for a main thread.
    ///
    /// Nested calls of units need about 3.5 KiB of stack per level in an optimized build. A stack
    /// overflow ends the process.
    pub fn with_stack_size(mut self, bytes: usize) -> Self {
        self.stack_size = bytes;
        self
    }

    /// Sets the folder where each rank records its last operations in a file, which remains however
    /// the program ends: see [`flight`](super::flight). Default: the value of the environment
    /// variable `BURN_DTENSOR_FLIGHT`, or no folder.
    ///
    /// A launch replaces the files of an earlier run that have the same launch number and rank, and
    /// keeps all others. Use one folder per run to keep runs apart.
    pub fn with_flight_recorder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.flight = Some(folder.into());
        self
    }

    /// Allows several threads of a rank's program to wait in collectives at the same time (MPI's
    /// `MPI_THREAD_MULTIPLE`). Default: one thread of a rank at a time (`MPI_THREAD_SERIALIZED`).
    ///
    /// Each thread needs its own group, because the ranks of a group must make the same calls in
    /// the same order. A rank that waits may still call elsewhere, so deadlocks are no longer
    /// detected at once: the [deadline](Self::with_deadline) ends the waits.
    ///
    /// Only one thread of a rank may use a graph of burn's autodiff. Backward holds the lock of the
    /// graph while it communicates, and another thread that records on the same graph blocks all
    /// ranks of the process.
    ///
    /// A backend passed to [`on_backend`](Self::on_backend) has its own
    /// [`ProcessOptions`](super::backend::ProcessOptions).
    pub fn with_multithreaded_ranks(mut self) -> Self {
        self.process_options.multithreaded = true;
        self
    }

    /// Compares local tensors that the ranks must hold identically, wherever the program creates a
    /// [`DTensor`](crate::dtensor::DTensor) from them: the values placed `Replicate` that it passes
    /// to [`from_local`](crate::dtensor::DTensor::from_local) and its variants, and the full
    /// tensors that it passes to
    /// [`distribute_replicated`](crate::dtensor::DTensor::distribute_replicated). Default: they are
    /// not compared. All processes must pass the same configuration.
    ///
    /// Use it for the first steps of a tensor-parallel program. Without it, ranks of one
    /// tensor-parallel group that pass the rows of different batches train on nonsense, without an
    /// error. If values differ, all ranks fail with
    /// [`CommError::Diverged`](super::CommError::Diverged), which names two ranks, the shape and
    /// the mesh dimension.
    ///
    /// The functions named above become collective over the mesh dimensions of several ranks that
    /// replicate. For each, they send a 64-bit digest with a barrier, and each rank reads its
    /// tensor once (on a GPU, a copy of it). So do functions that call them with tensors of the
    /// program: [`replicated_like`](crate::dtensor::DTensor::replicated_like), operators with a
    /// plain operand of one element, [`LocalMap::run`](crate::dtensor::ops::LocalMap::run),
    /// [`apply_io_layouts`](crate::nn::apply_io_layouts) with plain tensors, and
    /// [`from_initializer`](crate::dtensor::DTensor::from_initializer) for an orthogonal parameter.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use burn_dtensor::comm::CommError;
    /// use burn_dtensor::prelude::*;
    ///
    /// let error = launch(Launch::threads(2).with_replica_checks(), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
    ///     let rows = Tensor::<2>::full([4, 8], world.rank() as f32, world.device()); // should be equal
    ///     DTensor::from_local(rows, &mesh, &[Placement::Replicate])?;
    ///     Ok(())
    /// });
    /// assert!(matches!(error.unwrap_err().cause, Error::Comm(CommError::Diverged { .. })));
    /// ```
    pub fn with_replica_checks(mut self) -> Self {
        self.checks_replicas = true;
        self
    }

    /// Gives each rank its results in separate memory, as if it ran on its own machine. Use it to
    /// measure the memory of one rank. Default: the ranks of one process share identical results,
    /// such as gathered weights, and pass tensors to each other by reference.
    ///
    /// Values are the same either way: a tensor is a handle, and a write to shared memory makes a
    /// private copy first (copy-on-write).
    ///
    /// Reductions over many ranks take longer with separate memory, because each rank computes the
    /// full result. A backend passed to [`on_backend`](Self::on_backend) has its own
    /// [`ProcessOptions`](super::backend::ProcessOptions).
    ///
    /// ```
    /// use burn::tensor::{DType, Tensor};
    /// use burn_dtensor::comm::{Call, Launch, TensorMeta, launch};
    ///
    /// let are_alone = |config: Launch| {
    ///     let ranks = launch(config, |world| {
    ///         let weights = || vec![Tensor::<1>::ones([8], world.device()).into_dispatch()];
    ///         let (root, meta) = ((world.rank() == 0).then(weights), TensorMeta { shape: [8].into(), dtype: DType::F32 });
    ///         let got = world.all().broadcast(Call::new("weights"), root, vec![meta], 0).wait()?.remove(0);
    ///         let got = Tensor::<1>::from_dispatch(got);
    ///         world.barrier("received")?;
    ///         let is_alone = got.can_mut();
    ///         world.barrier("checked")?;
    ///         Ok(is_alone)
    ///     });
    ///     ranks.map(|ranks| ranks.into_iter().map(|(_, is_alone)| is_alone).collect::<Vec<_>>())
    /// };
    /// assert_eq!(are_alone(Launch::threads(2))?, [false, false]);
    /// assert_eq!(are_alone(Launch::threads(2).with_separate_memory())?, [true, true]);
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn with_separate_memory(mut self) -> Self {
        self.process_options.separate_memory = true;
        self
    }
}

/// Runs `program` on every rank. Returns, for each rank of this process in ascending order, the
/// rank and the value that its program returned.
///
/// If the ranks are threads, this process has all of them, and the result of rank `r` is at index
/// `r`. If the ranks are in several processes, each process returns only its own: index 0 is not
/// rank 0, and rank 0 may be in another process. Look results up by rank, not by index. Communicate
/// results that all ranks need inside the program, with a collective; to print on one rank only,
/// use [`World::run_on`] there. What follows the launch runs in every process;
/// [`is_first_process`](super::is_first_process) is true in one of them.
///
/// Every rank has its own rayon pool with its share of the cores, at least one thread. Ranks
/// therefore do not wait for each other's tensor operations, except for results that they compute
/// together, such as gathered weights. If a rank panics, returns an error, or returns while other
/// ranks still need it, all waits of all other ranks end at once with an error. The other ranks may
/// continue without it: [`World::shrink`].
///
/// The program runs on a thread of its pool, which is often the only one. A task that it passes to
/// `rayon::spawn` may not start before the program ends, so waiting for the task can deadlock. Use
/// `std::thread` instead.
///
/// The program returns this crate's [`Error`]. `?` converts other errors to it, see
/// [`Error::other`].
///
/// ```
/// use std::collections::BTreeMap;
///
/// use burn_dtensor::comm::{Launch, launch};
///
/// let ranks = launch(Launch::threads(4), |world| {
///     world.barrier("start")?;
///     Ok(world.rank())
/// })?;
/// assert_eq!(ranks, [(0, 0), (1, 1), (2, 2), (3, 3)]);
///
/// let of_rank = BTreeMap::from_iter(ranks);
/// if let Some(result) = of_rank.get(&0) {
///     println!("rank 0, which is in this process, returned {result}");
/// }
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Collective
/// If there are several processes, all of them must make the same launches.
///
/// # Errors
/// If any rank in any process panicked or returned an error, and the other ranks did not
/// [continue](World::shrink) without it. The error contains the first failure, and for every other
/// rank its activity at that moment and its outcome. Every process returns the error, but only one
/// should print it:
/// [`Error::is_reported_by_other_process`](crate::Error::is_reported_by_other_process).
#[expect(clippy::result_large_err, reason = "made once per program")]
pub fn launch<T, F>(config: Launch, program: F) -> Result<Vec<(usize, T)>, LaunchError>
where
    T: Send,
    F: Fn(&World) -> Result<T> + Sync,
{
    let with_planes = |backend: Arc<HostBackend>| {
        #[cfg(feature = "nccl")]
        if let Some(nccl) = &config.nccl {
            backend.use_nccl(nccl.plane());
        }
        backend
    };
    let backend: Arc<dyn Backend> = match &config.ranks {
        RankBackend::Threads(size) => with_planes(HostBackend::new(*size, config.process_options)),
        #[cfg(feature = "mpi")]
        RankBackend::Processes(processes, each) => {
            with_planes(processes.host_backend(*each, config.process_options))
        }
        RankBackend::On(backend) => backend.clone(),
    };
    let folder = config.flight.clone().or_else(flight_folder_from_env);
    let ranks = LaunchedRanks::new(backend, folder);
    let settings = RankSettings {
        stack_size: config.stack_size,
        deadline: config.deadline,
        checks_replicas: config.checks_replicas,
    };
    let outcomes = ranks.run(settings, |index| config.devices.of(index), program);
    ranks.finish(outcomes, config.deadline)
}

/// Returns the folder of flight files that the environment names.
fn flight_folder_from_env() -> Option<PathBuf> {
    let folder = env::var_os(FLIGHT)?;
    (!folder.is_empty()).then(|| folder.into())
}

#[cfg(test)]
mod tests {
    use super::super::launched_ranks::cores;
    use super::*;

    #[test]
    fn threads_of_a_rank_share_a_memory_pool_that_no_other_rank_uses() {
        let cores = cores();
        let home = || Arc::as_ptr(&memory::HostMemoryPool::of_thread()).addr();
        let of_ranks = launch(Launch::threads(3), |world| {
            world.barrier("started")?;
            let home = home();
            world.barrier("ended")?;
            Ok(home)
        });
        let mut homes: Vec<_> = of_ranks
            .unwrap()
            .into_iter()
            .map(|(_, home)| home)
            .collect();
        homes.sort();
        homes.dedup();
        assert_eq!(homes.len(), 3);

        let of_threads = launch(Launch::threads(1), |_| Ok(rayon::broadcast(|_| home())))
            .unwrap()
            .remove(0)
            .1;
        assert_eq!(of_threads, vec![of_threads[0]; cores]);
    }
}
