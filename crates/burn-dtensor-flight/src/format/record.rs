//! [`FlightRecord`]: one operation, stored in a ring of records of equal size.
//!
//! ```text
//! word  0       1      2 ..        9          13                          32
//!       ┌───────┬──────┬──────────┬──────────┬───────┬─────────┬─────────┐
//!       │ lock  │ check│ the call │ 4 marks  │ label │ tensors │ not used│
//!       └───────┴──────┴──────────┴──────────┴───────┴─────────┴─────────┘
//! ```
//!
//! A record is written once, when its operation is posted, under a sequence lock. The lock word is
//! odd while the record is written, and `2 * index + 2` afterwards. The checksum covers everything
//! that is written, including the lock word, so that a copy made during a write is detected.
//! Afterwards only the marks change, each with one atomic store: when the rank began to wait, when
//! the operation ended, and how. A mark contains the low bits of the operation's index, so that it
//! cannot be attributed to the next operation in the same record.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::RECORD_WORDS;
use super::bytes::{FixedBuf, WORD, pack, truncate, unpack};
use super::hash::StableHasher;
use super::shapes::{self, ElementType, Tensor};
use crate::{Op, Phase};

/// Number of words of the call: time, bytes, sequence number, channel and kinds, partner and tag,
/// hash, lengths.
const CALL: usize = 2;
const CALL_WORDS: usize = 7;
const MARKS: usize = CALL + CALL_WORDS;
const TEXT: usize = MARKS + 4;
const TEXT_BYTES: usize = (RECORD_WORDS - TEXT) * WORD;

/// Maximum number of bytes of a label that are kept.
const LABEL: usize = 72;

/// Encoding of a missing rank.
const NO_RANK: u32 = u32::MAX;

/// Event of an operation after it was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// The rank began to wait for the operation, at this number of nanoseconds after it was posted.
    Waited,
    /// The operation ended, at this number of nanoseconds after it was posted.
    Ended,
    /// Outcome of the operation, see [`OpOutcome`].
    How,
    /// The ledger counted the operation under this number.
    Counted,
}

/// Outcome of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpOutcome {
    /// The rank has its result. The value is the rank that called last, if the backend knows it, or
    /// for a receive the sender.
    Done(Option<usize>),
    /// The rank could not take part: the world had already failed, or this call made it fail.
    Refused,
    /// The operation failed while the rank waited.
    Failed,
    /// The rank dropped the operation without waiting for its result.
    Dropped,
}

/// Destination of a message, or source of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Global rank; `None` if a receive accepts messages from any rank.
    pub rank: Option<usize>,
    /// Tag of the message.
    pub tag: u32,
}

/// Kind of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the operations")]
pub enum Reduction {
    Sum,
    Average,
    Minimum,
    Maximum,
    Product,
    And,
    Or,
    ExclusiveOr,
    /// A sum of which each term is multiplied by a factor.
    SumOfMultiples,
}

impl Reduction {
    /// All reductions, in declaration order. The encoding is the index plus 1.
    const ALL: [Self; 9] = [
        Self::Sum,
        Self::Average,
        Self::Minimum,
        Self::Maximum,
        Self::Product,
        Self::And,
        Self::Or,
        Self::ExclusiveOr,
        Self::SumOfMultiples,
    ];

    /// Returns the name of the reduction.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Average => "average",
            Self::Minimum => "minimum",
            Self::Maximum => "maximum",
            Self::Product => "product",
            Self::And => "and",
            Self::Or => "or",
            Self::ExclusiveOr => "exclusive or",
            Self::SumOfMultiples => "sum of multiples",
        }
    }
}

/// Description of an operation that is being posted.
#[derive(Debug, Clone, Copy)]
pub struct PostedCall<'a> {
    /// Number of the channel, from 1; 0 if the recorder had no capacity for it.
    pub channel: u32,
    /// Sequence number among the channel's collectives, or among this rank's messages on the
    /// channel.
    pub seq: u64,
    /// Operation.
    pub op: Op,
    /// Pass in which it is posted.
    pub phase: Phase,
    /// Payload bytes.
    pub bytes: u64,
    /// Label of the call.
    pub label: &'a str,
    /// Reduction, if the operation reduces.
    pub reduction: Option<Reduction>,
    /// Group rank of the root.
    pub root: Option<usize>,
    /// Partner of a message.
    pub peer: Option<Peer>,
    /// True if each rank passes different tensors.
    pub is_of_pairs: bool,
    /// Hash of everything that ranks must agree on.
    pub agreement: u64,
}

/// A record as it is read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FlightRecord {
    pub index: u64,
    /// Time of posting, in nanoseconds since the launch's start.
    pub posted: u64,
    pub bytes: u64,
    pub seq: u64,
    pub channel: u32,
    pub op: Op,
    pub phase: Phase,
    pub reduction: Option<Reduction>,
    pub root: Option<usize>,
    pub peer: Option<Peer>,
    /// Hash of everything that ranks must agree on.
    pub agreement: u64,
    pub label: String,
    /// True if the label was not truncated.
    pub is_label_complete: bool,
    pub tensors: Vec<Tensor>,
    /// Number of tensors of the operation; `tensors` may hold fewer.
    pub count: usize,
    /// True if each rank passes different tensors.
    pub is_of_pairs: bool,
    /// Nanoseconds between posting and the begin of the wait.
    pub waited: Option<u64>,
    pub ended: Option<u64>,
    pub over: Option<OpOutcome>,
    pub counted: Option<u64>,
}

