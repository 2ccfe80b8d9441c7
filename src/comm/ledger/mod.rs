//! [`Ledger`]: every collective of a rank, counted.

mod entry;
mod histogram;
mod host_copies;
mod json;
mod queue;
mod summary;
mod table;
mod totals;
mod units;
mod waits;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use burn::backend::{Backend, Dispatch, DispatchDevice};
use parking_lot::Mutex;

use super::flight::{Operation, RankTrace, Recorder};
use super::{Op, PackStats, Phase};
pub(super) use entry::Charge;
pub use entry::LedgerEntry;
pub(crate) use entry::listen;
pub use histogram::Histogram;
pub(crate) use host_copies::CopyDirection;
pub use host_copies::OffloadTraffic;
use queue::InFlightCount;
pub use queue::QueueDepth;
pub use summary::Summary;
pub use totals::{CallTotals, LedgerKey, Snapshot};
pub use waits::{Straggler, WaitBreakdown, Waits};

/// The collectives one rank has issued: calls and bytes by operation, phase and label.
///
/// Bytes are payload, so that they do not depend on how a backend moves it:
///
/// | operation | bytes |
/// |---|---|
/// | all-gather, reduce-scatter | of the wholes |
/// | all-reduce, broadcast, scatter | of the tensors |
/// | all-to-all | of the rank's piece |
/// | all-to-all of lists | of what the rank gives to others |
/// | barrier | 0 |
///
/// A collective on a group of one rank moves nothing and is not counted. Operations, phases and labels are counted apart
/// up to 4096 of them; labels that come later are counted together, as `(other labels)`. The last 1024
/// collectives are kept one by one, by the [flight recorder](crate::comm::flight).
///
/// | | |
/// |---|---|
/// | [`summary`](Self::summary) | one line |
/// | `{}` | a table of calls and bytes |
/// | [`host_copies`](Self::host_copies) | what units whose shards are in host memory have copied |
/// | [`waits`](Self::waits) | how long the rank has waited, in a histogram, and for whom |
/// | [`queue_depth`](Self::queue_depth) | how many collectives are under way, and were at most |
/// | [`to_json`](Self::to_json) | all of it, for programs |
/// | [`flight`](Self::flight) | the last collectives: shapes, times, who came last |
#[derive(Debug)]
pub struct Ledger {
    recorder: Recorder,
    book: Mutex<Book>,
    queue: InFlightCount,
}

#[derive(Debug, Default)]
struct Book {
    totals: Snapshot,
    /// Collectives that were counted, ever.
    counted: u64,
    /// Those that are forgotten.
    forgotten: u64,
    waits: Waits,
    moving: Duration,
    copied: PackStats,
    host_copies: host_copies::TrafficByUnit,
    devices: Vec<DispatchDevice>,
}

impl Ledger {
    /// Of a rank whose operations `recorder` notes.
    pub(super) fn new(recorder: Recorder) -> Self {
        Self { recorder, book: Mutex::default(), queue: InFlightCount::default() }
    }

    /// What notes the rank's operations.
    pub(super) fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Counts one collective.
    pub(super) fn record(&self, charge: &Charge) {
        let mut book = self.book.lock();
        let Charge { op, phase, label, bytes, .. } = charge;
        book.totals.add(LedgerKey { op: *op, phase: *phase, label: label.clone() }, *bytes);
        self.recorder.counted(charge.noted, book.counted);
        entry::tell(book.counted - book.forgotten, charge);
        book.counted += 1;
    }

    /// Counts one more collective under way.
    pub(super) fn posted(&self) {
        self.queue.enter();
    }

    /// Counts one less.
    pub(super) fn ended(&self) {
        self.queue.leave();
    }

    /// Adds one wait, for `straggler` if another rank came last.
    pub(super) fn waited(&self, waiting: Duration, moving: Duration, straggler: Option<usize>) {
        let mut book = self.book.lock();
        book.waits.add(waiting, straggler);
        book.moving += moving;
    }

    /// Time spent in the collectives that have been waited for.
    pub fn spent(&self) -> WaitBreakdown {
        self.book.lock().spent()
    }

    /// Each wait: how long it took, and who came last.
    ///
    /// ```
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// launch(Launch::threads(2), |world| {
    ///     world.barrier("start")?;
    ///     let waits = world.ledger().waits();
    ///     assert_eq!(waits.count(), 1);
    ///     // One rank waited for the other, which waited for nobody.
    ///     let other = 1 - world.rank();
    ///     assert!(waits.straggler().is_none_or(|straggler| straggler.rank == other));
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn waits(&self) -> Waits {
        self.book.lock().waits.clone()
    }

