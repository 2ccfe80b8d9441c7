//! [`LaunchedRanks`]: the ranks of a launch in this process, each of which runs as a thread.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;

use super::active_launch::ActiveLaunch;
use super::backend::{Backend, RemoteOutcome};
use super::flight::{LaunchStart, RankTrace};
use super::launcher;
use super::observe::Ledger;
use super::rank_context::{self, RankContext};
use super::rank_outcome::RankOutcome;
use super::rank_worlds::{RankWorlds, last};
use super::{LaunchError, RankReport, StartError, World};
use crate::{Error, Result, memory};

/// Number of operations of the rank at fault that the error of a failed launch names.
const LAST_OPERATIONS: usize = 3;

/// Settings of each rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankSettings {
    pub stack_size: usize,
    pub deadline: Duration,
    pub checks_replicas: bool,
}

/// The ranks of a launch that belong to this process.
pub(super) struct LaunchedRanks {
    /// Backend of the launch's first world.
    backend: Arc<dyn Backend>,
    /// The ranks, each with its worlds.
    ranks: Vec<Arc<RankWorlds>>,
    /// The ledger of each rank in the first world.
    ledgers: Vec<Result<Arc<Ledger>, StartError>>,
    /// Folder of the flight recorders' files, if they have files.
    folder: Option<PathBuf>,
    _running: ActiveLaunch,
}

impl LaunchedRanks {
    /// Registers the launch and opens the ledgers of its ranks.
    pub fn new(backend: Arc<dyn Backend>, folder: Option<PathBuf>) -> Self {
        let start = LaunchStart::new(backend.size(), backend.launch_id());
        let mut ranks = Vec::new();
        for rank in backend.local_ranks() {
            ranks.push(RankWorlds::new(backend.clone(), rank, folder.clone()));
        }
        let running = ActiveLaunch::new(backend.launch(), ranks.clone());
        let mut ledgers = Vec::new();
        for rank in &ranks {
            ledgers.push(rank.open(rank.rank, &start));
        }
        Self {
            backend,
            ranks,
            ledgers,
            folder,
            _running: running,
        }
    }

    /// Runs `program` on every rank, the one at index `i` of this process on `device(i)`, and
    /// returns their outcomes once all have ended.
    pub fn run<T: Send>(
        &self,
        settings: RankSettings,
        device: impl Fn(usize) -> Device + Sync,
        program: impl Fn(&World) -> Result<T> + Sync,
    ) -> Vec<RankOutcome<T>> {
        let outer = RankContext::current();
        let run = &|index: usize| {
            let outcome = self.run_rank(index, &outer, settings, &device, &program);
            outcome.report(&self.ranks[index]);
            outcome
        };
        thread::scope(|scope| {
            let mut started = Vec::new();
            for (index, worlds) in self.ranks.iter().enumerate() {
                let thread = thread::Builder::new().name(format!("launch {}", worlds.rank));
                let thread = thread.spawn_scoped(scope, move || run(index));
                // Reported now, because the ranks that have started may wait for this one.
                started.push(thread.map_err(|error| not_started(worlds, &error)));
            }
            let mut outcomes = Vec::new();
            for thread in started {
                outcomes.push(match thread {
                    Ok(thread) => thread.join().unwrap_or_else(RankOutcome::from_panic),
                    Err(outcome) => outcome,
                });
            }
            outcomes
        })
    }

    /// Runs `program` on the rank at `index`, in a pool of its own.
    fn run_rank<T: Send>(
        &self,
        index: usize,
        outer: &Option<Arc<RankContext>>,
        settings: RankSettings,
        device: impl Fn(usize) -> Device + Sync,
        program: impl Fn(&World) -> Result<T> + Sync,
    ) -> RankOutcome<T> {
        let worlds = &self.ranks[index];
        // A panic is the outcome of the rank, even while its pool is created.
        RankOutcome::of(|| {
            let ledger = match &self.ledgers[index] {
                Ok(ledger) => ledger.clone(),
                Err(error) => return RankOutcome::failed(error.clone().into()),
            };
            let world = World::new(
                worlds.clone(),
                ledger,
                device(index),
                settings.deadline,
                settings.checks_replicas,
            );
            let context = Arc::new(RankContext {
                launch: self.backend.launch(),
                rank: worlds.rank,
                outer: outer.clone(),
            });
            let threads = (cores() / self.ranks.len()).max(1);
            in_own_pool(context, threads, settings.stack_size, || {
                run_program(&program, &world)
            })
        })
    }

