//! Forward of burn-nn's recurrent layers over DTensors.
//!
//! Two shardings are efficient. If the batch is sharded, each rank computes its rows and nothing is
//! communicated. If the hidden state is sharded, the gates are column-sharded (`Style::colwise()`
//! for `*_gate.*`, or for `gate.*` of `Rnn`) and all read the full hidden state. That takes one
//! all-gather per position of the sequence, for any number of gates.

mod basic;
mod gru;
mod lstm;

pub use lstm::LstmState;

use burn::nn::GateController;
use burn::tensor::{Shape, Tensor};

use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec};
use crate::nn::DTensorForward;
use crate::placement::Placement;

/// Runs `step` at each position of the sequence, on the input there and the previous state. `x` has
/// shape `[batch, seq, d_input]`. Returns the hidden states `[batch, seq, d_hidden]` and the last
/// state.
#[track_caller]
fn over_time<S>(
    x: DTensor<3>,
    reverse: bool,
    mut state: S,
    mut step: impl FnMut(DTensor<2>, S) -> (DTensor<2>, S),
) -> (DTensor<3>, S) {
    let mut inputs: Vec<DTensor<3>> = x.iter_dim(1).collect();
    if reverse {
        inputs.reverse();
    }
    let mut hidden = Vec::with_capacity(inputs.len());
    for input in inputs {
        let (here, next) = step(input.squeeze_dim(1), state);
        hidden.push(here);
        state = next;
    }
    if reverse {
        hidden.reverse();
    }
    (DTensor::stack(hidden, 1), state)
}

/// Computes a gate's pre-activation from an input and the hidden state.
#[track_caller]
fn gate(gate: &GateController, x: DTensor<2>, hidden: DTensor<2>) -> DTensor<2> {
    gate.input_transform.forward_dtensor(x) + gate.hidden_transform.forward_dtensor(hidden)
}

/// Returns the initial hidden state for `x` `[batch, seq, d_input]`: zeros of shape `[batch,
/// d_hidden]`, with the rows sharded like those of `x`.
fn zeros(x: &DTensor<3>, d_hidden: usize) -> Result<DTensor<2>> {
    let layout = x.layout().replaced(|_, placement| {
        if placement == Placement::Shard(0) {
            placement
        } else {
            Placement::Replicate
        }
    })?;
    let shape = Shape::from([x.dims()[0], d_hidden]);
    let spec = DTensorSpec::new(x.mesh(), layout.clone(), shape.clone(), x.dtype())?;
    let zeros = Tensor::zeros(spec.local_shape(), (&x.local().device(), x.dtype()));
    DTensor::from_local_with_layout(zeros, x.mesh(), layout, shape)
}

/// Runs `forward` with the batch in dimension 0. If the layer has it in dimension 1 (`already` is
/// false), input and output are transposed.
#[track_caller]
fn batch_first<T>(
    x: DTensor<3>,
    already: bool,
    forward: impl FnOnce(DTensor<3>) -> (DTensor<3>, T),
) -> (DTensor<3>, T) {
    if already {
        return forward(x);
    }
    let (y, state) = forward(x.swap_dims(0, 1));
    (y.swap_dims(0, 1), state)
}

/// Runs a layer in both directions (`run` takes `reverse` first) from states `[2, batch,
/// d_hidden]`. Returns the hidden states of both directions, `[batch, seq, 2 * d_hidden]`, and the
/// final state of each.
#[track_caller]
fn both_ways(
    x: DTensor<3>,
    state: Option<DTensor<3>>,
    run: impl Fn(bool, DTensor<3>, Option<DTensor<2>>) -> (DTensor<3>, DTensor<2>),
) -> (DTensor<3>, DTensor<3>) {
    let [deferred, back] = directions(state);
    let (deferred, last) = run(false, x.clone(), deferred);
    let (back, first) = run(true, x, back);
    (
        DTensor::cat(vec![deferred, back], 2),
        DTensor::stack(vec![last, first], 0),
    )
}

/// Splits `[2, batch, d_hidden]` into the states of the two directions.
#[track_caller]
fn directions(state: Option<DTensor<3>>) -> [Option<DTensor<2>>; 2] {
    [0, 1].map(|at| {
        state
            .clone()
            .map(|state| state.narrow(0, at, 1).squeeze_dim(0))
    })
}

#[track_caller]
fn clamped(x: DTensor<2>, clip: Option<f64>) -> DTensor<2> {
    match clip {
        Some(clip) => x.clamp(-clip, clip),
        None => x,
    }
}