/// Writes the operation with index `index`, posted `posted` nanoseconds after the launch's start.
pub(super) fn write<'a>(
    words: &[AtomicU64],
    index: u64,
    posted: u64,
    call: &PostedCall<'_>,
    tensors: impl Iterator<Item = Option<(&'a [usize], ElementType)>>,
) {
    let PostedCall {
        channel,
        seq,
        op,
        phase,
        bytes,
        label: full,
        reduction,
        root,
        peer,
        is_of_pairs,
        agreement,
    } = *call;
    let mut text = FixedBuf::<TEXT_BYTES>::new();
    let label = truncate(full, LABEL);
    text.push(label.as_bytes());
    let count = shapes::push(tensors, &mut text);
    let reduction = reduction.map_or(0, |reduction| reduction as u64 + 1);
    let kinds = op as u64 | (phase as u64) << 8 | reduction << 16 | u64::from(is_of_pairs) << 24;
    let rank = |rank: Option<usize>| rank.map_or(NO_RANK, |rank| rank as u32);
    // A message has a peer and a collective a root; the operation determines which of them this is.
    let (partner, tag) = peer.map_or((rank(root), 0), |peer| (rank(peer.rank), peer.tag));
    let lengths =
        label.len() | (text.bytes().len() << 8) | (usize::from(label.len() == full.len()) << 16);
    let call: [u64; CALL_WORDS] = [
        posted,
        bytes,
        seq,
        u64::from(channel) << 32 | kinds,
        u64::from(partner) << 32 | u64::from(tag),
        agreement,
        (count as u64) << 32 | lengths as u64,
    ];
    let place = 2 * index + 2;
    let check = StableHasher::of([place].into_iter().chain(call).chain(pack(text.bytes())));
    words[0].store(place - 1, Ordering::Relaxed);
    fence(Ordering::Release);
    words[1].store(check, Ordering::Relaxed);
    let behind = pack(text.bytes())
        .enumerate()
        .map(|(at, word)| (TEXT + at, word));
    let marks = (MARKS..TEXT).map(|at| (at, tag_of(index)));
    for (at, word) in call
        .into_iter()
        .enumerate()
        .map(|(at, word)| (CALL + at, word))
        .chain(marks)
        .chain(behind)
    {
        words[at].store(word, Ordering::Relaxed);
    }
    words[0].store(place, Ordering::Release);
}

/// Returns the bits by which a mark identifies its operation.
fn tag_of(index: u64) -> u64 {
    (index + 1) << VALUE_BITS
}

/// Number of bits of a mark's value; in nanoseconds, more than three days.
const VALUE_BITS: u32 = 48;

/// Sets a mark of the operation with index `index`, unless it is already set or the record holds
/// another operation by now.
pub(super) fn mark(words: &[AtomicU64], index: u64, mark: Mark, value: u64) {
    let value = value.saturating_add(1).min((1 << VALUE_BITS) - 1);
    let none = tag_of(index);
    // If the exchange fails, the mark keeps its earlier value.
    let _ = words[MARKS + mark as usize].compare_exchange(
        none,
        none | value,
        Ordering::Relaxed,
        Ordering::Relaxed,
    );
}

impl OpOutcome {
    /// Returns the name of the outcome.
    pub fn name(self) -> &'static str {
        match self {
            Self::Done(_) => "done",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Dropped => "dropped",
        }
    }

    /// Returns the value by which a mark encodes the outcome.
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

/// Decodes the operation in a record. Returns `None` if there is none, or if it was being written.
pub(crate) fn read(words: &[u64]) -> Option<FlightRecord> {
    let place = words[0];
    let index = (place / 2)
        .checked_sub(1)
        .filter(|_| place.is_multiple_of(2))?;
    let &[posted, bytes, seq, kinds, partners, agreement, lengths] =
        words[CALL..].first_chunk::<CALL_WORDS>()?;
    let label_bytes = lengths as usize & 0xff;
    let text_bytes = lengths as usize >> 8 & 0xff;
    if text_bytes > TEXT_BYTES || label_bytes > text_bytes {
        return None;
    }
    let text = unpack(&words[TEXT..], text_bytes);
    let call = [posted, bytes, seq, kinds, partners, agreement, lengths];
    if words[1] != StableHasher::of([place].into_iter().chain(call).chain(pack(&text))) {
        return None;
    }
    let rank = |rank: u32| Some(rank as usize).filter(|_| rank != NO_RANK);
    let (label, tensors) = text.split_at(label_bytes);
    let op = *Op::ALL.get(kinds as usize & 0xff)?;
    let partner = rank((partners >> 32) as u32);
    let is_of_pairs = kinds >> 24 & 1 == 1;
    let marked = |mark: Mark| {
        let word = words[MARKS + mark as usize];
        let of_this = word >> VALUE_BITS == tag_of(index) >> VALUE_BITS;
        (word & ((1 << VALUE_BITS) - 1))
            .checked_sub(1)
            .filter(|_| of_this)
    };
    Some(FlightRecord {
        index,
        posted,
        bytes,
        seq,
        channel: (kinds >> 32) as u32,
        op,
        phase: *Phase::ALL.get(kinds as usize >> 8 & 0xff)?,
        reduction: (kinds as usize >> 16 & 0xff)
            .checked_sub(1)
            .and_then(|number| Reduction::ALL.get(number).copied()),
        root: partner.filter(|_| !op.is_message()),
        peer: op.is_message().then_some(Peer {
            rank: partner,
            tag: partners as u32,
        }),
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
