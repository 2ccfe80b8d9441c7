//! burn-nn's transformers.
//!
//! Of the projections of attention and feed-forward, `colwise` inside and `rowwise` at the end, follow two
//! all-reduces a layer and pass; of sequence-parallel norms as many all-gathers and reduce-scatters.

mod decoder;
mod encoder;
mod feed_forward;

pub use decoder::TransformerDecoderInput;
pub use encoder::TransformerEncoderInput;
