//! Losses.
//!
//! # Cross-entropy
//!
//! If logits are sharded over classes ("loss parallel"), no rank has a complete row. The loss is
//! computed from sums over classes, for which the largest logit `m` of a row is subtracted. One
//! all-reduce sums them over the ranks:
//!
//! ```text
//!           rank 0              rank 1
//!  logits   z0 z1 z2            z3 z4 z5                target: class 4
//!  max      m = max over ranks                          all-reduce(max), outside the graph
//!  sums     e^(z0-m) + ..       e^(z3-m) + ..
//!           0                   z4 - m                  all-reduce(sum)
//!  loss     log(sum of e) - (z4 - m)                    backward sends nothing
//! ```
//!
//! A mean divides by the count (or weight) over all ranks, so uneven shards and ignored targets are
//! weighted correctly. Over sharded leading dimensions, the loss is `P(sum)`.
//!
//! # Elementwise losses
//!
//! The squared error and the binary cross-entropy are pointwise, followed by a mean or a sum. If
//! the inputs have the same sharding, the loss is `P(sum)` and nothing is sent.

mod config;
mod cross_entropy;
mod elementwise;
mod targets;

pub use config::{CrossEntropyLossConfig, Reduction};
pub use cross_entropy::{CrossEntropyLoss, cross_entropy, cross_entropy_with_logits, nll_loss};
pub use elementwise::{binary_cross_entropy_with_logits, mse_loss};
