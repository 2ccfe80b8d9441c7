//! The sources of what gathered weights live in, `burn_dtensor::param::storage`, compiled against
//! shuttle's primitives.
//!
//! Shuttle runs a program under many schedules. A weight's memory is overwritten when it is freed,
//! so that a read of freed memory shows. Run with `cargo test --manifest-path
//! tests/slot-model/Cargo.toml`, and after ` -- ` how many schedules to try of each check (10,000
//! by default), and the seed that an earlier run has printed.

#![allow(dead_code)]

use std::hash::{BuildHasher, RandomState};

mod memory;
mod model;
mod storage;

fn main() {
    let mut numbers = std::env::args()
        .skip(1)
        .map(|n| n.parse::<u64>().expect("schedules and seed are numbers"));
    let count = numbers.next().unwrap_or(10_000) as usize;
    let seed = numbers
        .next()
        .unwrap_or_else(|| RandomState::new().hash_one(()));
    println!("{count} schedules of each check, seed {seed}");
    for (name, check) in model::CHECKS {
        println!("{name} ...");
        model::Schedules { seed, count }.check(check);
    }
}
