//! Copies as kernels, on tensors of burn's Cube backends without fusion.
//!
//! A [`CubePlan`] runs a list of [`Copies`](super::CopyPlan) in one launch. Its targets are views of one
//! [`SharedAllocation`] of memory, so that a unit's weights come and go together.
//!
//! Work is divided by what is written: a unit of the device makes a vector of 16 bytes of the block, for which it
//! looks up, in a table on the device, which bytes of which source it is made of.
//!
//! ```text
//! sources   aaaaaaa   bbb         parts of 7 and 3 elements
//! target    aaaa aaa. bbb.        one vector from one place, or each lane looked up by itself
//! ```
//!
//! A vector whose lanes follow one another in a source, from a multiple of 16 bytes on, is one access; so is
//! almost every one where lengths are multiples of it. Where nothing is converted, a lane is a word of 4 bytes,
//! whatever the dtype: so dtypes that the device's shaders do not have are copied too, unless two runs share a
//! word. That is a [`CubeError`], as is a row of more sources than the device binds: the caller then copies with
//! burn's own operations.
//!
//! Results always go to fresh memory: another stream orders itself after what is allocated, not after later
//! writes to it.

mod bands;
mod block;
mod cache;
mod error;
#[expect(clippy::manual_div_ceil, clippy::len_zero, reason = "the language of kernels has neither")]
mod kernel;
mod lanes;
mod plan;
mod table;
#[cfg(all(test, feature = "wgpu"))]
mod tests;

pub(crate) use block::{BlockLayout, SharedAllocation, alignment, vector_lanes, vectors, view};
pub(crate) use cache::{CopySide, plan};
pub(crate) use error::CubeError;
pub(crate) use plan::CubePlan;
#[cfg(all(test, feature = "wgpu"))]
pub(crate) use plan::DeviceLimits;
