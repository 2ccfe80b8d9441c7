//! [`Operation`]: a collective or message of a rank, as it is read.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use itertools::Itertools;

use super::record::{FlightRecord, OpOutcome, REDUCTIONS};
use super::shapes::Tensor;
use crate::comm::{CollectiveId, Op, Phase};

/// A collective that a rank has posted, or a message.
///
/// Displays as ``all_reduce #40 `grads` on ranks [0, 1]: [4, 8] f32``.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// Its place among all that the rank has posted, from 0.
    pub index: u64,
    /// What it is, its place among the collectives of its group, or among the rank's messages there, its label as far as it
    /// fits, and the ranks.
    pub id: CollectiveId,
    /// The name of the channel, if it is a [duplicate](crate::comm::Communicator::duplicate).
    pub channel: Arc<str>,
    /// The pass it ran in.
    pub phase: Phase,
    /// Payload bytes, as the [`Ledger`](crate::comm::Ledger) counts them.
    pub bytes: u64,
    /// Shapes and dtypes of as many tensors as fit; of an all-to-all of lists, what is given to each rank.
    pub tensors: Vec<Tensor>,
    /// How many tensors there are.
    pub count: usize,
    /// The name of the reduction.
    pub reduction: Option<&'static str>,
    /// The root's place in the group.
    pub root: Option<usize>,
    /// Of a message the partner's global rank, if it was named, and the tag.
    pub message: Option<(Option<usize>, u32)>,
    /// When it was posted, since the launch's start.
    pub posted: Duration,
    /// When it was waited for.
    pub waited: Option<Duration>,
    /// When it was over, and how.
    pub over: Option<(Duration, OpOutcome)>,
    /// Of all that ranks must agree on.
    pub(super) agreement: u64,
    pub(super) is_of_pairs: bool,
    pub(super) is_label_complete: bool,
    /// The how-manieth that the ledger counted.
    pub(in crate::comm) counted: Option<u64>,
}

impl Operation {
    /// Of a record, on a channel of this name and ranks.
    pub(super) fn new(record: FlightRecord, channel: Arc<str>, ranks: Arc<[usize]>) -> Self {
        let FlightRecord { index, posted, bytes, seq, op, phase, reduce, root, peer, agreement, label, .. } = record;
        let posted = Duration::from_nanos(posted);
        let after = |nanos: u64| posted + Duration::from_nanos(nanos);
        Self {
            index,
            id: CollectiveId { op, seq, label: label.into(), ranks },
            channel,
            phase,
            bytes,
            tensors: record.tensors,
            count: record.count,
            reduction: usize::from(reduce).checked_sub(1).and_then(|reduce| REDUCTIONS.get(reduce).copied()),
            root,
            message: peer.map(|peer| (peer.rank, peer.tag)),
            posted,
            waited: record.waited.map(after),
            over: record.ended.map(after).zip(record.over),
            agreement,
            is_of_pairs: record.is_of_pairs,
            is_label_complete: record.is_label_complete,
            counted: record.counted,
        }
    }

    /// Whether the rank waits for it, or did until it failed.
    pub fn is_awaited(&self) -> bool {
        self.waited.is_some() && matches!(self.over, None | Some((_, OpOutcome::Failed)))
    }

    /// Whether the engine took it: the rank has taken part.
    pub fn is_taken(&self) -> bool {
        !matches!(self.over, Some((_, OpOutcome::Refused)))
    }

    /// What differs from the same call of another rank, this one's value first; `None` if nothing does.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let (id, its) = (&self.id, &other.id);
        let none = || "none".to_string();
        let root = |root: Option<usize>| root.map_or_else(none, |root| root.to_string());
        let differs = |what: &str, a: String, b: String| (a != b).then(|| format!("{what} {a} vs {b}"));
        differs("operation", id.op.to_string(), its.op.to_string())
            .or_else(|| differs("label", format!("`{}`", id.label), format!("`{}`", its.label)))
            .or_else(|| {
                differs(
                    "reduction",
                    self.reduction.map_or_else(none, str::to_string),
                    other.reduction.map_or_else(none, str::to_string),
                )
            })
            .or_else(|| differs("root", root(self.root), root(other.root)))
            .or_else(|| if self.is_of_pairs { None } else { self.tensors_differ(other) })
            .or_else(|| {
                let what = "its whole label, names of tensors, cuts, or place in forward differ";
                (self.agreement != other.agreement).then(|| what.into())
            })
    }

    fn tensors_differ(&self, other: &Self) -> Option<String> {
        if self.count != other.count {
            return Some(format!("number of tensors {} vs {}", self.count, other.count));
        }
        let mut pairs = self.tensors.iter().zip(&other.tensors).enumerate();
        pairs.find_map(|(i, (a, b))| match (a.shape != b.shape, a.dtype != b.dtype) {
            (true, _) => Some(format!("tensor {i}: shape {:?} vs {:?}", a.shape, b.shape)),
            (_, true) => Some(format!("tensor {i}: dtype {} vs {}", a.dtype, b.dtype)),
            _ => None,
        })
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id)?;
        if !self.is_label_complete {
            f.write_str(" (label cut)")?;
        }
        if !self.channel.is_empty() {
            write!(f, " ({})", self.channel)?;
        }
        if let Some((partner, tag)) = self.message {
            let word = if self.id.op == Op::Send { "to" } else { "from" };
            let partner = partner.map_or("anybody".into(), |rank| format!("rank {rank}"));
            write!(f, " {word} {partner}, tag {tag}")?;
        }
        if !self.tensors.is_empty() {
            write!(f, ": {}", self.tensors.iter().join(", "))?;
        }
        match self.count - self.tensors.len() {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}
