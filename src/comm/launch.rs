//! [`launch`]: runs one program on every rank.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::{env, thread};

use burn::tensor::Device;

use super::active_launch::ActiveLaunch;
use super::backend::{Backend, ProcessOptions, RemoteOutcome, last, worlds};
use super::flight::{LaunchStart, RankTrace};
use super::launcher;
use super::ledger_history::LedgerHistory;
use super::local::HostBackend;
#[cfg(feature = "mpi")]
use super::process::ProcessJob;
use super::rank_context::{self, RankContext};
use super::rank_outcome::RankOutcome;
use super::{LaunchError, RankReport, StartError, World};
use crate::{Error, Result, memory};

/// Where the ranks of a program run.
#[derive(Debug, Clone)]
pub struct Launch {
    ranks: RankBackend,
    deadline: Duration,
    devices: Devices,
    stack_size: usize,
    manner: ProcessOptions,
    flight: Option<PathBuf>,
}

/// The environment variable that names the folder of flight files, where [`Launch::with_flight_recorder`] does not.
const FLIGHT: &str = "BURN_DTENSOR_FLIGHT";

/// How many operations of the rank at fault a failed launch names.
const LAST: usize = 3;

/// Where the ranks' tensors live.
#[derive(Debug, Clone)]
enum Devices {
    /// One for all, or the default.
    All(Option<Device>),
    /// One for each, in order of ranks.
    Each(Vec<Device>),
}

impl Devices {
    /// Of the rank at `place` among this process's.
    fn of(&self, place: usize) -> Device {
        match self {
            Self::All(Some(device)) => device.clone(),
            Self::All(None) => memory::host(),
            Self::Each(devices) => devices[place].clone(),
        }
    }
}

/// What carries the collectives.
#[derive(Debug, Clone)]
enum RankBackend {
    /// Threads, which hand each other tensors by reference.
    Threads(usize),
    /// As many threads in each of several processes.
    #[cfg(feature = "mpi")]
    Processes(Arc<ProcessJob>, usize),
    On(Arc<dyn Backend>),
}

impl Launch {
    /// `ranks` threads of this process.
    ///
    /// # Panics
    /// If `ranks` is 0.
    pub fn threads(ranks: usize) -> Self {
        assert!(ranks > 0, "a launch needs at least one rank");
        Self::new(RankBackend::Threads(ranks))
    }

    /// `ranks` ranks, wherever the program is started: threads of this process; or, where a launcher has started several
    /// processes, as many threads in each of these, which MPI connects.
    ///
    /// ```console
    /// program                  # 4 threads
    /// mpirun -n 4 program      # 4 processes, one rank in each
    /// mpirun -n 2 program      # 2 processes, two ranks in each: process 0 has ranks 0 and 1
    /// ```
    ///
    /// The results are the same to the bit, on processors alike and with as many cores a rank. Launchers are known by the
    /// environment: Open MPI's `mpirun`, `mpiexec` of MPICH and those that speak PMI, MVAPICH's, Slurm's `srun`. Several
    /// processes need the feature `mpi`.
    ///
    /// # Collective
    /// Where there are several processes: all make the same launches.
    ///
    /// # Errors
    /// [`StartError`] if the processes cannot be connected, or `ranks` are not as many in each.
    ///
    /// # Panics
    /// If `ranks` is 0.
    pub fn from_env(ranks: usize) -> Result<Self, StartError> {
        #[cfg(feature = "mpi")]
        if let Some(connected) = super::mpi::processes()? {
            let processes = connected.count();
            if !ranks.is_multiple_of(processes) {
                return Err(StartError::Uneven { ranks, processes, here: connected.here() });
            }
            return Ok(Self::new(RankBackend::Processes(connected, ranks / processes)));
        }
        #[cfg(not(feature = "mpi"))]
        if let Some(launcher::ProcessRank { processes, here }) = launcher::place()? {
            return Err(StartError::NoMpi { processes, here });
        }
        Ok(Self::threads(ranks))
    }

    /// The ranks of `engine` that are in this process, each a thread.
    pub fn on_backend(engine: Arc<dyn Backend>) -> Self {
        Self::new(RankBackend::On(engine))
    }

