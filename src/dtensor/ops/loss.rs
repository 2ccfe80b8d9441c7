//! Losses.
//!
//! # Cross-entropy
//!
//! Of class-sharded logits ("loss parallel") no rank sees a whole row. With `m` the largest logit
//! of a row, its terms are sums over classes, and one all-reduce of all of them makes the loss:
//!
//! ```text
//!           rank 0              rank 1
//!  logits   z0 z1 z2            z3 z4 z5                target: class 4
//!  max      m = max over ranks                          all-reduce(max), outside the graph
//!  terms    e^(z0-m) + ..       e^(z3-m) + ..
//!           0                   z4 - m                  all-reduce(sum)
//!  loss     log(sum of e) - (z4 - m)                    backward sends nothing
//! ```
//!
//! A mean divides by what all ranks count, so uneven parts and ignored targets weigh as they
//! should: over sharded leading dimensions the loss is `P(sum)`.
//!
//! # Losses of elements
//!
//! The squared error and the binary cross-entropy are pointwise, then a mean or a sum: of inputs
//! sharded alike they are `P(sum)`, and send nothing.

mod config;
mod cross_entropy;
mod elementwise;
mod targets;

pub use config::{CrossEntropyLossConfig, Reduction};
pub use cross_entropy::{CrossEntropyLoss, cross_entropy, cross_entropy_with_logits, nll_loss};
pub use elementwise::{binary_cross_entropy_with_logits, mse_loss};
