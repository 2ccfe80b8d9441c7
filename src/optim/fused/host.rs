//! [`step_in_place`]: one pass over the memory of a parameter, its gradient and its state, on the CPU.

use burn::tensor::{DType, Element, Tensor, TensorData};
use burn_dtensor_optim as loops;
use half::{bf16, f16};
use rayon::prelude::*;

#[cfg(feature = "cube")]
use super::cube;
use super::pass::{AfterPass, FusedPass};
use crate::memory::is_host;

/// Elements that one thread steps at a time.
const CHUNK: usize = 16 << 10;

/// Steps `param` and `state` in their memory.
pub(super) fn step_in_place<const D: usize, const N: usize>(
    pass: &impl FusedPass<N>,
    param: Tensor<D>,
    grad: Tensor<D>,
    state: [Tensor<D>; N],
) -> AfterPass<D, [Tensor<D>; N]> {
    let (device, dtype, shape) = (param.device(), param.dtype(), param.shape());
    let fits = |tensor: &Tensor<D>| {
        tensor.dtype() == dtype && tensor.shape() == shape && tensor.device() == device
    };
    let fit = fits(&grad) && state.iter().all(fits);
    #[cfg(feature = "cube")]
    if fit && cube::is_taken(&param.clone().into_dispatch()) {
        return cube::step(pass, param, grad, state);
    }
    let is_taken = is_host(&device)
        && shape.num_elements() > 0
        && matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
    if !fit || !is_taken {
        return AfterPass::left(param, grad, state);
    }
    let mut tensors = SteppedMemory {
        param: param.into_data(),
        grad: grad.into_data(),
        state: state.map(Tensor::into_data),
    };
    let is_stepped = match dtype {
        DType::F32 => tensors.run::<f32>(pass),
        DType::F64 => tensors.run::<f64>(pass),
        DType::F16 => tensors.run::<f16>(pass),
        _ => tensors.run::<bf16>(pass),
    };
    let tensor = |data| Tensor::from_data(data, (&device, dtype));
    AfterPass {
        param: tensor(tensors.param),
        left: (!is_stepped).then(|| tensor(tensors.grad)),
        state: tensors.state.map(tensor),
    }
}

/// The memory of the tensors of a step.
struct SteppedMemory<const N: usize> {
    param: TensorData,
    grad: TensorData,
    state: [TensorData; N],
}

impl<const N: usize> SteppedMemory<N> {
    /// Steps all elements. Returns false if memory is not aligned to the element type.
    fn run<E: Element + loops::Element>(&mut self, pass: &impl FusedPass<N>) -> bool {
        let Self { param, grad, state } = self;
        let (Ok(param), Ok(grad)) = (param.as_mut_slice::<E>(), grad.as_slice::<E>()) else {
            return false;
        };
        let Ok(state) = state
            .iter_mut()
            .map(|tensor| tensor.as_mut_slice::<E>())
            .collect::<Result<Vec<_>, _>>()
        else {
            return false;
        };
        let mut chunks = Vec::with_capacity(param.len().div_ceil(CHUNK));
        let mut state: Vec<_> = state.into_iter().map(|all| all.chunks_mut(CHUNK)).collect();
        for (param, grad) in param.chunks_mut(CHUNK).zip(grad.chunks(CHUNK)) {
            let state =
                std::array::from_fn(|at| state[at].next().expect("all tensors have one length"));
            chunks.push((param, grad, state));
        }
        let step = |(param, grad, state): (&mut [E], &[E], [&mut [E]; N])| {
            pass.chunk(param, grad, state);
        };
        match chunks.len() {
            1 => chunks.into_iter().for_each(step),
            _ => chunks.into_par_iter().for_each(step),
        }
        true
    }
}

/// Returns true if a pass steps parameters like this one, without autodiff.
pub(in crate::optim) fn is_taken<const D: usize>(param: &Tensor<D>) -> bool {
    #[cfg(feature = "cube")]
    if cube::is_taken(&param.clone().into_dispatch()) {
        return true;
    }
    is_host(&param.device())
}
