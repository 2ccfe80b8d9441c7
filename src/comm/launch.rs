//! [`launch`]: runs one program on every rank.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::{env, thread};

use burn::tensor::Device;

use super::active_launch::ActiveLaunch;
use super::backend::{Backend, ProcessOptions, RemoteOutcome};
use super::flight::{LaunchStart, RankTrace};
use super::host_backend::HostBackend;
#[cfg(feature = "mpi")]
use super::host_backend::ProcessJob;
use super::launcher;
use super::rank_context::{self, RankContext};
use super::rank_outcome::RankOutcome;
use super::rank_worlds::{RankWorlds, last};
use super::world::DEADLINE;
use super::{LaunchError, RankReport, StartError, World};
use crate::{Error, Result, memory};

/// Configuration of a [`launch`]: the ranks of a program, their devices and their deadline.
#[derive(Debug, Clone)]
pub struct Launch {
    ranks: RankBackend,
    deadline: Duration,
    devices: Devices,
    stack_size: usize,
    manner: ProcessOptions,
    flight: Option<PathBuf>,
    checks_replicas: bool,
}

/// Environment variable with the folder of flight files, used if [`Launch::with_flight_recorder`]
/// does not set one.
const FLIGHT: &str = "BURN_DTENSOR_FLIGHT";

/// Number of operations of the rank at fault that the error of a failed launch names.
const LAST: usize = 3;

/// Devices of the ranks' tensors.
#[derive(Debug, Clone)]
enum Devices {
    /// One device for all ranks; `None` is the default.
    All(Option<Device>),
    /// One device for each rank, in order of ranks.
    Each(Vec<Device>),
}