    fn new(ranks: RankBackend) -> Self {
        Self {
            ranks,
            deadline: Duration::from_secs(600),
            devices: Devices::All(None),
            stack_size: 8 << 20,
            manner: ProcessOptions::default(),
            flight: None,
        }
    }

    /// How long a rank waits for the others in one collective before it gives up. Default: 10 minutes.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The device of all ranks. Default: the CPU.
    pub fn with_device(mut self, device: Device) -> Self {
        self.devices = Devices::All(Some(device.inner()));
        self
    }

    /// The device of each rank of this process, in order of ranks: as many GPUs as there are ranks, or several ranks on
    /// each.
    /// What a rank brings to a collective must be on its own device, and the results are there.
    ///
    /// # Panics
    /// If there is not one for each rank.
    pub fn with_devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        let devices: Vec<_> = devices.into_iter().map(Device::inner).collect();
        let ranks = match &self.ranks {
            RankBackend::Threads(ranks) => *ranks,
            #[cfg(feature = "mpi")]
            RankBackend::Processes(_, ranks) => *ranks,
            RankBackend::On(engine) => engine.local_ranks().len(),
        };
        assert_eq!(devices.len(), ranks, "{} devices for {ranks} ranks: give each rank one", devices.len());
        self.devices = Devices::Each(devices);
        self
    }

    /// Bytes of stack that a rank's program may use; only what is used takes memory. Default: 8 MiB, as much
    /// as a main thread usually has.
    ///
    /// The program itself decides what it needs: units whose forwards call each other take about 3.5 KiB per
    /// level in an optimized build. More than there is ends the process.
    pub fn with_stack_size(mut self, bytes: usize) -> Self {
        self.stack_size = bytes;
        self
    }

    /// The folder where each rank keeps its last operations in a file, which is there whatever becomes of the program: see
    /// [`flight`](super::flight). Default: what the environment variable `BURN_DTENSOR_FLIGHT` says, or none.
    ///
    /// Files of an earlier run are replaced by those of the same launch and rank; others stay. A folder for each run keeps
    /// them apart.
    pub fn with_flight_recorder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.flight = Some(folder.into());
        self
    }

    /// Lets threads that a rank's program has started wait in collectives at the same time
    /// (MPI's `MPI_THREAD_MULTIPLE`). Default: one thread of a rank after another (`MPI_THREAD_SERIALIZED`).
    ///
    /// Each thread needs a group of its own, since ranks of a group make the same calls in the same order.
    /// A rank that waits may then still call elsewhere, so ranks that wait for each other are no longer
    /// told at once: the [`with_deadline`](Self::with_deadline) ends their waits.
    ///
    /// Of all threads of a rank, one may touch a graph of burn's: backward holds the graph's lock while it
    /// communicates, and whoever else records on that graph stops every rank of the process.
    ///
    /// An engine that the launch is [on](Self::on_backend) has its own [manner](super::backend::ProcessOptions).
    pub fn with_multithreaded_ranks(mut self) -> Self {
        self.manner.multithreaded = true;
        self
    }

    /// Gives each rank results in memory of its own, as it would have them on a machine of its own: what is measured of one
    /// rank is then what it takes there. Default: ranks of one process have what all of them get alike, such as gathered
    /// weights, once for all, and hand each other tensors by reference.
    ///
    /// Values are the same either way: a tensor is a handle, and whoever writes to memory that others have, too, gets memory
    /// of its own.
    ///
    /// Reductions on many ranks take longer so: each makes the whole by itself. An engine that the launch is
    /// [on](Self::on_backend) has its own [manner](super::backend::ProcessOptions).
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
    ///         world.barrier("all have them")?;
    ///         let is_alone = got.can_mut();
    ///         world.barrier("all have looked")?;
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

