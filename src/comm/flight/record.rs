//! [`FlightRecord`]: one operation in a ring of records of one size.
//!
//! ```text
//! word  0       1      2 ..        9          13                          32
//!       ┌───────┬──────┬──────────┬──────────┬───────┬─────────┬─────────┐
//!       │ place │ check│ the call │ 4 marks  │ label │ tensors │ not used│
//!       └───────┴──────┴──────────┴──────────┴───────┴─────────┴─────────┘
//! ```
//!
//! A record is written once, when its operation is posted: a sequence lock. Its place is odd while it is, and the check
//! is of all that is written, the place too, so that of a copy made meanwhile nothing is misread. Afterwards only marks
//! are set, each at once: when the operation was waited for, when it was done and how. A mark names the operation by
//! the low bits of its place, so that it does not pass to the next one in the record.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::bytes::{Room, pack, truncate, unpack};
use super::fold::Fold;
use super::layout::RECORD_WORDS;
use super::shapes;
use super::words::WORD;
use crate::comm::backend::CallSignature;
use crate::comm::{Op, Phase, ReduceOp};

/// Words of the call: time, bytes, number, channel and kinds, partners, fingerprint, lengths.
const CALL: usize = 2;
const CALL_WORDS: usize = 7;
const MARKS: usize = CALL + CALL_WORDS;
const TEXT: usize = MARKS + 4;
const TEXT_BYTES: usize = (RECORD_WORDS - TEXT) * WORD;

/// Bytes of a label that are kept.
const LABEL: usize = 72;

/// Nobody, where a rank may be named.
const NO_RANK: u32 = u32::MAX;

/// What happened to an operation after it was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// After so many nanoseconds it was waited for.
    Waited,
    /// After so many nanoseconds it was over.
    Ended,
    /// How, see [`OpOutcome`].
    How,
    /// The ledger counted it, as the how-manieth.
    Counted,
}

/// How an operation is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpOutcome {
    /// The rank has its result. Who came last, if the engine knows: of a receive, the rank whose message it was.
    Done(Option<usize>),
    /// The rank could not take part: the world had failed, or failed by it.
    Refused,
    /// It failed while the rank waited.
    Failed,
    /// Its result was never asked for.
    Dropped,
}

/// Whom a message goes to, or is to come from; `None` is anybody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) struct Peer {
    /// Global rank.
    pub rank: Option<usize>,
    pub tag: u32,
}

/// An operation that is posted.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) struct Posting<'a> {
    /// The number of its channel.
    pub channel: u32,
    /// Its place among the channel's collectives, or messages of this rank.
    pub seq: u64,
    pub print: &'a CallSignature,
    pub phase: Phase,
    pub bytes: u64,
    pub peer: Option<Peer>,
}

/// An operation, as it is read.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FlightRecord {
    pub index: u64,
    /// Nanoseconds since the launch's start.
    pub posted: u64,
    pub bytes: u64,
    pub seq: u64,
    pub channel: u32,
    pub op: Op,
    pub phase: Phase,
    pub reduce: u8,
    pub root: Option<usize>,
    pub peer: Option<Peer>,
    /// Of all that ranks agree on.
    pub agreement: u64,
    pub label: String,
    /// Whether that is all of it.
    pub is_label_complete: bool,
    pub tensors: Vec<shapes::Tensor>,
    /// How many tensors there are.
    pub count: usize,
    /// Each rank has others.
    pub is_of_pairs: bool,
    /// Nanoseconds after it was posted.
    pub waited: Option<u64>,
    pub ended: Option<u64>,
    pub over: Option<OpOutcome>,
    pub counted: Option<u64>,
}

const OPS: [Op; 12] = [
    Op::AllGather,
    Op::ReduceScatter,
    Op::AllReduce,
    Op::AllToAll,
    Op::AllToAllList,
    Op::Broadcast,
    Op::Scatter,
    Op::Reduce,
    Op::Gather,
    Op::Barrier,
    Op::Send,
    Op::Receive,
];

const PHASES: [Phase; 3] = [Phase::Other, Phase::Forward, Phase::Backward];

/// What reductions are called, by their number from 1.
pub(super) const REDUCTIONS: [&str; 9] =
    ["sum", "average", "minimum", "maximum", "product", "and", "or", "exclusive or", "sum of multiples"];

fn reduction(reduce: Option<ReduceOp>) -> u64 {
    match reduce {
        None => 0,
        Some(ReduceOp::Sum) => 1,
        Some(ReduceOp::Avg) => 2,
        Some(ReduceOp::Min) => 3,
        Some(ReduceOp::Max) => 4,
        Some(ReduceOp::Product) => 5,
        Some(ReduceOp::BitAnd) => 6,
        Some(ReduceOp::BitOr) => 7,
        Some(ReduceOp::BitXor) => 8,
        Some(ReduceOp::PremulSum(_)) => 9,
    }
}

