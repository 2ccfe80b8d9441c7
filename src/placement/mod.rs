//! Placement arithmetic: which elements of a tensor each rank holds, and the steps that lead from
//! one layout to another. The module computes with numbers only; it uses no tensors and does not
//! communicate.
//!
//! A [`Placement`] describes, for one mesh dimension, how the ranks that differ only along it share
//! a tensor. A [`Layout`] holds one placement per mesh dimension, the shard order where several
//! mesh dimensions shard one tensor dimension, and the shard sizes where they are uneven.
//! [`ShardSizes`] determines which interval of a length each rank holds. [`plan`] returns the
//! [`Step`]s that lead from one layout to another.
//!
//! # The table of transitions
//!
//! One step changes the placement on one mesh dimension `m`. Here `k` is the size of `m`, and `n`
//! is the number of bytes that a rank holds before the step.
//!
//! | from -> to | step | sent per rank | requires |
//! |---|---|---|---|
//! | `Shard(d)` -> `Replicate` | [`AllGather`](Step::AllGather) | `n (k - 1)` | `m` is innermost for `d` |
//! | `Shard(a)` -> `Shard(b)` | [`AllToAll`](Step::AllToAll) | `n (k - 1) / k` | `m` is innermost for `a` |
//! | `Shard(d)` -> `Partial(sum)` | [`ShardToPartial`](Step::ShardToPartial) | nothing | `m` is innermost for `d` |
//! | `Replicate` -> `Shard(d)` | [`Slice`](Step::Slice) | nothing | |
//! | `Replicate` -> `Partial(sum)` | [`ReplicateToPartial`](Step::ReplicateToPartial) | nothing | |
//! | `Partial(op)` -> `Replicate` | [`AllReduce`](Step::AllReduce) | `2 n (k - 1) / k` | |
//! | `Partial(op)` -> `Shard(d)` | [`ReduceScatter`](Step::ReduceScatter) | `n (k - 1) / k` | |
//!
//! "Innermost for `d`" means that `m` is the last in the shard order of tensor dimension `d`.
//!
//! # Invariants
//!
//! 1. A shard is one contiguous interval per tensor dimension. It results from nested
//!    [`ShardSizes`], outermost mesh dimension first, each of which splits into [`chunk`]s or
//!    explicit sizes. Uneven and empty shards are allowed on any dimension.
//! 2. A step that ends in `Shard(d)` makes `m` innermost for `d`, and a step that starts there
//!    requires it to be innermost. So shardings are undone in the reverse of their order.
//! 3. A mesh dimension of size 1 never takes a step.
//! 4. All partial placements of a layout use the same operation, or only sum and avg. Their
//!    reductions commute, so a layout has one value whatever the order of the steps. Layouts with
//!    other combinations (sum with max) cannot be created.
//! 5. A plan depends only on the two layouts, so every rank computes the same plan, for every
//!    shape.
//! 6. Uneven shard sizes are one number per rank of their mesh dimension. They add up to the length
//!    that they split, which is the same on all ranks. Changing the sizes of a mesh dimension is a
//!    change of layout, by an all-gather and a slice.

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
