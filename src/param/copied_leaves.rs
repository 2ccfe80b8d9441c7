//! [`CopiedLeaves`]: the leaves that a checkpointed block has copied.
//!
//! A block computes with copies of the shards that it reads, so that its private graph does not
//! reach the program's. A copy stands for the shard: its gradient is the shard's, and it identifies
//! the shard.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{Dispatch, DispatchTensor};

use crate::autodiff;

thread_local! {
    /// Those of the blocks that run on the thread, innermost last.
    static COPIED: RefCell<Vec<Leaves>> = const { RefCell::new(Vec::new()) };
}

/// Guard of a block that runs. Dropping it ends the innermost one.
pub(super) struct CopiedLeaves(());

impl CopiedLeaves {
    /// Begins a block that has copied these leaves.
    pub(super) fn enter(leaves: Leaves) -> Self {
        COPIED.with(|copied| copied.borrow_mut().push(leaves));
        Self(())
    }
}

impl Drop for CopiedLeaves {
    fn drop(&mut self) {
        COPIED.with(|copied| copied.borrow_mut().pop());
    }
}

/// Leaf of each copy.
pub(crate) type Leaves = Arc<HashMap<NodeId, NodeId>>;

/// Returns the leaf that receives the gradient of this shard, or `None` if the shard is frozen.
pub(crate) fn trained(base: &DispatchTensor) -> Option<NodeId> {
    let node = autodiff::node_id(base.clone())?;
    leaf_of(node).or_else(|| Dispatch::is_tracked(base).then_some(node))
}

/// Returns the node that identifies a stored shard, also if `base` is a copy of it. Returns `None`
/// without autodiff.
pub(crate) fn node_id(base: &DispatchTensor) -> Option<NodeId> {
    let node = autodiff::node_id(base.clone())?;
    Some(leaf_of(node).unwrap_or(node))
}

fn leaf_of(copy: NodeId) -> Option<NodeId> {
    COPIED.with(|copied| {
        let copied = copied.borrow();
        copied
            .iter()
            .rev()
            .find_map(|leaves| leaves.get(&copy).copied())
    })
}
