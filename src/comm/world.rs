//! [`World`]: handle of one rank on all ranks of a launch.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use burn::tensor::Device;
use parking_lot::Mutex;

use super::backend::{ShrunkWorld, is_device_number};
use super::host_backend::HostBackend;
use super::observe::flight::LaunchStart;
use super::rank::Rank;
use super::rank_worlds::RankWorlds;
use super::{Call, CommError, Communicator, Group, Ledger};
use crate::{Error, Result};

/// Handle of one rank on all ranks of a [`launch`](super::launch). It is cheap to clone.
///
/// Only one thread of a rank may call collectives or wait for them at a time, because the order of
/// calls must be the same on all ranks. It may be any thread except one of another rank, which is
/// rejected with [`CommError::ForeignRankObject`]. To allow several threads at a time, see
/// [`Launch::with_multithreaded_ranks`](super::Launch::with_multithreaded_ranks). Run a forward and
/// its backward on the same thread: backward holds the lock of burn's graph while it communicates.
///
/// Displays as `rank 1 of launch 3`: the launches of a process are counted from 0.
#[derive(Debug, Clone)]
pub struct World(Arc<WorldInner>);

#[derive(Debug)]
struct WorldInner {
    rank: Arc<Rank>,
    /// Maximum duration of one wait.
    deadline: Duration,
    before: Option<Before>,
    groups: Mutex<HashMap<Vec<usize>, Communicator>>,
    /// The group of all ranks, after it was first requested. Looking it up in `groups` would
    /// compare a list of all ranks.
    all: OnceLock<Communicator>,
    /// The world to which this one was shrunk. All handles of the rank share it.
    next: Mutex<Option<World>>,
}

/// The world from which a world was shrunk.
#[derive(Debug)]
struct Before {
    /// Number of its launch.
    launch: u64,
    /// Old rank of each new rank.
    ranks: Arc<[usize]>,
}

/// Maximum duration of a wait, unless the launch sets another.
pub(super) const DEADLINE: Duration = Duration::from_secs(600);

/// Maximum number of groups of one rank. A mesh uses one group per dimension.
const MAX_GROUPS: usize = 1 << 12;

impl World {
    /// Creates the world of a rank in its launch, where it has a ledger.
    pub(super) fn new(
        worlds: Arc<RankWorlds>,
        ledger: Arc<Ledger>,
        device: Device,
        deadline: Duration,
        checks_replicas: bool,
    ) -> Self {
        let rank = worlds.rank;
        let backend = worlds.backend.clone();
        let rank = Rank {
            rank,
            device,
            ledger,
            worlds,
            backend,
            alone: AtomicUsize::new(0),
            checks_replicas,
        };
        Self::of(rank, deadline, None)
    }

    /// Creates the world of a program without ranks on `device`, which has one rank.
    pub(crate) fn of_device(device: &Device) -> Self {
        let worlds = RankWorlds::new(HostBackend::of_device(), 0, None);
        let ledger = worlds
            .open(0, &LaunchStart::new(1, worlds.backend.launch_id()))
            .expect("a ledger without a file opens");
        Self::new(worlds, ledger, device.clone().inner(), DEADLINE, false)
    }

    fn of(rank: Rank, deadline: Duration, before: Option<Before>) -> Self {
        Self(Arc::new(WorldInner {
            rank: Arc::new(rank),
            deadline,
            before,
            groups: Mutex::default(),
            all: OnceLock::new(),
            next: Mutex::default(),
        }))
    }

