//! [`Operation`]: a collective or message of a rank, read from its trace.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use itertools::Itertools;

use crate::format::{FlightRecord, OpOutcome, Reduction, Tensor};
use crate::op::{CollectiveId, Op, Phase};

/// A collective or message that a rank has posted.
///
/// Displays as ``all_reduce #40 `grads` on ranks [0, 1]: [4, 8] f32``.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// Index among all operations that the rank has posted, from 0.
    pub index: u64,
    /// Operation, sequence number, label and ranks. The sequence number counts the collectives of
    /// the channel, or the rank's messages there. A long label is truncated.
    pub id: CollectiveId,
    /// Name of the communicator, if it is a duplicate.
    pub channel: Arc<str>,
    /// Pass in which it was posted.
    pub phase: Phase,
    /// Payload bytes, as the `Ledger` counts them.
    pub bytes: u64,
    /// Shapes and dtypes of the first tensors, as many as fit. For an all-to-all of lists, the
    /// tensors that are sent to each rank.
    pub tensors: Vec<Tensor>,
    /// Number of tensors.
    pub count: usize,
    /// Name of the reduction.
    pub reduction: Option<&'static str>,
    /// Group rank of the root.
    pub root: Option<usize>,
    /// For a message, the partner's global rank, unless any rank is accepted, and the tag.
    pub message: Option<(Option<usize>, u32)>,
    /// Time of posting, since the launch's start.
    pub posted: Duration,
    /// Time at which the rank began to wait.
    pub waited: Option<Duration>,
    /// Time of the end, and the outcome.
    pub over: Option<(Duration, OpOutcome)>,
    /// Hash of everything that ranks must agree on.
    pub(crate) agreement: u64,
    pub(crate) is_of_pairs: bool,
    pub(crate) is_label_complete: bool,
    /// Number under which the `Ledger` counted it.
    pub counted: Option<u64>,
}

impl Operation {
    /// Makes an operation of a record, on a channel with this name and these ranks.
    pub(crate) fn new(record: FlightRecord, channel: Arc<str>, ranks: Arc<[usize]>) -> Self {
        let FlightRecord {
            index,
            posted,
            bytes,
            seq,
            op,
            phase,
            reduction,
            root,
            peer,
            agreement,
            label,
            ..
        } = record;
        let posted = Duration::from_nanos(posted);
        let after = |nanos: u64| posted + Duration::from_nanos(nanos);
        Self {
            index,
            id: CollectiveId {
                op,
                seq,
                label: label.into(),
                ranks,
            },
            channel,
            phase,
            bytes,
            tensors: record.tensors,
            count: record.count,
            reduction: reduction.map(Reduction::name),
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

    /// Returns true if the rank is waiting for the operation, or waited until it failed.
    pub fn is_awaited(&self) -> bool {
        self.waited.is_some() && matches!(self.over, None | Some((_, OpOutcome::Failed)))
    }

    /// Returns true if the backend accepted the operation, so that the rank has taken part.
    pub fn is_taken(&self) -> bool {
        !matches!(self.over, Some((_, OpOutcome::Refused)))
    }

    /// Returns a description of the first difference from another rank's call of the same
    /// collective, with this rank's value first. Returns `None` if nothing differs.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let (id, its) = (&self.id, &other.id);
        let none = || "none".to_string();
        let root = |root: Option<usize>| root.map_or_else(none, |root| root.to_string());
        let differs =
            |what: &str, a: String, b: String| (a != b).then(|| format!("{what} {a} vs {b}"));
        differs("operation", id.op.to_string(), its.op.to_string())
            .or_else(|| {
                differs(
                    "label",
                    format!("`{}`", id.label),
                    format!("`{}`", its.label),
                )
            })
            .or_else(|| {
                differs(
                    "reduction",
                    self.reduction.map_or_else(none, str::to_string),
                    other.reduction.map_or_else(none, str::to_string),
                )
            })
            .or_else(|| differs("root", root(self.root), root(other.root)))
            .or_else(|| {
                if self.is_of_pairs {
                    None
                } else {
                    self.tensors_differ(other)
                }
            })
            .or_else(|| {
                let what =
                    "the full label, the tensor names, the shardings or the forward index differ";
                (self.agreement != other.agreement).then(|| what.into())
            })
    }

    fn tensors_differ(&self, other: &Self) -> Option<String> {
        if self.count != other.count {
            return Some(format!(
                "number of tensors {} vs {}",
                self.count, other.count
            ));
        }
        let mut pairs = self.tensors.iter().zip(&other.tensors).enumerate();
        pairs.find_map(
            |(i, (a, b))| match (a.shape != b.shape, a.dtype != b.dtype) {
                (true, _) => Some(format!("tensor {i}: shape {:?} vs {:?}", a.shape, b.shape)),
                (_, true) => Some(format!("tensor {i}: dtype {} vs {}", a.dtype, b.dtype)),
                _ => None,
            },
        )
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id)?;
        if !self.is_label_complete {
            f.write_str(" (label truncated)")?;
        }
        if !self.channel.is_empty() {
            write!(f, " ({})", self.channel)?;
        }
        if let Some((partner, tag)) = self.message {
            let word = if self.id.op == Op::Send { "to" } else { "from" };
            let partner = partner.map_or("any rank".into(), |rank| format!("rank {rank}"));
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
