//! Maps a checkpointed block's copy of a shard to its leaf in the enclosing graph.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{Dispatch, DispatchTensor};

use crate::autodiff;

/// Leaf of each copy.
pub(super) type Leaves = Arc<HashMap<NodeId, NodeId>>;

thread_local! {
    /// Copies of the running blocks, innermost last.
    static COPIED: RefCell<Vec<Leaves>> = const { RefCell::new(Vec::new()) };
}

/// Returns the leaf that receives the gradient of this shard, or `None` if the shard is frozen.
pub(in crate::param) fn trained(base: &DispatchTensor) -> Option<NodeId> {
    let node = autodiff::node_id(base.clone())?;
    leaf_of(node).or_else(|| Dispatch::is_tracked(base).then_some(node))
}

/// Returns the node that identifies a stored shard, also if `base` is a copy of it. Returns `None` without
/// autodiff.
pub(in crate::param) fn node_id(base: &DispatchTensor) -> Option<NodeId> {
    let node = autodiff::node_id(base.clone())?;
    Some(leaf_of(node).unwrap_or(node))
}

fn leaf_of(copy: NodeId) -> Option<NodeId> {
    COPIED.with_borrow(|copied| copied.iter().rev().find_map(|leaves| leaves.get(&copy).copied()))
}

/// Guard that registers a block's copies on this thread until it is dropped.
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
