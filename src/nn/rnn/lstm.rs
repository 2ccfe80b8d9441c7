//! Forward of `Lstm` and `BiLstm` over DTensors.

use burn::nn::{BiLstm, Lstm};

use super::{batch_first, clamped, directions, gate, over_time, zeros};
use crate::dtensor::DTensor;
use crate::error::OrUnwind;
use crate::nn::DTensorForward;

/// State of an LSTM between two positions of the sequence: `[batch, d_hidden]`, or `[2, batch,
/// d_hidden]` for both directions of a bidirectional layer.
#[derive(Debug, Clone)]
pub struct LstmState<const D: usize> {
    /// The cell state.
    pub cell: DTensor<D>,
    /// The hidden state.
    pub hidden: DTensor<D>,
}

/// Takes an input `[batch, seq, d_input]` and the initial state (default: zeros). Returns all
/// hidden states `[batch, seq, d_hidden]`, and the last state.
impl DTensorForward<(DTensor<3>, Option<LstmState<2>>)> for Lstm {
    type Output = (DTensor<3>, LstmState<2>);

    fn forward_dtensor(&self, (x, state): (DTensor<3>, Option<LstmState<2>>)) -> Self::Output {
        batch_first(x, self.batch_first, |x| run(self, x, state, self.reverse))
    }
}

/// Like `Lstm`, with states of both directions. Returns the hidden states of both, `[batch, seq, 2 * d_hidden]`,
/// and the final state of each.
impl DTensorForward<(DTensor<3>, Option<LstmState<3>>)> for BiLstm {
    type Output = (DTensor<3>, LstmState<3>);

    fn forward_dtensor(&self, (x, state): (DTensor<3>, Option<LstmState<3>>)) -> Self::Output {
        batch_first(x, self.batch_first, |x| {
            let (cells, hidden) = state.map(|state| (state.cell, state.hidden)).unzip();
            let both = directions(cells).into_iter().zip(directions(hidden));
            let mut states = both.map(|(cell, hidden)| {
                Some(LstmState {
                    cell: cell?,
                    hidden: hidden?,
                })
            });
            let (deferred, last) = run(&self.forward, x.clone(), states.next().flatten(), false);
            let (back, first) = run(&self.reverse, x, states.next().flatten(), true);
            let cell = DTensor::stack(vec![last.cell, first.cell], 0);
            let hidden = DTensor::stack(vec![last.hidden, first.hidden], 0);
            (
                DTensor::cat(vec![deferred, back], 2),
                LstmState { cell, hidden },
            )
        })
    }
}

#[track_caller]
fn run(
    layer: &Lstm,
    x: DTensor<3>,
    state: Option<LstmState<2>>,
    reverse: bool,
) -> (DTensor<3>, LstmState<2>) {
    let state = state.unwrap_or_else(|| {
        let hidden = zeros(&x, layer.d_hidden).or_unwind();
        LstmState {
            cell: hidden.clone(),
            hidden,
        }
    });
    over_time(x, reverse, state, |x, LstmState { cell, hidden }| {
        let product = |controller| gate(controller, x.clone(), hidden.clone());
        let activated = |controller| layer.gate_activation.forward_dtensor(product(controller));
        let input = activated(&layer.input_gate);
        let forget = match &layer.forget_gate {
            Some(forget) if !layer.input_forget => activated(forget),
            // Coupled gates: the fraction that the input gate adds is forgotten.
            _ => input.clone().neg() + 1.0,
        };
        let output = activated(&layer.output_gate);
        let candidate = layer
            .cell_activation
            .forward_dtensor(product(&layer.cell_gate));
        let cell = clamped(forget * cell + input * candidate, layer.clip);
        let hidden = output * layer.hidden_activation.forward_dtensor(cell.clone());
        (hidden.clone(), LstmState { cell, hidden })
    })
}
