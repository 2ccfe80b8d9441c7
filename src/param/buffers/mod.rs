//! Buffers: state of a model other than its float parameters, such as a batch norm's running statistics.
//!
//! burn passes a `RunningState` to visitors and mappers as a float tensor, and writes it in place. Clones of a
//! model share it, and a forward writes to it. So when the model is distributed, each rank gets a private copy with
//! the first rank's value ([`own_buffers`]). Afterwards each rank has the statistics of its own batches, until
//! [`sync_buffers`] makes them equal. Int and bool parameters also get the first rank's values. No operation
//! changes them in place.
//!
//! A buffer belongs to the nearest parameter, and uses the groups over which that parameter is distributed.
//!
//! | module | contents |
//! |---|---|
//! | `buffer_owner` | the parameter to which a buffer belongs |
//! | `unshare` | private copies of buffers |
//! | `values` | reading and writing buffers by path |
//! | `first`, `sync` | communication when a model is distributed, and when the policy is applied |

mod buffer_owner;
mod first;
mod sync;
mod unshare;
mod values;

pub(crate) use first::own_buffers;
pub use sync::{BufferSync, sync_buffers};
pub(super) use unshare::settled;
pub(crate) use unshare::unshared;