    /// Returns this rank, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.rank.backend.size()
    }

    /// Returns true if replicated values are compared when a program passes them to a DTensor.
    pub(crate) fn checks_replicas(&self) -> bool {
        self.0.rank.checks_replicas
    }

    /// Returns the number of ranks in this process.
    pub(crate) fn ranks_here(&self) -> usize {
        self.0.rank.backend.local_ranks().len()
    }

    /// Returns the number of the launch and the rank. Handles of the same rank of the same launch
    /// have equal identities.
    pub(crate) fn identity(&self) -> (u64, usize) {
        (self.0.rank.backend.launch(), self.0.rank.rank)
    }

    /// Returns true if the programs of all ranks are over, so that no rank communicates any more.
    pub(crate) fn is_finished(&self) -> bool {
        self.0.rank.backend.is_finished()
    }

    /// Returns the device of this rank's tensors, without autodiff.
    pub fn device(&self) -> &Device {
        &self.0.rank.device
    }

    /// Returns the ledger of this rank, which counts its collectives in all groups.
    pub fn ledger(&self) -> &Ledger {
        &self.0.rank.ledger
    }

    /// Returns the group of `ranks`, in this order. Local.
    ///
    /// The same ranks in the same order always return the same group. Groups live as long as their
    /// world, so a rank may have at most 4096 of them.
    ///
    /// # Errors
    /// [`CommError::InvalidGroup`] if `ranks` is empty, contains a rank twice or a rank outside the
    /// world, or does not contain the caller, or if the rank has too many groups.
    pub fn group(&self, ranks: &[usize]) -> Result<Communicator> {
        let mut groups = self.0.groups.lock();
        if let Some(group) = groups.get(ranks) {
            return Ok(group.clone());
        }
        let full = || {
            Err(format!(
                "the rank has the maximum of {MAX_GROUPS} groups. Create each mesh once and keep it"
            ))
        };
        let room = if groups.len() < MAX_GROUPS {
            Ok(())
        } else {
            full()
        };
        let index = room.and_then(|()| self.index_in(ranks));
        let index = index.map_err(|problem| {
            let rank = self.rank();
            let ranks = ranks.to_vec();
            CommError::InvalidGroup {
                rank,
                ranks,
                problem,
            }
        })?;
        let communicator = Communicator::new(
            self.0.rank.clone(),
            Group::new(ranks, index),
            self.0.deadline,
        );
        groups.insert(ranks.to_vec(), communicator.clone());
        Ok(communicator)
    }

    /// Returns the group of all ranks. Local.
    pub fn all(&self) -> Communicator {
        self.0
            .all
            .get_or_init(|| {
                let ranks: Vec<_> = (0..self.size()).collect();
                self.group(&ranks).expect("all ranks form a valid group")
            })
            .clone()
    }

    /// Blocks until every rank of the world has called it.
    ///
    /// # Collective
    /// Called by all ranks.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn barrier(&self, call: impl Into<Call>) -> Result<()> {
        Ok(self.all().barrier(call.into()).wait()?)
    }

    /// Runs `program` on `rank` only, for example to print or log a value that all ranks have.
    /// Returns the result of `program` on that rank, and `None` on the others. Local: no rank
    /// waits.
    ///
    /// ```
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
    ///     // All ranks compute the value ..
    ///     let loss = mesh.all_reduce(0.5 + world.rank() as f64, ReduceOp::Avg)?;
    ///     // .. and one rank prints it.
    ///     world.run_on(0, || println!("loss {loss}"));
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// The other ranks do not run `program`, so a collective inside it cannot complete, whether it
    /// is called directly or by a unit's forward or a backward pass. It fails at once, on all
    /// ranks, with [`CommError::CollectiveInRunOn`]. The same happens if another thread of the rank
    /// calls a collective while `program` runs.
    ///
    /// # Panics
    /// Unwinds every rank with [`CommError::InvalidGroup`] if the world has no such rank.
    #[track_caller]
    pub fn run_on<T>(&self, rank: usize, program: impl FnOnce() -> T) -> Option<T> {
        if rank >= self.size() {
            let problem = self.outside(rank);
            Error::from(CommError::InvalidGroup {
                rank: self.rank(),
                ranks: vec![rank],
                problem,
            })
            .unwind();
        }
        (rank == self.rank()).then(|| self.0.rank.alone(program))
    }

    pub(super) fn outside(&self, rank: usize) -> String {
        format!(
            "rank {rank} is outside a world of {0} ranks. Pass a rank below {0}",
            self.size()
        )
    }

    /// Returns the world of the ranks that survive a failure. They are numbered from 0, in their
    /// old order.
    ///
    /// Call it on a rank that received the error of a collective, instead of returning the error. A
    /// rank whose program is over, or whose process is lost, does not survive. If nothing has
    /// failed yet, the call revokes this world, and the other ranks receive [`CommError::Revoked`].
    ///
    /// Meshes, communicators and sharded models belong to their world. Create new ones with
    /// [`DeviceMesh::survivors`](crate::mesh::DeviceMesh::survivors) and
    /// [`remesh`](crate::fsdp::remesh). An abandoned step has changed neither parameters nor the
    /// optimizer, unless Muon's own collectives failed: its momentum has advanced then. The new
    /// world has a new ledger. All calls on a rank return the same new world, whichever handle is
    /// used.
    ///
    /// [`launch`](super::launch) then succeeds if the surviving ranks do, and returns only their
    /// results.
    ///
    /// ```
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// let ranks = launch(Launch::threads(3), |world| {
    ///     if world.rank() == 1 {
    ///         panic!("a bit has flipped");
    ///     }
    ///     let failed = world.barrier("step").unwrap_err();
    ///     println!("rank {}: {failed}", world.rank());
    ///     let world = world.shrink()?;
    ///     world.barrier("step")?;
    ///     Ok((world.rank(), world.size()))
    /// })?;
    /// assert_eq!(ranks, [(0, (0, 2)), (2, (1, 2))]);
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Called by all surviving ranks. Waits until each of the other ranks has called it or its
    /// program is over, at most for the launch's deadline.
    ///
    /// # Errors
    /// [`CommError::ExcludedFromShrink`] if the other ranks have continued without this one;
    /// [`CommError::CannotShrink`] if the launch's [backend](super::backend) does not support it.
    pub fn shrink(&self) -> Result<Self> {
        let mut next = self.0.next.lock();
        if let Some(next) = &*next {
            return Ok(next.clone());
        }
        let Rank {
            rank,
            device,
            worlds,
            backend,
            checks_replicas,
            ..
        } = &*self.0.rank;
        let successor = backend.shrink(*rank, self.0.deadline)?;
        let place = successor
            .new_rank_of(*rank)
            .ok_or(CommError::ExcludedFromShrink { rank: *rank })?;
        let ShrunkWorld { backend, ranks } = successor;
        let start = LaunchStart::new(backend.size(), backend.launch_id());
        let ledger = worlds.open(place, &start)?;
        let alone = AtomicUsize::new(0);
        let device = device.clone();
        let worlds = worlds.clone();
        let checks_replicas = *checks_replicas;
        let rank = Rank {
            rank: place,
            device,
            ledger,
            worlds,
            backend,
            alone,
            checks_replicas,
        };
        let (launch, _) = self.identity();
        Ok(next
            .insert(Self::of(
                rank,
                self.0.deadline,
                Some(Before { launch, ranks }),
            ))
            .clone())
    }

    /// Returns the old rank of each rank, if this world was created by [`shrink`](Self::shrink).
    pub fn ranks_before(&self) -> Option<&[usize]> {
        self.0.before.as_ref().map(|before| &*before.ranks)
    }

    /// Returns true if it is that of a program on one device, without a launch.
    pub(crate) fn is_of_device(&self) -> bool {
        is_device_number(self.identity().0)
    }

    /// Returns true if `other` was shrunk to this world.
    pub(crate) fn is_left_of(&self, other: &Self) -> bool {
        self.0
            .before
            .as_ref()
            .is_some_and(|before| before.launch == other.identity().0)
    }

    /// Runs `build` on one rank after another, each time with burn's random state seeded with
    /// `seed`. All ranks draw the same numbers, in every run.
    ///
    /// burn's CPU backend has one random state per process, so ranks that draw at the same time
    /// draw from the same sequence, in an order that depends on timing. A model with lazy
    /// parameters, which most of burn's layers have, does not need this function: only the first
    /// rank initializes them, in [`fully_shard`](crate::fsdp::fully_shard). A model that reads or
    /// draws values while it is built needs it, unless it is built before
    /// [`launch`](super::launch).
    ///
    /// For random numbers that differ between ranks use
    /// [`random::tensor`](crate::dtensor::ops::random::tensor), which is repeatable in any process.
    /// If each process has one rank, burn's random state is not shared either: call
    /// `world.device().seed(seed + rank)` after the model is built, and burn's `Dropout` is bitwise
    /// repeatable. Ranks of one process share the state, and a seed set by one rank is set for all
    /// of them.
    ///
    /// ```
    /// use burn::tensor::{Distribution, Tensor};
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// let drawn = launch(Launch::threads(3), |world| {
    ///     let draw = || Tensor::<1>::random([4], Distribution::Default, world.device());
    ///     Ok(world.run_seeded(7, draw)?.into_data())
    /// })?;
    /// let (_, first) = &drawn[0];
    /// assert!(drawn.iter().all(|(_, values)| values == first));
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Called by all ranks. `build` must not call collectives, because the other ranks wait for it.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn run_seeded<T>(&self, seed: u64, build: impl FnOnce() -> T) -> Result<T> {
        in_turn(&self.all(), "seeded", self.rank(), self.size(), || {
            self.device().seed(seed);
            Ok(build())
        })
    }

    fn index_in(&self, ranks: &[usize]) -> Result<usize, String> {
        let size = self.size();
        if let Some(rank) = ranks.iter().find(|rank| **rank >= size) {
            return Err(self.outside(*rank));
        }
        let mut seen = vec![false; size];
        if let Some(rank) = ranks
            .iter()
            .find(|rank| std::mem::replace(&mut seen[**rank], true))
        {
            return Err(format!("rank {rank} is named twice. Name each rank once"));
        }
        let index = ranks.iter().position(|rank| *rank == self.rank());
        index.ok_or_else(|| {
            "only its members can use a group. Call this on the listed ranks only".into()
        })
    }
}

/// Runs `body` after all ranks with a lower `turn` have completed theirs. There are `turns` turns;
/// ranks with the same turn run at the same time.
///
/// # Collective
/// Called by every rank of the group, with the same label and number of turns. `body` must not wait
/// for ranks with another turn.
///
/// # Errors
/// The error of `body`, after which the other ranks still have their turns, or a failure of another
/// rank.
pub(crate) fn in_turn<T, E: From<CommError>>(
    group: &Communicator,
    label: &'static str,
    turn: usize,
    turns: usize,
    body: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let wait = |turns: usize| (0..turns).try_for_each(|_| group.barrier(label.into()).wait());
    wait(turn)?;
    let result = body();
    // Runs the remaining barriers even if `body` failed, because the other ranks wait for their
    // turns.
    match (result, wait(turns - turn)) {
        (Ok(_), Err(error)) => Err(error.into()),
        (result, _) => result,
    }
}

impl std::fmt::Display for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.identity() {
            _ if self.is_of_device() => f.write_str("a device outside a launch"),
            (launch, rank) => write!(f, "rank {rank} of launch {launch}"),
        }
    }
}
