//! Communication between ranks: launching a program on every rank, groups of ranks, collectives and
//! point-to-point messages.
//!
//! [`launch`] runs one program on every rank and passes it a [`World`]. Many programs use only the
//! functions of this example:
//!
//! ```
//! use burn_dtensor::prelude::*;
//!
//! let results = launch(Launch::threads(2), |world| {
//!     world.barrier("start")?; // waits until every rank has called it
//!     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
//!     let count = mesh.all_reduce(1.0, ReduceOp::Sum)?;
//!     assert_eq!(count, 2.0);
//!
//!     let own = [0.5, 1.5][world.rank()]; // such as the loss of this rank's rows
//!     let mean = mesh.all_reduce(own, ReduceOp::Avg)?;
//!     world.run_on(0, || println!("loss {mean}")); // prints once
//!     Ok(mean)
//! })?;
//! assert_eq!(results, [(0, 1.0), (1, 1.0)]); // each rank with its result
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! | purpose | use |
//! |---|---|
//! | run ranks as threads of one process, or of several (feature `mpi`) | [`Launch::threads`], [`Launch::from_env`] |
//! | choose the device of each rank | [`Launch::with_device`], [`Launch::with_devices`] |
//! | reduce a number, a metric or a plain tensor over all ranks | [`DeviceMesh::all_reduce`](crate::mesh::DeviceMesh::all_reduce) and the other collectives of a [mesh](crate::mesh) |
//! | wait for all ranks, or run something on one rank only | [`World::barrier`], [`World::run_on`] |
//! | build a model from the same random numbers on all ranks | [`World::run_seeded`] |
//! | exchange values that serde can serialize | [`Communicator::all_gather_object`], [`broadcast_object`](Communicator::broadcast_object), [`gather_object`](Communicator::gather_object), [`scatter_object`](Communicator::scatter_object) |
//! | create a group of some ranks | [`World::group`], [`World::subgroup`], [`World::subgroup_of_size`], [`World::split`] |
//! | send several tensors in one collective, or keep collectives in flight | the collectives of a [`Communicator`], each with a [`Work`] |
//! | send from one rank to another | [`Communicator::send`], [`receive`](Communicator::receive), [`send_object`](Communicator::send_object), [`receive_object`](Communicator::receive_object) |
//! | find ranks whose replicated values differ | [`Launch::with_replica_checks`] |
//! | continue after a rank has failed | [`World::shrink`] |
//! | see what was sent and who waited | [`World::ledger`], [`flight`], [spans](#measuring-waits) |
//! | connect ranks in another way | [`backend`], [`transport`] |
//!
//! # Collectives of a group
//!
//! [`World::group`] returns a [`Communicator`] for some of the ranks, and [`World::all`] one for all
//! ranks. Its collectives take a list of tensors and return a [`Work`], whose `wait` returns the
//! results. The tensors of a list may differ in element type and number of dimensions, so they are
//! passed as burn's untyped tensors: `into_dispatch` converts to them, and `from_dispatch` back. For
//! a single tensor, the collectives of a [mesh](crate::mesh) are simpler.
//!
//! ```
//! use burn::tensor::Tensor;
//! use burn_dtensor::comm::{Launch, ReduceOp, launch};
//!
//! launch(Launch::threads(2), |world| {
//!     let tensor = Tensor::<1>::full([3], world.rank() as f32 + 1.0, world.device());
//!     let work = world.all().all_reduce("sum".into(), vec![tensor.into_dispatch()], ReduceOp::Sum);
//!     let sum = Tensor::<1>::from_dispatch(work.wait()?.remove(0));
//!     assert_eq!(sum.sum().into_scalar::<f32>(), 9.0);
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! # Invariants
//!
//! 1. No collective blocks forever after a failure: it succeeds, or returns a [`CommError`] that
//!    names the rank at fault, the operation, its sequence number and the difference. A failure is
//!    joint: it ends every collective of every group of the world that is not complete. A rank that
//!    is stuck in the program's own code cannot be ended, so the [`launch`] of its process waits for
//!    it.
//! 2. Reductions add in one fixed binary tree over the group's ranks. A run is therefore bitwise
//!    repeatable, and on power-of-two groups one reduction over 4 ranks equals one over 2 x 2. NCCL
//!    and backends of other crates may add in another order: see [`Capabilities::fixed_tree`].
//! 3. Every collective of more than one rank is counted in the rank's [`Ledger`]. A
//!    [deferred](Call::with_deferred) collective is counted when the rank waits for its result.
//!
//! # Measuring waits
//!
//! [`Ledger::summary`] describes in one line what a rank has sent, how long it has waited and for
//! which rank. [`Ledger::waits`] contains the waiting times as a histogram, and [`Ledger::to_json`]
//! exports everything.
//!
//! Profilers use [`tracing`]. Each collective is a span named `collective`, with target
//! `burn_dtensor::comm` and level debug. It lasts from the time when the collective is posted until
//! its result is ready or its [`Work`] is dropped. The span is entered while the collective is
//! posted and while the rank waits for it. Without a subscriber, a collective costs one check.
//! Ranks are threads, so install the subscriber for the process:
//! `tracing::subscriber::set_global_default`.
//!
//! | field | meaning |
//! |---|---|
//! | `operation`, `label`, `phase`, `bytes` | as in the ledger |
//! | `tensors` | shapes of the full tensors and dtypes, such as `[4, 8] f32, [4] f32`; for an all-to-all of lists, the tensors sent to each rank |
//! | `group`, `ranks` | number of ranks in the group, and their global ranks |
//! | `rank`, `seq` | this rank, and the sequence number within the group |
//! | `waiting_ns`, `moving_ns`, `last` | set after the wait: waiting time, time to compute the result, and the last rank to join |
//!
//! # Architecture
//!
//! ```text
//! program of a rank
//!    │  World, Communicator      checks arguments, counts the call in the Ledger
//!    │  Call in, Work out
//!    ▼
//! backend                        interface of a backend: Backend, GroupBackend, Request
//! host_backend                   the backend of this crate: ranks as threads of one or more processes
//!    ├─ data                     copies and reductions: host memory, devices
//!    ├─ transport                bytes between processes: Transport, its messages, MPI
//!    └─ control                  who has called what: matching, agreement, failures, membership
//! observe                        one stream of events of every call: ledger, flight recorder, `tracing` spans
//! ```
//!
//! The modules [`backend`] and [`transport`] are public.

