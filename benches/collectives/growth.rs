//! How the time of one collective grows with the number of ranks.

use std::sync::{Arc, Barrier};

use burn::tensor::DType;
use burn_dtensor::comm::{Launch, World};

use crate::MIB;
use crate::bandwidth::best_of;
use crate::peers::copy_fresh;
use crate::steps::{Step, all_reduce, barrier, gather};

/// How often each number of ranks has its turn.
const TURNS: usize = 5;

/// What makes a rank's step; all ranks share the barrier.
type Prepare = fn(&World, &Arc<Barrier>) -> Step;

/// Prints the time of each collective whose name has `only` in it, at each of `ranks`.
pub fn growth(ranks: &[usize], only: &str) {
    print!(
        "us, best of many; in brackets beside {} ranks\n\n{:>18}",
        ranks[0], "ranks"
    );
    ranks.iter().for_each(|ranks| print!(" {ranks:>16}"));
    println!();
    let cases: [(&str, Prepare); 5] = [
        ("std barrier", |_, peer| {
            let peer = Arc::clone(peer);
            Box::new(move || _ = peer.wait())
        }),
        ("barrier", |world, _| barrier(world)),
        ("copy 1 MiB", |world, _| copy_fresh(MIB, world)),
        ("all-reduce 1 MiB", |world, _| {
            all_reduce(MIB, DType::F32, world)
        }),
        ("all-gather 1 MiB", |world, _| {
            gather(MIB, 0, DType::F32, world)
        }),
    ];
    for (name, prepare) in cases.into_iter().filter(|(name, _)| name.contains(only)) {
        let mut best = vec![f64::MAX; ranks.len()];
        for _ in 0..TURNS {
            for (best, ranks) in best.iter_mut().zip(ranks) {
                let peer = Arc::new(Barrier::new(*ranks));
                *best = best.min(best_of(
                    3,
                    (4096 / ranks).max(8),
                    &Launch::threads(*ranks),
                    |world| prepare(world, &peer),
                ));
            }
        }
        print!("{name:>18}");
        best.iter()
            .for_each(|seconds| print!(" {:>9.0} ({:>4.2})", seconds * 1e6, seconds / best[0]));
        println!();
    }
}
