pub(crate) mod backend;
pub(crate) mod control;
#[path = "../../../../src/comm/digests.rs"]
mod digests;
#[path = "../../../../src/comm/error.rs"]
mod error;

pub use burn_dtensor_flight::{CollectiveId, Op};
#[cfg(test)]
pub use digests::Digests;
pub use digests::Divergence;
pub use error::{CommError, ReplicatedValue};
