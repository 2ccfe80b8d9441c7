//! The sources of `burn_dtensor::comm::control`'s rendezvous, compiled against shuttle's
//! primitives.
//!
//! Shuttle runs a program under many schedules, and reports a lost wake-up as a deadlock. Run with
//! `cargo test --manifest-path tests/rendezvous-model/Cargo.toml`, and after ` -- ` how many
//! schedules to try of each check (10,000 by default), and the seed that an earlier run has
//! printed.

#![allow(dead_code, unused_imports)]

use std::hash::{BuildHasher, RandomState};

mod comm;
mod model;

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
        check(model::Schedules { seed, count });
    }
}
