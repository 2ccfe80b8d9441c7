//! [`Op`] and [`CollectiveId`]: which collective, the how-manieth, by whom.

use std::fmt;
use std::sync::Arc;

/// A kind of collective, or of message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Every rank gets the pieces of all ranks.
    AllGather,
    /// Every rank gets its part of the reduced whole.
    ReduceScatter,
    /// Every rank gets the reduced whole.
    AllReduce,
    /// Every rank swaps a piece with every other.
    AllToAll,
    /// Every rank gives each other a tensor of any shape, or none.
    AllToAllList,
    /// Every rank gets the root's tensors.
    Broadcast,
    /// Every rank gets its part of the root's tensors.
    Scatter,
    /// The root gets the reduced whole.
    Reduce,
    /// The root gets a tensor of each rank.
    Gather,
    /// No data; all ranks meet.
    Barrier,
    /// Tensors go to one rank.
    Send,
    /// Tensors of one rank, or of any.
    Receive,
}

impl Op {
    /// Whether two ranks make it, and not all of a group.
    pub fn is_message(self) -> bool {
        matches!(self, Self::Send | Self::Receive)
    }

    /// The name of the [`Communicator`](super::Communicator) method.
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

/// One collective of one group, as error messages and reports name it.
///
/// Displays as ``all_gather #12 `blocks.3` on ranks [0, 1]``.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CollectiveId {
    /// What it does.
    pub op: Op,
    /// Its place among the collectives of its group, from 0.
    pub seq: u64,
    /// The caller's label.
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
                write!(f, " on {} ranks [{}, {}, .., {}]", ranks.len(), ranks[0], ranks[1], ranks[ranks.len() - 1])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_op_number_label_and_ranks() {
        let id = CollectiveId { op: Op::AllGather, seq: 12, label: "blocks.3".into(), ranks: [0, 1].into() };
        assert_eq!(id.to_string(), "all_gather #12 `blocks.3` on ranks [0, 1]");
        let wide = CollectiveId { label: "".into(), ranks: (0..128).collect(), ..id };
        assert_eq!(wide.to_string(), "all_gather #12 on 128 ranks [0, 1, .., 127]");
    }
}
