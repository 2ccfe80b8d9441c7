//! The command line.

use std::path::{Path, PathBuf};

use burn_dtensor::checkpoint;
use clap::{Parser, Subcommand};
use glob::Pattern;

use crate::common::positive;

/// Shows what a checkpoint contains and who wrote it, verifies it, writes it as
/// safetensors files for Python, or divides it among another number of ranks; and
/// sets a run back to an older checkpoint. DIR is a checkpoint, or the folder of a
/// run, of which the latest is taken.
#[derive(Debug, Parser)]
#[command(name = "checkpoint", verbatim_doc_comment, disable_version_flag = true)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Show tensors, values and files, and which rank wrote how much
    Inspect(Inspect),
    /// Read everything and compare it with its checksums. Exits with 1 if something is damaged
    #[command(name = "verify")]
    CheckBlocks {
        #[arg(value_name = "DIR")]
        checkpoint: PathBuf,
    },
    /// Write the full tensors of a model in Hugging Face's layout
    Consolidate(Consolidate),
    /// Save once more, divided among another number of ranks. All tensors are in memory meanwhile
    Reshard(Reshard),
    /// Set a run back: the checkpoints after STEP are renamed to step-N.set-aside and kept
    SetBack {
        /// Folder of the run
        #[arg(value_name = "DIR")]
        run: PathBuf,
        /// Step that becomes the latest
        step: u64,
    },
}

#[derive(Debug, Clone, Parser)]
pub struct Inspect {
    #[arg(value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Draw which rank wrote which part of the tensors with such a key, such as 'model.*.weight'
    #[arg(long, value_name = "PATTERN", value_parser = Pattern::new, conflicts_with = "json")]
    pub tensor: Option<Pattern>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Also write a picture of the bytes of each rank and tensor
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

#[derive(Debug, Clone, Parser)]
pub struct Consolidate {
    #[arg(value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Folder to write to
    pub out: PathBuf,
    /// Write the tensors below this key, without it in their names; '' for all
    #[arg(long, default_value = "model")]
    pub key: String,
    /// Megabytes of tensors in one file
    #[arg(long, value_name = "MB", default_value_t = 5000)]
    pub max_file_mb: u64,
    /// Transpose matrices with such a name: the weights of `Linear` for PyTorch, such as
    /// '*.query.weight'
    #[arg(long, value_name = "PATTERN", value_parser = Pattern::new)]
    pub transpose: Vec<Pattern>,
    /// Replace a part of names, such as '.gamma=.weight'
    #[arg(long, value_name = "FROM=TO", value_parser = replacement)]
    pub rename: Vec<(String, String)>,
}

#[derive(Debug, Clone, Parser)]
pub struct Reshard {
    #[arg(value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Checkpoint to write
    pub out: PathBuf,
    /// Number of ranks, each of which writes a file
    #[arg(long, value_parser = positive)]
    pub ranks: usize,
    /// Divide tensors with such a key in this dimension, such as '*.down.weight=1'. The first that
    /// fits counts; others are divided in dimension 0
    #[arg(long, value_name = "PATTERN=DIM", value_parser = shard_dim)]
    pub shard: Vec<(Pattern, usize)>,
    /// Leave out what has this key, or a key below it, such as `optimizer`
    #[arg(long, value_name = "KEY")]
    pub without: Vec<String>,
}

/// A command whose checkpoint was found.
pub struct Settings {
    pub command: Command,
}

impl Args {
    /// Takes the latest checkpoint of a run's folder.
    ///
    /// # Errors
    /// A message with the folder that does not exist.
    pub fn settings(mut self) -> Result<Settings, String> {
        match &mut self.command {
            Command::Inspect(Inspect { checkpoint, .. })
            | Command::CheckBlocks { checkpoint }
            | Command::Consolidate(Consolidate { checkpoint, .. })
            | Command::Reshard(Reshard { checkpoint, .. }) => *checkpoint = found(checkpoint)?,
            Command::SetBack { .. } => {}
        }
        Ok(Settings {
            command: self.command,
        })
    }
}

fn found(folder: &Path) -> Result<PathBuf, String> {
    if !folder.is_dir() {
        return Err(format!("there is no folder {}", folder.display()));
    }
    if folder.join("manifest.json").exists() {
        return Ok(folder.into());
    }
    Ok(checkpoint::latest(folder)
        .map_err(|error| error.to_string())?
        .unwrap_or_else(|| folder.into()))
}

fn shard_dim(text: &str) -> Result<(Pattern, usize), String> {
    let (pattern, dim) = text.rsplit_once('=').ok_or("expected PATTERN=DIM")?;
    let pattern = Pattern::new(pattern).map_err(|error| error.to_string())?;
    Ok((
        pattern,
        dim.parse()
            .map_err(|error| format!("`{dim}` is no dimension: {error}"))?,
    ))
}

fn replacement(text: &str) -> Result<(String, String), String> {
    let (from, to) = text
        .split_once('=')
        .filter(|(from, _)| !from.is_empty())
        .ok_or("expected FROM=TO")?;
    Ok((from.into(), to.into()))
}
