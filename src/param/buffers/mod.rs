//! Buffers: what a model keeps beside its float parameters, such as a batch norm's running statistics.
//!
//! burn shows a `RunningState` to visitors and mappers as a float tensor, and writes it in place: clones of a
//! model share it, and a forward writes into it. So a rank makes it its own when the model is distributed,
//! with the first rank's value ([`own_buffers`]); from there on every rank's has the statistics of that rank's
//! batches, until [`sync_buffers`] makes them equal. Int and bool parameters are taken from the first rank
//! too; nothing changes them in place.
//!
//! A buffer goes with the parameter nearest to it: what distributes that one has a say in it.
//!
//! | to find | look in |
//! |---|---|
//! | what becomes of statistics that differ | `policy` |
//! | whose a buffer is | `home` |
//! | a buffer that no clone shares | `unshare` |
//! | reading and writing them by path | `values` |
//! | what distributing a model, and the policy, send | `first`, `sync` |

mod buffer_owner;
mod first;
mod policy;
mod sync;
mod unshare;
mod values;

pub(crate) use first::own_buffers;
pub use policy::BufferSync;
pub use sync::sync_buffers;
pub(super) use unshare::unshared;
