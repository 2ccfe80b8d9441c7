//! Collectives between ranks.
//!
//! [`launch`] runs one program on every rank and hands it a [`World`]; [`World::group`] makes a
//! [`Communicator`] of some of the ranks; its collectives return [`Work`], to be waited for.
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
//! # What holds on every backend
//!
//! 1. No call blocks for good after a failure: it succeeds, or returns a [`CommError`] that names
//!    the rank at fault, the operation, its sequence number and what differed. A failure is joint:
//!    it ends every collective of every group of the world.
//! 2. Reductions add in one fixed binary tree over the group's ranks, so a run is bitwise
//!    repeatable, and on power-of-two groups one reduction over 4 ranks equals one over 2 x 2.
//! 3. Every collective of more than one rank is in the rank's [`Ledger`]; one [issued
//!    ahead](Call::with_deferred) from when its result is taken on.
//!
//! # Who is waited for
//!
//! [`Ledger::summary`] says in one line what a rank has sent, how long it has waited and for whom, [`Ledger::waits`]
//! in a histogram, [`Ledger::to_json`] to a program. Profilers listen through [`tracing`]: each collective is a span
//! named `collective`, of target `burn_dtensor::comm` and level debug, from when it is posted until its result is there
//! or its [`Work`] is dropped; it is entered while it is posted and while it is waited for. Where nobody listens it
//! costs a look. Ranks are threads: a subscriber is to be the process's, `tracing::subscriber::set_global_default`.
//!
//! | field | what it is |
//! |---|---|
//! | `operation`, `label`, `phase`, `bytes` | as in the ledger |
//! | `tensors` | what ranks agree on: shapes of the wholes and dtypes, such as `[4, 8] f32, [4] f32`; of an all-to-all of lists what is given to each rank |
//! | `group`, `ranks` | number of ranks in the group, and these |
//! | `rank`, `seq` | this rank, and the place among the group's collectives |
//! | `waiting_ns`, `moving_ns`, `last` | once waited for: how long, then making the result, and the rank that came last |

mod active_launch;
mod arguments;
pub mod backend;
mod call;
mod collectives;
mod communicator;
mod digests;
mod error;
pub mod flight;
mod group;
mod groups;
mod launch;
mod launcher;
mod ledger;
mod ledger_history;
mod local;
#[cfg(feature = "mpi")]
mod mpi;
mod op;
mod pack_stats;
mod panic;
mod plan;
mod process;
mod rank;
mod rank_context;
mod rank_outcome;
mod replicated;
mod report;
mod tensors;
mod timing;
mod trace;
pub mod transport;
mod turn;
mod work;
mod world;

pub use backend::ReceivedTensors;
pub use call::{Call, Phase, ShardedModel};
pub use communicator::Communicator;
pub use digests::{Digests, Divergence};
pub use error::CommError;
pub use group::Group;
pub use launch::{Launch, launch};
pub use launcher::StartError;
pub use ledger::{
    CallTotals, Histogram, Ledger, LedgerEntry, LedgerKey, OffloadTraffic, QueueDepth, Snapshot, Straggler, Summary,
    WaitBreakdown, Waits,
};
pub(crate) use ledger::{CopyDirection, listen};
pub use op::{CollectiveId, Op};
pub use pack_stats::PackStats;
pub(crate) use panic::{error_behind, explain_panics_by};
pub use plan::CollectivePlan;
pub use process::ProcessJob;
pub(crate) use rank_context::{is_rank, note_unwinding, rank_of_thread};
pub use replicated::ReplicatedValue;
pub use report::{LaunchError, RankReport};
pub use tensors::{Factor, ReduceOp, ShardedTensor, TensorMeta};
pub use timing::{OpTiming, TransferTiming};
pub(crate) use turn::in_turn;
pub use work::Work;
pub use world::World;
