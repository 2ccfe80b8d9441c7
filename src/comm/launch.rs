//! [`launch`]: runs one program on every rank.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;

use super::local::{Failure, LocalWorld};
use super::{CommError, World};
use crate::{Error, Result};

/// Where the ranks of a program run.
#[derive(Debug, Clone)]
pub struct Launch {
    ranks: Ranks,
    deadline: Duration,
    device: Option<Device>,
}

/// What a rank is.
#[derive(Debug, Clone, Copy)]
enum Ranks {
    Threads(usize),
}

impl Launch {
    /// `ranks` threads of this process.
    ///
    /// # Panics
    /// If `ranks` is 0.
    pub fn threads(ranks: usize) -> Self {
        assert!(ranks > 0, "a launch needs at least one rank");
        Self { ranks: Ranks::Threads(ranks), deadline: Duration::from_secs(600), device: None }
    }

    /// How long a rank waits for the others in one collective before it gives up. Default: 10 minutes.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The device of all ranks. Default: the CPU.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device.inner());
        self
    }
}

/// Runs `program` on every rank and returns what each returned, by rank.
///
/// Every rank has a rayon pool of its own (its share of the cores, at least one thread), so that
/// ranks do not wait for each other's tensor operations. A rank that panics, returns an error, or
/// returns while others still need it ends every wait of every other rank at once.
///
/// ```
/// use burn_dtensor::Error;
/// use burn_dtensor::comm::{Launch, launch};
///
/// let ranks = launch(Launch::threads(4), |world| {
///     world.barrier("start")?;
///     Ok::<_, Error>(world.rank())
/// })?;
/// assert_eq!(ranks, [0, 1, 2, 3]);
/// # Ok::<_, Error>(())
/// ```
///
/// # Errors
/// If any rank panicked or returned an error: the first failure, and what every other rank was
/// doing at that moment and ended with.
#[expect(clippy::result_large_err, reason = "made once a program")]
pub fn launch<T, E, F>(config: Launch, program: F) -> Result<Vec<T>, LaunchError>
where
    T: Send,
    E: Into<Error>,
    F: Fn(&World) -> Result<T, E> + Sync,
{
    let Ranks::Threads(size) = config.ranks;
    let device = config.device.unwrap_or_else(default_device);
    let local = Arc::new(LocalWorld::new(size, config.deadline));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let run = |rank: usize| {
        let world = World::new(rank, device.clone(), local.clone());
        let end = in_own_pool(rank, (cores / size).max(1), || run_program(&program, &world));
        end.tell(rank, &local);
        end
    };
    let ends = thread::scope(|scope| {
        let spawn = |rank| {
            let thread = thread::Builder::new().name(format!("launch {rank}"));
            let run = &run;
            thread.spawn_scoped(scope, move || run(rank)).map_err(|error| {
                let end = End::Failed(Error::other(format!("rank {rank} has no thread: {error}")));
                end.tell(rank, &local);
                end
            })
        };
        let threads: Vec<_> = (0..size).map(spawn).collect();
        let join = |thread: Result<thread::ScopedJoinHandle<End<T>>, End<T>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(End::from_panic),
            Err(end) => end,
        };
        threads.into_iter().map(join).collect::<Vec<_>>()
    });
    match local.rendezvous.failure() {
        Some(failure) if !ends.iter().all(|end| matches!(end, End::Done(_))) => {
            Err(LaunchError::new(failure, ends, &local))
        }
        _ => Ok(ends.into_iter().filter_map(End::done).collect()),
    }
}

fn default_device() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex();
    #[cfg(not(feature = "flex"))]
    return Device::default().inner();
}

/// How a rank's program ended.
enum End<T> {
    Done(T),
    Failed(Error),
    Panicked(String),
}

