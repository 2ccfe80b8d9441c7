//! [`NodeRange`]: numbers of the graph nodes that are made while something runs.
//!
//! # What it relies on
//! burn numbers the nodes of autodiff graphs in the order in which they are made, in one sequence
//! for the process, and any code may draw a number. So the nodes that a thread makes between two
//! draws have numbers between the drawn ones.
//!
//! # The issue to file
//! *Name the operation when a graph has been consumed.* The panic of a second backward names a node
//! by its number. It could say where the operation was recorded.

use burn::backend::autodiff::NodeId;
use smallvec::SmallVec;

/// Numbers of the nodes that are made between [`open`](Self::open) and [`close`](Self::close).
/// Nodes that other threads make during that time have numbers in the same range.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeRange {
    opened: u64,
    closed: u64,
    /// Nodes of the tracked inputs, which were made before.
    inputs: SmallVec<[u64; 2]>,
}

impl NodeRange {
    /// Begins a range.
    pub(crate) fn open() -> Self {
        Self {
            opened: NodeId::new().value,
            closed: u64::MAX,
            inputs: SmallVec::new(),
        }
    }

    /// Returns the number that was drawn first. Ranges opened later have higher ones.
    pub(crate) fn opened_at(&self) -> u64 {
        self.opened
    }

    /// Records the node of a tracked input.
    pub(crate) fn add_input(&mut self, node: NodeId) {
        self.inputs.push(node.value);
    }

    /// Returns the nodes of the tracked inputs.
    pub(crate) fn inputs(&self) -> &[u64] {
        &self.inputs
    }

    /// Ends the range.
    pub(crate) fn close(&mut self) {
        self.closed = NodeId::new().value;
    }

    /// Returns true if the node is in the range.
    pub(crate) fn contains(&self, node: u64) -> bool {
        (self.opened..self.closed).contains(&node)
    }

    /// Creates a range of these numbers.
    #[cfg(test)]
    pub(crate) fn of(opened: u64, closed: u64, inputs: &[u64]) -> Self {
        Self {
            opened,
            closed,
            inputs: inputs.into(),
        }
    }
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::autodiff::node_id;

    #[test]
    fn nodes_have_numbers_in_the_range_in_which_they_are_made() {
        let node = |tensor: &Tensor<1>| node_id(tensor.clone().into_dispatch()).unwrap().value;
        let x = Tensor::<1>::ones([2], &Device::flex().autodiff()).require_grad();
        let before = x.clone().exp();
        let mut range = NodeRange::open();
        let first = before.clone() * 2.0;
        let second = first.clone() + x;
        range.close();
        let after = second.clone().exp();
        let is_inside = [&before, &first, &second, &after].map(|made| range.contains(node(made)));
        assert_eq!(is_inside, [false, true, true, false]);
        assert!(NodeRange::open().opened_at() > node(&after));
    }
}
