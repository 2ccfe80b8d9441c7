//! [`backward_number`]: tells one call of `backward` from another.
//!
//! # What it relies on
//! burn calls no hook when a backward begins or ends, and the address of a container of gradients
//! is that of an earlier one whose backward was abandoned. But the container keeps the gradients
//! that are registered in it, also of a node that is in no graph, and gives them back while the
//! backward runs. So it holds the number itself, from the first call on: as the shape of an empty
//! tensor, under a node of its own.
//!
//! # The issue to file
//! *Number backward passes.* An id in `Gradients`, or a hook that runs when a backward begins,
//! would replace the marker.

// The backend of the tensor that marks a container of gradients.
#[cfg(all(not(feature = "flex"), any(feature = "wgpu", feature = "cuda")))]
use burn::backend::Cube as MarkBackend;
#[cfg(feature = "flex")]
use burn::backend::Flex as MarkBackend;
use burn::backend::autodiff::grads::Gradients;
#[cfg(any(feature = "flex", feature = "wgpu", feature = "cuda"))]
use {
    burn::backend::autodiff::Autodiff,
    burn::backend::ops::FloatTensorOps,
    burn::backend::tensor::FloatTensor,
    burn::backend::{AutodiffBackend, TensorMetadata},
    burn::tensor::FloatDType,
    std::sync::LazyLock,
    std::sync::atomic::{AtomicUsize, Ordering},
};

/// Returns the number of the backward that created the container `grads`. No other backward of the
/// process has the same number.
#[cfg(any(feature = "flex", feature = "wgpu", feature = "cuda"))]
pub(crate) fn backward_number(grads: &mut Gradients) -> usize {
    static NODE: LazyLock<FloatTensor<Autodiff<MarkBackend>>> =
        LazyLock::new(|| Autodiff::<MarkBackend>::from_inner(mark(0)));
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    if let Some(mark) = grads.get::<MarkBackend>(&NODE) {
        return mark.shape()[1];
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    grads.register::<MarkBackend>(NODE.id(), mark(number));
    number
}

#[cfg(any(feature = "flex", feature = "wgpu", feature = "cuda"))]
fn mark(number: usize) -> FloatTensor<MarkBackend> {
    MarkBackend::float_empty([0, number].into(), &Default::default(), FloatDType::F32)
}

/// Without a backend there are no graphs.
#[cfg(not(any(feature = "flex", feature = "wgpu", feature = "cuda")))]
pub(crate) fn backward_number(_: &mut Gradients) -> usize {
    0
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use std::sync::Arc;

    use burn::backend::DispatchTensor;
    use burn::tensor::{Device, Tensor};
    use parking_lot::Mutex;

    use crate::autodiff::{BackwardId, BackwardStep, GraphOp, unary};

    /// Notes the backward in which each of its nodes runs.
    #[derive(Debug, Clone, Default)]
    struct NoteBackward(Arc<Mutex<Vec<BackwardId>>>);

    impl GraphOp for NoteBackward {
        fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
            parents[0].clone()
        }

        fn backward(&self, step: &mut BackwardStep<'_>) {
            self.0.lock().push(step.backward());
            let grad = step.take();
            step.give(0, || grad);
        }
    }

    #[test]
    fn nodes_of_one_backward_see_its_number_and_no_other() {
        let noted = NoteBackward::default();
        let note = |x: Tensor<1>| {
            Tensor::<1>::from_dispatch(unary(x.into_dispatch(), Arc::new(noted.clone())))
        };
        let x = Tensor::<1>::ones([2], &Device::flex().autodiff()).require_grad();
        for _ in 0..2 {
            let grads = note(note(x.clone()) * 3.0).sum().backward();
            let grad = x.grad(&grads).expect("a gradient");
            assert_eq!(grad.into_data().try_to_vec::<f32>().unwrap(), [3.0, 3.0]);
        }
        let seen = noted.0.lock();
        assert_eq!(seen[0], seen[1]);
        assert_eq!(seen[2], seen[3]);
        assert_ne!(seen[0], seen[2]);
    }
}
