//! `inspect`: tables of what a checkpoint contains.

use burn_dtensor::checkpoint::{self, CheckpointSummary, TensorSummary};
use burn_dtensor::prelude::*;

use crate::cli::Inspect;
use crate::picture::picture;
use crate::size;

/// Characters of a value that are printed.
const VALUE: usize = 72;
/// Shares of a tensor that a rank wrote, from none to all.
const SHADES: [char; 5] = ['.', '░', '▒', '▓', '█'];

pub fn inspect(command: &Inspect) -> Result<bool> {
    let summary = checkpoint::inspect(&command.checkpoint)?;
    match &command.tensor {
        _ if command.json => println!("{}", serde_json::to_string(&summary).map_err(Error::other)?),
        Some(pattern) => {
            let found: Vec<_> = summary
                .tensors
                .iter()
                .filter(|(key, _)| pattern.matches(key))
                .collect();
            if found.is_empty() {
                return Err(Error::other(format!(
                    "no tensor has a key like {pattern}: `inspect` without --tensor lists all"
                )));
            }
            found
                .iter()
                .for_each(|(key, tensor)| println!("{key}: {tensor}"));
        }
        None => print(&summary),
    }
    if let Some(file) = &command.svg {
        std::fs::write(file, picture(&summary))
            .map_err(|error| Error::other(format!("{}: {error}", file.display())))?;
    }
    Ok(true)
}

fn print(summary: &CheckpointSummary) {
    let CheckpointSummary {
        path,
        step,
        software,
        mesh,
        files,
        tensors,
        values,
        rank_values,
        ..
    } = summary;
    let by_rank = summary.bytes_by_rank();
    let dims: Vec<_> = mesh
        .iter()
        .map(|(name, ranks)| format!("{name}={ranks}"))
        .collect();
    let step = step.map_or("without a step".into(), |step| format!("step {step}"));
    println!(
        "{}: {step}, saved by {software} on the mesh {}",
        path.display(),
        dims.join(", ")
    );
    println!(
        "{} tensors, {}\n",
        tensors.len(),
        size(by_rank.iter().sum())
    );

    println!("{:<28} {:>6} {:>12}", "file", "rank", "bytes");
    files
        .iter()
        .for_each(|file| println!("{:<28} {:>6} {:>12}", file.name, file.rank, file.bytes));

    let width = tensors
        .keys()
        .map(String::len)
        .max()
        .unwrap_or(0)
        .max("tensor".len());
    let row = |key: &str, shape: &str, dtype: &str, bytes: &str, wrote: &str, placements: &str| {
        println!(
            "{key:<width$}  {shape:<16} {dtype:<5} {bytes:>12}  {wrote:<ranks$}  {placements}",
            ranks = by_rank.len().max(5)
        )
    };
    println!();
    row("tensor", "shape", "dtype", "bytes", "wrote", "placements");
    for (key, tensor) in tensors {
        let TensorSummary {
            shape,
            dtype,
            placements,
            bytes,
            ..
        } = tensor;
        row(
            key,
            &format!("{shape:?}"),
            dtype,
            &bytes.to_string(),
            &shares(tensor, by_rank.len()),
            placements,
        );
    }
    println!(
        "\nOne character for each rank in `wrote`: {} none to all. --tensor draws the parts.",
        SHADES.iter().collect::<String>()
    );

    if !values.is_empty() || !rank_values.is_empty() {
        println!("\nvalues");
    }
    values
        .iter()
        .for_each(|(key, value)| println!("  {key} = {}", shortened(value)));
    rank_values.iter().for_each(|(key, values)| {
        println!("  {key} of each rank = {}", shortened(&values.join(", ")))
    });
}

/// Draws the share of the tensor that each rank wrote.
fn shares(tensor: &TensorSummary, ranks: usize) -> String {
    let share = |rank: usize| {
        let bytes: u64 = tensor
            .chunks
            .iter()
            .filter(|chunk| chunk.rank == rank)
            .map(|chunk| chunk.bytes)
            .sum();
        SHADES[(bytes * 4).div_ceil(tensor.bytes.max(1)) as usize]
    };
    (0..ranks).map(share).collect()
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(VALUE) {
        Some((end, _)) => format!("{} ..", &text[..end]),
        None => text.into(),
    }
}
