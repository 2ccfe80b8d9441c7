//! [`Conformance`]: checks every collective of a backend against brute force.
//!
//! A backend implements the collectives ([`comm::backend`](crate::comm::backend)). These are tests
//! for the author of a new one:
//!
//! ```
//! use burn_dtensor::comm::Launch;
//! use burn_dtensor::testing::Conformance;
//!
//! // Threads. For another backend: `|ranks| Launch::on_backend(backend(ranks))`.
//! let report = Conformance::of(Launch::threads).with_ranks([2]).check("broadcast");
//! assert!(report > 100, "that many cases were tried");
//! ```
//!
//! Each check runs on the world, on the world in reverse order, on enumerated groups and, if there
//! are enough ranks, on the rows and columns of a mesh. It covers every dtype and root, and even,
//! uneven and empty shards, contiguous or not.

mod bits;
mod cases;
mod lists;
mod messages;
mod misuse;
mod objects;
mod order;
mod plain;
mod planned;
mod rooted;
mod scope;
mod shards;

use std::fmt;
use std::time::Duration;

use crate::Result;
use crate::comm::{Launch, launch};

use scope::TestGroup;

/// Function that runs one check in one group.
type Check = fn(&TestGroup) -> Result<()>;

/// Every check of the values that ranks receive, by name.
const CHECKS: [(&str, Check); 22] = [
    ("all_gather", shards::all_gather),
    ("all_gather_coalesced", shards::all_gather_coalesced),
    ("all_gather_stacked", shards::all_gather_stacked),
    ("reduce_scatter", shards::reduce_scatter),
    ("all_reduce", shards::all_reduce),
    ("all_reduce_coalesced", shards::all_reduce_coalesced),
    ("planned", planned::planned),
    ("all_to_all", shards::all_to_all),
    ("barrier", shards::barrier),
    ("broadcast", rooted::broadcast),
    ("scatter", rooted::scatter),
    ("reduce", rooted::reduce),
    ("gather", rooted::gather),
    ("all_gather_list", lists::all_gather_list),
    ("reduce_scatter_list", lists::reduce_scatter_list),
    ("all_to_all_list", lists::all_to_all_list),
    ("all_to_all_single", lists::all_to_all_single),
    ("sparse", lists::sparse),
    ("messages", messages::messages),
    ("objects", objects::objects),
    ("order", order::order),
    ("bits", bits::bits),
];

/// Conformance suite of a backend.
#[derive(Debug, Clone)]
pub struct Conformance<L> {
    launch: L,
    ranks: Vec<usize>,
    deadline: Duration,
    extent: TestExtent,
}

/// Amount of cases that are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct TestExtent {
    long: bool,
    brief: bool,
}

impl Conformance<fn(usize) -> Launch> {
    /// Returns the names of the checks of values, for [`check`](Self::check).
    pub fn names() -> impl Iterator<Item = &'static str> {
        CHECKS.into_iter().map(|(name, _)| name)
    }
}

impl<L: Fn(usize) -> Launch> Conformance<L> {
    /// Creates the suite. `launch` returns the configuration with which to launch a given number of
    /// ranks on the backend.
    pub fn of(launch: L) -> Self {
        Self {
            launch,
            ranks: vec![2, 3, 4],
            deadline: Duration::from_secs(60),
            extent: TestExtent::default(),
        }
    }

    /// Sets the sizes of the worlds to try. Default: 2, 3 and 4.
    pub fn with_ranks(mut self, ranks: impl IntoIterator<Item = usize>) -> Self {
        self.ranks = ranks.into_iter().collect();
        self
    }

    /// Sets how long a rank waits for the others. Default: one minute.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Uses tensors of some thousand elements instead of a few, for backends that split long
    /// tensors into several messages.
    pub fn with_large_tensors(mut self) -> Self {
        self.extent.long = true;
        self
    }

    /// Tries a few cases of each kind instead of all, as on many ranks. Use it to run the suite a
    /// second time on other ranks.
    pub fn with_few_cases(mut self) -> Self {
        self.extent.brief = true;
        self
    }

    /// Runs one check of values. Returns the number of cases that a rank tried.
    ///
    /// # Panics
    /// If there is no check with this name, or if a value is wrong.
    pub fn check(&self, name: &str) -> usize {
        let (_, check) = CHECKS
            .into_iter()
            .find(|(other, _)| *other == name)
            .unwrap_or_else(|| {
                panic!(
                    "there is no check `{name}`. The checks are {}",
                    Conformance::names().collect::<Vec<_>>().join(", ")
                )
            });
        self.ranks
            .iter()
            .map(|ranks| self.on_world(name, *ranks, check))
            .sum()
    }

    /// Runs programs with errors, each in a separate world, and checks that every rank gets the
    /// error that names the mistake. Returns the number of programs.
    ///
    /// # Panics
    /// If a program succeeds or fails with another error.
    pub fn misuse(&self) -> usize {
        let worlds = self.ranks.iter().filter(|ranks| **ranks > 1);
        worlds
            .map(|ranks| misuse::all(|| (self.launch)(*ranks).with_deadline(self.deadline)))
            .sum()
    }

    /// Runs all checks.
    ///
    /// # Panics
    /// Like [`check`](Self::check) and [`misuse`](Self::misuse).
    pub fn run(&self) -> ConformanceReport {
        let mut cases: Vec<_> = Conformance::names()
            .map(|name| (name, self.check(name)))
            .collect();
        cases.push(("misuse", self.misuse()));
        ConformanceReport { cases }
    }

    fn on_world(&self, name: &str, ranks: usize, check: Check) -> usize {
        let config = (self.launch)(ranks).with_deadline(self.deadline);
        let extent = self.extent;
        let returned = launch(config, |world| {
            let mut cases = 0;
            for scope in TestGroup::all(world, extent)? {
                check(&scope)?;
                cases += scope.cases();
            }
            Ok(cases)
        });
        let returned = returned.unwrap_or_else(|error| panic!("{name} on {ranks} ranks: {error}"));
        returned.first().map_or(0, |(_, cases)| *cases)
    }
}

/// Result of a run of the suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConformanceReport {
    /// Name of each check, and the number of cases that it tried.
    pub cases: Vec<(&'static str, usize)>,
}

impl ConformanceReport {
    /// Returns the number of all cases.
    pub fn total(&self) -> usize {
        self.cases.iter().map(|(_, cases)| cases).sum()
    }
}

impl fmt::Display for ConformanceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, cases) in &self.cases {
            writeln!(f, "{name:<22} {cases:>8}")?;
        }
        write!(f, "{:<22} {:>8}", "total", self.total())
    }
}
