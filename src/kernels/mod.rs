//! Copies before and after a unit's collectives. Each is a single operation for any number of
//! tensors.
//!
//! Collectives transfer flat buffers, but a unit has many tensors, which are sharded along any
//! dimension, evenly or not. Four copies convert between the two, and a [`FlatLayout`] maps each
//! element to its offset in the buffer:
//!
//! ```text
//!   all-gather      shards ─ copy-in ─> row of this rank ─ collective ─> rows of all ranks ─ copy-out ─> full tensors
//!   reduce-scatter  full tensors ─ copy-in ─> one row per rank ─ collective ─> reduced row ─ copy-out ─> shards
//! ```
//!
//! | copy | from | to |
//! |---|---|---|
//! | all-gather copy-in | this rank's shards | its row of the flat buffer |
//! | all-gather copy-out | the rows of all ranks | the full tensors |
//! | reduce-scatter copy-in | the full tensors | one row per rank |
//! | reduce-scatter copy-out | this rank's reduced row | its shards |
//!
//! Each copy is a [`CopyPlan`], which a backend executes in one pass over memory. A copy changes no
//! element: mixed precision casts with burn's operations, before packing and after unpacking.
//!
//! | backend | execution |
//! |---|---|
//! | Flex | `flex`: contiguous runs of memory, divided among the rank's threads |
//! | Cube | `cube`: one kernel launch; tables of segments are made once and stay on the device |
//!
//! If ranks can read each other's memory, as threads can, an all-gather is a single such copy
//! without a flat buffer.
//!
//! 1. Every segment of a plan is inside its source and its target ([`CopyPlan::new`] checks it).
//! 2. Each element of a target is written exactly once, by one segment or as zero.

mod concat;
mod copies;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod layout;
#[cfg(test)]
mod tests;

pub(crate) use copies::{CopyPlan, StridedCopy};
pub(crate) use layout::{FlatLayout, ShardedTensorSpec};
