//! A decoder with a mixture of experts in each block. Every token is processed by the two experts
//! that its router prefers.

use std::ops::Range;

use burn::module::{Initializer, Param};
use burn::nn::attention::{
    MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::ModuleOptimizer;
use burn::prelude::*;
use burn::tensor::activation::{silu, softmax};
use burn_dtensor::dtensor::ops::activation;
use burn_dtensor::optim::ShardedOptimizer;
use burn_dtensor::prelude::*;

use crate::data::Text;
use crate::plans;
use crate::task::{Task, mean_cross_entropy};

/// Number of experts per token.
const CHOICES: usize = 2;
/// Weight of the loss term that balances the load of the experts.
const BALANCE: f64 = 0.01;

/// Sizes of a [`Moe`].
#[derive(Debug, Clone, Copy)]
pub struct MoeConfig {
    pub vocab: usize,
    /// Characters per sequence.
    pub seq: usize,
    pub dim: usize,
    /// Width inside an expert.
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub experts: usize,
}

/// Embeddings, blocks, a final norm and a head.
#[derive(Module, Debug)]
pub struct Moe {
    token: Embedding,
    position: Embedding,
    pub blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    /// Characters per sequence.
    seq: usize,
}

/// Causal attention, then experts, each with a norm before it and a residual connection.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: LayerNorm,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    router: Linear,
    pub experts: Experts,
}

/// Gated perceptrons of all experts, stacked.
#[derive(Module, Debug)]
pub struct Experts {
    /// Weights `[experts, dim, hidden]`, like `gate`.
    up: Param<Tensor<3>>,
    gate: Param<Tensor<3>>,
    /// Weights `[experts, hidden, dim]`.
    down: Param<Tensor<3>>,
}

impl MoeConfig {
    /// Returns a model with 8 experts in each of 8 blocks: 101 M parameters in experts, of which
    /// each token uses a quarter.
    pub fn base(vocab: usize) -> Self {
        Self {
            vocab,
            seq: 64,
            dim: 512,
            hidden: 1024,
            layers: 8,
            heads: 8,
            experts: 8,
        }
    }

    /// Returns a model that trains in seconds. Lengths are odd where possible, so that shards are
    /// uneven.
    pub fn tiny(vocab: usize) -> Self {
        Self {
            vocab,
            seq: 15,
            dim: 36,
            hidden: 45,
            layers: 2,
            heads: 4,
            experts: 4,
        }
    }

    /// Creates the model with its parameters on `device`. Each parameter is initialized on first
    /// use.
    pub fn init(&self, device: &Device) -> Moe {
        let norm = || LayerNormConfig::new(self.dim).init(device);
        let experts = |from, to| {
            Initializer::Normal {
                mean: 0.0,
                std: 0.05,
            }
            .init([self.experts, from, to], device)
        };
        let block = || Block {
            attention_norm: norm(),
            attention: MultiHeadAttentionConfig::new(self.dim, self.heads)
                .with_dropout(0.0)
                .init(device),
            norm: norm(),
            router: LinearConfig::new(self.dim, self.experts)
                .with_bias(false)
                .init(device),
            experts: Experts {
                up: experts(self.dim, self.hidden),
                gate: experts(self.dim, self.hidden),
                down: experts(self.hidden, self.dim),
            },
        };
        let table = |rows| EmbeddingConfig::new(rows, self.dim).init(device);
        Moe {
            token: table(self.vocab),
            position: table(self.seq),
            blocks: (0..self.layers).map(|_| block()).collect(),
            norm: norm(),
            head: LinearConfig::new(self.dim, self.vocab)
                .with_bias(false)
                .init(device),
            seq: self.seq,
        }
    }
}

impl Moe {
    /// Returns logits `[batch, seq, vocab]` for the character after each of `tokens` `[batch,
    /// seq]`, and the load imbalance of the experts `[1]`, which is 1 per block if the load is
    /// balanced.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> (Tensor<3>, Tensor<1>) {
        unit(self, tokens, |moe, tokens| {
            let [_, seq] = tokens.dims();
            let positions = Tensor::arange(0..seq as i64, &tokens.device()).unsqueeze();
            let x = moe.token.forward(tokens) + moe.position.forward(positions);
            let busy = Tensor::zeros([1], &x.device());
            let (x, busy) = moe.blocks.iter().fold((x, busy), |(x, sum), block| {
                let (x, busy) = checkpoint_activations(block, x, |block, x| block.forward(x));
                (x, sum + busy)
            });
            (moe.head.forward(moe.norm.forward(x)), busy)
        })
    }
}

impl Block {
    /// Runs the block on `x` `[batch, seq, dim]`. Returns a tensor of the same shape, and the load
    /// imbalance of the experts `[1]`.
    pub fn forward(&self, x: Tensor<3>) -> (Tensor<3>, Tensor<1>) {
        let [batch, seq, dim] = x.dims();
        let mask = generate_autoregressive_mask(batch, seq, &x.device());
        let input = MhaInput::self_attn(self.attention_norm.forward(x.clone())).mask_attn(mask);
        let x = x + self.attention.forward(input).context;
        let tokens = self.norm.forward(x.clone()).reshape([batch * seq, dim]);
        let route = Route::new(softmax(self.router.forward(tokens.clone()), 1));
        let computed = self.experts.forward(route.dispatch(tokens));
        (
            x + route.combine(computed).reshape([batch, seq, dim]),
            route.busy,
        )
    }
}

