//! What a rank holds: placements, shard order, how lengths are cut, and the planner. Pure: numbers
//! in, numbers out; no tensors, no communication.
//!
//! A [`Placement`] says, for one mesh dimension, how ranks that differ only along it share a
//! tensor. A [`Layout`] holds one placement per mesh dimension, the order of the cuts where
//! several mesh dimensions shard one tensor dimension, and the lengths of cuts that are ragged. A
//! [`ShardSizes`] says which interval of a length each rank holds. [`plan`] lists the [`Step`]s that lead
//! from one layout to another.
//!
//! # The table of transitions
//!
//! One step changes the placement on one mesh dimension `m`; `k` is the size of `m` and `n` the
//! bytes a rank holds before the step.
//!
//! | from -> to | step | sent per rank | needs |
//! |---|---|---|---|
//! | `Shard(d)` -> `Replicate` | [`AllGather`](Step::AllGather) | `n (k - 1)` | `m` is the innermost cut of `d` |
//! | `Shard(a)` -> `Shard(b)` | [`AllToAll`](Step::AllToAll) | `n (k - 1) / k` | `m` is the innermost cut of `a` |
//! | `Shard(d)` -> `Partial(sum)` | [`ShardToPartial`](Step::ShardToPartial) | nothing | `m` is the innermost cut of `d` |
//! | `Replicate` -> `Shard(d)` | [`Slice`](Step::Slice) | nothing | |
//! | `Replicate` -> `Partial(sum)` | [`ReplicateToPartial`](Step::ReplicateToPartial) | nothing | |
//! | `Partial(op)` -> `Replicate` | [`AllReduce`](Step::AllReduce) | `2 n (k - 1) / k` | |
//! | `Partial(op)` -> `Shard(d)` | [`ReduceScatter`](Step::ReduceScatter) | `n (k - 1) / k` | |
//!
//! # Invariants
//!
//! 1. A shard is one contiguous interval per tensor dimension: nested [`ShardSizes`]s, outermost cut
//!    first, into [`chunk`]s or given lengths, with uneven and empty shards on any dimension.
//! 2. A step that ends in `Shard(d)` makes `m` the innermost cut of `d`; one that starts there
//!    finds it innermost. So cuts are undone in the reverse of their order.
//! 3. A mesh dimension of size 1 never takes a step.
//! 4. The partial placements of one layout use one operation, or sum and avg together: their
//!    reductions commute, so a layout has one value whatever the order of the steps. Layouts that
//!    would mix others (sum with max) do not exist.
//! 5. A plan depends on the two layouts alone: every rank finds the same one, for every shape.
//! 6. A ragged cut has one length per rank of its mesh dimension; they add up to the length that it
//!    cuts, which is the same on all ranks. Cuts of the same mesh dimension into other lengths are
//!    other cuts: from one to another leads an all-gather and a slice.

mod balanced;
mod blocks;
mod chunk;
mod comm_volume;
mod error;
mod fused_step;
mod kind;
mod layout;
#[cfg(test)]
mod matrix;
mod parse;
mod plan;
mod shard_sizes;
mod shards;
#[cfg(test)]
mod simulation;
mod step;
mod strided;
#[cfg(test)]
mod tests;
mod unstride;

pub(crate) use balanced::{TensorRows, balanced};
pub(crate) use blocks::{TensorBlock, blocks};
pub use chunk::chunk;
pub(crate) use comm_volume::{CommVolume, sent_backward, sent_forward};
pub use error::PlacementError;
pub(crate) use fused_step::{FusedStep, fused_steps};
pub use kind::{PartialOp, Placement, Placements};
pub use layout::Layout;
pub use plan::plan;
pub(crate) use plan::plan_input;
pub use shard_sizes::ShardSizes;
pub use step::Step;
pub use strided::{StridedLayout, StridedPlacement};
