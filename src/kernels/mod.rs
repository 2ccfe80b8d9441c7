//! The copies around a unit's collectives, each one operation whatever the number of tensors.
//!
//! Collectives move flat buffers; a unit has many tensors, cut along any dimension, evenly or not. Four copies lie
//! between the two, and a [`FlatLayout`] says which element goes where:
//!
//! | copy | from | to |
//! |---|---|---|
//! | all-gather copy-in | this rank's parts | its row of the flat buffer |
//! | all-gather copy-out | the rows of all ranks | the wholes |
//! | reduce-scatter copy-in | the wholes | a row for each rank |
//! | reduce-scatter copy-out | this rank's reduced row | its parts |
//!
//! Each is a list of [`CopyPlan`], which a backend runs as one pass over memory. On its way an element may be
//! [converted](Convert): cast to another dtype, scaled, or added to what is there.
//!
//! | backend | how |
//! |---|---|
//! | Flex | `flex`: runs of memory, over the rank's threads |
//! | Cube | `cube`: one kernel launch; tables of segments are made once and stay on the device |
//!
//! Where ranks can read each other's memory, as threads can, an all-gather is one of these copies alone, with no
//! flat buffer between.

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

/// What becomes of an element on its way: `cast(element * scale)`, rounded once.
///
/// Half-precision floats are widened to f32 first. Integers and booleans are neither cast nor scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Convert {
    /// The dtype of the targets.
    pub dtype: DType,
    /// 1 copies.
    pub scale: f32,
}

impl Convert {
    /// A plain copy.
    pub fn to(dtype: DType) -> Self {
        Self { dtype, scale: 1.0 }
    }
}
