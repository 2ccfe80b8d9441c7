//! [`GroupedQueryAttention`]: attention with fewer key and value heads than query heads.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RotaryEncoding};
use burn::tensor::Device;
use burn::tensor::ops::AttentionModuleOptions;

use super::DTensorForward;
use super::attention::{join, project};
use crate::dtensor::DTensor;
use crate::dtensor::ops::module::attention;

/// Configuration of [`GroupedQueryAttention`].
#[derive(Config, Debug)]
pub struct GroupedQueryAttentionConfig {
    /// Width of the input and output.
    pub d_model: usize,
    /// Number of query heads; divides `d_model`.
    pub n_heads: usize,
    /// Number of key and value heads; divides `n_heads`.
    pub n_heads_kv: usize,
    /// True if the projections have a bias.
    #[config(default = false)]
    pub bias: bool,
    /// True if a token attends only to itself and to earlier tokens.
    #[config(default = true)]
    pub causal: bool,
}

/// Self-attention in which groups of query heads share one head of keys and values
/// (Ainslie et al., *GQA*, 2023), with optional rotary encoding.
///
/// With query, key and value column-sharded and the output row-sharded, each rank computes complete
/// groups of heads. The number of ranks must divide both numbers of heads.
///
/// Built with [`GroupedQueryAttentionConfig`].
#[derive(Module, Debug)]
pub struct GroupedQueryAttention {
    /// Projection from `d_model` to `n_heads` heads.
    pub query: Linear,
    /// Projection from `d_model` to `n_heads_kv` heads of keys.
    pub key: Linear,
    /// Projection from `d_model` to `n_heads_kv` heads of values.
    pub value: Linear,
    /// Projection from `n_heads` heads to `d_model`.
    pub output: Linear,
    /// Rotary encoding of queries and keys by their position in the sequence.
    pub rotary: Option<RotaryEncoding>,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of key and value heads.
    pub n_heads_kv: usize,
    /// True if a token attends only to itself and to earlier tokens.
    pub causal: bool,
}

impl GroupedQueryAttentionConfig {
    /// Creates the layer with its parameters on `device`. Each parameter is initialized on first
    /// use.
    ///
    /// # Panics
    /// If `n_heads` does not divide `d_model`, or `n_heads_kv` does not divide `n_heads`.
    pub fn init(&self, device: &Device) -> GroupedQueryAttention {
        let Self {
            d_model,
            n_heads,
            n_heads_kv,
            bias,
            causal,
        } = *self;
        assert_eq!(
            d_model % n_heads,
            0,
            "n_heads {n_heads} must divide d_model {d_model}"
        );
        assert_eq!(
            n_heads % n_heads_kv,
            0,
            "n_heads_kv {n_heads_kv} must divide n_heads {n_heads}"
        );
        let d_kv = d_model / n_heads * n_heads_kv;
        let linear = |d_output| {
            LinearConfig::new(d_model, d_output)
                .with_bias(bias)
                .init(device)
        };
        GroupedQueryAttention {
            query: linear(d_model),
            key: linear(d_kv),
            value: linear(d_kv),
            output: linear(d_model),
            rotary: None,
            n_heads,
            n_heads_kv,
            causal,
        }
    }
}

impl GroupedQueryAttention {
    /// Adds a rotary encoding of queries and keys. The `d_model` of `rotary` must be the width of
    /// one head.
    #[must_use]
    pub fn with_rotary(mut self, rotary: RotaryEncoding) -> Self {
        self.rotary = Some(rotary);
        self
    }
}

impl DTensorForward<DTensor<3>> for GroupedQueryAttention {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, x: DTensor<3>) -> DTensor<3> {
        let turn = |x: DTensor<4>| match &self.rotary {
            Some(rotary) => rotary.forward_dtensor(x),
            None => x,
        };
        let groups = self.n_heads / self.n_heads_kv;
        let query = turn(project(x.clone(), &self.query, self.n_heads));
        let key = repeat_heads(turn(project(x.clone(), &self.key, self.n_heads_kv)), groups);
        let value = repeat_heads(project(x, &self.value, self.n_heads_kv), groups);
        let options = AttentionModuleOptions {
            is_causal: self.causal,
            ..Default::default()
        };
        self.output
            .forward_dtensor(join(attention(query, key, value, None, None, options)))
    }
}

/// Repeats each head of `[batch, heads, seq, d_head]` `times` times consecutively.
pub(super) fn repeat_heads(x: DTensor<4>, times: usize) -> DTensor<4> {
    if times == 1 {
        return x;
    }
    let [batch, heads, seq, width] = x.dims();
    let repeated = x
        .unsqueeze_dim::<5>(2)
        .expand([batch, heads, times, seq, width]);
    repeated.reshape([batch, heads * times, seq, width])
}
