//! [`in_backward`]: something that is done in the middle of backward.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::tensor::Tensor;

/// The tensor itself; `then` runs when its gradient is there, before that is passed on.
pub fn in_backward<const D: usize>(
    tensor: Tensor<D>,
    then: impl Fn() + Send + Sync + 'static,
) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as Hooked>::hooked(
        tensor.into_dispatch(),
        Then(Arc::new(then)),
    ))
}

/// What is done.
#[derive(Clone)]
struct Then(Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Then {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Then")
    }
}

#[backend_extension(Flex, Autodiff)]
trait Hooked: Backend {
    fn hooked(tensor: FloatTensor<Self>, then: Then) -> FloatTensor<Self>;
}

impl Hooked for Flex {
    fn hooked(tensor: FloatTensor<Self>, _: Then) -> FloatTensor<Self> {
        tensor
    }
}

impl<B: Hooked, C: CheckpointStrategy> Hooked for Autodiff<B, C> {
    fn hooked(tensor: FloatTensor<Self>, then: Then) -> FloatTensor<Self> {
        let output = tensor.primitive().clone();
        match Backward::<B, 1>::prepare::<C>(Hook, [tensor.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(then, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}

#[derive(Debug)]
struct Hook;

impl<B: Backend> Backward<B, 1> for Hook {
    type State = Then;

    fn backward(self, ops: Ops<Then, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        (ops.state.0)();
        let grad = grads.consume::<B>(&ops.node);
        if let [Some(parent)] = &ops.parents {
            grads.register::<B>(parent.id, grad);
        }
    }
}