/// Runs `program` on every rank and returns this process's ranks, ascending, each with what its program returned.
///
/// Where ranks are threads, the process has all of them; on other engines it has some, and nothing says that rank 0 is
/// among them. What all should know, or one should print, belongs into the program: [`World::run_on`], a collective.
///
/// Every rank has a rayon pool of its own (its share of the cores, at least one thread), so that
/// ranks do not wait for each other's tensor operations; they wait for what they make together, such as
/// gathered weights. A rank that panics, returns an error, or returns while others still need it ends every
/// wait of every other rank at once. The others may go on without it: [`World::shrink`].
///
/// The program runs on its pool's first thread, often the only one: what it hands to `rayon::spawn` may
/// not begin before the program ends, so waiting for it may wait for ever. Use `std::thread` for that.
///
/// The program's errors are this crate's [`Error`]; those of others enter it by `?`, as
/// [`Error::other`] says.
///
/// ```
/// use burn_dtensor::comm::{Launch, launch};
///
/// let ranks = launch(Launch::threads(4), |world| {
///     world.barrier("start")?;
///     Ok(world.rank())
/// })?;
/// assert_eq!(ranks, [(0, 0), (1, 1), (2, 2), (3, 3)]);
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Errors
/// If any rank panicked or returned an error, also in another process, and others have not [gone on](World::shrink)
/// without it: the first failure, and what every other rank was doing at that moment and ended with. Every process has the error, and one is to print it:
/// [`Error::is_reported_by_other_process`](crate::Error::is_reported_by_other_process).
#[expect(clippy::result_large_err, reason = "made once per program")]
pub fn launch<T, F>(config: Launch, program: F) -> Result<Vec<(usize, T)>, LaunchError>
where
    T: Send,
    F: Fn(&World) -> Result<T> + Sync,
{
    let engine: Arc<dyn Backend> = match config.ranks {
        RankBackend::Threads(size) => HostBackend::new(size, config.manner),
        #[cfg(feature = "mpi")]
        RankBackend::Processes(processes, each) => processes.engine_of(each, config.manner),
        RankBackend::On(engine) => engine,
    };
    let here = engine.local_ranks();
    let (cores, outer) = (cores(), RankContext::current());
    let threads = (cores / here.len()).max(1);
    let folder = config.flight.or_else(|| env::var_os(FLIGHT).filter(|folder| !folder.is_empty()).map(PathBuf::from));
    let start = LaunchStart::new(engine.size(), engine.launch());
    let books: Vec<_> = here.iter().map(|_| LedgerHistory::new(folder.clone())).collect();
    let _running = ActiveLaunch::new(engine.clone(), here.iter().copied().zip(books.iter().cloned()));
    let ledgers: Vec<_> = here.iter().zip(&books).map(|(rank, books)| books.open_at(*rank, &start)).collect();
    let run = |(place, rank): (usize, usize), memory: Arc<memory::HostMemoryPool>| {
        let home = Arc::new(RankContext { launch: engine.launch(), rank, outer: outer.clone() });
        // Whatever panics, also while the rank's pool is made, is the rank's end.
        let end = RankOutcome::of(|| match &ledgers[place] {
            Ok(_) => {
                let (device, books) = (config.devices.of(place), books[place].clone());
                let world = World::new(rank, device, engine.clone(), books, config.deadline);
                in_own_pool((home, memory), threads, config.stack_size, || run_program(&program, &world))
            }
            Err(error) => RankOutcome::failed(error.clone().into()),
        });
        end.tell(rank, &engine);
        for ((engine, rank), ledger) in worlds(engine.clone(), rank).zip(books[place].all()) {
            end.note(rank, &*engine, ledger.recorder());
        }
        end.leave(rank, &engine);
        end
    };
    // A rank's memory goes with it.
    let homes = memory::HostMemoryPool::of_ranks(here.len(), cores);
    let ends = thread::scope(|scope| {
        let spawn = |((place, rank), memory)| {
            let thread = thread::Builder::new().name(format!("launch {rank}"));
            let run = &run;
            thread.spawn_scoped(scope, move || run((place, rank), memory)).map_err(|error| {
                let end = RankOutcome::failed(Error::other(format!("rank {rank} has no thread: {error}")));
                end.tell(rank, &engine);
                end.leave(rank, &engine);
                end
            })
        };
        let threads: Vec<_> = here.iter().copied().enumerate().zip(homes).map(spawn).collect();
        let join = |thread: Result<thread::ScopedJoinHandle<RankOutcome<T>>, RankOutcome<T>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(RankOutcome::from_panic),
            Err(end) => end,
        };
        threads.into_iter().map(join).collect::<Vec<_>>()
    });
    // What counts is how those have ended that have gone on.
    let last = last(engine.clone());
    let place = |rank: usize| worlds(engine.clone(), rank).last().filter(|(engine, _)| Arc::ptr_eq(engine, &last));
    let left = here.iter().zip(&ends).filter_map(|(rank, end)| Some((place(*rank)?.1, end)));
    let left: Vec<_> = left.collect();
    let RemoteOutcome { failure, reports, is_told } = last.finish();
    if failure.is_none() && left.iter().all(|(_, end)| end.is_done()) {
        for (rank, error) in here.iter().zip(&ends).filter_map(|(rank, end)| Some((rank, end.error(*rank)?))) {
            log::warn!("rank {rank} was lost, and others have gone on: {error}");
        }
        return Ok(here.into_iter().zip(ends).filter_map(|(rank, end)| Some((rank, end.done()?))).collect());
    }
    let failure = failure.or_else(|| last.failure()).expect("a rank that does not succeed has told the others");
    let report = |(rank, end): (usize, &RankOutcome<T>)| {
        let at = end.unwound_at().map(ToString::to_string);
        RankReport { rank, doing: last.activity(rank), error: end.error(rank), at }
    };
    let mut reports: Vec<_> = left.into_iter().map(report).chain(reports).collect();
    reports.sort_by_key(|report| report.rank);
    let error = LaunchError::new(failure, reports);
    // Its ranks are those of the last world. Of several processes every one tells the same: what all of them can read.
    let at = here.iter().position(|rank| place(*rank).is_some_and(|(_, place)| place == error.rank));
    let flight = match at {
        Some(at) if last.local_ranks().len() == last.size() => books[at].all().last().map(|ledger| ledger.flight()),
        _ => folder.as_ref().and_then(|folder| RankTrace::of_rank(folder, last.launch(), error.rank)),
    };
    let last = flight.map(|flight| flight.last(LAST)).unwrap_or_default();
    Err(LaunchError { is_told_elsewhere: is_told, last, flight: folder, ..error })
}