    /// Returns the results of the ranks that succeeded, each with its rank in the launch, if all
    /// ranks did that continued in the last world.
    ///
    /// # Errors
    /// The report of the launch otherwise.
    #[expect(clippy::result_large_err, reason = "made once per program")]
    pub fn finish<T>(
        self,
        outcomes: Vec<RankOutcome<T>>,
        deadline: Duration,
    ) -> Result<Vec<(usize, T)>, LaunchError> {
        // The result depends on the ranks that continued in the last world.
        let last_world = last(self.backend.clone());
        let mut continued = Vec::new();
        for (worlds, outcome) in self.ranks.iter().zip(&outcomes) {
            if let Some(rank) = worlds.rank_in(&last_world) {
                continued.push((rank, outcome));
            }
        }
        let RemoteOutcome {
            failure,
            reports,
            is_reported_by_other_process,
        } = last_world.finish(deadline);
        if failure.is_none() && continued.iter().all(|(_, outcome)| outcome.is_done()) {
            return Ok(self.results(outcomes));
        }
        let failure = failure
            .or_else(|| last_world.failure())
            .expect("a rank that does not succeed records a failure");
        let local = continued.into_iter().map(|(rank, outcome)| RankReport {
            rank,
            activity: last_world.activity(rank),
            error: outcome.error(rank),
            at: outcome.unwound_at().map(ToString::to_string),
        });
        let mut reports: Vec<_> = local.chain(reports).collect();
        reports.sort_by_key(|report| report.rank);
        let error = LaunchError::new(failure, reports);
        let flight = self.flight_of(error.rank, &last_world);
        Err(LaunchError {
            is_reported_by_other_process,
            last: flight
                .map(|flight| flight.last(LAST_OPERATIONS))
                .unwrap_or_default(),
            flight: self.folder,
            ..error
        })
    }

    /// Returns the results, and logs the ranks that were lost.
    fn results<T>(&self, outcomes: Vec<RankOutcome<T>>) -> Vec<(usize, T)> {
        let mut results = Vec::new();
        for (worlds, outcome) in self.ranks.iter().zip(outcomes) {
            let rank = worlds.rank;
            if let Some(error) = outcome.error(rank) {
                log::warn!(
                    "rank {rank} was lost, and the other ranks continued without it: {error}"
                );
            }
            results.extend(outcome.done().map(|result| (rank, result)));
        }
        results
    }

    /// Returns the last operations of rank `rank` of the `last` world, as far as they can be read.
    ///
    /// With several processes, all must report the same operations, so they read the files, which
    /// every process can read.
    fn flight_of(&self, rank: usize, last: &Arc<dyn Backend>) -> Option<RankTrace> {
        let mut worlds = self.ranks.iter();
        let local = worlds.find(|worlds| worlds.rank_in(last) == Some(rank));
        if let Some(worlds) = local
            && last.local_ranks().len() == last.size()
        {
            return Some(worlds.ledger()?.flight());
        }
        let read = RankTrace::of_rank(self.folder.as_ref()?, last.launch_id(), rank)?;
        // If the rank has not begun, its file is of an earlier run.
        let mut own = self
            .ranks
            .iter()
            .filter_map(|worlds| Some(worlds.ledger()?.flight()));
        match own.find(|own| own.launch == last.launch_id()) {
            Some(own) if !own.is_same_run(&read) => None,
            _ => Some(read),
        }
    }
}

/// Returns this process's share of the available cores, at least 1.
///
/// A process that its launcher has bound to some cores uses all of these; other processes divide
/// the host's cores evenly.
pub(super) fn cores() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let sharers = if launcher::is_bound() {
        1
    } else {
        launcher::neighbours()
    };
    (cores / sharers).max(1)
}

/// Returns the outcome of a rank whose thread could not be started, and reports it to the others.
fn not_started<T>(worlds: &RankWorlds, error: &io::Error) -> RankOutcome<T> {
    let text = format!("cannot start rank {}: {error}", worlds.rank);
    let outcome = RankOutcome::failed(Error::other(text));
    outcome.report(worlds);
    outcome
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
    context: Arc<RankContext>,
    threads: usize,
    stack_size: usize,
    body: impl FnOnce() -> RankOutcome<T> + Send,
) -> RankOutcome<T> {
    let rank = context.rank;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |worker| {
            if worker == 0 {
                format!("rank {rank}")
            } else {
                format!("rank {rank}.{worker}")
            }
        })
        .stack_size(stack_size);
    let memory = Arc::<memory::HostMemoryPool>::default();
    let install = move |_| {
        context.clone().install();
        memory.clone().install();
    };
    match pool.start_handler(install).build() {
        Ok(pool) => pool.install(body),
        Err(error) => RankOutcome::failed(Error::other(format!(
            "cannot create the pool of rank {rank}: {error}"
        ))),
    }
}
