//! [`Delays`]: ranks that sleep somewhere in a step.
//!
//! Around collectives by their spans, which begin before a rank has posted and end when it has its
//! result: so whatever carries them is none the wiser.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::thread;
use std::time::Duration;

use burn_dtensor::comm::Op;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Longer than a unit takes forward, or back.
const DELAY: Duration = Duration::from_micros(500);

/// Where a rank sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    BeforeGather,
    AfterGather,
    InForward,
    BeforeReduce,
    AfterReduce,
    BeforeStep,
    Everywhere,
}

impl Place {
    pub const ALL: [Self; 7] = [
        Self::BeforeGather,
        Self::AfterGather,
        Self::InForward,
        Self::BeforeReduce,
        Self::AfterReduce,
        Self::BeforeStep,
        Self::Everywhere,
    ];
}

/// Which ranks sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whom {
    /// One, drawn anew for each step.
    One,
    All,
}

/// Who is late in each step, and where.
#[derive(Debug, Clone, Copy)]
pub struct Late {
    pub place: Place,
    pub whom: Whom,
}

impl Late {
    /// Whether `rank` of so many is late in `step`.
    fn is(self, rank: usize, ranks: usize, step: u64) -> bool {
        match self.whom {
            // The same on all ranks.
            Whom::One => StdRng::seed_from_u64(step).random_range(0..ranks) == rank,
            Whom::All => true,
        }
    }

    /// In how many of so many steps each of so many ranks is late, added up.
    pub fn count(self, steps: u64, ranks: usize) -> u64 {
        match self.whom {
            Whom::One => steps,
            Whom::All => steps * ranks as u64,
        }
    }
}

/// The delays of one rank, and what listens to its collectives.
#[derive(Debug)]
pub struct Delays {
    late: Option<Late>,
    rank: usize,
    ranks: usize,
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    step: u64,
    is_late: bool,
    /// The steps in which the rank has slept.
    slept: BTreeSet<u64>,
    /// The collectives so far.
    spans: Vec<Collective>,
}

/// What is known of a collective.
#[derive(Debug, Clone, Copy)]
struct Collective {
    /// Where a rank is that has its result.
    after: Place,
    /// Its span has been left once: next when it has been waited for.
    is_posted: bool,
}

impl Delays {
    pub fn new(late: Option<Late>, rank: usize, ranks: usize) -> Self {
        Self {
            late,
            rank,
            ranks,
            now: Mutex::default(),
        }
    }

    /// The next step begins.
    pub fn begin(&self, step: u64) {
        let mut now = self.now.lock();
        now.is_late = self
            .late
            .is_some_and(|late| late.is(self.rank, self.ranks, step));
        now.step = step;
    }

    /// The rank is at `place`.
    pub fn at(&self, place: Place) {
        let mut now = self.now.lock();
        if !now.is_late
            || !self
                .late
                .is_some_and(|late| [place, Place::Everywhere].contains(&late.place))
        {
            return;
        }
        let step = now.step;
        now.slept.insert(step);
        drop(now);
        thread::sleep(DELAY);
    }

    /// In how many steps it has slept.
    pub fn slept(&self) -> usize {
        self.now.lock().slept.len()
    }
}

impl Subscriber for Delays {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "burn_dtensor::comm" && metadata.is_span()
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut gathers = Gathers(false);
        attributes.record(&mut gathers);
        // A step has no other collectives.
        let (before, after) = match gathers.0 {
            true => (Place::BeforeGather, Place::AfterGather),
            false => (Place::BeforeReduce, Place::AfterReduce),
        };
        self.at(before);
        let spans = &mut self.now.lock().spans;
        spans.push(Collective {
            after,
            is_posted: false,
        });
        Id::from_u64(spans.len() as u64)
    }

    fn exit(&self, id: &Id) {
        let mut now = self.now.lock();
        let collective = &mut now.spans[id.into_u64() as usize - 1];
        let is_over = collective.is_posted;
        collective.is_posted = true;
        let after = collective.after;
        drop(now);
        if is_over {
            self.at(after);
        }
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}
}

/// Whether a collective is an all-gather.
struct Gathers(bool);

impl Visit for Gathers {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0 |= field.name() == "operation" && value == Op::AllGather.name();
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}
