//! Ranks in processes, one in each, beside raw calls of MPI.
//!
//! The bench starts its own binary by turns: once to make the collectives as a program does, with a
//! new result each time, once to call MPI alone, on one thread and with nothing beside it. Raw
//! calls write into memory that is kept and warm, the kindest that a program can do for MPI, and
//! once more into new memory, as ours do.
//!
//! | | raw |
//! |---|---|
//! | all-gather | the faster of `MPI_Iallgather` and an exchange by `MPI_Isend` and `MPI_Irecv` |
//! | all-to-all | the faster of `MPI_Ialltoall` and such an exchange |
//! | all-reduce | the faster of `MPI_Allreduce` and `MPI_Iallreduce` |
//! | reduce-scatter | the faster of `MPI_Reduce_scatter_block` and `MPI_Ireduce_scatter_block` |
//!
//! The whole is what an all-gather returns, and what every rank brings to the others.
//!
//! A round is a barrier and some calls; its time is that of the slowest process. What is printed
//! are medians over all rounds of all turns.

mod launcher;
mod ours;
mod overlap;
mod raw;
mod table;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::{MIB, Role};

/// How often ours and raw calls have their turn.
const TURNS: usize = 5;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Collective {
    AllGather,
    AllToAll,
    AllReduce,
    ReduceScatter,
}

impl Collective {
    const ALL: [Self; 4] = [
        Self::AllGather,
        Self::AllToAll,
        Self::AllReduce,
        Self::ReduceScatter,
    ];

    /// Those whose name has `only` in it.
    fn named(only: &str) -> impl Iterator<Item = Self> {
        Self::ALL
            .into_iter()
            .filter(move |collective| collective.name().contains(only))
    }

    fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::AllToAll => "all-to-all",
            Self::AllReduce => "all-reduce f32",
            Self::ReduceScatter => "reduce-scatter f32",
        }
    }

    /// The share of the raw bandwidth that ours is to have, from 4 MiB on.
    fn bar(self) -> f64 {
        match self {
            Self::AllGather | Self::AllToAll => 0.95,
            Self::AllReduce => 1.2,
            Self::ReduceScatter => 2.0,
        }
    }

    /// The calls of which the faster is what is called raw.
    fn raw(self) -> [Raw; 2] {
        match self {
            Self::AllGather | Self::AllToAll => [Raw::Immediate, Raw::Exchange],
            Self::AllReduce | Self::ReduceScatter => [Raw::Blocking, Raw::Immediate],
        }
    }
}

/// Calls of MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Raw {
    /// `MPI_Allgather` and the like.
    Blocking,
    /// `MPI_Iallgather` and the like, and a wait.
    Immediate,
    /// `MPI_Isend` and `MPI_Irecv` with every other process, and waits.
    Exchange,
}

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Way {
    Ours,
    /// The part of it in which a rank makes its result of what has come.
    Moving,
    /// Into memory that is kept.
    Raw(Raw),
    /// Into new memory.
    Fresh(Raw),
}

/// What the processes of one turn tell.
#[derive(Debug, Serialize, Deserialize)]
struct Sample {
    collective: Collective,
    bytes: usize,
    way: Way,
    /// Of one call: in each round, of the slowest process.
    seconds: Vec<f64>,
}

impl Sample {
    fn print(&self) {
        println!("{}", serde_json::to_string(self).expect("a sample is JSON"));
    }
}

/// How many rounds are timed of so many repeats each.
fn rounds(bytes: usize, repeats: usize) -> usize {
    (256 * MIB / (bytes * repeats)).clamp(3, 40)
}

/// Does what this process, one of `count`, has been started for.
pub fn play(role: Role, count: usize, only: &str) -> Result<()> {
    match role {
        Role::Ours => ours::measure(count, only),
        Role::Raw => {
            raw::measure(only);
            Ok(())
        }
        Role::Overlap => overlap::measure(count),
    }
}

/// Prints the time of each collective on `count` processes whose name has `only` in it, beside raw
/// calls.
pub fn bandwidth(count: usize, only: &str) -> Result<()> {
    let mut samples = Vec::<Sample>::new();
    for turn in 1..=TURNS {
        for role in ["ours", "raw"] {
            eprintln!("turn {turn} of {TURNS}: {role}");
            let text = launcher::start(count, &["--role", role, "--only", only])?;
            for line in text.lines() {
                samples.push(serde_json::from_str(line)?);
            }
        }
    }
    table::print(count, only, &samples);
    Ok(())
}

/// Prints how much of a collective on `count` processes shows behind a rank's own work.
pub fn overlap(count: usize) -> Result<()> {
    print!("{}", launcher::start(count, &["--role", "overlap"])?);
    Ok(())
}

/// The middle one, or the mean of the two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) {
        (values[middle - 1] + values[middle]) / 2.0
    } else {
        values[middle]
    }
}
