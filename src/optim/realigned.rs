//! [`Realigned`]: an optimizer that steps with a state as burn has loaded it.

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor};

use super::factor::{self, GradFactor};
use super::fused::{at_once, is_fused};
use super::state_exchange::{self, aligned, flattened, float_dtype};

/// A burn optimizer whose state may have been loaded.
///
/// A tensor without elements that was read from a file has bytes of any alignment. burn's CPU
/// backend steps a tensor in place, and panics if its bytes are not aligned, even if there are
/// none. Loaded state without elements therefore gets aligned bytes, and so does the shard.
///
/// burn loads state in the device's default float dtype. If the optimizer would have made it in
/// another, that of its parameter, it steps in the dtype of the state.
///
/// Optimizers that do not apply the [`GradFactor`] of a step as they read a gradient get the
/// product.
#[derive(Clone)]
pub(super) struct Realigned<O>(pub(super) O);

impl<O: Optimizer> Realigned<O> {
    /// Returns the float dtype of the state that the optimizer makes for a parameter of this dtype.
    fn state_dtype<const D: usize>(&self, device: &Device, dtype: DType) -> Option<DType> {
        let zeros = || Tensor::<D>::zeros([1; D], (device, dtype));
        float_dtype(&flattened(&self.0.step(0.0, zeros(), zeros(), None).1?))
    }
}

impl<O: Optimizer> Optimizer for Realigned<O> {
    type State<const D: usize> = RealignedState<O::State<D>>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let (device, dtype) = (param.device(), param.dtype());
        let param = match param.shape().num_elements() {
            0 => Tensor::zeros(param.shape(), (&device, dtype)),
            _ => param,
        };
        let (state, dtype_of_state) = state
            .map(|RealignedState { state, dtype }| (state, dtype))
            .unzip();
        let other = match dtype_of_state.flatten() {
            Some(StateDType::Other(other)) => Some(other),
            Some(StateDType::Loaded(loaded)) => Some(loaded).filter(|loaded| {
                *loaded != dtype && self.state_dtype::<D>(&device, dtype) != Some(*loaded)
            }),
            None => None,
        };
        let factor = factor::current();
        let is_own = other.is_none() && is_fused::<O>();
        let (grad, factor) = match is_own {
            true => (grad, factor),
            false => (factor.scale(grad), GradFactor::one()),
        };
        // Other optimizers may read the result of a fused one inside them.
        let step = |param, grad| {
            let step = || self.0.step(lr, param, grad, state);
            factor::scaled_by(factor, || if is_own { step() } else { at_once(step) })
        };
        let (param, state) = match other {
            None => step(param, grad),
            Some(other) => {
                let cast = param.clone().cast(other);
                let (stepped, state) = step(cast.clone(), grad.cast(other));
                // A parameter of more digits keeps them.
                let param = match other.size() < dtype.size() {
                    true => param + (stepped - cast).cast(dtype),
                    false => stepped.cast(dtype),
                };
                (param, state)
            }
        };
        let state = state.map(|state| RealignedState {
            state,
            dtype: other.map(StateDType::Other),
        });
        (param, state)
    }

    fn to_device<const D: usize>(
        RealignedState { state, dtype }: Self::State<D>,
        device: &Device,
    ) -> Self::State<D> {
        let state = O::to_device(state, device);
        RealignedState { state, dtype }
    }
}

/// Float dtype of a state that was loaded.
#[derive(Debug, Clone, Copy)]
enum StateDType {
    /// It may be the one in which the optimizer would have made it.
    Loaded(DType),
    /// It is another, in which the optimizer steps.
    Other(DType),
}

/// State of a [`Realigned`] optimizer. Its records are those of the optimizer.
#[derive(Clone)]
pub(super) struct RealignedState<S> {
    state: S,
    /// `None` for a state that the optimizer has made.
    dtype: Option<StateDType>,
}

impl<S: RecordState> RecordState for RealignedState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if !state_exchange::take(prefix, &self.state) {
            self.state.state_flatten(prefix, out);
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        if let Some(given) = state_exchange::give(prefix, device) {
            let (state, loaded) = given?;
            let dtype = loaded.map(StateDType::Loaded);
            return Some(Self { state, dtype });
        }
        let state = S::state_unflatten(prefix, source, device)?;
        let mut sink = StateSink::default();
        state.state_flatten(prefix, &mut sink);
        let dtype = float_dtype(&sink).map(StateDType::Loaded);
        if sink.tensors.iter().all(|(_, data)| data.num_elements() > 0) {
            return Some(Self { state, dtype });
        }
        let mut source = StateSource::new(sink.scalars.into_iter().collect());
        sink.tensors
            .into_iter()
            .for_each(|(name, data)| source.insert_tensor(name, aligned(data)));
        let state = S::state_unflatten(prefix, &mut source, device)?;
        Some(Self { state, dtype })
    }
}
