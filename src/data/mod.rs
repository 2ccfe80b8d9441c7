//! Rows of a dataset that each rank trains on or evaluates.
//!
//! [`DeviceMesh::data_shard`] answers which data shard the calling rank is, of how many. A
//! [`DistributedSampler`] answers which rows are in each batch of that shard. Both are local: no
//! rank communicates.
//!
//! ```text
//! 10 rows in the order of an epoch, global batches of 4 rows, two data shards:
//!
//!             batch 0    batch 1    batch 2
//! order       7 2 9 0    4 8 1 6    3 5
//!
//! shard 0     7 2        4 8        3 5        LastBatch::Drop: batches 0 and 1
//! shard 1     9 0        1 6        7 2        LastBatch::Pad: all three; the second 7 and 2 are padding
//! ```
//!
//! ```
//! use burn_dtensor::data::BatchRows;
//! use burn_dtensor::prelude::*;
//!
//! launch(Launch::threads(4), |world| {
//!     let mesh = DeviceMesh::new(world, [2, 2], ["shard", "tp"])?;
//!     let shard = mesh.data_shard("shard")?; // ranks along `tp` have the same rows
//!     assert_eq!((shard.index, shard.count), (world.rank() / 2, 2));
//!
//!     let sampler = DistributedSampler::new(10, shard).with_global_batch_size(4).with_shuffle(42);
//!     for epoch in 0..3 {
//!         for batch in sampler.epoch(epoch)? {
//!             let rows: &[usize] = batch.rows(); // 2 of the 10 rows
//! #           assert_eq!(rows.len(), 2);
//!         }
//!     }
//!     // Step 5 is the second batch of epoch 2, whether or not this run made the steps before it.
//!     let resumed: BatchRows = sampler.steps_from(5)?.next().expect("steps do not end");
//!     assert_eq!((resumed.epoch(), resumed.index()), (2, 1));
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! With the feature `dataset`, `DistributedLoader` is burn's `DataLoader` over the rows of a
//! sampler.
//!
//! # Invariants
//!
//! 1. The order of an epoch is a function of the number of rows, the seed and the epoch. It does
//!    not depend on the number of shards, on the batch size or on the platform.
//! 2. The rows of one batch on shard 0, 1, .. are, in this order, the global batch, which is the
//!    same for every number of shards that divides it. A run may therefore resume on another number
//!    of ranks.
//! 3. In every epoch each row occurs once over all shards, apart from dropped rows and padding.
//! 4. All shards have the same number of batches, and all batches the same number of rows.
//!
//! [`DeviceMesh::data_shard`]: crate::mesh::DeviceMesh::data_shard

mod batch_rows;
mod error;
#[cfg(feature = "dataset")]
mod loader;
mod sampler;
mod shuffle;
#[cfg(feature = "dataset")]
mod workers;

pub use crate::mesh::DataShard;
pub use batch_rows::{BatchRows, EpochBatches};
pub use error::DataError;
#[cfg(feature = "dataset")]
pub use loader::DistributedLoader;
pub use sampler::{DistributedSampler, LastBatch};
