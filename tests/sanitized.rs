//! What hands out memory that it takes back, or waits on other threads: the slots of gathered
//! weights, the scopes of units, the rendezvous of ranks and their ends, tensors of several ranks
//! and threads.
//!
//! The tests are the suite's own; `.ci/sanitize` builds them with AddressSanitizer, which knows
//! of every byte whether it is allocated. Few crates are compiled for it.

#[path = "suite/collective_numerics.rs"]
mod collective_numerics;
#[path = "suite/comm/mod.rs"]
mod comm;
#[path = "suite/compiler.rs"]
mod compiler;
#[path = "suite/ends.rs"]
mod ends;
#[path = "suite/failure.rs"]
mod failure;
#[path = "suite/fsdp/mod.rs"]
mod fsdp;
#[path = "suite/launched.rs"]
mod launched;
#[path = "suite/logged.rs"]
mod logged;
#[path = "suite/loopback/mod.rs"]
mod loopback;
#[path = "suite/models/mod.rs"]
#[allow(dead_code, unused_imports)]
mod models;
#[path = "suite/own_process.rs"]
mod own_process;
#[path = "suite/parallel"]
#[allow(dead_code)]
mod parallel {
    pub mod support;
}
#[path = "suite/worlds.rs"]
mod worlds;

/// The sizes of worlds that collectives are held to brute force on. More ranks take the same paths,
/// for minutes.
const CONFORMING: [usize; 2] = [2, 3];

mod effort {
    /// Returns true if everything is tried, which takes too long here.
    pub fn is_long() -> bool {
        false
    }
}
