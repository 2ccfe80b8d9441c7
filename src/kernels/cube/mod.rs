//! Copies as kernels, for tensors of burn's Cube backends without fusion.
//!
//! A [`CubePlan`] executes a [`CopyPlan`](super::CopyPlan) in one launch. Its targets are views of
//! one [`SharedAllocation`], so that a unit's weights are evicted and restored together.
//!
//! Work is divided by target: a unit of the device writes a vector of 16 bytes of the allocation.
//! It looks up, in a table on the device, which bytes of which source the vector consists of.
//!
//! ```text
//! sources   aaaaaaa   bbb         shards of 7 and 3 elements
//! target    aaaa aaa. bbb.        a vector is one access, or each lane is looked up separately
//! ```
//!
//! If the lanes of a vector are adjacent in a source and start at a multiple of 16 bytes, the
//! vector is one access. Nearly all vectors are if shard sizes are multiples of 16 bytes. A lane
//! has 4 bytes whatever the dtype, so dtypes that the device's shaders do not support are copied
//! too, unless two runs share 4 such bytes. That case is a [`CubeError`], and so is a row with more
//! sources than the device can bind: the caller then copies with burn's own operations.
//!
//! Results are always in new memory: another stream orders itself after allocations, but not after
//! later writes to existing memory.

mod bands;
mod block;
mod cache;
mod error;
#[expect(
    clippy::manual_div_ceil,
    reason = "the kernel language has no `div_ceil`"
)]
mod kernel;
mod plan;
#[expect(
    clippy::manual_div_ceil,
    reason = "the kernel language has no `div_ceil`"
)]
mod step_kernel;
mod steps;
mod table;
#[cfg(all(test, feature = "cube"))]
mod tests;
mod tuning;

pub(crate) use block::{BlockLayout, SharedAllocation, alignment, vector_lanes, vectors, view};
pub(crate) use cache::{CopySide, plan};
pub(crate) use error::CubeError;
pub(crate) use plan::CubePlan;
#[cfg(all(test, feature = "cube"))]
pub(crate) use plan::DeviceLimits;
pub(crate) use step_kernel::{MOST_ELEMENTS, StepFormula};
pub(crate) use steps::{StepScalars, SteppedTensors, step_list};