thread_local! {
    static IS_RANK: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is the one that runs a rank's program.
pub(crate) fn is_rank() -> bool {
    IS_RANK.get()
}

fn run_program<T, E: Into<Error>>(program: impl Fn(&World) -> Result<T, E>, world: &World) -> End<T> {
    IS_RANK.set(true);
    match catch_unwind(AssertUnwindSafe(|| program(world))) {
        Ok(Ok(value)) => End::Done(value),
        Ok(Err(error)) => End::Failed(error.into()),
        Err(payload) => End::from_panic(payload),
    }
}

/// Runs `body` in a rayon pool of its own, whose first thread is named after the rank.
fn in_own_pool<T: Send>(rank: usize, threads: usize, body: impl FnOnce() -> End<T> + Send) -> End<T> {
    let name = move |worker| if worker == 0 { format!("rank {rank}") } else { format!("rank {rank}.{worker}") };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(name).stack_size(STACK).build();
    match pool {
        Ok(pool) => pool.install(body),
        Err(error) => End::Failed(Error::other(format!("rank {rank} has no thread pool: {error}"))),
    }
}

/// As much as a main thread usually has; only what is used takes memory.
const STACK: usize = 8 << 20;

impl<T> End<T> {
    fn from_panic(payload: Box<dyn Any + Send>) -> Self {
        let payload = match payload.downcast::<Error>() {
            Ok(error) => return Self::Failed(*error),
            Err(payload) => payload,
        };
        Self::Panicked(match payload.downcast::<String>() {
            Ok(message) => *message,
            Err(payload) => payload.downcast_ref::<&str>().map_or("(no message)".into(), |message| message.to_string()),
        })
    }

    /// Tells the other ranks, of which some may be waiting for this one.
    fn tell(&self, rank: usize, local: &LocalWorld) {
        match self {
            Self::Done(_) => {}
            Self::Failed(error) => {
                local.rendezvous.fail(Failure::Failed { rank, message: error.to_string() });
            }
            Self::Panicked(message) => {
                local.rendezvous.fail(Failure::Panicked { rank, message: message.clone() });
            }
        }
        local.rendezvous.returned(rank);
    }

    fn done(self) -> Option<T> {
        match self {
            Self::Done(value) => Some(value),
            _ => None,
        }
    }

    fn error(self, rank: usize) -> Option<Error> {
        match self {
            Self::Done(_) => None,
            Self::Failed(error) => Some(error),
            Self::Panicked(message) => Some(CommError::RankPanicked { rank, message, during: None }.into()),
        }
    }
}

/// A launch failed: the first failure, and how every other rank fared.
#[derive(Debug, Clone)]
pub struct LaunchError {
    /// The rank at fault.
    pub rank: usize,
    /// The first failure.
    pub cause: Error,
    /// All other ranks.
    pub others: Vec<RankReport>,
}

/// How one rank fared in a failed [`launch`].
#[derive(Debug, Clone)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// What it was doing at the first failure, such as
    /// ``waiting in all_gather #12 `blocks.3` on ranks [0, 1, 2] for rank 2``.
    pub doing: String,
    /// The error it returned, if it did not succeed.
    pub error: Option<Error>,
}

impl LaunchError {
    fn new<T>(failure: Failure, ends: Vec<End<T>>, local: &LocalWorld) -> Self {
        let culprit = failure.error(None);
        let rank = culprit.rank();
        let mut cause = Error::Comm(culprit);
        let mut others = Vec::new();
        for (each, end) in ends.into_iter().enumerate() {
            let error = end.error(each);
            match error {
                // The rank's own error is more than its message, which is what the others know.
                Some(error) if each == rank && matches!(failure, Failure::Failed { .. }) => cause = error,
                _ if each == rank => {}
                error => others.push(RankReport { rank: each, doing: local.rendezvous.doing(each), error }),
            }
        }
        Self { rank, cause, others }
    }
}

impl fmt::Display for LaunchError {
    /// Ranks that fared alike share a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "launch failed at rank {}: {}", self.rank, self.cause)?;
        let mut lines: Vec<(String, Vec<usize>)> = Vec::new();
        for RankReport { rank, doing, error } in &self.others {
            let end = error.as_ref().map_or("it succeeded".into(), |error| format!("it ended with: {error}"));
            let line = format!("{doing}; {end}");
            match lines.iter_mut().find(|(other, _)| *other == line) {
                Some((_, ranks)) => ranks.push(*rank),
                None => lines.push((line, vec![*rank])),
            }
        }
        for (line, ranks) in lines {
            match &ranks[..] {
                [rank] => write!(f, "\n  rank {rank} was {line}")?,
                ranks => write!(f, "\n  ranks {ranks:?}, each: {line}")?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for LaunchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}
