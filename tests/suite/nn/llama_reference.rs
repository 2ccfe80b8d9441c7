//! The model of `examples/llama_3d` on one device, written with burn only.

use burn::prelude::*;
use burn::tensor::activation::{log_softmax, softmax};

use burn_dtensor::nn::GroupedQueryAttention;

use super::model::{Block, Llama};

/// Returns the mean cross entropy `[1]` of predicting `targets` `[batch, seq]` from `tokens`
/// `[batch, seq]`.
pub fn loss(llama: &Llama, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
    log_softmax(logits(llama, tokens), 2)
        .gather(2, targets.unsqueeze_dim(2))
        .mean()
        .neg()
}

/// Returns logits `[batch, seq, vocab]` for the token after each of `tokens` `[batch, seq]`.
pub fn logits(llama: &Llama, tokens: Tensor<2, Int>) -> Tensor<3> {
    let rotary = llama.blocks[0]
        .attention
        .rotary
        .as_ref()
        .expect("the model is built with rotary encoding");
    logits_turned(llama, tokens, &|x| rotary.forward(x))
}

/// Returns [`logits`] with `turn` as the rotary encoding of queries and keys `[batch, heads, seq,
/// width]`.
pub fn logits_turned(llama: &Llama, tokens: Tensor<2, Int>, turn: Turn<'_>) -> Tensor<3> {
    let x = llama
        .blocks
        .iter()
        .fold(llama.token.forward(tokens), |x, layer| {
            block(layer, x, turn)
        });
    llama.head.forward(llama.norm.forward(x))
}

type Turn<'a> = &'a dyn Fn(Tensor<4>) -> Tensor<4>;

fn block(block: &Block, x: Tensor<3>, turn: Turn<'_>) -> Tensor<3> {
    let x = x.clone() + attention(&block.attention, block.attention_norm.forward(x), turn);
    let h = block.gate.forward(block.mlp_norm.forward(x.clone()));
    x + block.down.forward(h)
}

fn attention(layer: &GroupedQueryAttention, x: Tensor<3>, turn: Turn<'_>) -> Tensor<3> {
    let [batch, seq, dim] = x.dims();
    let width = dim / layer.n_heads;
    let heads = |x: Tensor<3>, heads: usize| x.reshape([batch, seq, heads, width]).swap_dims(1, 2);
    let grouped = |x: Tensor<4>| {
        let groups = layer.n_heads / layer.n_heads_kv;
        x.unsqueeze_dim::<5>(2)
            .repeat_dim(2, groups)
            .reshape([batch, layer.n_heads, seq, width])
    };
    let query = turn(heads(layer.query.forward(x.clone()), layer.n_heads));
    let key = grouped(turn(heads(layer.key.forward(x.clone()), layer.n_heads_kv)));
    let value = grouped(heads(layer.value.forward(x), layer.n_heads_kv));
    let scores = query.matmul(key.transpose()) / (width as f64).sqrt();
    let future = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &scores.device()).unsqueeze();
    let weights = softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3);
    layer.output.forward(
        weights
            .matmul(value)
            .swap_dims(1, 2)
            .reshape([batch, seq, dim]),
    )
}
