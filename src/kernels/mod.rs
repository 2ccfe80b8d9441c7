//! Copies before and after a unit's collectives. Each is a single operation for any number of tensors.
//!
//! Collectives transfer flat buffers, but a unit has many tensors, which are sharded along any dimension, evenly or
//! not. Four copies convert between the two, and a [`FlatLayout`] maps each element to its offset in the buffer:
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
//! Each copy is a [`CopyPlan`], which a backend executes in one pass over memory. During a copy, an element may be
//! [converted](Convert): cast to another dtype, scaled, or added to the previous value of the target.
//!
//! | backend | execution |
//! |---|---|
//! | Flex | `flex`: contiguous runs of memory, divided among the rank's threads |
//! | Cube | `cube`: one kernel launch; tables of segments are made once and stay on the device |
//!
//! If ranks can read each other's memory, as threads can, an all-gather is a single such copy without a flat
//! buffer.
//!
//! 1. Every segment of a plan is inside its source and its target ([`CopyPlan::new`] checks it).
//! 2. Each element of a target is written exactly once, by one segment or as zero.
//! 3. A conversion rounds once.

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

use burn::tensor::DType;

/// Conversion of an element during a copy: `cast(element * scale)`, rounded once.
///
/// Half-precision floats are first widened to f32. Integers and booleans are neither cast nor scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Convert {
    /// Dtype of the targets.
    pub dtype: DType,
    /// Factor by which each value is multiplied; 1 leaves it unchanged.
    pub scale: f32,
}

impl Convert {
    /// Returns a plain copy.
    pub fn to(dtype: DType) -> Self {
        Self { dtype, scale: 1.0 }
    }
}
