//! burn-nn's recurrent layers.
//!
//! A rank may compute its rows of the batch, and nothing is sent. Or it computes its part of the hidden state: of
//! gates split by columns (`Style::colwise()` for `*_gate.*`, of `Rnn` for `gate.*`) all read the whole hidden
//! state, which one all-gather a step of the sequence brings, whatever the number of gates.

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

/// Runs `step` on what `x` `[batch, seq, d_input]` has at each place of the sequence and the state before:
/// the hidden states `[batch, seq, d_hidden]`, and the last state.
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

/// What a gate makes of an input and the hidden state.
#[track_caller]
fn gate(gate: &GateController, x: DTensor<2>, hidden: DTensor<2>) -> DTensor<2> {
    gate.input_transform.forward_dtensor(x) + gate.hidden_transform.forward_dtensor(hidden)
}

/// The first hidden state for `x` `[batch, seq, d_input]`: zeros `[batch, d_hidden]`, where the rows are.
fn zeros(x: &DTensor<3>, d_hidden: usize) -> Result<DTensor<2>> {
    let rows = |_, placement| if placement == Placement::Shard(0) { placement } else { Placement::Replicate };
    let (layout, shape) = (x.layout().replaced(rows)?, Shape::from([x.dims()[0], d_hidden]));
    let spec = DTensorSpec::new(x.mesh(), layout.clone(), shape.clone(), x.dtype())?;
    let zeros = Tensor::zeros(spec.local_shape(), (&x.local().device(), x.dtype()));
    DTensor::from_local_with_layout(zeros, x.mesh(), layout, shape)
}

/// With the batch in dimension 0, where a layer has it in dimension 1.
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

/// Runs a layer in both directions, the second if `reverse`, from states `[2, batch, d_hidden]`: to both directions'
/// hidden states `[batch, seq, 2 * d_hidden]`, and the last of each.
#[track_caller]
fn both_ways(
    x: DTensor<3>,
    state: Option<DTensor<3>>,
    run: impl Fn(bool, DTensor<3>, Option<DTensor<2>>) -> (DTensor<3>, DTensor<2>),
) -> (DTensor<3>, DTensor<3>) {
    let [deferred, back] = directions(state);
    let ((deferred, last), (back, first)) = (run(false, x.clone(), deferred), run(true, x, back));
    (DTensor::cat(vec![deferred, back], 2), DTensor::stack(vec![last, first], 0))
}

/// The states of both directions, of `[2, batch, d_hidden]`.
#[track_caller]
fn directions(state: Option<DTensor<3>>) -> [Option<DTensor<2>>; 2] {
    [0, 1].map(|at| state.clone().map(|state| state.narrow(0, at, 1).squeeze_dim(0)))
}

#[track_caller]
fn clamped(x: DTensor<2>, clip: Option<f64>) -> DTensor<2> {
    match clip {
        Some(clip) => x.clamp(-clip, clip),
        None => x,
    }
}
