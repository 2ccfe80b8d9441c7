//! [`edges_of`]: the nodes of the autodiff graph that a backward runs, with their parents.
//!
//! # What it relies on
//! The debug text of the checkpointer that burn passes to each step ends with `node_tree: NodeTree
//! { map: {NodeId { value: 2 }: [NodeId { value: 1 }], ..} }`: all nodes of the backward, also
//! those that have run.
//!
//! # The issue to file
//! *A custom operation cannot depend on a tensor without giving it a gradient.* A backward runs all
//! ancestors of the loss, and burn's operations panic if no gradient of their output has arrived.
//! So an operation that only orders the backward has to give zeros to its parents. A parameter that
//! receives nothing but these zeros then has a gradient, although the loss does not depend on it,
//! and an optimizer applies its weight decay. A parent that counts for the depth alone would solve
//! this. With a method `Checkpointer::parents(&self, node: NodeId)`, a library could at least tell
//! such gradients from others, without parsing debug text.

use std::collections::HashMap;
use std::fmt::{self, Write};

use burn::backend::autodiff::NodeId;

use crate::autodiff::BackwardStep;

/// The parents of each node.
pub(crate) type GraphEdges = HashMap<NodeId, Vec<NodeId>>;

/// Text before the nodes.
const BEFORE_NODES: &str = "node_tree: NodeTree";

/// Returns the graph that the backward of this step runs; an empty one if the text is not as
/// expected.
pub(crate) fn edges_of(step: &BackwardStep<'_>) -> GraphEdges {
    let mut text = TextAfter::default();
    step.write_checkpointer(&mut text)
        .expect("writing into memory does not fail");
    parse(&text.read)
}

fn parse(text: &str) -> GraphEdges {
    let mut edges = GraphEdges::new();
    let mut child = None;
    for node in text.split("NodeId { value: ").skip(1) {
        let Some((value, rest)) = node.split_once(" }") else {
            continue;
        };
        let Ok(value) = value.parse() else { continue };
        let id = NodeId { value };
        if rest.starts_with(':') {
            child = Some(id);
        }
        let parents = child.map(|child| edges.entry(child).or_default());
        parents
            .filter(|_| child != Some(id))
            .into_iter()
            .for_each(|parents| parents.push(id));
    }
    edges
}

/// Keeps the text that follows [`BEFORE_NODES`], and none of what burn writes before, which may be
/// long.
#[derive(Default)]
struct TextAfter {
    read: String,
    is_found: bool,
}

impl Write for TextAfter {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.read.push_str(text);
        if self.is_found {
            return Ok(());
        }
        if let Some((_, after)) = self.read.split_once(BEFORE_NODES) {
            (self.read, self.is_found) = (after.into(), true);
            return Ok(());
        }
        let mut kept = self.read.len().saturating_sub(BEFORE_NODES.len());
        while !self.read.is_char_boundary(kept) {
            kept -= 1;
        }
        self.read.drain(..kept);
        Ok(())
    }
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use std::sync::Arc;

    use burn::backend::DispatchTensor;
    use burn::tensor::{Device, Tensor};
    use parking_lot::Mutex;

    use super::*;
    use crate::autodiff::{self, GraphOp};

    /// Passes a tensor on, and records the graph in backward.
    #[derive(Debug, Default)]
    struct Record(Mutex<GraphEdges>);

    impl GraphOp for Record {
        fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
            parents[0].clone()
        }

        fn backward(&self, step: &mut BackwardStep<'_>) {
            *self.0.lock() = edges_of(step);
            let grad = step.take();
            step.give(0, || grad);
        }
    }

    /// A node that ran before, one that runs later, and one that is not in the graph; with burn's
    /// own checkpointing, which fills the text before the nodes.
    #[test]
    fn a_step_finds_all_nodes_of_its_backward_and_their_parents() {
        for device in [
            Device::flex().autodiff(),
            Device::flex().autodiff().gradient_checkpointing(),
        ] {
            let leaf = || Tensor::<1>::ones([2], &device).require_grad();
            let id = |tensor: &Tensor<1>| {
                autodiff::node_id(tensor.clone().into_dispatch()).expect("it is tracked")
            };
            let record = Arc::new(Record::default());
            let a = leaf();
            let b = leaf();
            let other = leaf();
            let product = a.clone() * b.clone();
            let recorded = Tensor::from_dispatch(autodiff::unary(
                product.clone().into_dispatch(),
                record.clone(),
            ));
            let after = recorded.clone().exp();
            let _other = other.clone() * product.clone();
            let loss = after.clone().sum();
            loss.clone().backward();
            let edges = record.0.lock();
            assert_eq!(edges[&id(&product)], [id(&a), id(&b)]);
            assert_eq!(edges[&id(&recorded)], [id(&product)]);
            assert_eq!(edges[&id(&after)], [id(&recorded)]);
            assert_eq!(edges[&id(&loss)], [id(&after)]);
            assert!(edges[&id(&a)].is_empty() && !edges.contains_key(&id(&other)));
        }
    }
}
