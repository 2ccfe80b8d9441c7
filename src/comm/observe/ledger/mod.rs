//! [`Ledger`]: counts of all collectives of a rank.

mod display;
mod json;
mod totals;
mod units;
mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use burn::backend::{Backend, Dispatch, DispatchDevice};
use parking_lot::Mutex;

use super::event::{CallEvent, CallInfo};
use super::flight::{Operation, RankTrace, Recorder};
use crate::comm::{Op, Phase};
pub use display::Summary;
pub(crate) use totals::CopyDirection;
pub use totals::{
    CallTotals, LedgerEntry, LedgerKey, OffloadTraffic, PackStats, QueueDepth, Snapshot,
};
use totals::{KEYS, OTHERS};
pub use waits::{Histogram, Straggler, WaitBreakdown, Waits};

/// Counts of the collectives that a rank has posted: calls and bytes by operation, phase and label.
///
/// Bytes are payload bytes, so they do not depend on how a backend sends the data:
///
/// | operation | bytes |
/// |---|---|
/// | all-gather, reduce-scatter | of the full tensors |
/// | all-reduce, broadcast, scatter | of the tensors |
/// | all-to-all | of the rank's shard |
/// | all-to-all of lists | of the tensors that the rank sends to other ranks |
/// | barrier | 0 |
///
/// A collective on a group of one rank sends nothing and is not counted. A ledger counts up to 4096
/// combinations of operation, phase and label separately; further labels are counted together, as
/// `(other labels)`. The [flight recorder](crate::comm::flight) keeps the last 1024 collectives
/// individually.
///
/// | method | contents |
/// |---|---|
/// | [`summary`](Self::summary) | a summary in one line |
/// | `{}` | a table of calls and bytes |
/// | [`host_copies`](Self::host_copies) | copies made by units whose shards are in host memory |
/// | [`waits`](Self::waits) | a histogram of waiting times, and the ranks that were waited for |
/// | [`queue_depth`](Self::queue_depth) | current and largest number of collectives in flight |
/// | [`to_json`](Self::to_json) | everything, as JSON |
/// | [`flight`](Self::flight) | the last collectives: shapes, times, last rank to join |
#[derive(Debug)]
pub struct Ledger {
    recorder: Recorder,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    totals: Snapshot,
    /// Number of collectives that were counted before the last reset.
    forgotten: u64,
    queue: QueueDepth,
    waits: Waits,
    local_work: Duration,
    copied: PackStats,
    host_copies: BTreeMap<Arc<str>, OffloadTraffic>,
    devices: Vec<DispatchDevice>,
}

impl Ledger {
    /// Creates the ledger of a rank whose operations `recorder` records.
    pub(in crate::comm) fn new(recorder: Recorder) -> Self {
        Self {
            recorder,
            book: Mutex::default(),
        }
    }

    /// Returns the flight recorder of the rank.
    pub(in crate::comm) fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Consumes an event of a call.
    pub(in crate::comm) fn observe(&self, call: &CallInfo, event: &CallEvent<'_>) {
        let CallInfo {
            rank,
            op,
            phase,
            label,
            bytes,
            ..
        } = call;
        match *event {
            CallEvent::Counted => {
                let key = LedgerKey {
                    op: *op,
                    phase: *phase,
                    label: label.clone(),
                };
                self.book.lock().totals.add(key, *bytes);
            }
            CallEvent::Accepted => self.book.lock().queue.enter(),
            CallEvent::Completed {
                waiting,
                local_work,
                last,
            } => {
                let mut book = self.book.lock();
                book.queue.leave();
                // A rank does not wait for itself.
                book.waits.add(waiting, last.filter(|last| last != rank));
                book.local_work += local_work;
            }
            CallEvent::Failed | CallEvent::Dropped => self.book.lock().queue.leave(),
            CallEvent::Posted(_) | CallEvent::Refused | CallEvent::Waiting => {}
        }
    }

    /// Returns the time spent in waits.
    pub fn spent(&self) -> WaitBreakdown {
        self.book.lock().spent()
    }

    /// Returns the waits: the duration of each, and the rank that joined last.
    ///
    /// ```
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// launch(Launch::threads(2), |world| {
    ///     world.barrier("start")?;
    ///     let waits = world.ledger().waits();
    ///     assert_eq!(waits.count(), 1);
    ///     // One rank waited for the other, which did not wait.
    ///     let other = 1 - world.rank();
    ///     assert!(waits.straggler().is_none_or(|straggler| straggler.rank == other));
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn waits(&self) -> Waits {
        self.book.lock().waits.clone()
    }

