//! The command line: parsed, checked against each other, and turned into [`Settings`].

use std::path::PathBuf;
use std::str::FromStr;

use burn::tensor::DType;
use burn_dtensor::prelude::*;
use clap::Parser;

use crate::common::{MeshShape, positive, positive_float};
use crate::data::Text;
use crate::device::RankDevice;
use crate::model::GptConfig;

/// Train a character-level GPT on several ranks, its parameters, gradients and optimizer state
/// sharded over a device mesh (FSDP on a 1-D mesh, HSDP on a 2-D one). Ranks are threads of this
/// process; started by `mpirun -n P` (feature `mpi`), an equal number in each of P processes.
#[derive(Debug, Parser)]
#[command(name = "train_gpt", disable_version_flag = true, after_help = PROCESSES)]
pub struct Cli {
    /// Number of ranks [default: what --mesh asks for, else 4]
    #[arg(long, value_parser = positive)]
    ranks: Option<usize>,
    /// Mesh of ranks: N shards over N ranks, RxS keeps R replicas of S shards [default: all ranks]
    #[arg(long)]
    mesh: Option<MeshShape<2>>,
    /// When a block gives back its full weights after forward: auto, always, never, or a number of
    /// ranks to reshard to
    #[arg(long, default_value = "auto")]
    reshard: Reshard,
    /// Blocks keep their inputs alone for backward, and compute again there: less memory, more time
    #[arg(long)]
    checkpoint_activations: bool,
    /// Where ranks compute: flex (the CPU), wgpu or cuda (the first GPU, which all ranks share)
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
    /// Batches a step: gradients of all but the last stay with their rank, and are reduced with those of the last
    #[arg(long, default_value_t = 1, value_parser = positive)]
    accumulate: usize,
    /// Blocks to gather before they are needed, in forward and in backward [default: one, in forward between processes]
    #[arg(long, value_name = "BLOCKS")]
    prefetch: Option<usize>,
    /// Write when units computed, and when their parameters and gradients moved: a picture to a FILE that ends with .svg,
    /// else JSON for https://ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Characters a sequence
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
    /// What blocks compute in, and weights are sent in: f32, bf16, or f16, whose loss is scaled
    #[arg(long, default_value = "f32")]
    param_dtype: Float,
    /// What gradients are sent and added up in: f32, bf16 or f16 [default: f32, as parameters are stored]
    #[arg(long)]
    reduce_dtype: Option<Float>,
    /// Also train the unsharded model on the same data; fail if losses or weights part
    #[arg(long)]
    check: bool,
    /// Characters of text to generate at the end
    #[arg(long, default_value_t = 200)]
    sample: usize,
    /// Text to learn [default: this crate's source]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
}

/// How to start it on several processes.
const PROCESSES: &str = "\
Ranks as processes, which an MPI library connects (docs/clusters.md):
  cargo build --release --features mpi --example train_gpt
  mpirun -n 2 target/release/examples/train_gpt --ranks 4      # 2 processes of 2 ranks
Each has as many ranks; losses are those of threads to the bit.";

/// A run whose parts fit together.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Mesh dimensions; one for FSDP, two (replicas, shards) for HSDP.
    pub mesh: Vec<usize>,
    pub reshard: ReshardAfterForward,
    pub checkpoint_activations: bool,
    pub device: RankDevice,
    /// Whether shards are on the CPU.
    pub offload: bool,
    pub steps: usize,
    /// Sequences per rank and step.
    pub batch: usize,
    /// Batches a step.
    pub accumulate: usize,
    /// Blocks to gather ahead, if not as many as is usual.
    pub prefetch: Option<usize>,
    /// Where to write a trace.
    pub trace: Option<PathBuf>,
    pub model: GptConfig,
    pub lr: f64,
    pub seed: u64,
    pub clip: Option<f64>,
    /// What blocks compute in.
    pub param_dtype: DType,
    /// What gradients are reduced in.
    pub reduce_dtype: DType,
    pub check: bool,
    /// Characters to generate.
    pub sample: usize,
    pub text: Text,
}

impl Settings {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }
}

impl Cli {
    /// Checks the flags against each other and reads the text.
    ///
    /// # Errors
    /// One line saying which flags do not fit, and what would.
    pub fn settings(self) -> Result<Settings, String> {
        let mesh = match (self.mesh, self.ranks) {
            (None, ranks) => vec![ranks.unwrap_or(4)],
            (Some(MeshShape(shape)), ranks) => {
                let size: usize = shape.iter().product();
                if let Some(ranks) = ranks.filter(|&ranks| ranks != size) {
                    return Err(format!(
                        "--ranks {ranks} do not make the mesh {}, which has {size}; drop --ranks or change --mesh",
                        crate::report::by(&shape)
                    ));
                }
                shape
            }
        };
        if !self.dim.is_multiple_of(self.heads) {
            return Err(format!("--heads {} do not divide --dim {}", self.heads, self.dim));
        }
        let shards = mesh[mesh.len() - 1];
        if let Reshard(ReshardAfterForward::Ranks(ranks)) = self.reshard
            && !shards.is_multiple_of(ranks)
        {
            return Err(format!("--reshard {ranks} does not divide the {shards} ranks a parameter is sharded over"));
        }
        let (param_dtype, reduce_dtype) = (self.param_dtype.0, self.reduce_dtype.unwrap_or(Float(DType::F32)).0);
        if self.check && [param_dtype, reduce_dtype] != [DType::F32; 2] {
            return Err("--check holds losses to 1e-5, which half precision does not: drop it or the dtypes".into());
        }
        for dtype in [param_dtype, reduce_dtype] {
            if !self.device.device().supports_dtype(dtype) {
                return Err(format!("the device has no {}", dtype.name()));
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

/// An element type of floats.
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
