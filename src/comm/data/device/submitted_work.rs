//! [`SubmittedWork`]: the order of what ranks submit to a GPU that they share.
//!
//! On CUDA, each rank's thread has a stream. A stream that reads memory of another waits for it only
//! if the memory was allocated after the last wait, and not if it was written in place since. So
//! events order the streams, one for each contribution and one for each rank that reads:
//!
//! ```text
//! stream of a rank that contributes   .. writes ..  work                          waits for read  .. writes in place ..
//! stream of a rank that reads                            waits for work  .. reads ..  read
//! ```
//!
//! No thread of the host waits for the GPU.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A point on the stream of a thread.
pub(super) type StreamPoint = Arc<dyn Any + Send + Sync>;

/// The streams of the threads that submit work to a GPU.
pub(super) trait RankStreams: Send + Sync {
    /// Records a point on the stream of the calling thread.
    fn record(&self) -> StreamPoint;

    /// Makes what the calling thread submits from now on run after `point`.
    fn wait(&self, point: &StreamPoint);

    /// Makes what is submitted from now on to the stream of `other` run after `point`.
    fn hold(&self, other: &StreamPoint, point: &StreamPoint);
}

/// Work that a thread has submitted to its GPU.
pub(super) struct SubmittedWork {
    streams: Arc<dyn RankStreams>,
    point: StreamPoint,
}

impl SubmittedWork {
    /// Records the work of the calling thread.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "only CUDA has several streams")
    )]
    pub(super) fn on(streams: Arc<dyn RankStreams>) -> Self {
        let point = streams.record();
        Self { streams, point }
    }

    /// Makes what the calling thread submits from now on run after it.
    pub(super) fn wait(&self) {
        self.streams.wait(&self.point);
    }
}

/// Makes what the threads of `others` submit from now on run after what the calling thread has
/// submitted so far.
pub(super) fn run_before<'a>(others: impl IntoIterator<Item = &'a SubmittedWork>) {
    let mut read = None;
    for other in others {
        let read = read.get_or_insert_with(|| other.streams.record());
        other.streams.hold(&other.point, read);
    }
}

impl fmt::Debug for SubmittedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SubmittedWork")
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::super::plane::{DeviceContribution, read_in_order};
    use super::*;
    use crate::comm::data::PlaneContribution;
    use crate::comm::data::contribution::Contribution;
    use crate::comm::data::nccl::fake::{Accesses, Clock, StreamKey};

    const RANKS: usize = 3;

    /// Streams of ranks, as clocks of what has run before.
    #[derive(Default)]
    struct FakeStreams(Mutex<FakeState>);

    #[derive(Default)]
    struct FakeState {
        /// Rank whose thread submits work.
        current: usize,
        clocks: [Clock; RANKS],
        records: usize,
        waits: usize,
    }

    /// Rank on whose stream a point is, and what has run before it.
    struct FakePoint(usize, Clock);

    impl FakeStreams {
        /// Accesses memory of `of` on the stream of `rank`. Returns true if all that it conflicts
        /// with has run before.
        fn access(&self, rank: usize, memory: &mut Accesses, writes: bool) -> bool {
            let mut state = self.0.lock();
            state.current = rank;
            let key = StreamKey::Communication(rank);
            let number = state.clocks[rank].tick(key);
            let clock = state.clocks[rank].clone();
            memory.add(0..1, writes, key, number, &clock).is_none()
        }
    }

    fn of(point: &StreamPoint) -> &FakePoint {
        point.downcast_ref().unwrap()
    }

    impl RankStreams for FakeStreams {
        fn record(&self) -> StreamPoint {
            let mut state = self.0.lock();
            state.records += 1;
            let rank = state.current;
            state.clocks[rank].tick(StreamKey::Communication(rank));
            Arc::new(FakePoint(rank, state.clocks[rank].clone()))
        }

        fn wait(&self, point: &StreamPoint) {
            let mut state = self.0.lock();
            state.waits += 1;
            let rank = state.current;
            state.clocks[rank].merge(&of(point).1);
        }

        fn hold(&self, other: &StreamPoint, point: &StreamPoint) {
            let mut state = self.0.lock();
            state.clocks[of(other).0].merge(&of(point).1);
        }
    }

    /// Each rank writes to its memory in place, reads that of all, and writes again.
    #[test]
    fn reads_run_after_the_writes_before_and_before_those_that_follow() {
        let streams = Arc::<FakeStreams>::default();
        let mut memory: [Accesses; RANKS] = Default::default();
        let contribute = |(rank, memory): (usize, &mut Accesses)| {
            assert!(streams.access(rank, memory, true));
            let work = SubmittedWork::on(streams.clone());
            let addition = Box::new(DeviceContribution::of_work(work));
            Contribution::new(Vec::new(), PlaneContribution::Device(addition))
        };
        let parts: Vec<_> = memory.iter_mut().enumerate().map(contribute).collect();
        for reader in 0..RANKS {
            streams.0.lock().current = reader;
            let are_written = read_in_order(&parts, Some(reader), || {
                let mut memory = memory.iter_mut();
                memory.all(|memory| streams.access(reader, memory, false))
            });
            assert!(are_written, "rank {reader} reads too early");
        }
        for (rank, memory) in memory.iter_mut().enumerate() {
            assert!(
                streams.access(rank, memory, true),
                "rank {rank} writes too early"
            );
        }
        let state = streams.0.lock();
        assert_eq!((state.records, state.waits), (2 * RANKS, RANKS * RANKS));
    }
}