/// Writes the operation of place `index`, posted `posted` nanoseconds after the launch's start.
pub(super) fn write(words: &[AtomicU64], index: u64, posted: u64, posting: &Posting<'_>) {
    let Posting { channel, seq, print, phase, bytes, peer } = *posting;
    let mut text = Room::<TEXT_BYTES>::new();
    let label = truncate(&print.label, LABEL);
    text.push(label.as_bytes());
    let count = shapes::push(print, &mut text);
    let (op, phase) = (print.op as u64, phase as u64);
    let kinds = op | phase << 8 | reduction(print.reduce) << 16 | u64::from(print.is_of_pairs()) << 24;
    let rank = |rank: Option<usize>| rank.map_or(NO_RANK, |rank| rank as u32);
    // Of a message the peer, of a collective the root; which one the operation says.
    let (partner, tag) = peer.map_or((rank(print.root), 0), |peer| (rank(peer.rank), peer.tag));
    let lengths = label.len() | (text.bytes().len() << 8) | (usize::from(label.len() == print.label.len()) << 16);
    let call: [u64; CALL_WORDS] = [
        posted,
        bytes,
        seq,
        u64::from(channel) << 32 | kinds,
        u64::from(partner) << 32 | u64::from(tag),
        agreement(print),
        (count as u64) << 32 | lengths as u64,
    ];
    let place = 2 * index + 2;
    let check = Fold::of([place].into_iter().chain(call).chain(pack(text.bytes())));
    words[0].store(place - 1, Ordering::Relaxed);
    fence(Ordering::Release);
    words[1].store(check, Ordering::Relaxed);
    let behind = pack(text.bytes()).enumerate().map(|(at, word)| (TEXT + at, word));
    let marks = (MARKS..TEXT).map(|at| (at, tag_of(index)));
    for (at, word) in call.into_iter().enumerate().map(|(at, word)| (CALL + at, word)).chain(marks).chain(behind) {
        words[at].store(word, Ordering::Relaxed);
    }
    words[0].store(place, Ordering::Release);
}

/// What every rank must agree on.
fn agreement(print: &CallSignature) -> u64 {
    let CallSignature {
        op,
        label,
        reduce,
        root,
        model,
        forward_index,
        global_tensor,
        operand_shapes,
        names,
        tensors,
        any: _,
        pairs: _,
        digests: _,
    } = print;
    let mut fold = Fold::default();
    (op, label, reduce, root, model, forward_index, global_tensor, operand_shapes, names, tensors).hash(&mut fold);
    fold.finish()
}

/// The bits of a mark that say what operation it is of.
fn tag_of(index: u64) -> u64 {
    (index + 1) << VALUE_BITS
}

/// Bits of a mark's value: of nanoseconds, more than three days.
const VALUE_BITS: u32 = 48;

/// Sets a mark of the operation of place `index`, unless it is set or another operation has taken the record.
pub(super) fn mark(words: &[AtomicU64], index: u64, mark: Mark, value: u64) {
    let value = value.saturating_add(1).min((1 << VALUE_BITS) - 1);
    let none = tag_of(index);
    // Whether it was set already says nothing: then it stays.
    let _ = words[MARKS + mark as usize].compare_exchange(none, none | value, Ordering::Relaxed, Ordering::Relaxed);
}

impl OpOutcome {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Done(_) => "done",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Dropped => "dropped",
        }
    }

    /// Its mark's value.
    pub(super) fn value(self) -> u64 {
        match self {
            Self::Done(None) => 0,
            Self::Refused => 1,
            Self::Failed => 2,
            Self::Dropped => 3,
            Self::Done(Some(rank)) => 4 + rank as u64,
        }
    }

    fn of(value: u64) -> Self {
        match value {
            0 => Self::Done(None),
            1 => Self::Refused,
            2 => Self::Failed,
            3 => Self::Dropped,
            more => Self::Done(Some(more as usize - 4)),
        }
    }
}

/// The operation in a record. `None`: there is none, or it was being written.
pub(super) fn read(words: &[u64]) -> Option<FlightRecord> {
    let place = words[0];
    let index = (place / 2).checked_sub(1).filter(|_| place.is_multiple_of(2))?;
    let &[posted, bytes, seq, kinds, partners, agreement, lengths] = words[CALL..].first_chunk::<CALL_WORDS>()?;
    let (label_bytes, text_bytes) = (lengths as usize & 0xff, lengths as usize >> 8 & 0xff);
    if text_bytes > TEXT_BYTES || label_bytes > text_bytes {
        return None;
    }
    let text = unpack(&words[TEXT..], text_bytes);
    let call = [posted, bytes, seq, kinds, partners, agreement, lengths];
    if words[1] != Fold::of([place].into_iter().chain(call).chain(pack(&text))) {
        return None;
    }
    let rank = |rank: u32| Some(rank as usize).filter(|_| rank != NO_RANK);
    let (label, tensors) = text.split_at(label_bytes);
    let op = *OPS.get(kinds as usize & 0xff)?;
    let partner = rank((partners >> 32) as u32);
    let is_of_pairs = kinds >> 24 & 1 == 1;
    let marked = |mark: Mark| {
        let word = words[MARKS + mark as usize];
        let of_this = word >> VALUE_BITS == tag_of(index) >> VALUE_BITS;
        (word & ((1 << VALUE_BITS) - 1)).checked_sub(1).filter(|_| of_this)
    };
    Some(FlightRecord {
        index,
        posted,
        bytes,
        seq,
        channel: (kinds >> 32) as u32,
        op,
        phase: *PHASES.get(kinds as usize >> 8 & 0xff)?,
        reduce: (kinds >> 16) as u8,
        root: partner.filter(|_| !op.is_message()),
        peer: op.is_message().then_some(Peer { rank: partner, tag: partners as u32 }),
        agreement,
        label: String::from_utf8_lossy(label).into_owned(),
        is_label_complete: lengths >> 16 & 1 == 1,
        tensors: shapes::read(tensors),
        count: (lengths >> 32) as usize,
        is_of_pairs,
        waited: marked(Mark::Waited),
        ended: marked(Mark::Ended),
        over: marked(Mark::How).map(OpOutcome::of),
        counted: marked(Mark::Counted),
    })
}
