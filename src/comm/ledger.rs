//! [`Ledger`]: every collective of a rank, counted.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use burn::backend::{Backend, Dispatch, DispatchDevice};
use parking_lot::Mutex;

use super::{Call, Copied, Op, Phase};

/// How many recent entries a ledger keeps.
const RECENT: usize = 1024;

/// How many keys a ledger counts apart.
const KEYS: usize = 4096;

/// What further labels are counted under.
static OTHERS: LazyLock<Arc<str>> = LazyLock::new(|| "(other labels)".into());

thread_local! {
    static LISTENER: Cell<Option<fn(&Entry)>> = const { Cell::new(None) };
}

/// Has `listener` told of every collective that the calling thread has counted from now on.
pub(crate) fn listen(listener: Option<fn(&Entry)>) {
    LISTENER.set(listener);
}

/// Number of calls and bytes of payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Total {
    /// Collectives made.
    pub calls: u64,
    /// Payload bytes, see [`Ledger`].
    pub bytes: u64,
}

impl Total {
    fn add(&mut self, bytes: u64) {
        self.calls += 1;
        self.bytes += bytes;
    }
}

impl std::iter::Sum for Total {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), |a, b| Self { calls: a.calls + b.calls, bytes: a.bytes + b.bytes })
    }
}

/// Time a rank has spent inside [`Work::wait`](super::Work::wait).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spent {
    /// Waiting for the other ranks.
    pub waiting: Duration,
    /// Making the result of what they brought: copies and reductions.
    pub moving: Duration,
}

/// One collective, as the ledger's flight recorder keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its place among all collectives of this rank, from 0.
    pub index: u64,
    /// What it did.
    pub op: Op,
    /// Number of ranks in its group.
    pub group_size: usize,
    /// Payload bytes.
    pub bytes: u64,
    /// The caller's label, such as a unit's path.
    pub label: Arc<str>,
    /// The pass it ran in.
    pub phase: Phase,
}

/// What a collective is counted under.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// What it did.
    pub op: Op,
    /// The pass it ran in.
    pub phase: Phase,
    /// The caller's label.
    pub label: Arc<str>,
}

/// A copy of a ledger's totals.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot(BTreeMap<Key, Total>);

impl Snapshot {
    /// Totals of the collectives whose key `select` accepts.
    pub fn total(&self, select: impl Fn(&Key) -> bool) -> Total {
        self.0.iter().filter(|(key, _)| select(key)).map(|(_, total)| *total).sum()
    }

    /// Every key with its totals, in order of operation, phase and label.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Total)> {
        self.0.iter()
    }
}

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
/// A collective on a group of one rank moves nothing and is not counted. The last 1024
/// collectives are kept one by one, as a flight recorder. Operations, phases and labels are counted apart
/// up to 4096 of them; labels that come later are counted together, as `(other labels)`.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<Book>);

#[derive(Debug, Default)]
struct Book {
    totals: Snapshot,
    recent: VecDeque<Entry>,
    count: u64,
    spent: Spent,
    copied: Copied,
    devices: Vec<DispatchDevice>,
}

impl Ledger {
    /// Counts one collective.
    pub(super) fn record(&self, op: Op, group_size: usize, bytes: u64, call: &Call) {
        let mut book = self.0.lock();
        let mut key = Key { op, phase: call.phase, label: call.label.clone() };
        if book.totals.0.len() >= KEYS && !book.totals.0.contains_key(&key) {
            key.label = OTHERS.clone();
        }
        book.totals.0.entry(key).or_default().add(bytes);
        if book.recent.len() == RECENT {
            book.recent.pop_front();
        }
        let entry = Entry { index: book.count, op, group_size, bytes, label: call.label.clone(), phase: call.phase };
        if let Some(listener) = LISTENER.get() {
            listener(&entry);
        }
        book.recent.push_back(entry);
        book.count += 1;
    }

    /// Adds the time one collective took.
    pub(super) fn spend(&self, waiting: Duration, moving: Duration) {
        let spent = &mut self.0.lock().spent;
        spent.waiting += waiting;
        spent.moving += moving;
    }

    /// Time spent in the collectives that have been waited for.
    pub fn spent(&self) -> Spent {
        self.0.lock().spent
    }

    /// Adds what kernels have copied.
    #[cfg(feature = "cube")]
    pub(super) fn copied_by(&self, more: Copied) {
        self.0.lock().copied += more;
    }

    /// What kernels have copied around collectives.
    pub fn copied(&self) -> Copied {
        self.0.lock().copied
    }

