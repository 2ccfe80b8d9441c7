//! Vector clocks of streams: which work of which stream has run before a point.
//!
//! Each stream counts what was enqueued on it. An event holds the clock of its stream, and a stream
//! that waits for the event takes it over. An access to memory is in order if the clock of its stream
//! includes the conflicting accesses before it.

use std::collections::HashMap;
use std::ops::Range;

/// Identifies a stream: of a rank, or for communication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamKey {
    /// Stream of a rank's thread in a process.
    Rank(usize, usize),
    Communication(usize),
}

/// Number of works of each stream that have run.
#[derive(Debug, Clone, Default)]
pub struct Clock(HashMap<StreamKey, u64>);

impl Clock {
    /// Counts a work of `stream`, whose clock this is, and returns its number.
    pub fn tick(&mut self, stream: StreamKey) -> u64 {
        let count = self.0.entry(stream).or_default();
        *count += 1;
        *count
    }

    pub fn merge(&mut self, other: &Self) {
        for (stream, count) in &other.0 {
            let own = self.0.entry(*stream).or_default();
            *own = (*own).max(*count);
        }
    }

    fn includes(&self, access: &Access) -> bool {
        self.0
            .get(&access.stream)
            .is_some_and(|count| *count >= access.number)
    }
}

#[derive(Debug, Clone)]
struct Access {
    range: Range<usize>,
    stream: StreamKey,
    number: u64,
    writes: bool,
}

/// Accesses to a block of memory.
#[derive(Debug, Clone, Default)]
pub struct Accesses(Vec<Access>);

impl Accesses {
    /// Adds an access of work `number` of `stream`, with its clock. Returns the stream of an earlier
    /// access that it conflicts with and does not follow.
    pub fn add(
        &mut self,
        range: Range<usize>,
        writes: bool,
        stream: StreamKey,
        number: u64,
        clock: &Clock,
    ) -> Option<StreamKey> {
        let overlaps =
            |access: &Access| access.range.start < range.end && range.start < access.range.end;
        let conflict = self.0.iter().find(|access| {
            overlaps(access) && (writes || access.writes) && !clock.includes(access)
        });
        let conflict = conflict.map(|access| access.stream);
        let is_covered = |access: &Access| {
            writes
                && range.start <= access.range.start
                && access.range.end <= range.end
                && clock.includes(access)
        };
        self.0.retain(|access| !is_covered(access));
        self.0.push(Access {
            range,
            stream,
            number,
            writes,
        });
        conflict
    }
}
