//! [`LAYER_DEPTH`]: depth of a layer's operations in the autodiff graph.
//!
//! # What it relies on
//! Backward runs the deepest node of the graph first, and the depth of a node is one more than that
//! of its deepest parent. So a node can be made to run before others by links that only add depth.
//!
//! # The issue to file
//! *Let an operation choose its place in backward.* A priority next to the depth, or a hook that
//! runs when all children of a node have run, would replace these links.

/// Number of links by which the token of a unit that a read opens is deeper in the graph than the
/// previous token. It is about the depth of a transformer layer's operations, so that backward runs
/// these first. See the end of `param/backward.md`.
pub(crate) const LAYER_DEPTH: usize = 96;

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use burn::backend::DispatchTensor;
    use burn::nn::transformer::{
        TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
    };
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::autodiff::{self, BackwardStep, GraphOp};

    /// Passes a tensor on, and records its depth in the graph in backward.
    #[derive(Debug, Default)]
    struct Depth(AtomicUsize);

    impl GraphOp for Depth {
        fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
            parents[0].clone()
        }

        fn backward(&self, step: &mut BackwardStep<'_>) {
            self.0.store(step.depth(), SeqCst);
            let grad = step.take();
            step.give(0, || grad);
        }
    }

    fn depth_after(layers: usize) -> usize {
        let device = Device::flex().autodiff();
        let encoder: TransformerEncoder = TransformerEncoderConfig::new(4, 8, 2, layers)
            .with_dropout(0.0)
            .init(&device);
        let x = Tensor::<3>::ones([1, 2, 4], &device).require_grad();
        let depth = Arc::new(Depth::default());
        let y = autodiff::unary(
            encoder
                .forward(TransformerEncoderInput::new(x))
                .into_dispatch(),
            depth.clone(),
        );
        Tensor::<3>::from_dispatch(y).sum().backward();
        depth.0.load(SeqCst)
    }

    #[test]
    fn a_transformer_layer_is_not_deeper() {
        let layer = depth_after(2) - depth_after(1);
        assert!((LAYER_DEPTH / 4..=LAYER_DEPTH).contains(&layer), "{layer}");
    }
}