    /// Notes where the tensors of a collective are.
    pub(super) fn ran_on(&self, device: DispatchDevice) {
        let devices = &mut self.0.lock().devices;
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
        self.0.lock().devices.iter().map(name).collect()
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
    pub fn total(&self, select: impl Fn(&Key) -> bool) -> Total {
        self.0.lock().totals.total(select)
    }

    /// Totals by operation and phase.
    pub fn by_phase(&self) -> BTreeMap<(Op, Phase), Total> {
        self.grouped(|key| (key.op, key.phase))
    }

    /// Totals by label.
    pub fn by_label(&self) -> BTreeMap<Arc<str>, Total> {
        self.grouped(|key| key.label.clone())
    }

    /// A copy of all totals.
    pub fn snapshot(&self) -> Snapshot {
        self.0.lock().totals.clone()
    }

    /// The last collectives, oldest first, at most 1024.
    pub fn recent(&self) -> Vec<Entry> {
        self.0.lock().recent.iter().cloned().collect()
    }

    /// Forgets everything.
    pub fn reset(&self) {
        *self.0.lock() = Book::default();
    }

    fn grouped<K: Ord>(&self, by: impl Fn(&Key) -> K) -> BTreeMap<K, Total> {
        let mut groups = BTreeMap::new();
        for (key, total) in self.0.lock().totals.iter() {
            let group: &mut Total = groups.entry(by(key)).or_default();
            group.calls += total.calls;
            group.bytes += total.bytes;
        }
        groups
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let totals = self.snapshot();
        let width = totals.iter().map(|(key, _)| key.label.len()).max().unwrap_or(0).max("label".len());
        writeln!(f, "{:<14} {:<8} {:<width$} {:>8} {:>14}", "operation", "phase", "label", "calls", "bytes")?;
        for (Key { op, phase, label }, Total { calls, bytes }) in totals.iter() {
            writeln!(f, "{op:<14} {phase:<8} {label:<width$} {calls:>8} {bytes:>14}")?;
        }
        let Total { calls, bytes } = totals.total(|_| true);
        write!(f, "{:<14} {:<8} {:<width$} {calls:>8} {bytes:>14}", "total", "", "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> Ledger {
        let ledger = Ledger::default();
        ledger.record(Op::AllGather, 2, 100, &Call::new("a").in_phase(Phase::Forward));
        ledger.record(Op::AllGather, 2, 100, &Call::new("a").in_phase(Phase::Backward));
        ledger.record(Op::ReduceScatter, 2, 40, &Call::new("b").in_phase(Phase::Backward));
        ledger
    }

    #[test]
    fn totals_by_operation_phase_and_label() {
        let ledger = filled();
        assert_eq!((ledger.calls(Op::AllGather), ledger.bytes(Op::AllGather)), (2, 200));
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
        assert_eq!(ledger.bytes_in(Op::ReduceScatter, Phase::Backward), 40);
        assert_eq!(ledger.calls(Op::Barrier), 0);
        assert_eq!(ledger.by_label()["a"], Total { calls: 2, bytes: 200 });
        assert_eq!(ledger.by_phase()[&(Op::ReduceScatter, Phase::Backward)], Total { calls: 1, bytes: 40 });
    }

    #[test]
    fn the_recorder_keeps_the_last_entries() {
        let ledger = Ledger::default();
        for i in 0..RECENT as u64 + 5 {
            ledger.record(Op::Barrier, 4, i, &Call::new(""));
        }
        let recent = ledger.recent();
        assert_eq!(recent.len(), RECENT);
        assert_eq!((recent[0].index, recent[RECENT - 1].bytes), (5, RECENT as u64 + 4));
    }

    #[test]
    fn labels_without_end_share_a_row() {
        let ledger = Ledger::default();
        for i in 0..KEYS as u64 + 10 {
            ledger.record(Op::Barrier, 2, 1, &Call::new(i.to_string()));
        }
        ledger.record(Op::Barrier, 2, 1, &Call::new("0"));
        let labels = ledger.by_label();
        assert_eq!(labels.len(), KEYS + 1);
        assert_eq!((labels["0"].calls, labels["(other labels)"].calls), (2, 10));
        assert_eq!(ledger.calls(Op::Barrier), KEYS as u64 + 11);
    }

    #[test]
    fn time_adds_up() {
        let ledger = filled();
        ledger.spend(Duration::from_millis(2), Duration::from_millis(3));
        ledger.spend(Duration::from_millis(20), Duration::from_millis(30));
        let spent = Spent { waiting: Duration::from_millis(22), moving: Duration::from_millis(33) };
        assert_eq!(ledger.spent(), spent);
    }

    #[test]
    #[cfg(feature = "cube")]
    fn copies_add_up() {
        let ledger = filled();
        ledger.copied_by(Copied { launches: 1, bytes: 20, padding: 3 });
        ledger.copied_by(Copied { launches: 2, bytes: 30, padding: 0 });
        assert_eq!(ledger.copied(), Copied { launches: 3, bytes: 50, padding: 3 });
        ledger.reset();
        assert_eq!(ledger.copied(), Copied::default());
    }

    #[test]
    fn reset_forgets() {
        let ledger = filled();
        ledger.spend(Duration::from_millis(2), Duration::from_millis(3));
        ledger.reset();
        assert_eq!(ledger.spent(), Spent::default());
        assert_eq!(ledger.snapshot(), Snapshot::default());
        assert!(ledger.recent().is_empty());
    }

    #[test]
    fn the_table_ends_with_the_sum() {
        let table = filled().to_string();
        let last: Vec<_> = table.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["total", "3", "240"]);
        assert_eq!(table.lines().count(), 5);
    }
}
