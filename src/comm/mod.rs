//! Collectives between ranks.

mod communicator;
mod error;
mod group;
mod work;

pub use communicator::{Call, Communicator, Phase, ReduceOp, Sharded, TensorMeta};
pub use error::CommError;
pub use group::Group;
pub use work::{Pending, Work};
