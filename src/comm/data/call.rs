//! [`DataCall`]: what a data plane must know of a call to prepare a rank's contribution.

use std::sync::Arc;

use crate::comm::backend::GroupMember;
use crate::comm::{CollectivePlan, Op};
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

/// A call that a rank is about to post.
#[derive(Debug, Clone, Copy)]
#[allow(dead_code, reason = "a plane reads what it needs")]
pub(in crate::comm) struct DataCall<'a> {
    pub op: Op,
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
}
