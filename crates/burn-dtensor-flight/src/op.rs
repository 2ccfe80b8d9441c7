//! [`Op`], [`Phase`] and [`CollectiveId`]: kind of a collective, its training pass, and its
//! identification in messages.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Kind of a collective or of a message. The declaration order is part of the
/// [format](crate::format), which gets a new version with a new kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Every rank receives the concatenated shards of all ranks.
    AllGather,
    /// Every rank receives its shard of the reduced tensor.
    ReduceScatter,
    /// Every rank receives the reduced tensor.
    AllReduce,
    /// Every rank exchanges blocks with every other rank, which changes the sharded dimension.
    AllToAll,
    /// Every rank sends a tensor of any shape, or none, to every other rank.
    AllToAllList,
    /// Every rank receives the root's tensors.
    Broadcast,
    /// Every rank receives its shard of the root's tensors.
    Scatter,
    /// The root receives the reduced tensor.
    Reduce,
    /// The root receives a tensor from each rank.
    Gather,
    /// No data; returns when all ranks have called it.
    Barrier,
    /// Sends tensors to one rank.
    Send,
    /// Receives tensors from one rank, or from any rank.
    Receive,
}

impl Op {
    /// All operations, in declaration order.
    pub const ALL: [Self; 12] = [
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllReduce,
        Self::AllToAll,
        Self::AllToAllList,
        Self::Broadcast,
        Self::Scatter,
        Self::Reduce,
        Self::Gather,
        Self::Barrier,
        Self::Send,
        Self::Receive,
    ];

    /// Returns true for point-to-point operations, which two ranks call rather than all of a group.
    pub fn is_message(self) -> bool {
        matches!(self, Self::Send | Self::Receive)
    }

    /// Returns the name of the operation, which is that of the `Communicator` method where one method
    /// makes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
            Self::AllToAll => "all_to_all",
            Self::AllToAllList => "all_to_all_list",
            Self::Broadcast => "broadcast",
            Self::Scatter => "scatter",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The training pass to which a collective belongs; part of the key under which the `Ledger` counts
/// it. The declaration order is part of the [format](crate::format).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Outside a training pass: set-up, checkpoints, norms.
    #[default]
    Other,
    /// In a forward pass.
    Forward,
    /// In a backward pass.
    Backward,
}

impl Phase {
    /// All phases, in declaration order.
    pub const ALL: [Self; 3] = [Self::Other, Self::Forward, Self::Backward];
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Other => "other",
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// Identification of one collective of one group in error messages and reports.
///
/// Displays as ``all_gather #12 `blocks.3` on ranks [0, 1]``.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CollectiveId {
    /// Kind of the operation.
    pub op: Op,
    /// Sequence number among the collectives of the group, from 0.
    pub seq: u64,
    /// Label of the call.
    pub label: Arc<str>,
    /// Global ranks of the group, in group order.
    pub ranks: Arc<[usize]>,
}

impl fmt::Display for CollectiveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.op, self.seq)?;
        if !self.label.is_empty() {
            write!(f, " `{}`", self.label)?;
        }
        match &self.ranks[..] {
            ranks if ranks.len() <= 8 => write!(f, " on ranks {ranks:?}"),
            ranks => {
                write!(
                    f,
                    " on {} ranks [{}, {}, .., {}]",
                    ranks.len(),
                    ranks[0],
                    ranks[1],
                    ranks[ranks.len() - 1]
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_an_operation_or_a_phase_finds_it() {
        assert!(
            Op::ALL
                .iter()
                .enumerate()
                .all(|(number, op)| *op as usize == number)
        );
        assert!(
            Phase::ALL
                .iter()
                .enumerate()
                .all(|(number, phase)| *phase as usize == number)
        );
        let names = Op::ALL.map(|op| serde_json::to_value(op).unwrap());
        assert_eq!(names, Op::ALL.map(|op| serde_json::Value::from(op.name())));
    }

    #[test]
    fn an_id_names_op_number_label_and_ranks() {
        let id = CollectiveId {
            op: Op::AllGather,
            seq: 12,
            label: "blocks.3".into(),
            ranks: [0, 1].into(),
        };
        assert_eq!(id.to_string(), "all_gather #12 `blocks.3` on ranks [0, 1]");
        let wide = CollectiveId {
            label: "".into(),
            ranks: (0..128).collect(),
            ..id
        };
        assert_eq!(
            wide.to_string(),
            "all_gather #12 on 128 ranks [0, 1, .., 127]"
        );
    }
}
