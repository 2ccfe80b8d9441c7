//! The sources of `burn_dtensor::comm::local`'s rendezvous, compiled against shuttle's primitives.
//!
//! Shuttle runs a program under many schedules, and reports a lost wake-up as a deadlock. Run with
//! `cargo test --manifest-path tests/rendezvous-model/Cargo.toml`.

#![allow(dead_code, unused_imports)]

mod comm;
mod model;

fn main() {
    for (name, check) in model::CHECKS {
        println!("{name} ...");
        check();
    }
}
