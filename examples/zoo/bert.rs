//! BERT: an encoder that learns to predict masked characters. It consists of burn's own layers; the
//! head reuses the token embedding. It has no dropout: burn's dropout draws from a random state
//! that all ranks of a process share, so a recomputed block would draw a different mask.

use std::ops::Range;

use burn::module::{Initializer, Lora, Param, ParamGroup};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::optim::ModuleOptimizer;
use burn::prelude::*;
use burn::tensor::IndexingUpdateOp;
use burn::tensor::module::linear;
use burn_dtensor::optim::ShardedOptimizer;
use burn_dtensor::prelude::*;

use crate::data::Text;
use crate::plans;
use crate::task::{Task, mean_cross_entropy};

/// Distance between masked positions.
const MASKED: usize = 7;

/// Sizes of a [`Bert`].
#[derive(Debug, Clone, Copy)]
pub struct BertConfig {
    /// Number of rows of the token embedding. The last one is the mask token.
    pub vocab: usize,
    /// Characters per sequence.
    pub seq: usize,
    pub dim: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
}

/// Embeddings, burn's encoder, and a head that is tied to the token embedding.
#[derive(Module, Debug)]
pub struct Bert {
    token: Embedding,
    position: Embedding,
    norm: LayerNorm,
    encoder: TransformerEncoder,
    transform: Linear,
    gelu: Gelu,
    head_norm: LayerNorm,
    /// Bias of the head, `[vocab]`.
    bias: Param<Tensor<1>>,
    /// Characters per sequence.
    seq: usize,
    /// Token that replaces a masked one.
    mask: usize,
}

impl BertConfig {
    /// Returns the base model of the paper: 110 M parameters with a vocabulary of 30,522.
    pub fn base() -> Self {
        Self {
            vocab: 30_522,
            seq: 64,
            dim: 768,
            hidden: 3072,
            layers: 12,
            heads: 12,
        }
    }

    /// Returns a model that trains in seconds, for this number of characters. Lengths are odd where
    /// possible, so that shards are uneven.
    pub fn tiny(characters: usize) -> Self {
        Self {
            vocab: characters + 1,
            seq: 21,
            dim: 36,
            hidden: 75,
            layers: 3,
            heads: 4,
        }
    }

    /// Creates the model with its parameters on `device`. Each parameter is initialized on first
    /// use.
    pub fn init(&self, device: &Device) -> Bert {
        let initializer = Initializer::Normal {
            mean: 0.0,
            std: 0.02,
        };
        let table = |rows| {
            EmbeddingConfig::new(rows, self.dim)
                .with_initializer(initializer.clone())
                .init(device)
        };
        let norm = || LayerNormConfig::new(self.dim).init(device);
        Bert {
            token: table(self.vocab),
            position: table(self.seq),
            norm: norm(),
            encoder: TransformerEncoderConfig::new(self.dim, self.hidden, self.heads, self.layers)
                .with_dropout(0.0)
                .with_initializer(initializer.clone())
                .init(device),
            transform: LinearConfig::new(self.dim, self.dim).init(device),
            gelu: Gelu::new(),
            head_norm: norm(),
            bias: Initializer::Zeros.init([self.vocab], device),
            seq: self.seq,
            mask: self.vocab - 1,
        }
    }
}

impl Bert {
    /// Freezes the weights of attention and adds adapters (LoRA) to them. All other parameters
    /// remain trainable.
    pub fn adapted(self) -> Self {
        let attention = ParamGroup::from_predicates(vec!["mha.", "weight"]);
        let adapted = self.apply_lora(Lora::new(4, 8.0).set_param_group(attention.clone()));
        adapted.unfreeze_group(ParamGroup::all().exclude(attention))
    }

    /// Returns logits `[batch, seq, vocab]` of the characters of `tokens` `[batch, seq]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |bert, tokens| {
            let [_, seq] = tokens.dims();
            let positions = Tensor::arange(0..seq as i64, &tokens.device()).unsqueeze();
            let x = bert.token.forward(tokens) + bert.position.forward(positions);
            let x = bert.norm.forward(x);
            let layers = bert.encoder.layers.iter();
            let x = layers.fold(x, |x, layer| {
                checkpoint_activations(layer, x, |layer, x| layer.forward(x, None, None))
            });
            let x = bert
                .head_norm
                .forward(bert.gelu.forward(bert.transform.forward(x)));
            linear(
                x,
                bert.token.weight.val().transpose(),
                Some(bert.bias.val()),
            )
        })
    }
}

impl Task for Bert {
    type Data = Text;

    fn loss(
        &self,
        text: &Text,
        (seed, step): (u64, usize),
        rows: Range<usize>,
        device: &Device,
    ) -> Tensor<1> {
        let (tokens, _) = text.batch((seed, step), rows, self.seq, device);
        let places: Vec<i32> = (step % MASKED..self.seq)
            .step_by(MASKED)
            .map(|place| place as i32)
            .collect();
        let places = Tensor::<1, Int>::from_data(&places[..], device);
        let targets = tokens.clone().select(1, places.clone());
        let masks = targets.zeros_like().add_scalar(self.mask as i64);
        let masked = tokens.clone().select_assign(
            1,
            places.clone(),
            masks - targets.clone(),
            IndexingUpdateOp::Add,
        );
        mean_cross_entropy(self.forward(masked).select(1, places), targets)
    }

    const DIMS: &'static [&'static str] = &["replicate", "shard"];

    fn parallel(self, mesh: &DeviceMesh) -> Result<Self> {
        plans::bert(self, mesh)
    }

    fn optimizers() -> (ShardedOptimizer, ModuleOptimizer) {
        plans::adamw()
    }
}
