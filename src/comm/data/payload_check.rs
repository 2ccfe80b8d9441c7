//! Check that the tensors that a process announces are those of the call, as its signature
//! determines them.

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
            op,
            root,
            tensors,
            pairs,
            ..
        } = signature;
        if signature.exchange.is_some() {
            let bytes = self
                .tensors
                .iter()
                .map(|meta| meta.shape.num_elements() * meta.dtype.size());
            return self.recipients.is_empty() && bytes.sum::<usize>() <= INTRODUCTION;
        }
        let recipients_are = |count: usize| {
            let each = to
                .members
                .iter()
                .flat_map(|member| std::iter::repeat_n(*member, count));
            each.eq(self.recipients.iter().copied())
        };
        let shared = |meta: &dyn Fn(&TensorSignature) -> Option<TensorMeta>| {
            self.recipients.is_empty() && self.are(tensors.iter().map(meta))
        };
        let for_each = |meta: &dyn Fn(&TensorSignature, usize) -> Option<TensorMeta>| {
            let metas = to
                .members
                .iter()
                .flat_map(|member| tensors.iter().map(move |tensor| meta(tensor, *member)));
            recipients_are(tensors.len()) && self.are(metas)
        };
        let shard = |tensor: &TensorSignature, member: usize| {
            shard_of(tensor, &tensor.sharding, to.ranks, member)
        };
        if let Some(pairs) = pairs {
            let given = || {
                to.members
                    .iter()
                    .filter_map(|member| Some((*member, pairs.sent[*member].clone()?)))
            };
            return given()
                .map(|(member, _)| member)
                .eq(self.recipients.iter().copied())
                && self.are(given().map(|(_, meta)| Some(meta)));
        }
        match op {
            // The first of two phases, in which the tensors are sharded as rows.
            Op::AllReduce if !self.recipients.is_empty() => {
                let count = self.tensors.len() / to.members.len().max(1);
                count == tensors.len()
                    && recipients_are(count)
                    && self.tensors.len() == self.recipients.len()
            }
            // The second of two phases, whose signature has no tensors.
            Op::AllGather | Op::AllReduce if tensors.is_empty() => self.recipients.is_empty(),
            Op::AllReduce => shared(&full),
            Op::AllGather => shared(&|tensor| shard(tensor, from)),
            Op::Broadcast if *root == Some(from) => shared(&full),
            Op::Scatter if *root == Some(from) => for_each(&shard),
            Op::Broadcast | Op::Scatter | Op::Barrier => {
                self.tensors.is_empty() && self.recipients.is_empty()
            }
            Op::ReduceScatter => for_each(&shard),
            // The root's shard is everything.
            Op::Reduce => for_each(&|tensor, member| {
                let mut meta = full(tensor)?;
                *meta.shape.first_mut()? *= usize::from(*root == Some(member));
                Some(meta)
            }),
            Op::AllToAll => for_each(&|tensor, member| {
                let shape = shard(tensor, from)?.shape;
                shard_of(
                    &TensorSignature {
                        shape,
                        ..tensor.clone()
                    },
                    &tensor.to,
                    to.ranks,
                    member,
                )
            }),
            // The signature of a list has `pairs`, and messages are no collectives.
            Op::AllToAllList | Op::Gather | Op::Send | Op::Receive => false,
        }
    }

    /// Returns true if this is the data of a message with this signature.
    pub fn is_of_message(&self, signature: &CallSignature) -> bool {
        self.recipients.is_empty() && self.are(signature.tensors.iter().map(full))
    }

    fn are(&self, metas: impl Iterator<Item = Option<TensorMeta>>) -> bool {
        metas.eq(self.tensors.iter().cloned().map(Some))
    }
}

fn full(tensor: &TensorSignature) -> Option<TensorMeta> {
    Some(TensorMeta {
        shape: tensor.shape.clone(),
        dtype: tensor.dtype,
    })
}

/// Describes the shard of a rank; `None` if the tensor has no sharding.
fn shard_of(
    tensor: &TensorSignature,
    sharding: &Option<ShardSignature>,
    ranks: usize,
    member: usize,
) -> Option<TensorMeta> {
    let mut meta = full(tensor)?;
    let sharding = sharding.as_ref()?;
    let len = meta.shape.get_mut(sharding.dim)?;
    *len = sharding.of(*len).range(ranks, member).len();
    Some(meta)
}
