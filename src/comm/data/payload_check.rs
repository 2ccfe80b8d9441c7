//! Check that the tensors that a process announces are those of the call, as its signature
//! determines them.

use std::iter;

use crate::comm::backend::{CallSignature, ShardSignature, TensorSignature};
use crate::comm::transport::header::PayloadDesc;
use crate::comm::{Op, TensorMeta};

/// Maximum number of bytes that accompany a call whose tensors are exchanged.
const INTRODUCTION: usize = 4096;

/// Number of a group's ranks, and those of them that receive a call's data in this process,
/// ascending.
pub(in crate::comm) struct Recipients<'a> {
    pub ranks: usize,
    pub members: &'a [usize],
}

impl PayloadDesc {
    /// Returns true if this is the data that member `from` sends to `to` in a collective. The
    /// signature must [fit](CallSignature::fits) the group.
    pub fn is_of_call(&self, signature: &CallSignature, from: usize, to: &Recipients<'_>) -> bool {
        let CallSignature {
            op, tensors, pairs, ..
        } = signature;
        let is_of_all = pairs.is_none();
        if signature.exchange.is_some() {
            let bytes = self
                .tensors
                .iter()
                .map(|meta| meta.shape.num_elements() * meta.dtype.size());
            return self.recipients.is_empty() && bytes.sum::<usize>() <= INTRODUCTION;
        }
        // The first of two phases of an all-reduce, in which the tensors are sharded as rows.
        if is_of_all && *op == Op::AllReduce && !self.recipients.is_empty() {
            let count = self.tensors.len() / to.members.len().max(1);
            let each = to
                .members
                .iter()
                .flat_map(|member| iter::repeat_n(*member, count));
            return count == tensors.len() && each.eq(self.recipients.iter().copied());
        }
        // The second of two phases, whose signature has no tensors.
        if is_of_all && matches!(op, Op::AllGather | Op::AllReduce) && tensors.is_empty() {
            return self.recipients.is_empty();
        }
        let sent = |member: usize| signature.tensors_sent(from, member, to.ranks);
        if is_of_all && matches!(op, Op::AllReduce | Op::AllGather | Op::Broadcast) {
            return self.recipients.is_empty() && sent(from).as_ref() == Some(&self.tensors);
        }
        let for_each: Option<Vec<_>> = to
            .members
            .iter()
            .map(|member| Some((*member, sent(*member)?)))
            .collect();
        for_each.is_some_and(|for_each| {
            let each = for_each
                .iter()
                .flat_map(|(member, metas)| iter::repeat_n(*member, metas.len()));
            let metas = for_each.iter().flat_map(|(_, metas)| metas);
            each.eq(self.recipients.iter().copied()) && metas.eq(&self.tensors)
        })
    }

    /// Returns true if this is the data of a message with this signature.
    pub fn is_of_message(&self, signature: &CallSignature) -> bool {
        self.recipients.is_empty() && signature.message_tensors() == self.tensors
    }
}

impl CallSignature {
    /// Returns the tensors of a message with this signature.
    pub fn message_tensors(&self) -> Vec<TensorMeta> {
        self.tensors.iter().map(full).collect()
    }

    /// Returns the tensors that member `from` of a group of `ranks` sends to member `to` in a
    /// collective. One of the two must be the member that made the call. Returns `None` if there is
    /// no such collective. The signature must [fit](Self::fits) the group.
    pub fn tensors_sent(&self, from: usize, to: usize, ranks: usize) -> Option<Vec<TensorMeta>> {
        if let Some(pairs) = &self.pairs {
            let list = match from == pairs.member {
                true => &pairs.sent[to],
                false => &pairs.received[from],
            };
            return Some(list.iter().cloned().collect());
        }
        let is_root = |member: usize| self.root == Some(member);
        let shard = |tensor: &TensorSignature, sharding: &Option<ShardSignature>, member: usize| {
            shard_of(tensor, sharding, ranks, member)
        };
        let meta = |tensor: &TensorSignature| match self.op {
            Op::AllReduce | Op::Broadcast => Some(full(tensor)),
            Op::AllGather => shard(tensor, &tensor.sharding, from),
            Op::ReduceScatter | Op::Scatter => shard(tensor, &tensor.sharding, to),
            // The root's shard is everything.
            Op::Reduce => {
                let mut meta = full(tensor);
                *meta.shape.first_mut()? *= usize::from(is_root(to));
                Some(meta)
            }
            Op::AllToAll => {
                let shape = shard(tensor, &tensor.sharding, from)?.shape;
                let shard_of_from = TensorSignature {
                    shape,
                    ..tensor.clone()
                };
                shard(&shard_of_from, &tensor.to, to)
            }
            // The signature of a list has `pairs`, and messages are no collectives.
            Op::AllToAllList | Op::Gather | Op::Barrier | Op::Send | Op::Receive => None,
        };
        match self.op {
            Op::Barrier => Some(Vec::new()),
            Op::Broadcast | Op::Scatter if !is_root(from) => Some(Vec::new()),
            Op::AllToAllList | Op::Gather | Op::Send | Op::Receive => None,
            _ => self.tensors.iter().map(meta).collect(),
        }
    }
}

fn full(tensor: &TensorSignature) -> TensorMeta {
    TensorMeta {
        shape: tensor.shape.clone(),
        dtype: tensor.dtype,
    }
}

/// Describes the shard of a rank; `None` if the tensor has no sharding.
fn shard_of(
    tensor: &TensorSignature,
    sharding: &Option<ShardSignature>,
    ranks: usize,
    member: usize,
) -> Option<TensorMeta> {
    let mut meta = full(tensor);
    let sharding = sharding.as_ref()?;
    let len = meta.shape.get_mut(sharding.dim)?;
    *len = sharding.of(*len).range(ranks, member).len();
    Some(meta)
}
