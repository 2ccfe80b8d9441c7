//! A Llama-style decoder over DTensors, made of burn-nn's own layers. It contains no communication:
//! what is sent follows from the placements of the parameters, which the plan determines.

use burn::module::Module;
use burn::nn::RotaryEncodingConfig;
use burn::nn::activation::{SwiGlu, SwiGluConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
};
use burn::tensor::{Device, Int};
use burn_dtensor::prelude::*;

/// Sizes of a [`Llama`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LlamaConfig {
    /// Number of distinct tokens.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub seq: usize,
    /// Width of the residual stream.
    pub dim: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads per block; divides `dim`.
    pub heads: usize,
    /// Key and value heads per block; divides `heads`.
    pub kv_heads: usize,
    /// Width inside the multilayer perceptron.
    pub hidden: usize,
    /// Added to the mean square in norms.
    pub norm_epsilon: f64,
    /// Base of the rotary encoding's wavelengths.
    pub rope_theta: f32,
}

/// Token embedding, blocks, a final norm and an untied head.
#[derive(Module, Debug)]
pub struct Llama {
    pub token: Embedding,
    pub blocks: Vec<Block>,
    pub norm: RmsNorm,
    pub head: Linear,
}

/// Grouped-query attention, then a gated multilayer perceptron, each with a norm before it and a
/// residual connection.
#[derive(Module, Debug)]
pub struct Block {
    pub attention_norm: RmsNorm,
    pub attention: GroupedQueryAttention,
    pub mlp_norm: RmsNorm,
    pub gate: SwiGlu,
    pub down: Linear,
}

impl LlamaConfig {
    /// Creates the model with its parameters on `device`. Each parameter is initialized on first
    /// use.
    pub fn init(&self, device: &Device) -> Llama {
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        Llama {
            token: EmbeddingConfig::new(self.vocab, self.dim)
                .with_initializer(normal)
                .init(device),
            blocks: (0..self.layers).map(|_| self.block(device)).collect(),
            norm: self.norm(device),
            head: linear(self.dim, self.vocab, device),
        }
    }

    fn block(&self, device: &Device) -> Block {
        let width = self.dim / self.heads;
        let rotary = RotaryEncodingConfig::new(self.seq, width).with_theta(self.rope_theta);
        Block {
            attention_norm: self.norm(device),
            attention: GroupedQueryAttentionConfig::new(self.dim, self.heads, self.kv_heads)
                .init(device)
                .with_rotary(rotary.init(device)),
            mlp_norm: self.norm(device),
            gate: SwiGluConfig::new(self.dim, self.hidden).init(device),
            down: linear(self.hidden, self.dim, device),
        }
    }

    fn norm(&self, device: &Device) -> RmsNorm {
        RmsNormConfig::new(self.dim)
            .with_epsilon(self.norm_epsilon)
            .init(device)
    }
}

fn linear(input: usize, output: usize, device: &Device) -> Linear {
    LinearConfig::new(input, output)
        .with_bias(false)
        .init(device)
}

impl Llama {
    /// Returns logits `[batch, seq, vocab]` for the token after each of `tokens` `[batch, seq]`.
    pub fn forward(&self, tokens: DTensor<2, Int>) -> DTensor<3> {
        unit(self, tokens, |llama, tokens| {
            let mut x = llama.token.forward_dtensor(tokens);
            for block in &llama.blocks {
                x = unit(block, x, |block, x| block.forward(x));
            }
            llama.head.forward_dtensor(llama.norm.forward_dtensor(x))
        })
    }

    /// Returns the mean cross entropy `[1]` of predicting `targets` `[batch, seq]` from `tokens`
    /// `[batch, seq]`.
    pub fn loss(&self, tokens: DTensor<2, Int>, targets: DTensor<2, Int>) -> DTensor<1> {
        loss::cross_entropy(self.forward(tokens), targets)
    }
}

impl Block {
    /// Runs the block on `x` `[batch, seq, dim]`. The result has the same shape.
    pub fn forward(&self, x: DTensor<3>) -> DTensor<3> {
        let x = x.clone()
            + self
                .attention
                .forward_dtensor(self.attention_norm.forward_dtensor(x));
        let h = self
            .gate
            .forward_dtensor(self.mlp_norm.forward_dtensor(x.clone()));
        x + self.down.forward_dtensor(h)
    }
}
