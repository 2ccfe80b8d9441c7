//! Forward of `Rnn` and `BiRnn` over DTensors.

use burn::nn::{BiRnn, Rnn};

use super::{batch_first, both_ways, clamped, gate, over_time, zeros};
use crate::dtensor::DTensor;
use crate::error::OrUnwind;
use crate::nn::DTensorForward;

/// Takes an input `[batch, seq, d_input]` and the initial hidden state `[batch, d_hidden]`
/// (default: zeros). Returns all hidden states `[batch, seq, d_hidden]`, and the last one.
impl DTensorForward<(DTensor<3>, Option<DTensor<2>>)> for Rnn {
    type Output = (DTensor<3>, DTensor<2>);

    fn forward_dtensor(&self, (x, state): (DTensor<3>, Option<DTensor<2>>)) -> Self::Output {
        batch_first(x, self.batch_first, |x| run(self, x, state, self.reverse))
    }
}

/// Like `Rnn`, with two states `[2, batch, d_hidden]`. Returns the hidden states of both
/// directions, `[batch, seq, 2 * d_hidden]`, and the final state of each.
impl DTensorForward<(DTensor<3>, Option<DTensor<3>>)> for BiRnn {
    type Output = (DTensor<3>, DTensor<3>);

    fn forward_dtensor(&self, (x, state): (DTensor<3>, Option<DTensor<3>>)) -> Self::Output {
        let layer = |reverse| {
            if reverse {
                &self.reverse
            } else {
                &self.forward
            }
        };
        batch_first(x, self.batch_first, |x| {
            both_ways(x, state, |reverse, x, state| {
                run(layer(reverse), x, state, reverse)
            })
        })
    }
}

#[track_caller]
fn run(
    layer: &Rnn,
    x: DTensor<3>,
    state: Option<DTensor<2>>,
    reverse: bool,
) -> (DTensor<3>, DTensor<2>) {
    let state = state.unwrap_or_else(|| zeros(&x, layer.d_hidden).or_unwind());
    over_time(x, reverse, state, |x, hidden| {
        let hidden = layer
            .hidden_activation
            .forward_dtensor(gate(&layer.gate, x, hidden));
        let hidden = clamped(hidden, layer.clip);
        (hidden.clone(), hidden)
    })
}
