//! [`CrossAttention`]: queries of one sequence, keys and values of another.

use burn::module::Module;
use burn::nn::attention::CrossAttentionConfig;
use burn::nn::{Dropout, DropoutConfig, Initializer, Linear, LinearConfig};
use burn::tensor::{Bool, Device};

use super::DTensorForward;
use super::attention::{join, of_keys, project};
use super::grouped::repeat_heads;
use crate::dtensor::DTensor;
use crate::dtensor::ops::activation::{quiet_softmax, softmax};

/// Attention of a query to a context of another width, whose heads of keys and values groups of query heads may
/// share: burn-nn's [`CrossAttention`](burn::nn::attention::CrossAttention), which keeps its fields to itself.
/// Configuration, parameter names and initialization are burn's, so that a record of one loads into the other.
///
/// Split by columns over query, key and value, and by rows over the output, each rank computes
/// whole groups: the ranks must divide both numbers of heads.
#[derive(Module, Debug)]
pub struct CrossAttention {
    /// `d_model` to `n_heads` heads.
    pub query: Linear,
    /// `d_context` to `n_heads_kv` heads.
    pub key: Linear,
    /// `d_context` to `n_heads_kv` heads.
    pub value: Linear,
    /// `n_heads` heads to `d_model`.
    pub output: Linear,
    /// Drops attention weights.
    pub dropout: Dropout,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_heads_kv: usize,
    /// Width of a head.
    pub d_head: usize,
    /// The score of what a mask hides.
    pub min_float: f64,
    /// Whether all weights of a query may be near zero.
    pub quiet_softmax: bool,
}

impl CrossAttention {
    /// Draws the parameters on `device`, each on its first use.
    ///
    /// # Panics
    /// If `n_heads_kv` does not divide `n_heads`.
    pub fn new(config: &CrossAttentionConfig, device: &Device) -> Self {
        let CrossAttentionConfig { d_model, d_context, n_heads, n_heads_kv, d_head, .. } = *config;
        assert_eq!(n_heads % n_heads_kv, 0, "n_heads {n_heads} must divide by n_heads_kv {n_heads_kv}");
        let initializer = Initializer::KaimingUniform { gain: 1.0 / (d_head as f64).sqrt(), fan_out_only: false };
        let linear = |d_in, d_out| LinearConfig::new(d_in, d_out).with_initializer(initializer.clone()).init(device);
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

/// A query `[batch, seq_1, d_model]`, a context `[batch, seq_2, d_context]`, and what of the context not to read,
/// `[batch, seq_2]`: to `[batch, seq_1, d_model]`.
impl DTensorForward<(DTensor<3>, DTensor<3>, Option<DTensor<2, Bool>>)> for CrossAttention {
    type Output = DTensor<3>;

    fn forward_dtensor(
        &self,
        (query, context, mask): (DTensor<3>, DTensor<3>, Option<DTensor<2, Bool>>),
    ) -> DTensor<3> {
        let groups = self.n_heads / self.n_heads_kv;
        let query = project(query, &self.query, self.n_heads);
        let key = repeat_heads(project(context.clone(), &self.key, self.n_heads_kv), groups);
        let value = repeat_heads(project(context, &self.value, self.n_heads_kv), groups);
        let scores = query.matmul(key.transpose()).div_scalar((self.d_head as f32).sqrt());
        let scores = match mask {
            Some(mask) => scores.mask_fill(of_keys(mask), self.min_float),
            None => scores,
        };
        let weights = if self.quiet_softmax { quiet_softmax(scores, 3) } else { softmax(scores, 3) };
        self.output.forward_dtensor(join(self.dropout.forward_dtensor(weights).matmul(value)))
    }
}