    /// Returns the number of collectives in flight: posted, and neither waited for nor dropped.
    /// [Deferred](crate::comm::Call::with_deferred) collectives are included.
    pub fn queue_depth(&self) -> QueueDepth {
        self.book.lock().queue
    }

    /// Returns a summary of the ledger, displayed in one line.
    ///
    /// ```
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let works = ["first", "second"].map(|label| world.all().barrier(label.into()));
    ///     for work in works {
    ///         work.wait()?;
    ///     }
    ///     let summary = world.ledger().summary();
    ///     assert_eq!((summary.total.calls, summary.queue.most), (2, 2));
    ///     assert!(summary.to_string().starts_with("2 collectives, 0 B; waiting "));
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn summary(&self) -> Summary {
        let book = self.book.lock();
        let total = book.totals.total(|_| true);
        let queue = book.queue;
        let host_copies = book.host_copies.values().copied().sum();
        Summary {
            total,
            spent: book.spent(),
            queue,
            waits: book.waits.clone(),
            host_copies,
        }
    }

    /// Adds copies made by kernels around collectives.
    #[allow(dead_code, reason = "not every data plane copies by kernels")]
    pub(in crate::comm) fn copied_by(&self, more: PackStats) {
        self.book.lock().copied += more;
    }

    /// Returns the copies made by kernels around collectives.
    pub fn copied(&self) -> PackStats {
        self.book.lock().copied
    }

    /// Counts one copy of a unit's tensors between host memory and device.
    pub(crate) fn crossed(&self, unit: &Arc<str>, way: CopyDirection, bytes: u64) {
        let copies = &mut self.book.lock().host_copies;
        let unit = if copies.len() < KEYS || copies.contains_key(unit) {
            unit
        } else {
            &*OTHERS
        };
        copies.entry(unit.clone()).or_default().way(way).add(bytes);
    }

    /// Returns, by unit, the copies of units whose shards are in host memory.
    pub fn host_copies(&self) -> BTreeMap<Arc<str>, OffloadTraffic> {
        self.book.lock().host_copies.clone()
    }

    /// Records the device of the tensors of a collective.
    pub(in crate::comm) fn ran_on(&self, device: DispatchDevice) {
        let devices = &mut self.book.lock().devices;
        if !devices.contains(&device) {
            devices.push(device);
        }
    }

    /// Returns burn's names of the backends of the tensors in this rank's collectives, such as
    /// `flex` or `cubecl<wgpu<wgsl>>`.
    pub fn backends(&self) -> BTreeSet<String> {
        let name = |device: &DispatchDevice| {
            let name = Dispatch::name(device);
            let inner = name
                .strip_prefix("dispatch<")
                .and_then(|name| name.strip_suffix('>'));
            inner.map_or(name.clone(), String::from)
        };
        self.book.lock().devices.iter().map(name).collect()
    }

    /// Returns the number of calls of `op`.
    pub fn calls(&self, op: Op) -> u64 {
        self.total(|key| key.op == op).calls
    }

    /// Returns the payload bytes of `op`.
    pub fn bytes(&self, op: Op) -> u64 {
        self.total(|key| key.op == op).bytes
    }

    /// Returns the number of calls of `op` in `phase`.
    pub fn calls_in(&self, op: Op, phase: Phase) -> u64 {
        self.total(|key| key.op == op && key.phase == phase).calls
    }

    /// Returns the payload bytes of `op` in `phase`.
    pub fn bytes_in(&self, op: Op, phase: Phase) -> u64 {
        self.total(|key| key.op == op && key.phase == phase).bytes
    }

    /// Returns the totals of the collectives whose key `select` accepts.
    pub fn total(&self, select: impl Fn(&LedgerKey) -> bool) -> CallTotals {
        self.book.lock().totals.total(select)
    }

    /// Returns the totals by operation and phase.
    pub fn by_phase(&self) -> BTreeMap<(Op, Phase), CallTotals> {
        self.book.lock().totals.grouped(|key| (key.op, key.phase))
    }

    /// Returns the totals by label.
    pub fn by_label(&self) -> BTreeMap<Arc<str>, CallTotals> {
        self.book.lock().totals.grouped(|key| key.label.clone())
    }

