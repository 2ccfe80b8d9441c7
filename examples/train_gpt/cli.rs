//! The command line: parsed, checked for consistency, and converted to [`Settings`].

use std::path::PathBuf;
use std::str::FromStr;

use burn::tensor::DType;
use burn_dtensor::prelude::*;
use clap::Parser;

use crate::common::{MeshShape, positive, positive_float};
use crate::data::Text;
use crate::device::RankDevice;
use crate::model::GptConfig;

/// Train a character-level GPT on several ranks, with its parameters, gradients and optimizer state sharded over a
/// device mesh (FSDP on a 1-D mesh, HSDP on a 2-D one). Ranks are threads of this process. With `mpirun -n P`
/// (feature `mpi`), each of P processes has an equal number of them.
#[derive(Debug, Parser)]
#[command(name = "train_gpt", disable_version_flag = true, after_help = PROCESSES)]
pub struct Cli {
    /// Number of ranks [default: the size of --mesh, or 4]
    #[arg(long, value_parser = positive)]
    ranks: Option<usize>,
    /// Mesh of ranks: N shards over N ranks, RxS keeps R replicas of S shards [default: all ranks]
    #[arg(long)]
    mesh: Option<MeshShape<2>>,
    /// When a block frees its unsharded weights after forward: auto, always, never, or a number of ranks to reshard
    /// to
    #[arg(long, default_value = "auto")]
    reshard: Reshard,
    /// Keep only the inputs of blocks for backward, and recompute the rest there: less memory, more time
    #[arg(long)]
    checkpoint_activations: bool,
    /// Device of the ranks: flex (the CPU), wgpu or cuda (the first GPU, which all ranks share)
    #[arg(long, default_value = "flex")]
    device: RankDevice,
    /// Keep shards, their gradients and the optimizer's state on the CPU, whatever the device
    #[arg(long)]
    offload: bool,
    /// Training steps
    #[arg(long, default_value_t = 300, value_parser = positive)]
    steps: usize,
    /// Sequences per rank and step
    #[arg(long, default_value_t = 4, value_parser = positive)]
    batch: usize,
    /// Batches per step. Gradients are reduced once, with the last batch
    #[arg(long, default_value_t = 1, value_parser = positive)]
    accumulate: usize,
    /// Blocks to gather before they are needed, in forward and in backward [default: one, in forward between
    /// processes]
    #[arg(long, value_name = "BLOCKS")]
    prefetch: Option<usize>,
    /// Write when units computed, and when their parameters and gradients were communicated: as a picture if FILE
    /// ends with .svg, else as JSON for https://ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Characters per sequence
    #[arg(long, default_value_t = 64, value_parser = positive)]
    seq: usize,
    /// Width of the model
    #[arg(long, default_value_t = 128, value_parser = positive)]
    dim: usize,
    /// Number of blocks
    #[arg(long, default_value_t = 4, value_parser = positive)]
    layers: usize,
    /// Attention heads per block; must divide --dim
    #[arg(long, default_value_t = 4, value_parser = positive)]
    heads: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 1e-3, value_parser = positive_float)]
    lr: f64,
    /// Seed of the initial weights, the batches and the sample
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Clip the gradient to this L2 norm, taken over all ranks [default: no clipping]
    #[arg(long, value_parser = positive_float)]
    clip: Option<f64>,
    /// Dtype in which blocks compute and weights are sent: f32, bf16, or f16 with loss scaling
    #[arg(long, default_value = "f32")]
    param_dtype: Float,
    /// Dtype in which gradients are sent and summed: f32, bf16 or f16 [default: f32, as parameters are stored]
    #[arg(long)]
    reduce_dtype: Option<Float>,
    /// Also train the unsharded model on the same data, and fail if losses or weights differ
    #[arg(long)]
    check: bool,
    /// Characters of text to generate at the end
    #[arg(long, default_value_t = 200)]
    sample: usize,
    /// Text to learn [default: this crate's source]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
}

/// Help text about running with several processes.
const PROCESSES: &str = "\
Ranks as processes, connected by an MPI library (docs/guides/clusters.md):
  cargo build --release --features mpi --example train_gpt
  mpirun -n 2 target/release/examples/train_gpt --ranks 4      # 2 processes of 2 ranks
Every process has the same number of ranks. Losses equal those of threads bit for bit.";

