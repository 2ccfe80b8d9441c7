//! [`FinishedGraphs`]: names the unit behind a panic of burn, by the numbers of graph nodes.

use std::collections::VecDeque;
use std::sync::Arc;

use super::ParamError;
use crate::Error;
use crate::burn_compat::consumed_node;
use crate::burn_compat::internals::NodeRange;

/// Maximum number of recorded passes. The first of two backwards is of the same step, so the units
/// of a step suffice.
const REMEMBERED: usize = 1024;

/// The most recent passes of a thread whose graphs are gone.
///
/// burn consumes a graph's nodes as backward runs them, and drops all nodes that depend on them. A
/// later backward panics at the first missing node, before any of its own nodes has run: no
/// gradient is wrong, and no rank waits. The panic contains only the node's number. Numbers ascend
/// in the order in which forward makes nodes. So a unit's nodes have numbers between one that is
/// drawn when the unit is opened and one that is drawn when it is closed:
///
/// ```text
///   trunk           left            loss  right           loss
///   opened..closed  opened..closed        opened..closed   └── missing: it depends on `right`, which was dropped
///   consumed        consumed              dropped              because its input, a node of `trunk`, was consumed
/// ```
#[derive(Debug, Default)]
pub(super) struct FinishedGraphs(VecDeque<FinishedGraph>);

/// One forward through a unit.
#[derive(Debug)]
struct FinishedGraph {
    nodes: NodeRange,
    unit: Arc<str>,
    /// True if a backward consumed the graph; false if it was dropped without one.
    consumed: bool,
}

impl FinishedGraphs {
    /// Records that the graph of a pass through `unit` is gone: `consumed` by a backward, or
    /// dropped.
    pub(super) fn add(&mut self, nodes: NodeRange, unit: Arc<str>, consumed: bool) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(FinishedGraph {
            nodes,
            unit,
            consumed,
        });
    }

    /// Returns the error that explains a panic of burn with this `text`, if the text names a node
    /// that depends on a consumed unit.
    pub(super) fn explain(&self, text: &str) -> Option<Error> {
        let node = consumed_node(text)?;
        let unit = self
            .around(node)
            .or_else(|| self.forgotten_before(node))
            .or_else(|| {
                let before = self
                    .0
                    .iter()
                    .filter(|gone| gone.consumed && gone.nodes.opened_at() < node);
                before.max_by_key(|gone| gone.nodes.opened_at())
            })?;
        Some(
            ParamError::SecondBackward {
                unit: unit.unit.to_string(),
            }
            .into(),
        )
    }

    /// Returns the innermost consumed pass that contains the node.
    fn around(&self, node: u64) -> Option<&FinishedGraph> {
        self.0
            .iter()
            .filter(|gone| gone.consumed && gone.nodes.contains(node))
            .max_by_key(|gone| gone.nodes.opened_at())
    }

    /// Returns the consumed pass whose backward caused the last pass before the node to be dropped.
    fn forgotten_before(&self, node: u64) -> Option<&FinishedGraph> {
        let forgotten = self
            .0
            .iter()
            .filter(|gone| !gone.consumed && gone.nodes.opened_at() < node);
        let on = |gone: &FinishedGraph| {
            gone.nodes
                .inputs()
                .iter()
                .find_map(|&input| self.around(input))
        };
        forgotten
            .filter_map(|gone| Some((gone.nodes.opened_at(), on(gone)?)))
            .max_by_key(|(opened, _)| *opened)
            .map(|(_, on)| on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(opened: u64, closed: u64, inputs: &[u64]) -> NodeRange {
        NodeRange::of(opened, closed, inputs)
    }

    fn named(graphs: &FinishedGraphs, node: u64) -> Option<String> {
        let text = format!(
            "Cannot run backward: graph tape has already been consumed at NodeId({node}). Burn .."
        );
        match graphs.explain(&text)? {
            Error::Param(ParamError::SecondBackward { unit }) => Some(unit),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn the_innermost_unit_around_a_node_is_named_or_else_the_last_before_it() {
        let mut graphs = FinishedGraphs::default();
        graphs.add(gone(20, 30, &[]), "inner".into(), true);
        graphs.add(gone(10, 40, &[]), "outer".into(), true);
        assert_eq!(named(&graphs, 25).as_deref(), Some("inner"));
        assert_eq!(
            [30, 35].map(|node| named(&graphs, node)),
            [Some("outer".into()), Some("outer".into())]
        );
        assert_eq!(named(&graphs, 50).as_deref(), Some("inner"));
        assert_eq!(named(&graphs, 9), None);
        assert!(graphs.explain("index out of bounds").is_none());
    }

    #[test]
    fn a_forgotten_unit_leads_to_the_one_that_was_consumed() {
        let mut graphs = FinishedGraphs::default();
        graphs.add(gone(30, 40, &[29]), "left".into(), true);
        graphs.add(gone(10, 20, &[]), "trunk".into(), true);
        assert_eq!(named(&graphs, 70).as_deref(), Some("left"));
        graphs.add(gone(50, 60, &[19]), "right".into(), false);
        assert_eq!(named(&graphs, 70).as_deref(), Some("trunk"));
        // A pass that was only dropped, as after a validation.
        graphs.add(gone(61, 62, &[5]), "other".into(), false);
        assert_eq!(named(&graphs, 70).as_deref(), Some("trunk"));
    }

    #[test]
    fn what_was_left_long_ago_is_forgotten() {
        let mut graphs = FinishedGraphs::default();
        for at in 0..=REMEMBERED as u64 {
            graphs.add(gone(2 * at, 2 * at + 1, &[]), at.to_string().into(), true);
        }
        assert_eq!(graphs.0.len(), REMEMBERED);
        assert_eq!(
            [0, 2].map(|node| named(&graphs, node)),
            [None, Some("1".into())]
        );
    }
}
