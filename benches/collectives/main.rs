//! Bandwidth of the collectives, beside what else moves as many bytes in the same run.
//!
//! The allocator is mimalloc, which keeps freed pages, so that memory is equally warm for all: the
//! C library returns large blocks to the system, and then page faults are all that there is to
//! measure.
//!
//! # Ranks as threads, beside threads that copy or add
//!
//! Every figure is GB of *output* per rank and second, best of many rounds. What it is beside:
//!
//! - of an all-gather and an all-to-all, as many threads that copy as many bytes each into new
//!   memory;
//! - of a reduce-scatter and an all-reduce, as many threads that add the same elements each of as
//!   many arrays as there are ranks into new memory: bf16 in f32, rounded once. Of an all-reduce on
//!   more than two ranks each adds its share, and copies the others'.
//!
//! Beside both there is the collective [by hand](by_hand): what the machine takes where threads
//! meet, and rows lie apart.
//!
//! What all ranks get alike, of an all-gather or an all-reduce, they make together and have in
//! common, where the others make it once for each: so the figures of the two may be as many times
//! those beside them as there are ranks. With `--separate` each rank makes its own, as on a machine
//! of its own.
//!
//! ```text
//! cargo bench --bench collectives                 # 2 ranks
//! cargo bench --bench collectives -- --threads 4
//! cargo bench --bench collectives -- --separate   # each rank has memory of its own
//! ```
//!
//! With `--ranks` the question is another: how the time of one collective grows with the number of
//! ranks, whatever the number of cores.
//!
//! ```text
//! cargo bench --bench collectives -- --ranks 64,128,256
//! ```
//!
//! What the ranks do together grows as fast as they, and so does the time once there are more of
//! them than cores; what grows faster is overhead: ours, or that of so many threads, which
//! `std::sync::Barrier` and a copy of as many bytes on every rank show. The numbers of ranks take
//! turns, so that whatever else the machine does meets all alike.
//!
//! # Ranks as processes, beside raw MPI
//!
//! The bench has `mpirun` start its own binary, by turns for ours and for raw calls of MPI
//! ([`processes`]).
//!
//! ```text
//! cargo bench --features mpi --bench collectives -- --processes              # 2 processes
//! cargo bench --features mpi --bench collectives -- --processes --overlap    # behind a rank's own work
//! ```

mod bandwidth;
mod by_hand;
mod growth;
mod peers;
#[cfg(feature = "mpi")]
mod processes;
mod steps;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Bytes of the wholes.
const SIZES: [usize; 7] = [
    64 * KIB,
    256 * KIB,
    MIB,
    4 * MIB,
    16 * MIB,
    64 * MIB,
    256 * MIB,
];

#[derive(Parser)]
#[command(
    about = "Bandwidth of the collectives, beside what else moves as many bytes in the same run"
)]
struct Cli {
    /// How many ranks, each a thread
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    threads: u32,
    /// Each rank, a thread, has results in memory of its own, as on a machine of its own
    #[arg(long)]
    separate: bool,
    /// Only what has this in its name, such as `reduce-scatter bf16`
    #[arg(long, default_value = "")]
    only: String,
    /// Instead the microseconds of a barrier, of an all-reduce of 1 MiB on every rank, and of an
    /// all-gather of a whole of 1 MiB, at each of these numbers of ranks, such as 64,128,256; in
    /// brackets beside the first one
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Vec<u32>,
    /// Instead so many ranks, each a process, beside raw MPI
    #[arg(long, num_args = 0..=1, default_missing_value = "2", value_parser = clap::value_parser!(u32).range(2..))]
    processes: Option<u32>,
    /// Instead how much of a collective shows behind a rank's own work
    #[arg(long, requires = "processes")]
    overlap: bool,
    /// What this process is one of several for
    #[arg(long, requires = "processes", hide = true)]
    role: Option<Role>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// What processes do that the bench has started.
#[derive(Clone, Copy, ValueEnum)]
enum Role {
    Ours,
    Raw,
    Overlap,
}

fn main() -> ExitCode {
    let Cli {
        threads,
        separate,
        only,
        ranks,
        processes,
        overlap,
        role,
        ..
    } = Cli::parse();
    match (processes, &ranks[..]) {
        (Some(count), _) => {
            if let Err(error) = among_processes(count as usize, &only, overlap, role) {
                eprintln!("{error:#}");
                return ExitCode::FAILURE;
            }
        }
        (None, []) => bandwidth::bandwidth(threads as usize, separate, &only),
        (None, ranks) => growth::growth(
            &ranks
                .iter()
                .map(|ranks| *ranks as usize)
                .collect::<Vec<_>>(),
            &only,
        ),
    }
    ExitCode::SUCCESS
}

#[cfg(feature = "mpi")]
fn among_processes(
    count: usize,
    only: &str,
    overlap: bool,
    role: Option<Role>,
) -> anyhow::Result<()> {
    match role {
        Some(role) => processes::play(role, count, only),
        None if overlap => processes::overlap(count),
        None => processes::bandwidth(count, only),
    }
}

#[cfg(not(feature = "mpi"))]
fn among_processes(
    count: usize,
    _only: &str,
    _overlap: bool,
    _role: Option<Role>,
) -> anyhow::Result<()> {
    anyhow::bail!(
        "ranks in {count} processes need MPI: cargo bench --features mpi --bench collectives -- --processes"
    )
}

/// How often a step of `bytes` is repeated in a round, so that what begins and ends the round is
/// little beside it.
fn repeats(bytes: usize) -> usize {
    (16 * MIB / bytes).clamp(1, 8)
}

/// `64 KiB`, `4 MiB`
fn size_text(bytes: usize) -> String {
    if bytes < MIB {
        format!("{} KiB", bytes / KIB)
    } else {
        format!("{} MiB", bytes / MIB)
    }
}