/// Settings of a run, checked for consistency.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Mesh dimensions; one for FSDP, two (replicas, shards) for HSDP.
    pub mesh: Vec<usize>,
    pub reshard: ReshardAfterForward,
    pub checkpoint_activations: bool,
    pub device: RankDevice,
    /// True if shards are on the CPU.
    pub offload: bool,
    pub steps: usize,
    /// Sequences per rank and step.
    pub batch: usize,
    /// Batches per step.
    pub accumulate: usize,
    /// Number of blocks to prefetch, if not the default.
    pub prefetch: Option<usize>,
    /// File to which to write a trace.
    pub trace: Option<PathBuf>,
    pub model: GptConfig,
    pub lr: f64,
    pub seed: u64,
    pub clip: Option<f64>,
    /// Dtype in which blocks compute.
    pub param_dtype: DType,
    /// Dtype in which gradients are reduced.
    pub reduce_dtype: DType,
    pub check: bool,
    /// Number of characters to generate.
    pub sample: usize,
    pub text: Text,
}

impl Settings {
    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }
}

impl Cli {
    /// Checks the flags against each other and reads the text.
    ///
    /// # Errors
    /// A message with the flags that do not fit, and the remedy.
    pub fn settings(self) -> Result<Settings, String> {
        let mesh = match (self.mesh, self.ranks) {
            (None, ranks) => vec![ranks.unwrap_or(4)],
            (Some(MeshShape(shape)), ranks) => {
                let size: usize = shape.iter().product();
                if let Some(ranks) = ranks.filter(|&ranks| ranks != size) {
                    return Err(format!(
                        "--ranks is {ranks}, but the mesh {} has {size} ranks. Omit --ranks or change --mesh",
                        crate::report::by(&shape)
                    ));
                }
                shape
            }
        };
        if !self.dim.is_multiple_of(self.heads) {
            return Err(format!("--heads {} does not divide --dim {}", self.heads, self.dim));
        }
        let shards = mesh[mesh.len() - 1];
        if let Reshard(ReshardAfterForward::Ranks(ranks)) = self.reshard
            && !shards.is_multiple_of(ranks)
        {
            return Err(format!("--reshard {ranks} does not divide the {shards} ranks a parameter is sharded over"));
        }
        let (param_dtype, reduce_dtype) = (self.param_dtype.0, self.reduce_dtype.unwrap_or(Float(DType::F32)).0);
        if self.check && [param_dtype, reduce_dtype] != [DType::F32; 2] {
            return Err("half precision exceeds the bound of --check, 1e-5. Omit --check or the dtypes".into());
        }
        for dtype in [param_dtype, reduce_dtype] {
            if !self.device.device().supports_dtype(dtype) {
                return Err(format!("the device does not support {}", dtype.name()));
            }
        }
        let text = Text::load(self.text.as_deref())?;
        let ranks: usize = mesh.iter().product();
        text.check_batch(ranks.saturating_mul(self.batch), self.seq)?;
        let model =
            GptConfig { vocab: text.vocab(), seq: self.seq, dim: self.dim, layers: self.layers, heads: self.heads };
        Ok(Settings {
            mesh,
            reshard: self.reshard.0,
            checkpoint_activations: self.checkpoint_activations,
            device: self.device,
            offload: self.offload,
            steps: self.steps,
            batch: self.batch,
            accumulate: self.accumulate,
            prefetch: self.prefetch,
            trace: self.trace,
            model,
            lr: self.lr,
            seed: self.seed,
            clip: self.clip,
            param_dtype,
            reduce_dtype,
            check: self.check,
            sample: self.sample,
            text,
        })
    }
}

/// A floating-point dtype.
#[derive(Debug, Clone, Copy)]
struct Float(DType);

impl FromStr for Float {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [DType::F32, DType::BF16, DType::F16].into_iter().find(|dtype| dtype.name() == text);
        known.map(Self).ok_or_else(|| "expected f32, bf16 or f16".into())
    }
}

/// `auto`, `always`, `never` or a number of ranks.
#[derive(Debug, Clone)]
struct Reshard(ReshardAfterForward);

impl FromStr for Reshard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(ReshardAfterForward::Auto)),
            "always" => Ok(Self(ReshardAfterForward::Always)),
            "never" => Ok(Self(ReshardAfterForward::Never)),
            ranks => positive(ranks)
                .map(|ranks| Self(ReshardAfterForward::Ranks(ranks)))
                .map_err(|_| "expected auto, always, never or a number of ranks".into()),
        }
    }
}
