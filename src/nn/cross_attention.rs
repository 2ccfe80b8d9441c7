//! [`CrossAttention`]: attention with queries from one sequence, and keys and values from another.

use burn::module::Module;
use burn::nn::attention::CrossAttentionConfig;
use burn::nn::{Dropout, DropoutConfig, Initializer, Linear, LinearConfig};
use burn::tensor::{Bool, Device};

use super::DTensorForward;
use super::attention::{check_batches, join, of_keys, project};
use super::grouped::repeat_heads;
use crate::dtensor::DTensor;
use crate::dtensor::ops::activation::{quiet_softmax, softmax};

/// Attention of a query to a context of another width. Groups of query heads may share a head of
/// keys and values. The layer replaces burn-nn's
/// [`CrossAttention`](burn::nn::attention::CrossAttention), whose fields are private.
/// Configuration, parameter names and initialization are burn's, so a record of one loads into the
/// other.
///
/// With query, key and value column-sharded and the output row-sharded, each rank computes complete
/// groups of heads. The number of ranks must divide both numbers of heads.
#[derive(Module, Debug)]
pub struct CrossAttention {
    /// Projection from `d_model` to `n_heads` heads.
    pub query: Linear,
    /// Projection from `d_context` to `n_heads_kv` heads of keys.
    pub key: Linear,
    /// Projection from `d_context` to `n_heads_kv` heads of values.
    pub value: Linear,
    /// Projection from `n_heads` heads to `d_model`.
    pub output: Linear,
    /// Dropout of the attention weights.
    pub dropout: Dropout,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key and value heads.
    pub n_heads_kv: usize,
    /// Width of a head.
    pub d_head: usize,
    /// Score that replaces the scores of masked keys.
    pub min_float: f64,
    /// True if the attention weights of a query may sum to less than 1 (`quiet_softmax`).
    pub quiet_softmax: bool,
}

impl CrossAttention {
    /// Creates the layer with its parameters on `device`. Each parameter is initialized on first
    /// use.
    ///
    /// # Panics
    /// If `n_heads_kv` does not divide `n_heads`.
    pub fn new(config: &CrossAttentionConfig, device: &Device) -> Self {
        let CrossAttentionConfig {
            d_model,
            d_context,
            n_heads,
            n_heads_kv,
            d_head,
            ..
        } = *config;
        assert_eq!(
            n_heads % n_heads_kv,
            0,
            "n_heads {n_heads} must be divisible by n_heads_kv {n_heads_kv}"
        );
        let initializer = Initializer::KaimingUniform {
            gain: 1.0 / (d_head as f64).sqrt(),
            fan_out_only: false,
        };
        let linear = |d_in, d_out| {
            LinearConfig::new(d_in, d_out)
                .with_initializer(initializer.clone())
                .init(device)
        };
        Self {
            query: linear(d_model, n_heads * d_head),
            key: linear(d_context, n_heads_kv * d_head),
            value: linear(d_context, n_heads_kv * d_head),
            output: linear(n_heads * d_head, d_model),
            dropout: DropoutConfig::new(config.dropout).init(),
            n_heads,
            n_heads_kv,
            d_head,
            min_float: config.min_float,
            quiet_softmax: config.quiet_softmax,
        }
    }
}

/// Takes a query `[batch, seq_1, d_model]`, a context `[batch, seq_2, d_context]` and optionally a
/// mask `[batch, seq_2]`, which is true for context tokens to ignore. Returns `[batch, seq_1,
/// d_model]`.
impl DTensorForward<(DTensor<3>, DTensor<3>, Option<DTensor<2, Bool>>)> for CrossAttention {
    type Output = DTensor<3>;

    fn forward_dtensor(
        &self,
        (query, context, mask): (DTensor<3>, DTensor<3>, Option<DTensor<2, Bool>>),
    ) -> DTensor<3> {
        check_batches("cross-attention", &[&query, &context]);
        let groups = self.n_heads / self.n_heads_kv;
        let query = project(query, &self.query, self.n_heads);
        let key = repeat_heads(project(context.clone(), &self.key, self.n_heads_kv), groups);
        let value = repeat_heads(project(context, &self.value, self.n_heads_kv), groups);
        let scores = query
            .matmul(key.transpose())
            .div_scalar((self.d_head as f32).sqrt());
        let scores = match mask {
            Some(mask) => scores.mask_fill(of_keys(mask), self.min_float),
            None => scores,
        };
        let weights = if self.quiet_softmax {
            quiet_softmax(scores, 3)
        } else {
            softmax(scores, 3)
        };
        self.output
            .forward_dtensor(join(self.dropout.forward_dtensor(weights).matmul(value)))
    }
}
