//! Encoding of [`CallSignature`]s, on which the ranks of several processes must agree, and of [`Failure`]s, which
//! end a world.

use super::wire::{Decode, Encode, wire_enum, wire_struct};
use crate::comm::backend::{CallSignature, Failure, PairwiseSignature, ShardSignature, TensorSignature};
use crate::comm::{CollectiveId, CommError, Digests, Op, ReduceOp, ReplicatedValue, ShardedModel, TensorMeta};

// Many signatures differ from an earlier one only in their digests. Those are therefore encoded separately.
wire_struct!(CallSignature { op, label, reduce, root, model, forward_index, global_tensor, operand_shapes, names, tensors, any, pairs } but { digests });
wire_struct!(ShardedModel { number, states, origin });
wire_struct!(Digests { of, step, names, values });
wire_enum!(ReplicatedValue {
    0 Weight {},
    1 GatheredWeight {},
    2 Gradient {},
    3 LocalTensor {},
});
wire_struct!(PairwiseSignature { member, given, taken });
wire_struct!(TensorSignature { shape, dtype, sharding, to });
wire_struct!(ShardSignature { dim, lengths });
wire_struct!(TensorMeta { shape, dtype });
wire_struct!(CollectiveId { op, seq, label, ranks });

/// Operations; each is encoded as its index in this list.
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

impl Encode for Op {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(OPS.iter().position(|op| op == self).expect("`OPS` contains every operation") as u8);
    }
}

impl Decode for Op {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        OPS.get(usize::from(u8::decode(input)?)).copied()
    }
}

/// Reductions; each is encoded as its index in this list. `PremulSum` is encoded as the length of the list,
/// followed by its factor.
const REDUCTIONS: [ReduceOp; 8] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];

impl Encode for ReduceOp {
    fn encode(&self, out: &mut Vec<u8>) {
        let at = REDUCTIONS.iter().position(|op| op == self);
        out.push(at.unwrap_or(REDUCTIONS.len()) as u8);
        if let Self::PremulSum(factor) = self {
            factor.value().to_bits().encode(out);
        }
    }
}

impl Decode for ReduceOp {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        let at = usize::from(u8::decode(input)?);
        match REDUCTIONS.get(at) {
            Some(op) => Some(*op),
            None if at == REDUCTIONS.len() => Some(Self::premul_sum(f64::from_bits(u64::decode(input)?))),
            None => None,
        }
    }
}

impl Encode for Failure {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Panicked { rank, message } => {
                out.push(0);
                rank.encode(out);
                message.encode(out);
            }
            Self::Failed { rank, message } => {
                out.push(1);
                rank.encode(out);
                message.encode(out);
            }
            Self::Collective(error) => {
                out.push(2);
                error.encode(out);
            }
        }
    }
}

impl Decode for Failure {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        Some(match u8::decode(input)? {
            0 => Self::Panicked { rank: Decode::decode(input)?, message: Decode::decode(input)? },
            1 => Self::Failed { rank: Decode::decode(input)?, message: Decode::decode(input)? },
            2 => Self::Collective(Decode::decode(input)?),
            _ => return None,
        })
    }
}

wire_enum!(CommError {
    0 RankPanicked { rank, message, during },
    1 RankFailed { rank, message, during },
    2 RankReturned { rank, during },
    3 Mismatch { rank, other, during, differs },
    4 Deadlock { waits },
    5 ConcurrentCalls { rank, called, during },
    6 CollectiveInRunOn { rank, called },
    7 ForeignRankObject { rank, owner, op, label },
    8 DeadlineExceeded { rank, missing, during, deadline },
    9 InvalidArgument { rank, op, label, problem, remedy },
    10 InvalidGroup { rank, ranks, problem },
    11 Disconnected { rank, problem },
    12 Revoked { rank },
    13 ExcludedFromShrink { rank },
    14 CannotShrink { rank },
    15 Diverged { rank, other, during, param, of, step, majority },
    16 StillRunning { rank, deadline },
});
