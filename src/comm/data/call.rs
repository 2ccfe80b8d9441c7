//! [`DataCall`]: what a data plane must know of a call to prepare a rank's contribution.

use std::sync::Arc;

use crate::comm::CollectivePlan;
use crate::comm::backend::{CallSignature, GroupMember};
use crate::placement::ShardSizes;

/// Data of a contribution that another rank needs.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) enum RecipientData<'a> {
    /// All tensors.
    Full,
    /// Shards of the recipient, each given as (dimension, shard sizes).
    Shards(&'a [(usize, ShardSizes)]),
    /// Tensors that are addressed to the recipient.
    Addressed,
}

/// The member with which a rank exchanges a message.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) enum MessagePeer {
    /// Recipient of the rank's message.
    To(usize),
    /// Sender of the message that the rank receives.
    From(usize),
}

/// A call that a rank is about to post, or a message that it receives from another rank.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code, reason = "a plane reads what it needs")]
pub(in crate::comm) struct DataCall<'a> {
    /// Signature of the call: the operation, and the tensors that all ranks pass and receive.
    pub signature: &'a CallSignature,
    pub member: &'a GroupMember,
    /// Name of the channel, which distinguishes groups of the same ranks.
    pub name: &'static str,
    /// Data that each other rank needs.
    pub needed: RecipientData<'a>,
    /// Plan of an all-gather or a reduce-scatter.
    pub plan: Option<&'a Arc<CollectivePlan>>,
    /// True if some ranks of the group are in other processes.
    pub is_distributed: bool,
    /// True if the result is needed later.
    pub is_deferred: bool,
    /// True for the rank's first call on the channel whose tensors are exchanged.
    pub is_first_exchange: bool,
    /// The other rank of a message whose tensors the two exchange.
    pub peer: Option<MessagePeer>,
}

impl<'a> DataCall<'a> {
    /// Creates the call of a message, whose tensors are exchanged with `peer`, if there is one.
    pub fn of_message(
        signature: &'a CallSignature,
        member: &'a GroupMember,
        name: &'static str,
        is_distributed: bool,
        peer: Option<MessagePeer>,
    ) -> Self {
        Self {
            signature,
            member,
            name,
            needed: RecipientData::Full,
            plan: None,
            is_distributed,
            is_deferred: false,
            is_first_exchange: false,
            peer,
        }
    }
}
