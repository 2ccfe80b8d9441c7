//! The command line: parsed, checked for consistency, and converted to [`Settings`].

use std::path::PathBuf;

use clap::Parser;

use crate::common::{MeshShape, positive, positive_float};
use crate::data::Text;
use crate::model::LlamaConfig;
use crate::weights::Weights;

/// Trains a character-level Llama on 8 ranks, in parallel over three mesh
/// dimensions: replicas (HSDP), parameter shards (FSDP), and tensor with sequence
/// parallelism. Shows the loss and the collectives with their formulas. The same
/// model runs on one device: --check compares its losses, --generate its samples.
#[derive(Debug, Parser)]
#[command(name = "llama_3d", verbatim_doc_comment, disable_version_flag = true, after_help = PROCESSES)]
pub struct Cli {
    /// Mesh of ranks: T for tensor parallelism only, SxT with S parameter shards, RxSxT with R
    /// replicas
    #[arg(long, default_value = "2x2x2")]
    mesh: MeshShape<3>,
    /// Training steps; with 0 the model is only loaded and sampled from
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Sequences per step and tensor-parallel group
    #[arg(long, default_value_t = 2, value_parser = positive)]
    batch: usize,
    /// Characters per sequence
    #[arg(long, default_value_t = 32, value_parser = positive)]
    seq: usize,
    /// Width of the model
    #[arg(long, default_value_t = 64, value_parser = positive)]
    dim: usize,
    /// Width inside the multilayer perceptron
    #[arg(long, default_value_t = 172, value_parser = positive)]
    hidden: usize,
    /// Number of blocks
    #[arg(long, default_value_t = 2, value_parser = positive)]
    layers: usize,
    /// Query heads per block: a divisor of --dim and a multiple of the tensor-parallel ranks
    #[arg(long, default_value_t = 8, value_parser = positive)]
    heads: usize,
    /// Key and value heads per block: a divisor of --heads and a multiple of the tensor-parallel
    /// ranks
    #[arg(long, default_value_t = 4, value_parser = positive)]
    kv_heads: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 1e-3, value_parser = positive_float)]
    lr: f64,
    /// Seed of the initial weights and the batches
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Characters to sample from the trained model, on the mesh and on one device
    #[arg(long, default_value_t = 0, value_name = "CHARACTERS")]
    generate: usize,
    /// Also train the model on one device, on the same data, and fail if losses differ
    #[arg(long)]
    check: bool,
    /// Text to learn [default: short stories, examples/common/stories.txt]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Start from a Llama in Hugging Face's layout: a folder with config.json, which has the sizes,
    /// and safetensors files. Tokens are the characters of the text, whatever they were.
    /// make_weights.py writes such a folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["dim", "hidden", "layers", "heads", "kv_heads"])]
    weights: Option<PathBuf>,
    /// Memory that each rank may use to read --weights, besides its shards before and after
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = positive)]
    read_memory: usize,
}

/// Help text about running with several processes.
const PROCESSES: &str = "\
Ranks are threads of this process. They are processes with an MPI library (docs/guides/clusters.md):
  cargo build --release --features mpi --example llama_3d
  mpirun -n 4 target/release/examples/llama_3d --mesh 2x2x2      # 4 processes of 2 ranks
Every process has the same number of ranks. Losses equal those of threads bit for bit.";

/// Settings of a run, checked for consistency.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Sizes of the mesh dimensions, the last one tensor-parallel.
    pub mesh: Vec<usize>,
    pub steps: usize,
    /// Sequences per step and tensor-parallel group.
    pub batch: usize,
    pub model: LlamaConfig,
    pub lr: f64,
    pub seed: u64,
    /// Tokens to sample after training.
    pub generate: usize,
    pub check: bool,
    pub text: Text,
    /// The weights that training starts from; `None` for random ones.
    pub weights: Option<Weights>,
    /// Bytes of memory that each rank may use to read them.
    pub read_memory: usize,
}

impl Settings {
    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }

    /// Returns the number of tensor-parallel groups. Each trains on different rows.
    pub fn groups(&self) -> usize {
        self.mesh[..self.mesh.len() - 1].iter().product()
    }

    /// Returns the names of the mesh dimensions.
    pub fn names(&self) -> &'static [&'static str] {
        const NAMES: &[&str] = &["replicate", "shard", "tp"];
        &NAMES[NAMES.len() - self.mesh.len()..]
    }

    /// Returns the names of the mesh dimensions whose ranks train on different rows.
    pub fn data_names(&self) -> &'static [&'static str] {
        &self.names()[..self.mesh.len() - 1]
    }
}

impl Cli {
    /// Checks the flags against each other and reads the text.
    ///
    /// # Errors
    /// A message with the flags that do not fit, and the remedy.
    pub fn settings(self) -> Result<Settings, String> {
        let text = Text::load(self.text.as_deref())?;
        let weights = self
            .weights
            .as_deref()
            .map(|folder| Weights::open(folder, self.seq))
            .transpose()?;
        let (model, [dim, heads, kv_heads]) = match &weights {
            Some(Weights { config, .. }) => (
                *config,
                ["hidden_size", "num_attention_heads", "num_key_value_heads"],
            ),
            None => (self.model(text.vocab()), ["--dim", "--heads", "--kv-heads"]),
        };
        let LlamaConfig { vocab, .. } = model;
        if vocab < text.vocab() {
            return Err(format!(
                "the weights have {vocab} tokens, but the text has {} distinct characters. Pass another --text",
                text.vocab()
            ));
        }
        for (a, b, divisor, number) in [
            (heads, dim, model.heads, model.dim),
            (kv_heads, heads, model.kv_heads, model.heads),
        ] {
            if divisor == 0 || !number.is_multiple_of(divisor) {
                return Err(format!("{a} {divisor} does not divide {b} {number}"));
            }
        }
        let MeshShape(mesh) = self.mesh;
        let tp = mesh[mesh.len() - 1];
        for (name, heads) in [(heads, model.heads), (kv_heads, model.kv_heads)] {
            if !heads.is_multiple_of(tp) {
                return Err(format!(
                    "{name} {heads} cannot be split over the {tp} tensor-parallel ranks, the last size of --mesh. \
                     Use a multiple of {tp}, or fewer ranks"
                ));
            }
        }
        if !(model.dim / model.heads).is_multiple_of(2) {
            return Err(format!(
                "{dim} {} / {heads} {} is odd, but rotary encoding needs heads of even width. Change one of them",
                model.dim, model.heads
            ));
        }
        let groups: usize = mesh[..mesh.len() - 1].iter().product();
        text.check_batch(groups.saturating_mul(self.batch), self.seq)?;
        let Self {
            steps,
            batch,
            lr,
            seed,
            generate,
            check,
            ..
        } = self;
        let read_memory = self.read_memory << 20;
        Ok(Settings {
            mesh,
            steps,
            batch,
            model,
            lr,
            seed,
            generate,
            check,
            text,
            weights,
            read_memory,
        })
    }

    /// Returns the sizes of the flags.
    fn model(&self, vocab: usize) -> LlamaConfig {
        LlamaConfig {
            vocab,
            seq: self.seq,
            dim: self.dim,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            hidden: self.hidden,
            norm_epsilon: 1e-5,
            rope_theta: 10_000.0,
        }
    }
}
