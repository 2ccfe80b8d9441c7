//! Which leaf of the graph around a checkpointed block a shard is, of which the block has a copy.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{Dispatch, DispatchTensor};

use crate::autodiff;

/// Of each copy its leaf.
pub(super) type Leaves = Arc<HashMap<NodeId, NodeId>>;

thread_local! {
    /// Of the blocks that compute, innermost last.
    static COPIED: RefCell<Vec<Leaves>> = const { RefCell::new(Vec::new()) };
}

/// The leaf whose gradient is wanted of this shard; `None` of a frozen one.
pub(in crate::param) fn trained(base: &DispatchTensor) -> Option<NodeId> {
    let node = autodiff::node_id(base.clone())?;
    leaf_of(node).or_else(|| Dispatch::is_tracked(base).then_some(node))
}

/// What a stored shard is called, whoever has a copy; `None` without autodiff.
pub(in crate::param) fn node_id(base: &DispatchTensor) -> Option<NodeId> {
    let node = autodiff::node_id(base.clone())?;
    Some(leaf_of(node).unwrap_or(node))
}

fn leaf_of(copy: NodeId) -> Option<NodeId> {
    COPIED.with_borrow(|copied| copied.iter().rev().find_map(|leaves| leaves.get(&copy).copied()))
}

/// These are copied as long as it lives.
pub(super) struct KnownLeaves;

impl KnownLeaves {
    pub(super) fn new(leaves: Leaves) -> Self {
        COPIED.with_borrow_mut(|copied| copied.push(leaves));
        Self
    }
}

impl Drop for KnownLeaves {
    fn drop(&mut self) {
        COPIED.with_borrow_mut(Vec::pop);
    }
}
