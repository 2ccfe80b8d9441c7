//! [`Realigned`]: an optimizer that steps a shard without elements after its state was loaded.

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor};

use super::state_exchange::{self, aligned};

/// A burn optimizer for shards, some of which have no elements.
///
/// A tensor without elements that was read from a file has bytes of any alignment. burn's CPU
/// backend steps a tensor in place, and panics if its bytes are not aligned, even if there are
/// none. Loaded state without elements therefore gets aligned bytes, and so does the shard.
#[derive(Clone)]
pub(super) struct Realigned<O>(pub(super) O);

impl<O: Optimizer> Optimizer for Realigned<O> {
    type State<const D: usize> = RealignedState<O::State<D>>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let param = match param.shape().num_elements() {
            0 => Tensor::zeros(param.shape(), (&param.device(), param.dtype())),
            _ => param,
        };
        let (param, state) = self
            .0
            .step(lr, param, grad, state.map(|RealignedState(state)| state));
        (param, state.map(RealignedState))
    }

    fn to_device<const D: usize>(
        RealignedState(state): Self::State<D>,
        device: &Device,
    ) -> Self::State<D> {
        RealignedState(O::to_device(state, device))
    }
}

/// State of a [`Realigned`] optimizer. Its records are those of the optimizer.
#[derive(Clone)]
pub(super) struct RealignedState<S>(S);

impl<S: RecordState> RecordState for RealignedState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if !state_exchange::take(prefix, &self.0) {
            self.0.state_flatten(prefix, out);
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        if let Some(given) = state_exchange::give(prefix, device) {
            return given.map(Self);
        }
        let state = S::state_unflatten(prefix, source, device)?;
        let mut sink = StateSink::default();
        state.state_flatten(prefix, &mut sink);
        if sink.tensors.iter().all(|(_, data)| data.num_elements() > 0) {
            return Some(Self(state));
        }
        let mut source = StateSource::new(sink.scalars.into_iter().collect());
        sink.tensors
            .into_iter()
            .for_each(|(name, data)| source.insert_tensor(name, aligned(data)));
        S::state_unflatten(prefix, &mut source, device).map(Self)
    }
}