/// This process's share of the cores that it may use: 1 or more.
///
/// A process that its launcher has bound to some cores has these to itself; others share the host's.
fn cores() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let sharers = if launcher::is_bound() { 1 } else { launcher::neighbours() };
    (cores / sharers).max(1)
}

fn run_program<T>(program: impl Fn(&World) -> Result<T>, world: &World) -> RankOutcome<T> {
    rank_context::become_rank();
    // Here, on the rank's own thread, it is known where the program unwound.
    RankOutcome::of(|| program(world).map_or_else(RankOutcome::failed, RankOutcome::Done))
}

/// Runs `body` in a rayon pool of the rank's own, whose first thread is named after the rank. Of its threads it is known whose
/// they are, and where their memory waits.
fn in_own_pool<T: Send>(
    (home, memory): (Arc<RankContext>, Arc<memory::HostMemoryPool>),
    threads: usize,
    stack_size: usize,
    body: impl FnOnce() -> RankOutcome<T> + Send,
) -> RankOutcome<T> {
    let rank = home.rank;
    let name = move |worker| if worker == 0 { format!("rank {rank}") } else { format!("rank {rank}.{worker}") };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(name).stack_size(stack_size);
    let settle = move |_| {
        home.clone().settle();
        memory.clone().settle();
    };
    match pool.start_handler(settle).build() {
        Ok(pool) => pool.install(body),
        Err(error) => RankOutcome::failed(Error::other(format!("rank {rank} has no thread pool: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_rank_share_a_home_of_memory_and_so_do_ranks_of_one_core() {
        let cores = cores();
        let home = || Arc::as_ptr(&memory::HostMemoryPool::of_thread()).addr();
        let of_ranks = launch(Launch::threads(2 * cores), |world| {
            world.barrier("all have one")?;
            Ok(home())
        });
        let homes: Vec<_> = of_ranks.unwrap().into_iter().map(|(_, home)| home).collect();
        assert_eq!(homes[..cores], homes[cores..]);
        let mut distinct = homes[..cores].to_vec();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), cores, "one for each core");

        let of_threads = launch(Launch::threads(1), |_| Ok(rayon::broadcast(|_| home()))).unwrap().remove(0).1;
        assert_eq!(of_threads, vec![of_threads[0]; cores]);
    }
}
