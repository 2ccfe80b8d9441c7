//! [`World`]: one rank's handle on all ranks.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use burn::tensor::Device;
use parking_lot::Mutex;

use super::backend::{Backend, ShrunkWorld};
use super::ledger_history::LedgerHistory;
use super::rank::Rank;
use super::{Call, CommError, Communicator, Group, Ledger, in_turn};
use crate::{Error, Result};

/// One rank's handle on all ranks of a [`launch`](super::launch). Cheap to clone.
///
/// One thread of a rank at a time calls collectives, and waits for them: the order of calls is part of
/// what ranks must agree on. Which thread does not matter, but for those of other ranks, which are refused
/// ([`CommError::ForeignRankObject`]); for more at a time see
/// [`Launch::with_multithreaded_ranks`](super::Launch::with_multithreaded_ranks). A forward and its backward belong on
/// one thread: backward holds the lock of burn's graph while it communicates.
///
/// Displays as `rank 1 of launch 3`: the launches of a process are counted from 0.
#[derive(Debug, Clone)]
pub struct World(Arc<WorldInner>);

#[derive(Debug)]
struct WorldInner {
    rank: Arc<Rank>,
    /// How long one wait may last.
    deadline: Duration,
    before: Option<Before>,
    groups: Mutex<HashMap<Vec<usize>, Communicator>>,
    /// The one of all ranks, once it was asked for: to find it among the groups, every rank would look at all.
    all: OnceLock<Communicator>,
    /// What it was shrunk to: once, by whatever handle.
    next: Mutex<Option<World>>,
}

/// The world that another is left of.
#[derive(Debug)]
struct Before {
    /// The number of its launch.
    launch: u64,
    /// What each rank was there.
    ranks: Arc<[usize]>,
}

/// Groups of one rank. A mesh takes one per dimension.
const MAX_GROUPS: usize = 1 << 12;

impl World {
    /// Of a rank whose last ledger is that of this world.
    pub(super) fn new(
        rank: usize,
        device: Device,
        engine: Arc<dyn Backend>,
        books: Arc<LedgerHistory>,
        deadline: Duration,
    ) -> Self {
        let (home, ledger) = ((engine.launch(), rank), books.last());
        let rank = Rank { rank, device, ledger, books, engine, home, alone: AtomicUsize::new(0) };
        Self::of(rank, deadline, None)
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

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.0.rank.engine.size()
    }

    /// The number of the launch and the rank: equal for handles of one rank of one launch.
    pub(crate) fn identity(&self) -> (u64, usize) {
        (self.0.rank.engine.launch(), self.0.rank.rank)
    }

    /// Whether every rank's program is over: nothing will be communicated any more.
    pub(crate) fn is_finished(&self) -> bool {
        self.0.rank.engine.is_finished()
    }

    /// The device of this rank's tensors, without autodiff.
    pub fn device(&self) -> &Device {
        &self.0.rank.device
    }

    /// This rank's record of its collectives, over all groups.
    pub fn ledger(&self) -> &Ledger {
        &self.0.rank.ledger
    }

    /// The group of `ranks`, in this order. Local: needs no other rank.
    ///
    /// The same ranks in the same order are the same group, however often it is asked for. Groups live as
    /// long as their world, so a rank may have 4096 of them.
    ///
    /// # Errors
    /// [`CommError::InvalidGroup`] if `ranks` is empty, names a rank twice or one outside the
    /// world, or does not contain the caller, or if it would be one too many.
    pub fn group(&self, ranks: &[usize]) -> Result<Communicator> {
        let mut groups = self.0.groups.lock();
        if let Some(group) = groups.get(ranks) {
            return Ok(group.clone());
        }
        let full =
            || Err(format!("the rank has {MAX_GROUPS} groups, the most there may be; make a mesh once and keep it"));
        let room = if groups.len() < MAX_GROUPS { Ok(()) } else { full() };
        let index = room.and_then(|()| self.index_in(ranks));
        let index = index.map_err(|problem| {
            let (rank, ranks) = (self.rank(), ranks.to_vec());
            CommError::InvalidGroup { rank, ranks, problem }
        })?;
        let communicator = Communicator::new(self.0.rank.clone(), Group::new(ranks, index), "", self.0.deadline);
        groups.insert(ranks.to_vec(), communicator.clone());
        Ok(communicator)
    }

    /// The group of all ranks.
    pub fn all(&self) -> Communicator {
        let find = || {
            let ranks: Vec<_> = (0..self.size()).collect();
            self.group(&ranks).expect("all ranks are a group")
        };
        self.0.all.get_or_init(find).clone()
    }

