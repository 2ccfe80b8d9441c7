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
//!    ahead](Call::ahead) from when its result is taken on.

mod arguments;
mod call;
mod collectives;
mod communicator;
mod copied;
mod end;
pub mod engine;
mod error;
mod group;
mod groups;
mod home;
mod launch;
mod ledger;
mod local;
mod op;
mod rank;
mod report;
mod tensors;
mod turn;
mod work;
mod world;

pub use call::{Call, Phase};
pub use communicator::Communicator;
pub use copied::Copied;
pub use engine::Message;
pub use error::CommError;
pub use group::Group;
pub(crate) use home::{is_rank, note_unwinding, rank_of_thread};
pub use launch::{Launch, launch};
pub(crate) use ledger::listen;
pub use ledger::{Entry, Key, Ledger, Snapshot, Spent, Total};
pub use op::{CollectiveId, Op};
pub use report::{LaunchError, RankReport};
pub use tensors::{Factor, ReduceOp, Sharded, TensorMeta};
pub(crate) use turn::in_turn;
pub use work::Work;
pub use world::World;