impl Devices {
    /// Returns the device of the rank at position `place` among the ranks of this process.
    fn of(&self, place: usize) -> Device {
        match self {
            Self::All(Some(device)) => device.clone(),
            Self::All(None) => memory::host(),
            Self::Each(devices) => devices[place].clone(),
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
            manner: ProcessOptions::default(),
            flight: None,
            checks_replicas: false,
        }
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
        let ranks = match &self.ranks {
            RankBackend::Threads(ranks) => *ranks,
            #[cfg(feature = "mpi")]
            RankBackend::Processes(_, ranks) => *ranks,
            RankBackend::On(backend) => backend.local_ranks().len(),
        };
        assert_eq!(
            devices.len(),
            ranks,
            "{} devices for {ranks} ranks. Pass one device per rank",
            devices.len()
        );
        self.devices = Devices::Each(devices);
        self
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
        self.manner.multithreaded = true;
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
    /// tensor once (on a GPU, a copy of it).
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
        self.manner.separate_memory = true;
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
/// use [`World::run_on`] there.
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
    let backend: Arc<dyn Backend> = match config.ranks {
        RankBackend::Threads(size) => HostBackend::new(size, config.manner),
        #[cfg(feature = "mpi")]
        RankBackend::Processes(processes, each) => {
            processes.backend_with_options(each, config.manner)
        }
        RankBackend::On(backend) => backend,
    };
    let here = backend.local_ranks();
    let (cores, outer) = (cores(), RankContext::current());
    let threads = (cores / here.len()).max(1);
    let folder = config.flight.or_else(|| {
        env::var_os(FLIGHT)
            .filter(|folder| !folder.is_empty())
            .map(PathBuf::from)
    });
    let start = LaunchStart::new(backend.size(), backend.launch_id());
    let worlds = |rank: &usize| RankWorlds::new(backend.clone(), *rank, folder.clone());
    let worlds: Vec<_> = here.iter().map(worlds).collect();
    let _running = ActiveLaunch::new(backend.launch(), worlds.clone());
    let ledgers: Vec<_> = worlds
        .iter()
        .map(|worlds| worlds.open(worlds.rank, &start))
        .collect();
    let run = |(place, rank): (usize, usize)| {
        let home = Arc::new(RankContext {
            launch: backend.launch(),
            rank,
            outer: outer.clone(),
        });
        // A panic is the outcome of the rank, even while its pool is created.
        let end = RankOutcome::of(|| match &ledgers[place] {
            Ok(ledger) => {
                let (worlds, ledger, device) = (
                    worlds[place].clone(),
                    ledger.clone(),
                    config.devices.of(place),
                );
                let world = World::new(
                    worlds,
                    ledger,
                    device,
                    config.deadline,
                    config.checks_replicas,
                );
                in_own_pool(home, threads, config.stack_size, || {
                    run_program(&program, &world)
                })
            }
            Err(error) => RankOutcome::failed(error.clone().into()),
        });
        end.report(&worlds[place]);
        end
    };
    let ends = thread::scope(|scope| {
        let spawn = |(place, rank)| {
            let thread = thread::Builder::new().name(format!("launch {rank}"));
            let (run, worlds) = (&run, &worlds);
            thread
                .spawn_scoped(scope, move || run((place, rank)))
                .map_err(|error| {
                    let end = RankOutcome::failed(Error::other(format!(
                        "cannot start rank {rank}: {error}"
                    )));
                    end.report(&worlds[place]);
                    end
                })
        };
        let threads: Vec<_> = here.iter().copied().enumerate().map(spawn).collect();
        let join =
            |thread: Result<thread::ScopedJoinHandle<RankOutcome<T>>, RankOutcome<T>>| match thread
            {
                Ok(thread) => thread.join().unwrap_or_else(RankOutcome::from_panic),
                Err(end) => end,
            };
        threads.into_iter().map(join).collect::<Vec<_>>()
    });
    // The result depends on the ranks that continued in the last world.
    let last = last(backend.clone());
    let left = worlds
        .iter()
        .zip(&ends)
        .filter_map(|(worlds, end)| Some((worlds.rank_in(&last)?, end)));
    let left: Vec<_> = left.collect();
    let RemoteOutcome {
        failure,
        reports,
        is_reported_by_other_process,
    } = last.finish(config.deadline);
    if failure.is_none() && left.iter().all(|(_, end)| end.is_done()) {
        for (rank, error) in here
            .iter()
            .zip(&ends)
            .filter_map(|(rank, end)| Some((rank, end.error(*rank)?)))
        {
            log::warn!("rank {rank} was lost, and the other ranks continued without it: {error}");
        }
        return Ok(here
            .into_iter()
            .zip(ends)
            .filter_map(|(rank, end)| Some((rank, end.done()?)))
            .collect());
    }
    let failure = failure
        .or_else(|| last.failure())
        .expect("a rank that does not succeed records a failure");
    let report = |(rank, end): (usize, &RankOutcome<T>)| {
        let at = end.unwound_at().map(ToString::to_string);
        RankReport {
            rank,
            activity: last.activity(rank),
            error: end.error(rank),
            at,
        }
    };
    let mut reports: Vec<_> = left.into_iter().map(report).chain(reports).collect();
    reports.sort_by_key(|report| report.rank);
    let error = LaunchError::new(failure, reports);
    // `error.rank` is a rank of the last world. With several processes, all must report the same
    // operations, so they read the files, which every process can read.
    let at = worlds
        .iter()
        .position(|worlds| worlds.rank_in(&last) == Some(error.rank));
    let flight = match at {
        Some(at) if last.local_ranks().len() == last.size() => {
            worlds[at].ledger().map(|ledger| ledger.flight())
        }
        _ => {
            let read = |folder: &PathBuf| RankTrace::of_rank(folder, last.launch_id(), error.rank);
            let own = worlds
                .iter()
                .filter_map(|worlds| Some(worlds.ledger()?.flight()));
            let own = own.into_iter().find(|own| own.launch == last.launch_id());
            // If the rank has not begun, its file is of an earlier run.
            folder
                .as_ref()
                .and_then(read)
                .filter(|read| own.is_none_or(|own| own.is_same_run(read)))
        }
    };
    let last = flight.map(|flight| flight.last(LAST)).unwrap_or_default();
    Err(LaunchError {
        is_reported_by_other_process,
        last,
        flight: folder,
        ..error
    })
}

/// Returns this process's share of the available cores, at least 1.
///
/// A process that its launcher has bound to some cores uses all of these; other processes divide
/// the host's cores evenly.
fn cores() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let sharers = if launcher::is_bound() {
        1
    } else {
        launcher::neighbours()
    };
    (cores / sharers).max(1)
}

fn run_program<T>(program: impl Fn(&World) -> Result<T>, world: &World) -> RankOutcome<T> {
    rank_context::become_rank();
    // The location of an unwind is stored per thread, so the outcome is determined here, on the
    // rank's own thread.
    RankOutcome::of(|| program(world).map_or_else(RankOutcome::failed, RankOutcome::Done))
}

/// Runs `body` in a new rayon pool of the rank, whose first thread is named after the rank. The
/// threads of the pool are registered as threads of the rank, and share a memory pool, which is
/// freed with the rank.
fn in_own_pool<T: Send>(
    home: Arc<RankContext>,
    threads: usize,
    stack_size: usize,
    body: impl FnOnce() -> RankOutcome<T> + Send,
) -> RankOutcome<T> {
    let rank = home.rank;
    let name = move |worker| {
        if worker == 0 {
            format!("rank {rank}")
        } else {
            format!("rank {rank}.{worker}")
        }
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(name)
        .stack_size(stack_size);
    let memory = Arc::<memory::HostMemoryPool>::default();
    let settle = move |_| {
        home.clone().settle();
        memory.clone().settle();
    };
    match pool.start_handler(settle).build() {
        Ok(pool) => pool.install(body),
        Err(error) => RankOutcome::failed(Error::other(format!(
            "cannot create the pool of rank {rank}: {error}"
        ))),
    }
}

#[cfg(test)]
mod tests {
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
