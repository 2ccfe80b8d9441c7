//! Weights of a Llama in Hugging Face's layout. Each rank reads its shards straight from the files.
//!
//! ```text
//! here                                     in the files
//! token.weight                             model.embed_tokens.weight
//! blocks.N.attention_norm.gamma            model.layers.N.input_layernorm.weight
//! blocks.N.attention.query.weight    T R   model.layers.N.self_attn.q_proj.weight
//! blocks.N.attention.key.weight      T R   model.layers.N.self_attn.k_proj.weight
//! blocks.N.attention.value.weight    T     model.layers.N.self_attn.v_proj.weight
//! blocks.N.attention.output.weight   T     model.layers.N.self_attn.o_proj.weight
//! blocks.N.mlp_norm.gamma                  model.layers.N.post_attention_layernorm.weight
//! blocks.N.gate.linear_inner.weight  T     model.layers.N.mlp.gate_proj.weight
//! blocks.N.gate.linear_outer.weight  T     model.layers.N.mlp.up_proj.weight
//! blocks.N.down.weight               T     model.layers.N.mlp.down_proj.weight
//! norm.gamma                               model.norm.weight
//! head.weight                        T     lm_head.weight, or the embedding if they are tied
//! ```
//!
//! T: PyTorch's `Linear` stores `[out, in]`, burn's `[in, out]`. R: rotary encoding turns pairs of
//! a head's elements. They are `(i, i + width / 2)` there (`rotate_half`) and `(2 i, 2 i + 1)` in
//! burn. So once they are loaded, the columns of these weights are [reordered](Interleave), which
//! is local: ranks hold complete heads. Queries and keys get the same order, so their products stay
//! the same.

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use burn_dtensor::checkpoint::{
    KeyReport, ReadOptions, ReadStats, SafetensorsWeights, WeightSource,
};
use burn_dtensor::prelude::*;
use serde::Deserialize;

use super::model::{Llama, LlamaConfig};

/// A folder with a Llama in Hugging Face's layout: `config.json`, and one or several safetensors
/// files.
#[derive(Debug, Clone)]
pub struct Weights {
    pub folder: PathBuf,
    /// Sizes of the model, from `config.json`.
    pub config: LlamaConfig,
    /// True if the head has the embedding's values. The model's head is a parameter of its own that
    /// starts from them.
    is_tied: bool,
}

/// The fields of `config.json` that decide about the model, with transformers' defaults.
#[derive(Deserialize)]
struct ConfigFile {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "rms_norm_eps")]
    rms_norm_eps: f64,
    rope_theta: Option<f32>,
    rope_scaling: Option<Rope>,
    rope_parameters: Option<Rope>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    hidden_act: Option<String>,
}

#[derive(Deserialize)]
struct Rope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f32>,
}

fn rms_norm_eps() -> f64 {
    1e-6
}

impl Weights {
    /// Reads `config.json` of the folder, for sequences of at most `seq` tokens.
    ///
    /// # Errors
    /// A message about a file that cannot be read, or about a model that this one cannot be.
    pub fn open(folder: &Path, seq: usize) -> Result<Self, String> {
        let path = folder.join("config.json");
        let text = fs::read_to_string(&path)
            .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let file: ConfigFile =
            serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let refused = file.refused();
        if !refused.is_empty() {
            return Err(format!(
                "{}: this example has no {}",
                path.display(),
                refused.join(", ")
            ));
        }
        let theta = file
            .rope_parameters
            .and_then(|rope| rope.rope_theta)
            .or(file.rope_theta);
        let config = LlamaConfig {
            vocab: file.vocab_size,
            seq,
            dim: file.hidden_size,
            layers: file.num_hidden_layers,
            heads: file.num_attention_heads,
            kv_heads: file.num_key_value_heads.unwrap_or(file.num_attention_heads),
            hidden: file.intermediate_size,
            norm_epsilon: file.rms_norm_eps,
            rope_theta: theta.unwrap_or(10_000.0),
        };
        Ok(Self {
            folder: folder.into(),
            config,
            is_tied: file.tie_word_embeddings,
        })
    }