    /// Returns once every rank of the world has called it.
    ///
    /// # Collective
    /// Of all ranks.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn barrier(&self, call: impl Into<Call>) -> Result<()> {
        Ok(self.all().barrier(call.into()).wait()?)
    }

    /// Runs `program` on `rank` and on no other, such as to print or log what all of them have; returns
    /// what it returned there, and `None` on the others. Local: nobody waits.
    ///
    /// ```
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
    ///     // Every rank has a part in what is printed ..
    ///     let loss = mesh.all_reduce(0.5 + world.rank() as f64, ReduceOp::Avg)?;
    ///     // .. and one prints it.
    ///     world.run_on(0, || println!("loss {loss}"));
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// The others are not there for a collective inside `program`, whether it is called, belongs to a unit's
    /// forward or to a backward pass: it is an error at once, [`CommError::CollectiveInRunOn`], on all ranks. So is,
    /// while `program` runs, one on another thread of the rank.
    ///
    /// # Panics
    /// Unwinds every rank with [`CommError::InvalidGroup`] if the world has no such rank.
    #[track_caller]
    pub fn run_on<T>(&self, rank: usize, program: impl FnOnce() -> T) -> Option<T> {
        if rank >= self.size() {
            let problem = self.outside(rank);
            Error::from(CommError::InvalidGroup { rank: self.rank(), ranks: vec![rank], problem }).unwind();
        }
        (rank == self.rank()).then(|| self.0.rank.alone(program))
    }

    pub(super) fn outside(&self, rank: usize) -> String {
        format!("rank {rank} is outside a world of {} ranks", self.size())
    }

    /// The world of the ranks that go on after a failure, numbered anew from 0 in their old order.
    ///
    /// A rank goes on by calling this; one whose program is over, or whose process is lost, does not. All that is left
    /// meet here: so this is for what a rank does with the error of a collective, in the place of returning it. Where
    /// nothing has failed yet it ends this world itself, with [`CommError::Revoked`] for the others.
    ///
    /// Meshes, communicators and sharded models belong to their world, and are made anew:
    /// [`DeviceMesh::survivors`](crate::mesh::DeviceMesh::survivors), [`remesh`](crate::fsdp::remesh). An abandoned step
    /// has changed neither parameters nor optimizer. The new world has a ledger of its own, and is the same whichever handle
    /// of a rank's asks for it, and however often.
    ///
    /// [`launch`](super::launch) then succeeds if the ranks that have gone on do, and returns these alone.
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
    /// Of all ranks that go on. Waits for the others until their programs are over, or for the launch's deadline.
    ///
    /// # Errors
    /// [`CommError::ExcludedFromShrink`] if the others have gone on without this rank, and [`CommError::CannotShrink`]
    /// if the launch's [engine](super::backend) does not support it.
    pub fn shrink(&self) -> Result<Self> {
        let mut next = self.0.next.lock();
        if let Some(next) = &*next {
            return Ok(next.clone());
        }
        let Rank { rank, device, books, engine, home, .. } = &*self.0.rank;
        let successor = engine.shrink(*rank, self.0.deadline)?;
        let place = successor.place_of(*rank).ok_or(CommError::ExcludedFromShrink { rank: *rank })?;
        let ShrunkWorld { engine, ranks } = successor;
        let (ledger, alone) = (books.open(place, &*engine)?, AtomicUsize::new(0));
        let (device, books) = (device.clone(), books.clone());
        let rank = Rank { rank: place, device, ledger, books, engine, home: *home, alone };
        let (launch, _) = self.identity();
        Ok(next.insert(Self::of(rank, self.0.deadline, Some(Before { launch, ranks }))).clone())
    }

    /// Of a world that another was [shrunk](Self::shrink) to, what each rank was there.
    pub fn ranks_before(&self) -> Option<&[usize]> {
        self.0.before.as_ref().map(|before| &*before.ranks)
    }

    /// Whether this is what `other` was shrunk to.
    pub(crate) fn is_left_of(&self, other: &Self) -> bool {
        self.0.before.as_ref().is_some_and(|before| before.launch == other.identity().0)
    }

    /// Runs `build` on one rank after the other, each time with burn's random state started anew at `seed`:
    /// every rank draws the same, at every run.
    ///
    /// burn's CPU backend has one random state a process, of which ranks that draw at once get each a part,
    /// as time will have it. Lazy parameters, which most of burn's layers have, need none of this to be made:
    /// only the first rank draws them, in [`fully_shard`](crate::fsdp::fully_shard). A model that reads or draws values
    /// while it is built does, unless it is built before [`launch`](super::launch).
    ///
    /// Random numbers of a rank's own come from [`random::tensor`](crate::dtensor::ops::random::tensor), which repeats
    /// wherever the rank is. Where a process has one rank, burn's random state is that rank's own, too: with
    /// `world.device().seed(seed + rank)`, after the model is built, burn's `Dropout` repeats to the bit. Ranks of one
    /// process share that state, and a seed that one sets is set for all of them.
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
    /// Of all ranks. `build` must call no other: the others wait for it.
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
        if let Some(rank) = ranks.iter().find(|rank| std::mem::replace(&mut seen[**rank], true)) {
            return Err(format!("rank {rank} is named twice"));
        }
        let index = ranks.iter().position(|rank| *rank == self.rank());
        index.ok_or_else(|| "only its members can use a group".into())
    }
}

impl std::fmt::Display for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (launch, rank) = self.identity();
        write!(f, "rank {rank} of launch {launch}")
    }
}
