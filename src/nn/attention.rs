//! Forward of `MultiHeadAttention` over DTensors.
//!
//! With column-sharded projections each rank computes complete heads. Nothing is communicated until
//! the row-sharded output projection sums its partial results.

use burn::nn::Linear;
use burn::nn::attention::MultiHeadAttention;
use burn::tensor::{Bool, Shape};

use super::DTensorForward;
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::ops::activation::{quiet_softmax, softmax};
use crate::dtensor::ops::operand_error;
use crate::error::OrUnwind;
use crate::parallel::ParallelError;
use crate::param::path;
use crate::placement::Placement;

/// Input of [`MultiHeadAttention`].
#[derive(Debug, Clone)]
pub struct MhaInput {
    query: DTensor<3>,
    key: DTensor<3>,
    value: DTensor<3>,
    mask_pad: Option<DTensor<2, Bool>>,
    mask_attn: Option<DTensor<3, Bool>>,
}

/// Local: an input only holds its tensors.
impl MhaInput {
    /// Creates the input of self-attention: query, key and value are the same tensor `[batch, seq,
    /// d_model]`.
    pub fn self_attn(tensor: DTensor<3>) -> Self {
        Self::new(tensor.clone(), tensor.clone(), tensor)
    }

    /// Creates an input with query `[batch, seq_1, d_model]`, and key and value `[batch, seq_2,
    /// d_model]`.
    pub fn new(query: DTensor<3>, key: DTensor<3>, value: DTensor<3>) -> Self {
        Self {
            query,
            key,
            value,
            mask_pad: None,
            mask_attn: None,
        }
    }

    /// Sets the padding mask `[batch, seq_2]`, which is true for keys to ignore.
    #[must_use]
    pub fn mask_pad(mut self, mask: DTensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask);
        self
    }

    /// Sets the attention mask `[batch, seq_1, seq_2]`, which is true where a query must not attend
    /// to a key.
    #[must_use]
    pub fn mask_attn(mut self, mask: DTensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask);
        self
    }

    pub(super) fn with_masks(
        self,
        mask_pad: Option<DTensor<2, Bool>>,
        mask_attn: Option<DTensor<3, Bool>>,
    ) -> Self {
        Self {
            mask_pad,
            mask_attn,
            ..self
        }
    }
}

/// Output of [`MultiHeadAttention`].
#[derive(Debug, Clone)]
pub struct MhaOutput {
    /// Attention weights `[batch, heads, seq_1, seq_2]`, after dropout.
    pub weights: DTensor<4>,
    /// Output `[batch, seq_1, d_model]`.
    pub context: DTensor<3>,
}

crate::tensor_tree! {
    struct MhaInput { query, key, value, mask_pad, mask_attn }
    struct MhaOutput { weights, context }
}

impl DTensorForward<MhaInput> for MultiHeadAttention {
    type Output = MhaOutput;

    fn forward_dtensor(&self, input: MhaInput) -> MhaOutput {
        check_batches(
            "multi-head attention",
            &[&input.query, &input.key, &input.value],
        );
        let heads = |x, layer| project(x, layer, self.n_heads);
        let query = heads(input.query, &self.query);
        let key = heads(input.key, &self.key);
        let value = heads(input.value, &self.value);
        let scores = query
            .matmul(key.transpose())
            .div_scalar((self.d_k as f32).sqrt());
        let masks = [
            input.mask_pad.map(of_keys),
            input.mask_attn.map(|mask| mask.unsqueeze_dim(1)),
        ];
        let scores = masks.into_iter().flatten().fold(scores, |scores, mask| {
            scores.mask_fill(mask, self.min_float)
        });
        let weights = if self.quiet_softmax {
            quiet_softmax(scores, 3)
        } else {
            softmax(scores, 3)
        };
        let weights = self.dropout.forward_dtensor(weights);
        let context = self
            .output
            .forward_dtensor(join(weights.clone().matmul(value)));
        MhaOutput { weights, context }
    }
}

/// Unwinds with an error unless query, key and value `[batch, seq, d]` have equal batches. The
/// products of an attention would broadcast a batch of 1, which burn's layers refuse.
#[track_caller]
pub(super) fn check_batches(operator: &'static str, inputs: &[&DTensor<3>]) {
    if inputs
        .iter()
        .any(|input| input.dims()[0] != inputs[0].dims()[0])
    {
        let shapes: Vec<Shape> = inputs.iter().map(|input| input.shape()).collect();
        operand_error(
            operator,
            &shapes,
            "the batches differ. Pass a query, keys and values of equal batches",
        )
        .unwind();
    }
}

/// Applies `layer` to `x` `[batch, seq, d]` and splits the result into heads: `[batch, heads, seq,
/// d_head]`.
pub(super) fn project(x: DTensor<3>, layer: &Linear, heads: usize) -> DTensor<4> {
    let y = layer.forward_dtensor(x);
    let [batch, seq, width] = y.dims();
    check_heads(&y, layer, heads).or_unwind();
    y.reshape([batch, seq, heads, width / heads])
        .swap_dims(1, 2)
}

/// Reshapes a mask of keys `[batch, seq]` so that it broadcasts to the scores of all heads and
/// queries.
pub(super) fn of_keys(mask: DTensor<2, Bool>) -> DTensor<4, Bool> {
    let [batch, seq] = mask.dims();
    mask.reshape([batch, 1, 1, seq])
}

/// Merges the heads: `[batch, heads, seq, d_head]` to `[batch, seq, heads * d_head]`.
pub(super) fn join(x: DTensor<4>) -> DTensor<3> {
    let [batch, heads, seq, width] = x.dims();
    x.swap_dims(1, 2).reshape([batch, seq, heads * width])
}

/// Checks that ranks that shard the features of `y` hold complete heads.
fn check_heads(y: &DTensor<3>, layer: &Linear, heads: usize) -> Result<()> {
    let shardings = y
        .placements()
        .iter()
        .enumerate()
        .filter(|(_, placement)| **placement == Placement::Shard(2));
    let shardings: Vec<usize> = shardings.map(|(dim, _)| dim).collect();
    let size = shardings.iter().map(|&dim| y.mesh().size_of(dim)).product();
    let len = y.dims()[2];
    if heads.is_multiple_of(size) {
        return Ok(());
    }
    let mesh_dim = shardings
        .iter()
        .map(|&dim| &*y.mesh().names()[dim])
        .collect::<Vec<_>>()
        .join("`, `");
    Err(ParallelError::Heads {
        param: path(&layer.weight),
        heads,
        len,
        size,
        mesh_dim,
    }
    .into())
}