impl Experts {
    /// Applies each expert to its tokens `[experts, tokens, dim]`. The result has the same shape.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        if self.up.styles().is_empty() {
            let hidden = silu(x.clone().matmul(self.gate.val())) * x.matmul(self.up.val());
            return hidden.matmul(self.down.val());
        }
        self.on_mesh(x).unwrap_or_else(|error| error.unwind())
    }

    /// Like [`forward`](Self::forward), for experts sharded over several ranks. Tokens are sent to
    /// the ranks along `ep` that hold their experts, and back.
    fn on_mesh(&self, x: Tensor<3>) -> Result<Tensor<3>> {
        let up = self.up.dtensor()?;
        let gate = self.gate.dtensor()?;
        let down = self.down.dtensor()?;
        let mesh = up.mesh().clone();
        let by_token = [Placement::Shard(1), Placement::Replicate];
        let by_expert = [Placement::Shard(0), Placement::Replicate];
        let x = DTensor::from_local(x, &mesh, &by_token)?.redistribute(&by_expert)?;
        let hidden = activation::silu(x.clone().matmul(gate)) * x.matmul(up);
        Ok(hidden.matmul(down).redistribute(&by_token)?.to_local())
    }
}

/// Assignment of tokens to experts. The capacity of each expert is its average number of tokens,
/// plus a quarter. A token that exceeds the capacity is not processed by that expert.
struct Route {
    experts: usize,
    /// `[experts x capacity, tokens]`: 1 if the token has this slot.
    places: Tensor<2>,
    /// `[tokens, experts x capacity]`: weight of the slot's output in the token's result.
    shares: Tensor<2>,
    /// Load imbalance of the experts, `[1]`.
    busy: Tensor<1>,
}

impl Route {
    /// Creates the assignment from the routing probabilities `[tokens, experts]`.
    fn new(probabilities: Tensor<2>) -> Self {
        let [tokens, experts] = probabilities.dims();
        let places = (tokens * CHOICES * 5).div_ceil(experts * 4);
        let (best, chosen) = probabilities.clone().topk_with_indices(CHOICES, 1);
        let best = best.clone() / best.sum_dim(1);
        // All first choices get slots before the second ones.
        let chosen = chosen.transpose().flatten::<1>(0, 1);
        let asks: Tensor<2, Int> = chosen.clone().one_hot(experts);
        let first = asks.clone().narrow(0, 0, tokens).float().mean_dim(0);
        let busy = (first * probabilities.mean_dim(0)).sum() * experts as f64;
        let place = (asks.clone().cumsum(0) * asks)
            .sum_dim(1)
            .squeeze_dim::<1>(1)
            - 1;
        let late = place.clone().greater_equal_elem(places as i64);
        let none = (experts * places) as i64;
        let at = (chosen * places as i64 + place).mask_fill(late, none);
        let at: Tensor<2, Int> = at.one_hot(experts * places + 1);
        let at = at
            .slice([0..CHOICES * tokens, 0..experts * places])
            .float()
            .reshape([CHOICES, tokens, experts * places]);
        let shares = at.clone() * best.transpose().unsqueeze_dim(2);
        let over_choices = |x: Tensor<3>| x.sum_dim(0).squeeze_dim::<2>(0);
        Self {
            experts,
            places: over_choices(at).transpose(),
            shares: over_choices(shares),
            busy,
        }
    }

    /// Returns the tokens of each expert, `[experts, capacity, dim]`, from `[tokens, dim]`. Free
    /// slots are zero.
    fn dispatch(&self, tokens: Tensor<2>) -> Tensor<3> {
        let [places, dim] = [self.places.dims()[0], tokens.dims()[1]];
        self.places
            .clone()
            .matmul(tokens)
            .reshape([self.experts, places / self.experts, dim])
    }

    /// Returns the weighted sum of the experts' outputs for each token: from `[experts, capacity,
    /// dim]` to `[tokens, dim]`.
    fn combine(&self, computed: Tensor<3>) -> Tensor<2> {
        self.shares.clone().matmul(computed.flatten(0, 1))
    }
}

impl Task for Moe {
    type Data = Text;

    fn loss(
        &self,
        text: &Text,
        (seed, step): (u64, usize),
        rows: Range<usize>,
        device: &Device,
    ) -> Tensor<1> {
        let (tokens, targets) = text.batch((seed, step), rows, self.seq, device);
        let (logits, busy) = self.forward(tokens);
        mean_cross_entropy(logits, targets) + busy * BALANCE
    }

    const DIMS: &'static [&'static str] = &["shard", "ep", "tp"];

    fn parallel(self, mesh: &DeviceMesh) -> Result<Self> {
        plans::moe(self, mesh)
    }

    fn optimizers() -> (ShardedOptimizer, ModuleOptimizer) {
        plans::muon()
    }
}
