//! The command line: parsed, checked for consistency, and converted to [`Settings`].

use std::path::PathBuf;

use burn::tensor::DType;
use burn_dtensor::prelude::*;
use clap::Parser;

use crate::common::{MeshShape, positive, positive_float};
use crate::data::Text;
use crate::device::{Nccl, RankDevice};
use crate::model::GptConfig;

/// Number of characters that are used of a long validation text.
const VALIDATION: usize = 1 << 14;

/// Trains a character-level GPT on short stories, with its parameters, gradients
/// and optimizer state sharded over 4 ranks (FSDP on a 1-D mesh, HSDP on a 2-D
/// one). Shows what the model learns (loss, validation loss, a sample), what a rank
/// sends and holds in memory, and with --check that losses and weights equal those
/// of one device.
#[derive(Debug, Clone, Parser)]
#[command(name = "train_gpt", verbatim_doc_comment, disable_version_flag = true, after_help = PROCESSES)]
pub struct Args {
    /// Number of ranks [default: the size of --mesh, or 4]
    #[arg(long, value_parser = positive)]
    ranks: Option<usize>,
    /// Mesh of ranks: N shards over N ranks, RxS keeps R replicas of S shards [default: all ranks]
    #[arg(long)]
    mesh: Option<MeshShape<2>>,
    /// Training steps
    #[arg(long, default_value_t = 500, value_parser = positive)]
    pub steps: usize,
    /// Steps between two computations of the validation loss
    #[arg(long, value_name = "STEPS", default_value_t = 50, value_parser = positive)]
    pub validate_every: usize,
    /// Also train the unsharded model on the same data, and fail if losses or weights differ
    #[arg(long)]
    pub check: bool,
    /// Characters of text to generate at the end
    #[arg(long, value_name = "CHARACTERS", default_value_t = 400)]
    pub sample: usize,
    /// Text to learn. Its last tenth is for validation [default: short stories,
    /// examples/common/stories.txt]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Sequences per rank and batch
    #[arg(long, default_value_t = 4, value_parser = positive)]
    pub batch: usize,
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
    /// Learning rate of AdamW after warm-up. Warm-up takes a tenth of the steps; then the rate
    /// falls to 0
    #[arg(long, default_value_t = 3e-3, value_parser = learning_rate)]
    pub lr: f64,
    /// Seed of the initial weights, the batches and the sample
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Batches per step. Gradients are reduced once, with the last batch
    #[arg(long, value_name = "BATCHES", default_value_t = 1, value_parser = positive)]
    pub accumulate: usize,
    /// Clip the gradient to this L2 norm, taken over all ranks [default: no clipping]
    #[arg(long, value_name = "NORM", value_parser = positive_float)]
    pub clip: Option<f64>,
    /// Dtype in which blocks compute and weights are sent: f32, bf16, or f16 with loss scaling
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = float)]
    pub param_dtype: DType,
    /// Dtype in which gradients are sent and summed: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = float)]
    pub reduce_dtype: DType,
    /// When a block frees its unsharded weights after forward: auto, always, never, or a number of
    /// ranks that keep them together
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = reshard)]
    pub reshard: ReshardAfterForward,
    /// Keep only the inputs of blocks for backward, and recompute the rest there: less memory, more
    /// time
    #[arg(long)]
    pub checkpoint_activations: bool,
    /// Blocks to gather before they are needed, in forward and in backward [default: one, in
    /// forward between processes]
    #[arg(long, value_name = "BLOCKS")]
    pub prefetch: Option<usize>,
    /// Save checkpoints in this folder
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Steps between two checkpoints. The last step is saved as well
    #[arg(long, value_name = "STEPS", default_value_t = 100, value_parser = positive)]
    pub every: usize,
    /// Keep this number of checkpoints, and remove older ones [default: keep all]
    #[arg(long, value_name = "NUMBER", value_parser = positive)]
    pub keep: Option<usize>,
    /// Continue from the latest checkpoint in --save, if there is one, on any mesh
    #[arg(long)]
    pub resume: bool,
    /// Device of the ranks: flex (the CPU), wgpu, cuda (the first GPU, which all ranks share), or
    /// cuda:0,1 and so on (the ranks take turns)
    #[arg(long, default_value = "flex")]
    pub device: RankDevice,
    /// Exchange of tensors between GPUs [default: native with several GPUs, if it is built in]
    #[arg(long, value_enum)]
    pub nccl: Option<Nccl>,
    /// Keep shards, their gradients and the optimizer's state on the CPU, whatever the device
    #[arg(long)]
    pub offload: bool,
    /// Write when units computed, and when their parameters and gradients were communicated: as a
    /// picture if FILE ends with .svg, else as JSON for https://ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

