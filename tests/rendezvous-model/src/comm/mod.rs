#[path = "../../../../src/comm/digests.rs"]
mod digests;
pub(crate) mod engine;
#[path = "../../../../src/comm/error.rs"]
mod error;
pub(crate) mod local;
#[path = "../../../../src/comm/op.rs"]
mod op;

pub use digests::{Divergence, Replicated};
pub use error::CommError;
pub use op::{CollectiveId, Op};