    /// Loads a model, as it is distributed. Each rank uses at most `memory` bytes next to its
    /// shards. Also returns the tensors of the files that were not used, and what this rank read.
    ///
    /// # Collective
    /// Every rank of `mesh`, of which the model's meshes are slices.
    pub fn load(
        &self,
        model: Llama,
        mesh: &DeviceMesh,
        memory: usize,
    ) -> Result<(Llama, Vec<String>, ReadStats)> {
        let options = ReadOptions::new().with_memory(memory);
        let files = SafetensorsWeights::open(&self.folder, mesh)?.with_read_options(options);
        let (model, report) = files.load_model(model, |path| self.source(path))?;
        let KeyReport {
            skipped,
            unexpected,
            ..
        } = report;
        assert!(
            skipped.is_empty(),
            "the table has every parameter, also {skipped:?}"
        );
        let width = self.config.dim / self.config.heads;
        Ok((
            model.map(&mut Interleave {
                width,
                path: Vec::new(),
            }),
            unexpected,
            files.read_stats(),
        ))
    }

    /// Returns the place of a parameter's values.
    fn source(&self, path: &str) -> Option<WeightSource> {
        let path: Vec<&str> = path.split('.').collect();
        let (key, is_linear) = match path[..] {
            ["token", _] => ("model.embed_tokens.weight".into(), false),
            ["norm", _] => ("model.norm.weight".into(), false),
            ["head", _] if self.is_tied => ("model.embed_tokens.weight".into(), true),
            ["head", _] => ("lm_head.weight".into(), true),
            ["blocks", block, ref layer @ .., _] => {
                let (layer, is_linear) = match layer {
                    ["attention_norm"] => ("input_layernorm", false),
                    ["attention", "query"] => ("self_attn.q_proj", true),
                    ["attention", "key"] => ("self_attn.k_proj", true),
                    ["attention", "value"] => ("self_attn.v_proj", true),
                    ["attention", "output"] => ("self_attn.o_proj", true),
                    ["mlp_norm"] => ("post_attention_layernorm", false),
                    ["gate", "linear_inner"] => ("mlp.gate_proj", true),
                    ["gate", "linear_outer"] => ("mlp.up_proj", true),
                    ["down"] => ("mlp.down_proj", true),
                    _ => return None,
                };
                (format!("model.layers.{block}.{layer}.weight"), is_linear)
            }
            _ => return None,
        };
        let source = WeightSource::new(key);
        Some(if is_linear {
            source.transposed()
        } else {
            source
        })
    }
}

impl ConfigFile {
    /// Returns what the model of this example does not have.
    fn refused(&self) -> Vec<&'static str> {
        let has_other_width = self
            .head_dim
            .is_some_and(|width| width * self.num_attention_heads != self.hidden_size);
        let is_scaled = [&self.rope_scaling, &self.rope_parameters]
            .into_iter()
            .flatten();
        let is_scaled = is_scaled
            .filter_map(|rope| rope.rope_type.as_deref())
            .any(|kind| kind != "default");
        let refused = [
            (self.attention_bias || self.mlp_bias, "biases"),
            (
                has_other_width,
                "`head_dim` other than `hidden_size` / `num_attention_heads`",
            ),
            (is_scaled, "scaled rotary encoding"),
            (
                self.hidden_act
                    .as_deref()
                    .is_some_and(|name| name != "silu"),
                "`hidden_act` other than `silu`",
            ),
        ];
        refused
            .into_iter()
            .filter_map(|(is_refused, what)| is_refused.then_some(what))
            .collect()
    }
}

/// Mapper that reorders the columns of query and key weights `[dim, heads x width]`, of each head
/// on its own: a column of the first half and one of the second, in turn.
struct Interleave {
    /// Columns of one head.
    width: usize,
    path: Vec<String>,
}

impl ModuleMapper for Interleave {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !matches!(&self.path[..], [.., layer, _] if layer == "query" || layer == "key") {
            return param;
        }
        param.map(|weight| {
            let is_trained = weight.is_require_grad();
            let shape = weight.shape();
            let halves = [shape[0], shape[1] / self.width, 2, self.width / 2];
            let turned = weight
                .detach()
                .reshape(halves)
                .swap_dims(2, 3)
                .reshape(shape);
            turned.detach().set_require_grad(is_trained)
        })
    }
}
