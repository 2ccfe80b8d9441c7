//! Forward of `Gru` and `BiGru` over DTensors.

use burn::nn::{BiGru, Gru};

use super::{batch_first, both_ways, clamped, gate, over_time, zeros};
use crate::dtensor::DTensor;
use crate::error::OrUnwind;
use crate::nn::DTensorForward;

/// Takes an input `[batch, seq, d_input]` and the initial hidden state `[batch, d_hidden]`
/// (default: zeros). Returns all hidden states `[batch, seq, d_hidden]`.
impl DTensorForward<(DTensor<3>, Option<DTensor<2>>)> for Gru {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, (x, state): (DTensor<3>, Option<DTensor<2>>)) -> DTensor<3> {
        run(self, x, state, false).0
    }
}

/// Like `Gru`, with two states `[2, batch, d_hidden]`. Returns the hidden states of both
/// directions, `[batch, seq, 2 * d_hidden]`, and the final state of each.
impl DTensorForward<(DTensor<3>, Option<DTensor<3>>)> for BiGru {
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
    layer: &Gru,
    x: DTensor<3>,
    state: Option<DTensor<2>>,
    reverse: bool,
) -> (DTensor<3>, DTensor<2>) {
    let state = state.unwrap_or_else(|| zeros(&x, layer.d_hidden).or_unwind());
    over_time(x, reverse, state, |x, hidden| {
        let activated = |controller| {
            layer
                .gate_activation
                .forward_dtensor(gate(controller, x.clone(), hidden.clone()))
        };
        let update = activated(&layer.update_gate);
        let reset = activated(&layer.reset_gate);
        let new = &layer.new_gate;
        let candidate = match layer.reset_after {
            true => {
                let kept = reset * new.hidden_transform.forward_dtensor(hidden.clone());
                new.input_transform.forward_dtensor(x) + kept
            }
            false => gate(new, x, hidden.clone() * reset),
        };
        let candidate = layer.hidden_activation.forward_dtensor(candidate);
        let hidden = candidate * (update.clone().neg() + 1.0) + update * hidden;
        let hidden = clamped(hidden, layer.clip);
        (hidden.clone(), hidden)
    })
}
