//! The file: configuration, initial values, batches, and what PyTorch had in every run.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use burn::tensor::TensorData;
use serde::Deserialize;
use serde_json::Value;

use super::tied;
use crate::models::Init;

#[derive(Deserialize)]
pub struct Golden {
    pub config: Config,
    pub mlp_dims: Vec<usize>,
    pub optimizer: AdamW,
    pub init: HashMap<String, HashMap<String, Array>>,
    pub gpt_inputs: Array,
    pub gpt_targets: Array,
    pub mlp_inputs: Array,
    pub mlp_targets: Array,
    pub runs: BTreeMap<String, Run>,
}

#[derive(Deserialize)]
pub struct Config {
    pub layers: usize,
    pub heads: usize,
}

#[derive(Deserialize)]
pub struct AdamW {
    pub lr: f64,
    pub betas: [f32; 2],
    pub eps: f32,
    pub weight_decay: f32,
}

#[derive(Deserialize, Clone)]
pub struct Array {
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

impl Array {
    pub fn floats(&self) -> TensorData {
        TensorData::new(
            self.data.iter().map(|x| *x as f32).collect(),
            self.shape.clone(),
        )
    }

    /// Row block `rows` of step `step`; the leading dimension is the step.
    pub fn batch(&self, step: usize, rows: Range<usize>) -> TensorData {
        let row: usize = self.shape[2..].iter().product();
        let start = step * self.shape[1] * row;
        let data = self.data[start + rows.start * row..start + rows.end * row].to_vec();
        let shape = [&[rows.len()], &self.shape[2..]].concat();
        TensorData::new(data, shape)
    }
}

#[derive(Deserialize, Clone)]
pub struct Run {
    pub ws: usize,
    pub par: String,
    pub model: String,
    pub mesh: Option<Vec<usize>>,
    #[serde(default)]
    pub losses: Vec<f64>,
    #[serde(default)]
    pub final_checksums: BTreeMap<String, [f64; 2]>,
    #[serde(default)]
    pub final_weights: BTreeMap<String, Array>,
    #[serde(default)]
    pub comm_step1: BTreeMap<String, u64>,
    #[serde(default)]
    pub local_shapes: Vec<BTreeMap<String, Vec<usize>>>,
    #[serde(default)]
    pub grad_norms: Vec<f64>,
    pub grad_local_step0: Option<Vec<BTreeMap<String, Array>>>,
    pub clip: Option<f64>,
    pub acc: Option<usize>,
    pub spf: Option<String>,
    pub raf: Option<Value>,
    /// Element types of weights and of reductions: `bf16_fp32`.
    pub mp: Option<String>,
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

impl Init for HashMap<String, Array> {
    fn data(&self, path: &str) -> TensorData {
        self[path].floats()
    }
}

/// Key of the tied GPT's initial values.
pub const TIED: &str = "gpt_tied";

impl Golden {
    pub fn read() -> Self {
        let mut golden: Self = crate::golden::read("4_training.json");
        if let Some(tied) = tied::init(&golden.init["gpt"]) {
            golden.init.insert(TIED.into(), tied);
        }
        golden
    }
}

impl Run {
    pub fn is(&self, key: &str) -> bool {
        self.rest.get(key).and_then(Value::as_bool) == Some(true)
    }

    pub fn is_tied(&self) -> bool {
        self.is("tied")
    }

    /// The mesh dimensions.
    pub fn dims(&self) -> &'static [&'static str] {
        match self.par.as_str() {
            "none" => &[],
            "fsdp" => &["shard"],
            "hsdp" => &["replicate", "shard"],
            "tp" => &["tp"],
            "fsdp_tp" => &["shard", "tp"],
            "hsdp_tp" => &["replicate", "shard", "tp"],
            other => panic!("unknown parallelism {other}"),
        }
    }

    pub fn is_tensor_parallel(&self) -> bool {
        self.dims().contains(&"tp")
    }

    /// Returns the largest magnitude in the recorded first gradient of a parameter, on any rank.
    pub fn largest_gradient(&self, path: &str) -> f64 {
        let grads = self
            .grad_local_step0
            .iter()
            .flatten()
            .flat_map(|grads| &grads[path].data);
        grads.fold(0.0, |largest: f64, value| largest.max(value.abs()))
    }

    /// The same run without sharding. Recorded unless torch fails.
    pub fn baseline(&self) -> String {
        let model = if self.is_tied() { TIED } else { &self.model };
        let clip = self
            .clip
            .map_or(String::new(), |clip| format!("clip{clip}_"));
        let recorded = self
            .rest
            .get("baseline")
            .and_then(Value::as_str)
            .map(Into::into);
        recorded.unwrap_or_else(|| format!("{model}/{clip}unsharded"))
    }
}
