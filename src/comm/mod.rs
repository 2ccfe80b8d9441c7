//! Collectives between ranks.

mod communicator;
mod error;
mod group;
mod launch;
mod ledger;
mod local;
mod op;
mod work;
mod world;

pub use communicator::{Call, Communicator, Phase, ReduceOp, Sharded, TensorMeta};
pub use error::CommError;
pub use group::Group;
pub use launch::{Launch, LaunchError, RankReport, launch};
pub use ledger::{Entry, Key, Ledger, Snapshot, Total};
pub use op::{CollectiveId, Op};
pub use work::{Pending, Work};
pub use world::World;
