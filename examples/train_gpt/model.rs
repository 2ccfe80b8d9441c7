//! A decoder-only transformer as an ordinary burn module. It does not depend on the mesh. The only
//! addition to a single-device model is `unit(..)` around the root and around each block.

use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::prelude::*;
use burn::tensor::activation::{log_softmax, softmax};
use burn_dtensor::prelude::*;

/// Sizes of a [`Gpt`].
#[derive(Debug, Clone, Copy)]
pub struct GptConfig {
    /// Number of distinct tokens.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub seq: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads per block; divides `dim`.
    pub heads: usize,
}

/// Token and position embeddings, blocks, a final norm and an untied head.
#[derive(Module, Debug)]
pub struct Gpt {
    token: Embedding,
    position: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    /// True if blocks keep only their inputs, and recompute the rest in backward.
    pub checkpoint: bool,
}

/// Causal multi-head attention, then a multilayer perceptron, each with a norm before it and a
/// residual connection.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    mlp_norm: LayerNorm,
    up: Linear,
    gelu: Gelu,
    down: Linear,
    heads: usize,
}

impl GptConfig {
    /// Creates the model with its parameters on `device`. Each parameter is initialized on first
    /// use.
    pub fn init(&self, device: &Device) -> Gpt {
        let embedding = |rows| {
            EmbeddingConfig::new(rows, self.dim)
                .with_initializer(Initializer::Normal {
                    mean: 0.0,
                    std: 0.02,
                })
                .init(device)
        };
        Gpt {
            token: embedding(self.vocab),
            position: embedding(self.seq),
            blocks: (0..self.layers).map(|_| self.block(device)).collect(),
            norm: LayerNormConfig::new(self.dim).init(device),
            head: LinearConfig::new(self.dim, self.vocab)
                .with_bias(false)
                .init(device),
            checkpoint: false,
        }
    }

    fn block(&self, device: &Device) -> Block {
        let norm = || LayerNormConfig::new(self.dim).init(device);
        let square = || {
            LinearConfig::new(self.dim, self.dim)
                .with_bias(false)
                .init(device)
        };
        Block {
            attention_norm: norm(),
            query: square(),
            key: square(),
            value: square(),
            output: square(),
            mlp_norm: norm(),
            up: LinearConfig::new(self.dim, 4 * self.dim).init(device),
            gelu: Gelu::new(),
            down: LinearConfig::new(4 * self.dim, self.dim).init(device),
            heads: self.heads,
        }
    }
}

impl Gpt {
    /// Returns the blocks. Each is an FSDP unit if the model is sharded with units `blocks.*`.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns logits `[batch, seq, vocab]` for the token after each of `tokens` `[batch, seq]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.forward_after(tokens, |_| ())
    }

    /// Runs [`forward`](Self::forward) and calls `before` before each block, for example for a
    /// profile or a delay.
    pub fn forward_after(&self, tokens: Tensor<2, Int>, before: impl Fn(usize)) -> Tensor<3> {
        // The root unit: embeddings, final norm and head share one all-gather.
        unit(self, tokens, |gpt, tokens| {
            let [_, seq] = tokens.dims();
            let positions = Tensor::arange(0..seq as i64, &tokens.device()).unsqueeze();
            let mut x = gpt.token.forward(tokens) + gpt.position.forward(positions);
            for (at, block) in gpt.blocks.iter().enumerate() {
                before(at);
                x = match gpt.checkpoint {
                    true => checkpoint_activations(block, x, Block::forward),
                    false => unit(block, x, Block::forward),
                };
            }
            rows(&gpt.head, gpt.norm.forward(x))
        })
    }

    /// Returns the mean cross entropy `[1]` of predicting `targets` `[batch, seq]` from `tokens`
    /// `[batch, seq]`.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        mean_cross_entropy(self.forward(tokens), targets)
    }
}

impl Block {
    /// Runs the block on `x` `[batch, seq, dim]`. The result has the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = x.clone() + self.attend(self.attention_norm.forward(x));
        let h = self
            .gelu
            .forward(rows(&self.up, self.mlp_norm.forward(x.clone())));
        x + rows(&self.down, h)
    }

    fn attend(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, dim] = x.dims();
        let head_dim = dim / self.heads;
        // [batch, seq, dim] -> [batch, heads, seq, head_dim]
        let split = |t: Tensor<3>| {
            t.reshape([batch, seq, self.heads, head_dim])
                .swap_dims(1, 2)
        };
        let query = split(rows(&self.query, x.clone()) / (head_dim as f64).sqrt());
        let key = split(rows(&self.key, x.clone()));
        let value = split(rows(&self.value, x));
        let future = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &query.device()).unsqueeze();
        let scores = query
            .matmul(key.transpose())
            .mask_fill(future, f32::NEG_INFINITY);
        let weights = softmax(scores, 3);
        let mixed = weights
            .matmul(value)
            .swap_dims(1, 2)
            .reshape([batch, seq, dim]);
        rows(&self.output, mixed)
    }
}

/// Returns the mean cross entropy of logits `[batch, seq, vocab]` and targets `[batch, seq]`.
pub fn mean_cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<1> {
    log_softmax(logits, 2)
        .gather(2, targets.unsqueeze_dim(2))
        .mean()
        .neg()
}

/// Applies `layer` to `x` `[batch, seq, d_input]` as one matrix of `batch * seq` rows.
///
/// burn multiplies a batch of matrices by a `Linear` one after the other, with a view of the weight
/// for each. One multiplication of all rows is faster, and the graph keeps no views.
fn rows(layer: &Linear, x: Tensor<3>) -> Tensor<3> {
    let [batch, seq, _] = x.dims();
    let y = layer.forward(x.flatten::<2>(0, 1));
    let [_, width] = y.dims();
    y.reshape([batch, seq, width])
}