mod active_launch;
mod agree;
mod arguments;
pub mod backend;
mod call;
mod collectives;
mod communicator;
mod control;
mod data;
mod digests;
mod error;
mod group;
mod groups;
mod host_backend;
mod launch;
mod launched_ranks;
mod launcher;
mod observe;
mod panic;
mod plan;
mod rank;
mod rank_context;
mod rank_outcome;
mod rank_worlds;
mod report;
#[cfg(feature = "testing")]
mod simulated_gpus;
mod tensors;
pub mod transport;
mod work;
mod world;

pub(crate) use agree::{agree, agree_on_first, agree_on_success};
pub use backend::{Capabilities, OpTiming, ReceivedTensors, TransferTiming};
pub use burn_dtensor_flight::{CollectiveId, Op, Phase};
pub use call::{Call, ShardedModel};
pub use communicator::Communicator;
pub use data::cuda_devices;
pub use digests::{Digests, Divergence};
pub(crate) use digests::{Vote, vote};
pub use error::{CommError, ReplicatedValue};
pub use group::Group;
pub use host_backend::ProcessJob;
#[cfg(any(feature = "nccl", feature = "testing"))]
pub use launch::NcclReductions;
pub use launch::{Launch, launch};
pub use launcher::{StartError, is_first_process};
pub(crate) use observe::{CallEvent, CallInfo, CopyDirection, listen};
pub use observe::{
    CallTotals, Histogram, Ledger, LedgerEntry, LedgerKey, OffloadTraffic, PackStats, QueueDepth,
    Snapshot, Straggler, Summary, WaitBreakdown, Waits, flight,
};
pub(crate) use panic::{
    error_behind, explain_panics_by, forget_panic, note_interrupted, note_panic, panic_text,
};
pub use plan::CollectivePlan;
pub(crate) use rank_context::{is_rank, note_unwinding, rank_of_thread};
pub use report::{LaunchError, RankReport};
#[cfg(feature = "testing")]
pub use simulated_gpus::SimulatedGpus;
pub use tensors::{Factor, ReduceOp, ShardedTensor, TensorMeta};
pub use work::Work;
pub use world::World;
pub(crate) use world::in_turn;