    /// How many collectives are under way, those [ahead](crate::comm::Call::with_deferred) among them: posted, and
    /// neither waited for nor dropped.
    pub fn queue_depth(&self) -> QueueDepth {
        self.queue.depth()
    }

    /// All of it in one line.
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
        let (total, queue) = (book.totals.total(|_| true), self.queue.depth());
        let host_copies = book.host_copies.0.values().copied().sum();
        Summary { total, spent: book.spent(), queue, waits: book.waits.clone(), host_copies }
    }

    /// Adds what kernels have copied.
    #[cfg(feature = "cube")]
    pub(super) fn copied_by(&self, more: PackStats) {
        self.book.lock().copied += more;
    }

    /// What kernels have copied around collectives.
    pub fn copied(&self) -> PackStats {
        self.book.lock().copied
    }

    /// Counts one copy of a unit's tensors between host and device.
    pub(crate) fn crossed(&self, unit: &Arc<str>, way: CopyDirection, bytes: u64) {
        self.book.lock().host_copies.add(unit, way, bytes);
    }

    /// What units whose shards are in host memory have copied, by unit.
    pub fn host_copies(&self) -> BTreeMap<Arc<str>, OffloadTraffic> {
        self.book.lock().host_copies.0.clone()
    }

    /// Notes where the tensors of a collective are.
    pub(super) fn ran_on(&self, device: DispatchDevice) {
        let devices = &mut self.book.lock().devices;
        if !devices.contains(&device) {
            devices.push(device);
        }
    }

    /// burn's names of the backends that tensors of this rank's collectives were on, such as `flex` or
    /// `cubecl<wgpu<wgsl>>`.
    pub fn backends(&self) -> BTreeSet<String> {
        let name = |device: &DispatchDevice| {
            let name = Dispatch::name(device);
            let inner = name.strip_prefix("dispatch<").and_then(|name| name.strip_suffix('>'));
            inner.map_or(name.clone(), String::from)
        };
        self.book.lock().devices.iter().map(name).collect()
    }

    /// Calls of `op`.
    pub fn calls(&self, op: Op) -> u64 {
        self.total(|key| key.op == op).calls
    }

    /// Payload bytes of `op`.
    pub fn bytes(&self, op: Op) -> u64 {
        self.total(|key| key.op == op).bytes
    }

    /// Calls of `op` in `phase`.
    pub fn calls_in(&self, op: Op, phase: Phase) -> u64 {
        self.total(|key| key.op == op && key.phase == phase).calls
    }

    /// Payload bytes of `op` in `phase`.
    pub fn bytes_in(&self, op: Op, phase: Phase) -> u64 {
        self.total(|key| key.op == op && key.phase == phase).bytes
    }

    /// Totals of the collectives whose key `select` accepts.
    pub fn total(&self, select: impl Fn(&LedgerKey) -> bool) -> CallTotals {
        self.book.lock().totals.total(select)
    }

    /// Totals by operation and phase.
    pub fn by_phase(&self) -> BTreeMap<(Op, Phase), CallTotals> {
        self.book.lock().totals.grouped(|key| (key.op, key.phase))
    }

    /// Totals by label.
    pub fn by_label(&self) -> BTreeMap<Arc<str>, CallTotals> {
        self.book.lock().totals.grouped(|key| key.label.clone())
    }

    /// A copy of all totals.
    pub fn snapshot(&self) -> Snapshot {
        self.book.lock().totals.clone()
    }

    /// The last collectives that were counted, oldest first, at most 1024; their labels as far as the flight recorder keeps
    /// them, 72 bytes.
    pub fn recent(&self) -> Vec<LedgerEntry> {
        let forgotten = self.book.lock().forgotten;
        let entry = |operation: &Operation| {
            let (id, index) = (&operation.id, operation.counted?.checked_sub(forgotten)?);
            let (group_size, label) = (id.ranks.len(), id.label.clone());
            Some(LedgerEntry { index, op: id.op, group_size, bytes: operation.bytes, label, phase: operation.phase })
        };
        let mut entries: Vec<_> = self.flight().operations.iter().filter_map(entry).collect();
        entries.sort_unstable_by_key(|entry| entry.index);
        entries
    }

    /// The rank's last collectives and messages as its flight recorder has them now, whatever was [`reset`](Self::reset).
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
        RankTrace::of_words(&self.recorder.words()).expect("a recorder's memory begins as its file does")
    }

    /// Forgets everything but the flight recorder's; collectives under way stay in the queue.
    pub fn reset(&self) {
        let mut book = self.book.lock();
        let counted = book.counted;
        *book = Book { counted, forgotten: counted, ..Book::default() };
        drop(book);
        self.queue.reset();
    }
}

