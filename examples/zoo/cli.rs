//! The command line: parsed, checked against each other, and turned into [`Settings`].

use clap::{Parser, ValueEnum};

use crate::common::{MeshShape, positive, positive_float};
use crate::data::Text;

/// Train a BERT, a ResNet or a mixture of experts on several ranks, with activation checkpointing, shards in host memory,
/// gradients accumulated and clipped, and whatever else suits the model (plans.rs). Ranks are threads of this process;
/// started by `mpirun -n P` (feature `mpi`), an equal number in each of P processes.
#[derive(Debug, Parser)]
#[command(name = "zoo", disable_version_flag = true)]
pub struct Cli {
    /// Which model
    #[arg(value_enum)]
    model: Kind,
    /// How large: tiny trains in seconds, base has the size that papers give
    #[arg(long, value_enum, default_value = "tiny")]
    size: Size,
    /// Mesh of ranks [default: 2x2, replicas x shards, for bert; 3, shards, for resnet; 2x2x2, shards x experts x tensor
    /// parallel, for moe]
    #[arg(long)]
    mesh: Option<MeshShape<3>>,
    /// Training steps
    #[arg(long, default_value_t = 20, value_parser = positive)]
    steps: usize,
    /// Rows per data-parallel rank and batch
    #[arg(long, default_value_t = 4, value_parser = positive)]
    batch: usize,
    /// Batches a step
    #[arg(long, default_value_t = 2, value_parser = positive)]
    accumulate: usize,
    /// Learning rate to begin with [default: what suits the model's optimizer]
    #[arg(long, value_parser = positive_float)]
    lr: Option<f64>,
    /// Seed of the initial weights and the batches
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also train the model in burn alone on the same data; fail if losses or weights part
    #[arg(long)]
    check: bool,
}

/// A model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Bert,
    Resnet,
    Moe,
}

/// How large it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Size {
    Tiny,
    Base,
}

/// A run whose parts fit together.
#[derive(Debug, Clone)]
pub struct Settings {
    pub model: Kind,
    pub size: Size,
    /// Sizes of the mesh dimensions.
    pub mesh: Vec<usize>,
    pub steps: usize,
    /// Rows per data-parallel rank and batch.
    pub batch: usize,
    /// Batches a step.
    pub accumulate: usize,
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
}

impl Cli {
    /// Checks the flags against each other and reads the text.
    ///
    /// # Errors
    /// One line saying which flags do not fit, and what would.
    pub fn settings(self) -> Result<Settings, String> {
        let (usual, most, lr) = match self.model {
            Kind::Bert => (vec![2, 2], 2, 3e-3),
            Kind::Resnet => (vec![3], 1, 2e-2),
            Kind::Moe => (vec![2, 2, 2], 3, 3e-3),
        };
        let mesh = self.mesh.map_or(usual, |mesh| mesh.0);
        let fits = if self.model == Kind::Moe { mesh.len() == most } else { mesh.len() <= most };
        if !fits {
            let (model, dims) = (self.model.to_possible_value(), mesh.len());
            let model = model.expect("no model is hidden");
            return Err(format!("--mesh has {dims} dimensions, of which {} takes {most}", model.get_name()));
        }
        let lr = self.lr.unwrap_or(lr);
        let Self { model, size, steps, batch, accumulate, seed, check, .. } = self;
        Ok(Settings { model, size, mesh, steps, batch, accumulate, lr, seed, check, text: Text::load(None)? })
    }
}
