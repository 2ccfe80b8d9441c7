//! [`Conformance`]: every collective of an engine, held to brute force.
//!
//! An engine carries collectives from rank to rank ([`comm::backend`](crate::comm::backend)). Whoever writes one starts
//! with its tests written:
//!
//! ```
//! use burn_dtensor::comm::Launch;
//! use burn_dtensor::testing::Conformance;
//!
//! // Threads; of another engine `|ranks| Launch::on_backend(engine(ranks))`.
//! let report = Conformance::of(Launch::threads).with_ranks([2]).check("broadcast");
//! assert!(report > 100, "that many cases were tried");
//! ```
//!
//! Each check runs on the world, on the world in reverse order, on enumerated groups and, where they fit, on the rows and
//! columns of a mesh; over every dtype and root, over even, uneven and empty parts, contiguous or not.

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

/// What one check does in one group.
type Check = fn(&TestGroup) -> Result<()>;

/// Every check of what ranks get, by name.
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

/// The conformance suite of an engine.
#[derive(Debug, Clone)]
pub struct Conformance<L> {
    launch: L,
    ranks: Vec<usize>,
    deadline: Duration,
    extent: TestExtent,
}

/// How much is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct TestExtent {
    long: bool,
    brief: bool,
}

impl<L: Fn(usize) -> Launch> Conformance<L> {
    /// Of what `launch` starts so many ranks on.
    pub fn of(launch: L) -> Self {
        Self { launch, ranks: vec![2, 3, 4], deadline: Duration::from_secs(60), extent: TestExtent::default() }
    }

    /// The sizes of worlds to try. Default: 2, 3 and 4.
    pub fn with_ranks(mut self, ranks: impl IntoIterator<Item = usize>) -> Self {
        self.ranks = ranks.into_iter().collect();
        self
    }

    /// How long a rank waits for the others. Default: a minute.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Tensors of some thousand elements in place of a few: for engines that cut what is long into messages.
    pub fn with_large_tensors(mut self) -> Self {
        self.extent.long = true;
        self
    }

    /// A few cases of each kind in place of all, as on many ranks: for an engine that is tried once more, on other ranks.
    pub fn with_few_cases(mut self) -> Self {
        self.extent.brief = true;
        self
    }

    /// Names of the checks of values, for [`check`](Self::check).
    pub fn names() -> impl Iterator<Item = &'static str> {
        CHECKS.into_iter().map(|(name, _)| name)
    }

    /// Runs one check of values. Returns how many cases a rank tried.
    ///
    /// # Panics
    /// If there is no such check, or if a value is wrong.
    pub fn check(&self, name: &str) -> usize {
        let (_, check) = CHECKS.into_iter().find(|(other, _)| *other == name).unwrap_or_else(|| {
            panic!("there is no check `{name}`, only {}", Self::names().collect::<Vec<_>>().join(", "))
        });
        self.ranks.iter().map(|ranks| self.on_world(name, *ranks, check)).sum()
    }

    /// Runs what programs do wrong, each in a world of its own, and looks for the error that names it on every rank.
    /// Returns how many were tried.
    ///
    /// # Panics
    /// If one succeeds, or fails otherwise.
    pub fn misuse(&self) -> usize {
        let worlds = self.ranks.iter().filter(|ranks| **ranks > 1);
        worlds.map(|ranks| misuse::all(|| (self.launch)(*ranks).with_deadline(self.deadline))).sum()
    }

    /// Runs everything.
    ///
    /// # Panics
    /// As [`check`](Self::check) and [`misuse`](Self::misuse).
    pub fn run(&self) -> ConformanceReport {
        let mut cases: Vec<_> = Self::names().map(|name| (name, self.check(name))).collect();
        cases.push(("misuse", self.misuse()));
        ConformanceReport { cases }
    }

    fn on_world(&self, name: &str, ranks: usize, check: Check) -> usize {
        let (config, extent) = ((self.launch)(ranks).with_deadline(self.deadline), self.extent);
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

/// What was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConformanceReport {
    /// Each check, and how many cases it tried.
    pub cases: Vec<(&'static str, usize)>,
}

impl ConformanceReport {
    /// All cases.
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
