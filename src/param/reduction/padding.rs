//! [`ZeroPadding`]: tells gradients of the loss from zeros that replace a missing gradient.
//!
//! Post-backward nodes and checkpointed blocks order the backward: burn runs all ancestors of the
//! loss, and so what only such a node ties to the loss, too. No gradient of the loss arrives there,
//! and the node passes zeros on ([`backward_nodes`](crate::param::backward_nodes), rule 4). Without
//! sharding, a parameter that receives only these zeros has no gradient, and an optimizer does not
//! step it. A parameter that the loss depends on may have a gradient of zero as well, which an
//! optimizer does apply. The values do not tell the two apart; the graph does:
//!
//! ```text
//!   w ──> x ──> unit that leaves x unused        zeros for x, and no gradient of w
//!   │      ╰─┄┄> token ┄┄> output ──> loss
//!   v ──> y ──> relu ────────^                   the gradient of v, which may be zero
//! ```
//!
//! A gradient reaches a node on a path from the loss that enters no such ordering node. The graph
//! is read once per backward, and only if zeros were given in it.

use std::collections::HashSet;
use std::mem;

use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;

use crate::autodiff::{BackwardId, BackwardStep};
use crate::burn_compat::{GraphEdges, edges_of};

/// The backwards of a thread that were given zeros in place of a missing gradient.
#[derive(Debug, Default)]
pub(crate) struct ZeroPadding(Mutex<PaddedGraphs>);

#[derive(Debug, Default)]
struct PaddedGraphs {
    /// Nodes that only order the backward, until they are dropped or have passed gradients to all
    /// their parents. After it has run, such a node may be missing here: if it gave zeros, the
    /// graph was read before.
    ordering: HashSet<NodeId>,
    /// The backward that the program called.
    program: Option<BackwardId>,
    /// It, and those of checkpointed blocks in it, as far as their graphs were read.
    read: Vec<BackwardId>,
    edges: GraphEdges,
    /// The nodes of these graphs that a gradient reaches.
    reached: HashSet<NodeId>,
}

impl ZeroPadding {
    /// Records that a node only orders the backward.
    pub(crate) fn add(&self, node: NodeId) {
        self.0.lock().ordering.insert(node);
    }

    /// Removes such a node when it is dropped, or has passed gradients to all its parents.
    pub(crate) fn remove(&self, node: NodeId) {
        self.0.lock().ordering.remove(&node);
    }

    /// Records that `step` gives zeros in place of a missing gradient, in the backward `program`
    /// that the program called.
    pub(crate) fn pad(&self, step: &mut BackwardStep<'_>, program: BackwardId) {
        let backward = step.backward();
        let program = Some(program);
        if self.0.lock().program != program {
            self.forget();
        }
        let mut graphs = self.0.lock();
        graphs.program = program;
        if !graphs.read.contains(&backward) {
            graphs.read.push(backward);
            graphs.add(edges_of(step));
        }
    }

    /// Returns true if a gradient of the loss reaches this node of the running backward.
    pub(crate) fn is_reached(&self, node: NodeId) -> bool {
        let graphs = self.0.lock();
        graphs.reached.contains(&node) || !graphs.edges.contains_key(&node)
    }

    /// Records that an ordering node has passed a gradient of the loss to `node`.
    pub(crate) fn reach(&self, node: NodeId) {
        self.0.lock().reach(vec![node]);
    }

    /// Drops what is known of a backward that has ended.
    pub(crate) fn forget(&self) {
        let mut graphs = self.0.lock();
        *graphs = PaddedGraphs {
            ordering: mem::take(&mut graphs.ordering),
            ..PaddedGraphs::default()
        };
    }
}

impl PaddedGraphs {
    /// Adds the graph of a backward. Its root is the node that is a parent of none.
    fn add(&mut self, edges: GraphEdges) {
        let mut roots: HashSet<_> = edges.keys().copied().collect();
        edges
            .values()
            .flatten()
            .for_each(|parent| _ = roots.remove(parent));
        self.edges.extend(edges);
        self.reach(roots.into_iter().collect());
    }

    /// Marks these nodes as reached, with all nodes to which they pass gradients.
    fn reach(&mut self, mut nodes: Vec<NodeId>) {
        while let Some(node) = nodes.pop() {
            if let Some(parents) = self.edges.get(&node)
                && !self.ordering.contains(&node)
                && self.reached.insert(node)
            {
                nodes.extend(parents);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(value: u64) -> NodeId {
        NodeId { value }
    }

    fn reached(graphs: &PaddedGraphs, nodes: std::ops::Range<u64>) -> Vec<u64> {
        nodes
            .filter(|&value| graphs.reached.contains(&node(value)))
            .collect()
    }

    /// ```text
    ///   1 ──> 3 ──> 5 (ordering) ──> 7 (loss)
    ///   2 ──> 4 ───────────────────> 7
    /// ```
    #[test]
    fn a_gradient_does_not_pass_through_a_node_that_only_orders() {
        let edges = [
            (7, vec![4, 5]),
            (5, vec![3]),
            (4, vec![2]),
            (3, vec![1]),
            (2, vec![]),
            (1, vec![]),
        ];
        let edges =
            edges.map(|(child, parents)| (node(child), parents.into_iter().map(node).collect()));
        let mut graphs = PaddedGraphs {
            ordering: HashSet::from([node(5)]),
            ..PaddedGraphs::default()
        };
        graphs.add(GraphEdges::from(edges));
        assert_eq!(reached(&graphs, 1..8), [2, 4, 7]);
        // A checkpointed block passes a gradient to an input.
        graphs.reach(vec![node(3)]);
        assert_eq!(reached(&graphs, 1..8), [1, 2, 3, 4, 7]);
        let padding = ZeroPadding(Mutex::new(graphs));
        assert!(!padding.is_reached(node(5)) && padding.is_reached(node(4)));
        assert!(
            padding.is_reached(node(9)),
            "it is in no graph that was given zeros"
        );
        padding.forget();
        assert!(padding.is_reached(node(5)) && padding.0.lock().ordering.contains(&node(5)));
    }
}
