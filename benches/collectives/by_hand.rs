//! The collectives by hand: threads that meet, then read each other's memory where it is, as a
//! program without this crate would.
//!
//! What they are beside threads that only copy or add is what a machine takes for it, whoever asks:
//! rows that lie apart are slower to copy than memory in one piece, and threads that are more than
//! the cores sleep until the last has come.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, OnceLock};

use burn::tensor::DType;
use burn_dtensor::comm::World;

use crate::peers::{add_fresh, add_part, copy_fresh};
use crate::steps::{Step, matrix};

/// What the threads share.
pub struct HandWritten {
    meeting: StepBarrier,
    parts: Box<[OnceLock<Vec<u8>>]>,
}

impl HandWritten {
    pub fn new(ranks: usize) -> Self {
        Self {
            meeting: StepBarrier::new(ranks),
            parts: (0..ranks).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Every rank brings a part of so many bytes, and copies these runs of all into new memory.
    fn copy(self: &Arc<Self>, part: usize, runs: Runs, world: &World) -> Step {
        let (hands, own) = (Arc::clone(self), vec![world.rank() as u8 + 1; part]);
        hands.parts[world.rank()]
            .set(own)
            .expect("a rank has one part");
        Box::new(move || {
            hands.meeting.wait();
            let parts = hands
                .parts
                .iter()
                .map(|part| &part.get().expect("all have met")[..]);
            drop(black_box(
                runs.copied(black_box(&parts.collect::<Vec<_>>())),
            ));
        })
    }

    /// The steps, each once all ranks have come.
    fn met(self: &Arc<Self>, mut steps: Vec<Step>) -> Step {
        let hands = Arc::clone(self);
        Box::new(move || {
            steps.iter_mut().for_each(|step| {
                hands.meeting.wait();
                step();
            });
        })
    }
}

/// Where all wait for the last.
enum StepBarrier {
    /// Each has a core of its own: how often one has come, and how many they are.
    Spinning(AtomicUsize, usize),
    Sleeping(Barrier),
}

impl StepBarrier {
    fn new(ranks: usize) -> Self {
        match std::thread::available_parallelism() {
            Ok(cores) if cores.get() >= ranks => Self::Spinning(AtomicUsize::new(0), ranks),
            _ => Self::Sleeping(Barrier::new(ranks)),
        }
    }

    fn wait(&self) {
        match self {
            Self::Spinning(come, ranks) => {
                let all = (come.fetch_add(1, Ordering::AcqRel) + 1).next_multiple_of(*ranks);
                while come.load(Ordering::Acquire) < all {
                    spin_loop();
                }
            }
            Self::Sleeping(barrier) => _ = barrier.wait(),
        }
    }
}

/// Which bytes of each part, and in which order.
struct Runs {
    rows: usize,
    /// Bytes of each.
    run: usize,
    start: usize,
    /// From one to the next.
    stride: usize,
    /// Row by row of all parts, instead of part by part.
    side_by_side: bool,
}

impl Runs {
    /// One.
    fn one(run: usize, start: usize) -> Self {
        Self {
            rows: 1,
            run,
            start,
            stride: run,
            side_by_side: false,
        }
    }

    fn copied(&self, parts: &[&[u8]]) -> Vec<u8> {
        let Self {
            rows,
            run,
            start,
            stride,
            side_by_side,
        } = *self;
        let mut out = Vec::with_capacity(parts.len() * rows * run);
        let mut copy =
            |part: &[u8], row: usize| out.extend_from_slice(&part[start + row * stride..][..run]);
        if side_by_side {
            (0..rows).for_each(|row| parts.iter().for_each(|part| copy(part, row)));
        } else {
            parts
                .iter()
                .for_each(|part| (0..rows).for_each(|row| copy(part, row)));
        }
        out
    }
}

pub fn gather(
    bytes: usize,
    dim: usize,
    dtype: DType,
    world: &World,
    hands: &Arc<HandWritten>,
) -> Step {
    let ([rows, columns], part) = (matrix(bytes, dtype), bytes / world.size());
    let run = columns * dtype.size() / world.size();
    let runs = match dim {
        0 => Runs::one(part, 0),
        _ => Runs {
            rows,
            run,
            start: 0,
            stride: run,
            side_by_side: true,
        },
    };
    hands.copy(part, runs, world)
}

pub fn all_to_all(
    bytes: usize,
    dim: usize,
    dtype: DType,
    world: &World,
    hands: &Arc<HandWritten>,
) -> Step {
    let [rows, columns] = matrix(bytes, dtype);
    let (rows, row) = (rows / world.size(), columns * dtype.size());
    let run = row / world.size();
    let runs = match dim {
        0 => Runs {
            rows,
            run,
            start: world.rank() * run,
            stride: row,
            side_by_side: false,
        },
        _ => Runs {
            rows,
            run,
            start: world.rank() * rows * run,
            stride: run,
            side_by_side: true,
        },
    };
    hands.copy(bytes / world.size(), runs, world)
}

pub fn rows_to_all(bytes: usize, world: &World, hands: &Arc<HandWritten>) -> Step {
    let part = bytes / world.size();
    let run = part / world.size();
    hands.copy(part, Runs::one(run, world.rank() * run), world)
}

pub fn scatter(
    bytes: usize,
    dim: usize,
    dtype: DType,
    world: &World,
    hands: &Arc<HandWritten>,
) -> Step {
    hands.met(vec![add_part(bytes, dim, dtype, world)])
}

pub fn all_reduce(bytes: usize, dtype: DType, world: &World, hands: &Arc<HandWritten>) -> Step {
    hands.met(match world.size() {
        2 => vec![add_fresh(bytes, dtype, world)],
        ranks => vec![
            add_fresh(bytes / ranks, dtype, world),
            copy_fresh(bytes, world),
        ],
    })
}
