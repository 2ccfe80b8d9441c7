//! Forward of burn-nn's transformers over DTensors.
//!
//! Shard the projections of attention and feed-forward `colwise` inside and `rowwise` at the end.
//! Each attention and each feed-forward then takes one all-reduce in forward and one in backward,
//! so an encoder layer takes two of each. With sequence-parallel norms, an all-gather and a
//! reduce-scatter replace each all-reduce.

mod decoder;
mod encoder;
mod feed_forward;

pub use decoder::TransformerDecoderInput;
pub use encoder::TransformerEncoderInput;
