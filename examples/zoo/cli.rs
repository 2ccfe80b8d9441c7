//! The command line: parsed, checked for consistency, and converted to [`Settings`].

use clap::{Parser, ValueEnum};

use crate::common::{MeshShape, positive, positive_float};
use crate::data::Text;

/// Trains a BERT, a ResNet or a mixture of experts on several ranks, with
/// activation checkpointing, shards in host memory, accumulated and clipped
/// gradients, and further options that suit the model (examples/zoo/plans.rs).
/// Shows the loss and the communication, and with --check that losses and weights
/// equal those of one device. Ranks are threads of this process. With `mpirun -n P`
/// (feature `mpi`), each of P processes has an equal number of them.
#[derive(Debug, Parser)]
#[command(name = "zoo", verbatim_doc_comment, disable_version_flag = true)]
pub struct Cli {
    /// Model to train
    #[arg(value_enum)]
    model: Kind,
    /// Size of the model: tiny trains in seconds, base has the size of the model's paper
    #[arg(long, value_enum, default_value = "tiny")]
    size: Size,
    /// Mesh of ranks [default: 2x2, replicas x shards, for bert; 3, shards, for resnet; 2x2x2,
    /// shards x experts x tensor parallel, for moe]
    #[arg(long)]
    mesh: Option<MeshShape<3>>,
    /// Training steps
    #[arg(long, default_value_t = 20, value_parser = positive)]
    steps: usize,
    /// Rows per data-parallel rank and batch
    #[arg(long, default_value_t = 4, value_parser = positive)]
    batch: usize,
    /// Batches per step
    #[arg(long, value_name = "BATCHES", default_value_t = 2, value_parser = positive)]
    accumulate: usize,
    /// Initial learning rate [default: one that suits the model's optimizer]
    #[arg(long, value_parser = positive_float)]
    lr: Option<f64>,
    /// Seed of the initial weights and the batches
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also train the model with burn only on the same data, and fail if losses or weights differ
    #[arg(long)]
    check: bool,
}

/// Kind of model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Bert,
    Resnet,
    Moe,
}

/// Size of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Size {
    Tiny,
    Base,
}

/// Settings of a run, checked for consistency.
#[derive(Debug, Clone)]
pub struct Settings {
    pub model: Kind,
    pub size: Size,
    /// Sizes of the mesh dimensions.
    pub mesh: Vec<usize>,
    pub steps: usize,
    /// Rows per data-parallel rank and batch.
    pub batch: usize,
    /// Batches per step.
    pub accumulate: usize,
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
}

impl Cli {
    /// Checks the flags against each other and reads the text.
    ///
    /// # Errors
    /// A message with the flags that do not fit, and the remedy.
    pub fn settings(self) -> Result<Settings, String> {
        let (usual, most, lr) = match self.model {
            Kind::Bert => (vec![2, 2], 2, 3e-3),
            Kind::Resnet => (vec![3], 1, 2e-2),
            Kind::Moe => (vec![2, 2, 2], 3, 3e-3),
        };
        let mesh = self.mesh.map_or(usual, |mesh| mesh.0);
        let fits = if self.model == Kind::Moe {
            mesh.len() == most
        } else {
            mesh.len() <= most
        };
        if !fits {
            let model = self.model.to_possible_value();
            let dims = mesh.len();
            let model = model.expect("no model is hidden");
            return Err(format!(
                "--mesh has {dims} dimensions, but {} takes {most}",
                model.get_name()
            ));
        }
        let lr = self.lr.unwrap_or(lr);
        let Self {
            model,
            size,
            steps,
            batch,
            accumulate,
            seed,
            check,
            ..
        } = self;
        Ok(Settings {
            model,
            size,
            mesh,
            steps,
            batch,
            accumulate,
            lr,
            seed,
            check,
            text: Text::load(None)?,
        })
    }
}
