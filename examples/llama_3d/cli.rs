//! The command line: parsed, checked against each other, and turned into [`Settings`].

use std::path::PathBuf;
use std::str::FromStr;

use clap::Parser;

use crate::data::Text;
use crate::model::LlamaConfig;

/// Train a character-level Llama in parallel over up to three mesh dimensions: replicas (HSDP),
/// parameter shards (FSDP), and tensor with sequence parallelism. Ranks are threads of this process.
#[derive(Debug, Parser)]
#[command(name = "llama_3d", disable_version_flag = true)]
pub struct Cli {
    /// Mesh of ranks: T tensor-parallel ranks, SxT that many shards of parameters, RxSxT that many
    /// replicas
    #[arg(long, default_value = "2x2x2")]
    mesh: MeshShape,
    /// Training steps
    #[arg(long, default_value_t = 20, value_parser = positive)]
    steps: usize,
    /// Sequences a step of each tensor-parallel group
    #[arg(long, default_value_t = 2, value_parser = positive)]
    batch: usize,
    /// Characters a sequence; the tensor-parallel ranks must divide it
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
    /// Query heads a block; must divide --dim, and by the tensor-parallel ranks
    #[arg(long, default_value_t = 8, value_parser = positive)]
    heads: usize,
    /// Key and value heads a block; must divide --heads
    #[arg(long, default_value_t = 4, value_parser = positive)]
    kv_heads: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Seed of the initial weights and the batches
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also train the model in burn alone on the same data; fail if losses part
    #[arg(long)]
    check: bool,
    /// Text to learn [default: this crate's source]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
}

/// A run whose parts fit together.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Sizes of the mesh dimensions, the last one tensor-parallel.
    pub mesh: Vec<usize>,
    pub steps: usize,
    /// Sequences a step of each tensor-parallel group.
    pub batch: usize,
    pub model: LlamaConfig,
    pub lr: f64,
    pub seed: u64,
    pub check: bool,
    pub text: Text,
}

impl Settings {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.mesh.iter().product()
    }

    /// Number of tensor-parallel groups: each trains on rows of its own.
    pub fn groups(&self) -> usize {
        self.mesh[..self.mesh.len() - 1].iter().product()
    }

    /// Names of the mesh dimensions.
    pub fn names(&self) -> &'static [&'static str] {
        const NAMES: &[&str] = &["replicate", "shard", "tp"];
        &NAMES[NAMES.len() - self.mesh.len()..]
    }
}

impl Cli {
    /// Checks the flags against each other and reads the text.
    ///
    /// # Errors
    /// One line saying which flags do not fit, and what would.
    pub fn settings(self) -> Result<Settings, String> {
        let MeshShape(mesh) = self.mesh;
        for (a, b, divisor, number) in
            [("heads", "dim", self.heads, self.dim), ("kv-heads", "heads", self.kv_heads, self.heads)]
        {
            if !number.is_multiple_of(divisor) {
                return Err(format!("--{a} {divisor} does not divide --{b} {number}"));
            }
        }
        if !(self.dim / self.heads).is_multiple_of(2) {
            return Err(format!(
                "--dim {} over --heads {} is an odd width, and rotary encoding turns pairs",
                self.dim, self.heads
            ));
        }
        let text = Text::load(self.text.as_deref())?;
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

/// `2`, `2x2` or `2x2x2`.
#[derive(Debug, Clone)]
struct MeshShape(Vec<usize>);

impl FromStr for MeshShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shape: Vec<usize> = text
            .split('x')
            .map(positive)
            .collect::<Result<_, _>>()
            .map_err(|_| "expected T (such as 2), SxT or RxSxT (such as 2x2x2)".to_string())?;
        match shape.len() {
            1..=3 => Ok(Self(shape)),
            n => Err(format!("expected one to three mesh dimensions, not {n}")),
        }
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number above 0".into()),
        Ok(value) => Ok(value),
    }
}