    /// Returns a copy of all totals.
    pub fn snapshot(&self) -> Snapshot {
        self.book.lock().totals.clone()
    }

    /// Returns the last collectives that were counted since the last [`reset`](Self::reset), oldest
    /// first, at most
    /// 1024. Labels are truncated to 72 bytes by the flight recorder.
    pub fn recent(&self) -> Vec<LedgerEntry> {
        let forgotten = self.book.lock().forgotten;
        let entry = |operation: &Operation| {
            let id = &operation.id;
            let index = operation.counted?.checked_sub(forgotten)?;
            let group_size = id.ranks.len();
            let label = id.label.clone();
            Some(LedgerEntry {
                index,
                op: id.op,
                group_size,
                bytes: operation.bytes,
                label,
                phase: operation.phase,
            })
        };
        let mut entries: Vec<_> = self.flight().operations.iter().filter_map(entry).collect();
        entries.sort_unstable_by_key(|entry| entry.index);
        entries
    }

    /// Returns the rank's last collectives and messages from its flight recorder, including those
    /// before the last [`reset`](Self::reset).
    ///
    /// ```
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// launch(Launch::threads(2), |world| {
    ///     world.barrier("start")?;
    ///     assert_eq!(world.ledger().flight().operations[0].to_string(), "barrier #0 `start` on ranks [0, 1]");
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn flight(&self) -> RankTrace {
        self.recorder.trace()
    }

    /// Clears the ledger, except for the flight recorder. Collectives in flight stay counted as
    /// such.
    pub fn reset(&self) {
        let mut book = self.book.lock();
        let now = book.queue.now;
        *book = Book {
            forgotten: self.recorder.count(),
            queue: QueueDepth { now, most: now },
            ..Book::default()
        };
    }
}

