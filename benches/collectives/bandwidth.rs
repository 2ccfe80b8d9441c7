//! Bandwidth of thread ranks, beside threads that copy or add as much.

use std::time::Instant;

use burn::tensor::DType;
use burn_dtensor::comm::{Launch, World, launch};

use crate::peers::{add_part, copy_fresh, reduce_fresh};
use crate::steps::{Step, all_reduce, all_to_all, barrier, gather, rows_to_all, scatter};
use crate::{MIB, SIZES, repeats, size_text};

/// What makes a rank's step of a whole of so many bytes.
type OfBytes = Box<dyn Fn(usize, &World) -> Step + Sync>;

/// A collective, and what it is beside.
struct Case {
    name: String,
    /// Bytes of output on each rank, of a whole of so many.
    output: fn(usize, usize) -> usize,
    collective: OfBytes,
    peer: OfBytes,
}

fn cases() -> Vec<Case> {
    let part = |bytes, ranks| bytes / ranks;
    let whole = |bytes, _| bytes;
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let mut case = |name: &str, output, collective, peer| {
            cases.push(Case { name: format!("{name} {}", dtype.name()), output, collective, peer });
        };
        for dim in [0, 1] {
            let copied = move |bytes, world: &World| copy_fresh(bytes, world);
            let gathered = move |bytes, world: &World| gather(bytes, dim, dtype, world);
            case(&format!("all-gather dim {dim}"), whole, Box::new(gathered), Box::new(copied));
            let copied = move |bytes, world: &World| copy_fresh(bytes / world.size(), world);
            let cut = move |bytes, world: &World| all_to_all(bytes, dim, dtype, world);
            case(&format!("all-to-all dim {dim} to {}", 1 - dim), part, Box::new(cut), Box::new(copied));
            let added = move |bytes, world: &World| add_part(bytes, dim, dtype, world);
            let scattered = move |bytes, world: &World| scatter(bytes, dim, dtype, world);
            case(&format!("reduce-scatter dim {dim}"), part, Box::new(scattered), Box::new(added));
        }
        let copied = move |bytes, world: &World| copy_fresh(bytes / world.size(), world);
        let rows = move |bytes, world: &World| rows_to_all(bytes, dtype, world);
        case("all-to-all of rows", part, Box::new(rows), Box::new(copied));
        let added = move |bytes, world: &World| reduce_fresh(bytes, dtype, world);
        let reduced = move |bytes, world: &World| all_reduce(bytes, dtype, world);
        case("all-reduce", whole, Box::new(reduced), Box::new(added));
    }
    cases
}

/// Prints the bandwidth of each collective whose name has `only` in it.
pub fn bandwidth(ranks: usize, only: &str) {
    let barrier = measure(MIB, ranks, &|_, world| barrier(world));
    println!(
        "{ranks} ranks; a barrier takes {:.1} us; GB of output per rank and second, and beside its peer:",
        barrier * 1e6
    );
    for Case { name, output, collective, peer } in cases().iter().filter(|case| case.name.contains(only)) {
        println!("\n{name:<28} {:>10} {:>10} {:>7} {:>12}", "collective", "peer", "", "us above it");
        for bytes in SIZES {
            let (own, its) = (measure(bytes, ranks, collective), measure(bytes, ranks, peer));
            let speed = |seconds: f64| output(bytes, ranks) as f64 / seconds / 1e9;
            let (percent, above) = (100.0 * its / own, (own - its) * 1e6);
            println!(
                "{:>28} {:>10.2} {:>10.2} {percent:>5.0} % {above:>12.1}",
                size_text(bytes),
                speed(own),
                speed(its)
            );
        }
    }
}

/// Seconds of one step of `bytes` on all ranks at once.
fn measure(bytes: usize, ranks: usize, prepare: &(dyn Fn(usize, &World) -> Step + Sync)) -> f64 {
    let repeats = repeats(bytes);
    best_of((2048 * MIB / (bytes * repeats)).clamp(8, 400), repeats, ranks, |world| prepare(bytes, world))
}

/// Seconds of one step on all ranks: the best of `rounds`, each of so many `repeats`, from the first rank's start to the
/// last one's end.
pub fn best_of(rounds: usize, repeats: usize, ranks: usize, prepare: impl Fn(&World) -> Step + Sync) -> f64 {
    let spans = launch(Launch::threads(ranks), |world| {
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
    let spans: Vec<_> = spans.unwrap_or_else(|error| panic!("{error}")).into_iter().map(|(_, spans)| spans).collect();
    let of_round = |round: usize| {
        let of_rank = spans.iter().map(|spans| spans[round]);
        let (start, end) = of_rank.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).expect("there are ranks");
        end - start
    };
    (0..rounds).map(of_round).min().expect("there are rounds").as_secs_f64() / repeats as f64
}
