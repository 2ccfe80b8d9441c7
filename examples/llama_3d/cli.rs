//! The command line: parsed, checked for consistency, and converted to [`Settings`].

use std::path::PathBuf;

use clap::Parser;

use crate::common::{MeshShape, positive, positive_float};
use crate::data::Text;
use crate::model::LlamaConfig;

/// Train a character-level Llama in parallel over up to three mesh dimensions: replicas (HSDP), parameter shards
/// (FSDP), and tensor with sequence parallelism. Ranks are threads of this process. With `mpirun -n P` (feature
/// `mpi`), each of P processes has an equal number of them.
#[derive(Debug, Parser)]
#[command(name = "llama_3d", disable_version_flag = true, after_help = PROCESSES)]
pub struct Cli {
    /// Mesh of ranks: T for tensor parallelism only, SxT with S parameter shards, RxSxT with R replicas
    #[arg(long, default_value = "2x2x2")]
    mesh: MeshShape<3>,
    /// Training steps
    #[arg(long, default_value_t = 20, value_parser = positive)]
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
    /// Key and value heads per block: a divisor of --heads and a multiple of the tensor-parallel ranks
    #[arg(long, default_value_t = 4, value_parser = positive)]
    kv_heads: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 1e-3, value_parser = positive_float)]
    lr: f64,
    /// Seed of the initial weights and the batches
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also train the model with burn only on the same data, and fail if losses differ
    #[arg(long)]
    check: bool,
    /// Text to learn [default: this crate's source]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
}

/// Help text about running with several processes.
const PROCESSES: &str = "\
Ranks as processes, connected by an MPI library (docs/guides/clusters.md):
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
    pub check: bool,
    pub text: Text,
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
        let MeshShape(mesh) = self.mesh;
        for (a, b, divisor, number) in
            [("heads", "dim", self.heads, self.dim), ("kv-heads", "heads", self.kv_heads, self.heads)]
        {
            if !number.is_multiple_of(divisor) {
                return Err(format!("--{a} {divisor} does not divide --{b} {number}"));
            }
        }
        let tp = mesh[mesh.len() - 1];
        for (name, heads) in [("heads", self.heads), ("kv-heads", self.kv_heads)] {
            if !heads.is_multiple_of(tp) {
                return Err(format!(
                    "--{name} {heads} cannot be split over the {tp} tensor-parallel ranks, the last size of --mesh. \
                     Use a multiple of {tp}, or fewer ranks"
                ));
            }
        }
        if !(self.dim / self.heads).is_multiple_of(2) {
            return Err(format!(
                "--dim {} / --heads {} is odd, but rotary encoding needs heads of even width. Change one of them",
                self.dim, self.heads
            ));
        }
        let text = Text::load(self.text.as_deref())?;
        let groups: usize = mesh[..mesh.len() - 1].iter().product();
        text.check_batch(groups.saturating_mul(self.batch), self.seq)?;
        let model = LlamaConfig {
            vocab: text.vocab(),
            seq: self.seq,
            dim: self.dim,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            hidden: self.hidden,
        };
        let Self { steps, batch, lr, seed, check, .. } = self;
        Ok(Settings { mesh, steps, batch, model, lr, seed, check, text })
    }
}
