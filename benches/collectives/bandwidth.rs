//! Bandwidth of thread ranks, beside threads that copy or add as much.

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::DType;
use burn_dtensor::comm::{Launch, World, launch};

use crate::by_hand::{self, HandWritten};
use crate::peers::{add_part, copy_fresh, reduce_fresh};
use crate::steps::{Step, all_reduce, all_to_all, barrier, gather, rows_to_all, scatter};
use crate::{MIB, SIZES, repeats, size_text};

/// What makes a rank's step of a whole of so many bytes.
type OfBytes = Box<dyn Fn(usize, &World, &Arc<HandWritten>) -> Step + Sync>;

/// A collective, and what it is beside.
struct Case {
    name: String,
    /// Bytes of output on each rank, of a whole of so many.
    output: fn(usize, usize) -> usize,
    collective: OfBytes,
    peer: OfBytes,
    by_hand: OfBytes,
}

fn cases() -> Vec<Case> {
    let part = |bytes, ranks| bytes / ranks;
    let full = |bytes, _| bytes;
    let copied = || -> OfBytes { Box::new(|bytes, world, _| copy_fresh(bytes, world)) };
    let part_copied =
        || -> OfBytes { Box::new(|bytes, world, _| copy_fresh(bytes / world.size(), world)) };
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let mut case = |name: &str, output, collective, peer, by_hand| {
            cases.push(Case {
                name: format!("{name} {}", dtype.name()),
                output,
                collective,
                peer,
                by_hand,
            });
        };
        for dim in [0, 1] {
            case(
                &format!("all-gather dim {dim}"),
                full,
                Box::new(move |bytes, world, _| gather(bytes, dim, dtype, world)),
                copied(),
                Box::new(move |bytes, world, hands| {
                    by_hand::gather(bytes, dim, dtype, world, hands)
                }),
            );
            case(
                &format!("all-to-all dim {dim} to {}", 1 - dim),
                part,
                Box::new(move |bytes, world, _| all_to_all(bytes, dim, dtype, world)),
                part_copied(),
                Box::new(move |bytes, world, hands| {
                    by_hand::all_to_all(bytes, dim, dtype, world, hands)
                }),
            );
            case(
                &format!("reduce-scatter dim {dim}"),
                part,
                Box::new(move |bytes, world, _| scatter(bytes, dim, dtype, world)),
                Box::new(move |bytes, world, _| add_part(bytes, dim, dtype, world)),
                Box::new(move |bytes, world, hands| {
                    by_hand::scatter(bytes, dim, dtype, world, hands)
                }),
            );
        }
        case(
            "all-to-all of rows",
            part,
            Box::new(move |bytes, world, _| rows_to_all(bytes, dtype, world)),
            part_copied(),
            Box::new(|bytes, world, hands| by_hand::rows_to_all(bytes, world, hands)),
        );
        case(
            "all-reduce",
            full,
            Box::new(move |bytes, world, _| all_reduce(bytes, dtype, world)),
            Box::new(move |bytes, world, _| reduce_fresh(bytes, dtype, world)),
            Box::new(move |bytes, world, hands| by_hand::all_reduce(bytes, dtype, world, hands)),
        );
    }
    cases
}

/// Prints the bandwidth of each collective whose name has `only` in it, of so many threads, in
/// memory of their own if they are `separate`.
pub fn bandwidth(ranks: usize, separate: bool, only: &str) {
    let threads = Launch::threads(ranks);
    let threads = if separate {
        threads.with_separate_memory()
    } else {
        threads
    };
    let measure =
        |bytes: usize, prepare: &(dyn Fn(usize, &World, &Arc<HandWritten>) -> Step + Sync)| {
            measure(bytes, ranks, &threads, prepare)
        };
    let barrier = measure(MIB, &|_, world, _| barrier(world));
    println!(
        "{ranks} ranks; a barrier takes {:.1} us; GB of output per rank and second, and beside its peers:",
        barrier * 1e6
    );
    for Case {
        name,
        output,
        collective,
        peer,
        by_hand,
    } in cases().iter().filter(|case| case.name.contains(only))
    {
        println!(
            "\n{name:<28} {:>10} {:>10} {:>7} {:>12} {:>10}",
            "collective", "peer", "", "us above it", "by hand"
        );
        for bytes in SIZES {
            let [own, its, hands] =
                [collective, peer, by_hand].map(|prepare| measure(bytes, &**prepare));
            let speed = |seconds: f64| output(bytes, ranks) as f64 / seconds / 1e9;
            let above = (own - its) * 1e6;
            println!(
                "{:>28} {:>10.2} {:>10.2} {:>5.0} % {above:>12.1} {:>10.2} {:>5.0} %",
                size_text(bytes),
                speed(own),
                speed(its),
                100.0 * its / own,
                speed(hands),
                100.0 * hands / own,
            );
        }
    }
}

/// Seconds of one step of `bytes` on all ranks at once.
fn measure(
    bytes: usize,
    ranks: usize,
    threads: &Launch,
    prepare: &(dyn Fn(usize, &World, &Arc<HandWritten>) -> Step + Sync),
) -> f64 {
    let (repeats, hands) = (repeats(bytes), Arc::new(HandWritten::new(ranks)));
    best_of(
        (4096 * MIB / (bytes * repeats)).clamp(16, 4000),
        repeats,
        threads,
        |world| prepare(bytes, world, &hands),
    )
}

/// Seconds of one step on all ranks of `threads`: the best of `rounds`, each of so many `repeats`,
/// from the first rank's start to the last one's end.
pub fn best_of(
    rounds: usize,
    repeats: usize,
    threads: &Launch,
    prepare: impl Fn(&World) -> Step + Sync,
) -> f64 {
    let spans = launch(threads.clone(), |world| {
        let mut step = prepare(world);
        let mut spans = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            world.barrier("start")?;
            let start = Instant::now();
            (0..repeats).for_each(|_| step());
            spans.push((start, Instant::now()));
            world.barrier("end")?;
        }
        Ok(spans)
    });
    let spans: Vec<_> = spans
        .unwrap_or_else(|error| panic!("{error}"))
        .into_iter()
        .map(|(_, spans)| spans)
        .collect();
    let of_round = |round: usize| {
        let of_rank = spans.iter().map(|spans| spans[round]);
        let (start, end) = of_rank
            .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
            .expect("there are ranks");
        end - start
    };
    (0..rounds)
        .map(of_round)
        .min()
        .expect("there are rounds")
        .as_secs_f64()
        / repeats as f64
}