impl Book {
    fn spent(&self) -> WaitBreakdown {
        WaitBreakdown {
            waiting: self.waits.total(),
            local_work: self.local_work,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::CommError;
    use crate::comm::Group;
    use crate::comm::backend::{CallSignature, Completed, PostResult};
    use crate::comm::observe::flight::{LaunchId, LaunchStart};
    use crate::comm::observe::{ObservedCall, Posting};

    /// Posts a call of a group of two ranks.
    fn post(
        ledger: &Arc<Ledger>,
        op: Op,
        bytes: u64,
        label: &str,
        phase: Phase,
        is_deferred: bool,
    ) -> ObservedCall {
        let group = Group::new([0, 1], 0);
        let sequence = ledger.recorder().sequence(&group, "");
        let signature = CallSignature::new(op, &label.into(), Vec::new());
        let channel = sequence.number();
        let seq = sequence.next(op);
        let posting = Posting {
            group: &group,
            channel,
            seq,
            signature: &signature,
            phase,
            bytes,
            peer: None,
        };
        let info = CallInfo {
            rank: 0,
            op,
            group_size: 2,
            bytes,
            label: label.into(),
            phase,
            seq,
        };
        ObservedCall::post(ledger.clone(), sequence, info, &posting, is_deferred)
    }

    fn done() -> PostResult<()> {
        Ok(Box::new(Completed::timed(|| ())))
    }

    fn filled() -> Arc<Ledger> {
        let recorder = Recorder::new(0, &LaunchStart::new(2, LaunchId::first(0)), None)
            .expect("it has no file");
        let ledger = Arc::new(Ledger::new(recorder));
        drop(post(
            &ledger,
            Op::AllGather,
            100,
            "a",
            Phase::Forward,
            false,
        ));
        drop(post(
            &ledger,
            Op::AllGather,
            100,
            "a",
            Phase::Backward,
            false,
        ));
        drop(post(
            &ledger,
            Op::ReduceScatter,
            40,
            "b",
            Phase::Backward,
            false,
        ));
        ledger
    }

    /// Records a wait, at whose end rank `last` was the last to call.
    fn waited(ledger: &Arc<Ledger>, waiting: u64, local_work: u64, last: Option<usize>) {
        let call = post(ledger, Op::Barrier, 0, "wait", Phase::Other, false);
        let [waiting, local_work] = [waiting, local_work].map(Duration::from_millis);
        for event in [
            CallEvent::Accepted,
            CallEvent::Completed {
                waiting,
                local_work,
                last,
            },
        ] {
            ledger.observe(&call.info, &event);
        }
    }

    #[test]
    fn totals_by_operation_phase_and_label() {
        let ledger = filled();
        assert_eq!(
            (ledger.calls(Op::AllGather), ledger.bytes(Op::AllGather)),
            (2, 200)
        );
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
        assert_eq!(ledger.bytes_in(Op::ReduceScatter, Phase::Backward), 40);
        assert_eq!(ledger.calls(Op::Barrier), 0);
        assert_eq!(
            ledger.by_label()["a"],
            CallTotals {
                calls: 2,
                bytes: 200
            }
        );
        assert_eq!(
            ledger.by_phase()[&(Op::ReduceScatter, Phase::Backward)],
            CallTotals {
                calls: 1,
                bytes: 40
            }
        );
    }

    #[test]
    fn time_adds_up() {
        let ledger = filled();
        waited(&ledger, 2, 3, Some(1));
        waited(&ledger, 20, 30, Some(0));
        let spent = WaitBreakdown {
            waiting: Duration::from_millis(22),
            local_work: Duration::from_millis(33),
        };
        assert_eq!(ledger.spent(), spent);
        assert_eq!(
            ledger.waits().stragglers().len(),
            1,
            "a rank does not wait for itself"
        );
    }

    #[test]
    fn copies_add_up() {
        let ledger = filled();
        ledger.copied_by(PackStats {
            launches: 1,
            bytes: 20,
            padding: 3,
        });
        ledger.copied_by(PackStats {
            launches: 2,
            bytes: 30,
            padding: 0,
        });
        assert_eq!(
            ledger.copied(),
            PackStats {
                launches: 3,
                bytes: 50,
                padding: 3
            }
        );
        ledger.reset();
        assert_eq!(ledger.copied(), PackStats::default());
    }

    #[test]
    fn reset_forgets() {
        let ledger = filled();
        waited(&ledger, 2, 3, Some(1));
        ledger.reset();
        assert_eq!((ledger.spent(), ledger.waits()), Default::default());
        assert_eq!(ledger.snapshot(), Snapshot::default());
        assert!(ledger.recent().is_empty());
        assert_eq!(
            ledger.flight().operations.len(),
            4,
            "the flight recorder is not reset"
        );
    }

    #[test]
    fn the_most_in_flight_outlives_them_until_it_is_reset() {
        let ledger = filled();
        let calls = || post(&ledger, Op::Barrier, 0, "call", Phase::Other, false);
        let mut calls = [calls(), calls(), calls()];
        for call in &mut calls {
            drop(call.begin(done));
        }
        let [first, second, third] = calls;
        drop(first);
        assert!(second.wait(|| Ok(Completed::timed(|| ()))).is_ok());
        assert_eq!(ledger.queue_depth(), QueueDepth { now: 1, most: 3 });
        ledger.reset();
        assert_eq!(ledger.queue_depth(), QueueDepth { now: 1, most: 1 });
        assert!(
            third
                .wait(|| Err::<Completed<()>, _>(CommError::Revoked { rank: 1 }))
                .is_err()
        );
        assert_eq!(ledger.queue_depth(), QueueDepth { now: 0, most: 1 });
    }

    #[test]
    fn entries_are_those_counted_since_the_last_reset() {
        let ledger = filled();
        let labels = |ledger: &Ledger| {
            ledger
                .recent()
                .iter()
                .map(|entry| entry.label.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(labels(&ledger), ["a", "a", "b"]);
        assert_eq!(
            (
                ledger.recent()[2].index,
                ledger.recent()[2].group_size,
                ledger.recent()[2].bytes
            ),
            (2, 2, 40)
        );
        ledger.reset();
        // Posted before the reset, and counted after it.
        let mut deferred = post(&ledger, Op::Barrier, 0, "deferred", Phase::Other, true);
        drop(deferred.begin(done));
        ledger.reset();
        assert!(ledger.recent().is_empty());
        let failed = CommError::Revoked { rank: 1 };
        assert!(deferred.wait(|| Err::<Completed<()>, _>(failed)).is_err());
        assert_eq!(
            (labels(&ledger), ledger.recent()[0].index),
            (vec!["deferred".to_string()], 0)
        );
    }

    #[test]
    fn the_table_ends_with_the_sum() {
        let table = filled().to_string();
        let last: Vec<_> = table.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["total", "3", "240"]);
        assert_eq!(table.lines().count(), 5);
    }
}