/// Help text about running with several processes.
const PROCESSES: &str = "\
Ranks are threads of this process. They are processes with an MPI library (docs/guides/clusters.md):
  cargo build --release --features mpi --example train_gpt
  mpirun -n 2 target/release/examples/train_gpt --ranks 4      # 2 processes of 2 ranks
Every process has the same number of ranks. Losses equal those of threads bit for bit.";

/// Settings of a run, checked for consistency.
#[derive(Debug, Clone)]
pub struct Settings {
    pub args: Args,
    /// Mesh dimensions; one for FSDP, two (replicas, shards) for HSDP.
    pub mesh: Vec<usize>,
    pub model: GptConfig,
    /// Text to train on.
    pub text: Text,
    /// Text to validate with.
    pub validation: Text,
}

impl Settings {
    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }

    /// Returns true if the validation loss is computed after step `step`, counted from 0.
    pub fn is_validated_after(&self, step: usize) -> bool {
        (step + 1).is_multiple_of(self.args.validate_every) || step + 1 == self.args.steps
    }

    /// Returns the number of validation rows.
    pub fn validation_rows(&self) -> usize {
        self.validation
            .row_count(self.model.seq)
            .min((VALIDATION / self.model.seq).max(1))
    }
}

impl Args {
    /// Checks the flags against each other and reads the text.
    ///
    /// # Errors
    /// A message with the flags that do not fit, and the remedy.
    pub fn settings(self) -> Result<Settings, String> {
        let mesh = match (&self.mesh, self.ranks) {
            (None, ranks) => vec![ranks.unwrap_or(4)],
            (Some(MeshShape(shape)), ranks) => {
                let size: usize = shape.iter().product();
                if let Some(ranks) = ranks.filter(|&ranks| ranks != size) {
                    return Err(format!(
                        "--ranks is {ranks}, but the mesh {} has {size} ranks. Omit --ranks or change --mesh",
                        crate::report::by(shape)
                    ));
                }
                shape.clone()
            }
        };
        if self.save.is_none() && (self.resume || self.keep.is_some()) {
            return Err(
                "--resume and --keep concern the checkpoints of --save. Add --save DIR".into(),
            );
        }
        if !self.dim.is_multiple_of(self.heads) {
            return Err(format!(
                "--heads {} does not divide --dim {}",
                self.heads, self.dim
            ));
        }
        let shards = mesh[mesh.len() - 1];
        if let ReshardAfterForward::Ranks(ranks) = self.reshard
            && !shards.is_multiple_of(ranks)
        {
            return Err(format!(
                "--reshard {ranks} does not divide the {shards} ranks a parameter is sharded over"
            ));
        }
        let dtypes = [self.param_dtype, self.reduce_dtype];
        if self.check && dtypes != [DType::F32; 2] {
            return Err(
                "half precision exceeds the bound of --check, 1e-5. Omit --check or the dtypes"
                    .into(),
            );
        }
        let devices = self.device.devices().map_err(|error| error.to_string())?;
        for dtype in dtypes {
            if !devices[0].supports_dtype(dtype) {
                return Err(format!("the device does not support {}", dtype.name()));
            }
        }
        let (text, validation) = Text::load(self.text.as_deref())?.split();
        let ranks: usize = mesh.iter().product();
        text.check_batch(ranks.saturating_mul(self.batch), self.seq)?;
        if validation.row_count(self.seq) == 0 {
            return Err(format!(
                "the last tenth of the text, for validation, has {} characters, but one row takes --seq {} + 1. Pass a \
                 longer --text or a smaller --seq",
                validation.len(),
                self.seq
            ));
        }
        let model = GptConfig {
            vocab: text.vocab(),
            seq: self.seq,
            dim: self.dim,
            layers: self.layers,
            heads: self.heads,
        };
        Ok(Settings {
            args: self,
            mesh,
            model,
            text,
            validation,
        })
    }
}

fn learning_rate(text: &str) -> Result<f64, String> {
    positive_float(text)
        .ok()
        .filter(|&rate| rate <= 1.0)
        .ok_or_else(|| "expected a number above 0, at most 1".into())
}

fn float(text: &str) -> Result<DType, String> {
    let known = [DType::F32, DType::BF16, DType::F16]
        .into_iter()
        .find(|dtype| dtype.name() == text);
    known.ok_or_else(|| "expected f32, bf16 or f16".into())
}

fn reshard(text: &str) -> Result<ReshardAfterForward, String> {
    match text {
        "auto" => Ok(ReshardAfterForward::Auto),
        "always" => Ok(ReshardAfterForward::Always),
        "never" => Ok(ReshardAfterForward::Never),
        ranks => positive(ranks)
            .map(ReshardAfterForward::Ranks)
            .map_err(|_| "expected auto, always, never or a number of ranks".into()),
    }
}