impl Book {
    fn spent(&self) -> WaitBreakdown {
        WaitBreakdown { waiting: self.waits.total(), local_work: self.moving }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::comm::Group;
    use crate::comm::backend::CallSignature;
    use crate::comm::flight::{LaunchStart, Posting};

    fn filled() -> Ledger {
        let recorder = Recorder::new(0, &LaunchStart::new(2, 0), None).expect("it is in memory");
        let sequence = recorder.sequence(&Group::new([0, 1], 0), "");
        let ledger = Ledger::new(recorder);
        let record = |op, bytes, label: &str, phase| {
            let print = CallSignature::new(op, &label.into(), Vec::new());
            let (channel, seq, at) = (sequence.number(), sequence.next(op), Instant::now());
            let posting = Posting { channel, seq, print: &print, phase, bytes, peer: None };
            let noted = ledger.recorder().posted(at, &posting);
            ledger.record(&Charge { noted, op, group_size: 2, bytes, label: label.into(), phase });
        };
        record(Op::AllGather, 100, "a", Phase::Forward);
        record(Op::AllGather, 100, "a", Phase::Backward);
        record(Op::ReduceScatter, 40, "b", Phase::Backward);
        ledger
    }

    #[test]
    fn totals_by_operation_phase_and_label() {
        let ledger = filled();
        assert_eq!((ledger.calls(Op::AllGather), ledger.bytes(Op::AllGather)), (2, 200));
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
        assert_eq!(ledger.bytes_in(Op::ReduceScatter, Phase::Backward), 40);
        assert_eq!(ledger.calls(Op::Barrier), 0);
        assert_eq!(ledger.by_label()["a"], CallTotals { calls: 2, bytes: 200 });
        assert_eq!(ledger.by_phase()[&(Op::ReduceScatter, Phase::Backward)], CallTotals { calls: 1, bytes: 40 });
    }

    #[test]
    fn time_adds_up() {
        let ledger = filled();
        ledger.waited(Duration::from_millis(2), Duration::from_millis(3), Some(1));
        ledger.waited(Duration::from_millis(20), Duration::from_millis(30), None);
        let spent = WaitBreakdown { waiting: Duration::from_millis(22), local_work: Duration::from_millis(33) };
        assert_eq!(ledger.spent(), spent);
    }

    #[test]
    #[cfg(feature = "cube")]
    fn copies_add_up() {
        let ledger = filled();
        ledger.copied_by(PackStats { launches: 1, bytes: 20, padding: 3 });
        ledger.copied_by(PackStats { launches: 2, bytes: 30, padding: 0 });
        assert_eq!(ledger.copied(), PackStats { launches: 3, bytes: 50, padding: 3 });
        ledger.reset();
        assert_eq!(ledger.copied(), PackStats::default());
    }

    #[test]
    fn reset_forgets() {
        let ledger = filled();
        ledger.waited(Duration::from_millis(2), Duration::from_millis(3), Some(1));
        ledger.reset();
        assert_eq!((ledger.spent(), ledger.waits()), Default::default());
        assert_eq!(ledger.snapshot(), Snapshot::default());
        assert!(ledger.recent().is_empty());
        assert_eq!(ledger.flight().operations.len(), 3, "they have been");
    }

    #[test]
    fn entries_are_those_counted_since_the_last_reset() {
        let ledger = filled();
        let labels = |ledger: &Ledger| ledger.recent().iter().map(|entry| entry.label.to_string()).collect::<Vec<_>>();
        assert_eq!(labels(&ledger), ["a", "a", "b"]);
        assert_eq!((ledger.recent()[2].index, ledger.recent()[2].group_size, ledger.recent()[2].bytes), (2, 2, 40));
        ledger.reset();
        // Issued ahead of the reset: noted before, counted after.
        let print = CallSignature::new(Op::Barrier, &"ahead".into(), Vec::new());
        let posting = Posting { channel: 1, seq: 3, print: &print, phase: Phase::Other, bytes: 0, peer: None };
        let (noted, op, label) = (ledger.recorder().posted(Instant::now(), &posting), Op::Barrier, print.label.clone());
        ledger.reset();
        ledger.record(&Charge { noted, op, group_size: 2, bytes: 0, label, phase: Phase::Other });
        assert_eq!((labels(&ledger), ledger.recent()[0].index), (vec!["ahead".to_string()], 0));
    }

    #[test]
    fn the_table_ends_with_the_sum() {
        let table = filled().to_string();
        let last: Vec<_> = table.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["total", "3", "240"]);
        assert_eq!(table.lines().count(), 5);
    }
}
