//! Forward of `TransformerEncoder` and its layer over DTensors.

use burn::nn::transformer::{TransformerEncoder, TransformerEncoderLayer};
use burn::tensor::Bool;

use crate::dtensor::DTensor;
use crate::nn::{DTensorForward, MhaInput};
use crate::param::unit;

/// Input of [`TransformerEncoder`] and [`TransformerEncoderLayer`].
#[derive(Debug, Clone)]
pub struct TransformerEncoderInput {
    tensor: DTensor<3>,
    mask_pad: Option<DTensor<2, Bool>>,
    mask_attn: Option<DTensor<3, Bool>>,
}

crate::tensor_tree! {
    struct TransformerEncoderInput { tensor, mask_pad, mask_attn }
}

/// Local: an input only holds its tensors.
impl TransformerEncoderInput {
    /// Creates an input of shape `[batch, seq, d_model]` without masks.
    pub fn new(tensor: DTensor<3>) -> Self {
        Self {
            tensor,
            mask_pad: None,
            mask_attn: None,
        }
    }

    /// Sets the padding mask `[batch, seq]`, which is true for tokens to ignore.
    #[must_use]
    pub fn mask_pad(mut self, mask: DTensor<2, Bool>) -> Self {
        self.mask_pad = Some(mask);
        self
    }

    /// Sets the attention mask `[batch, seq, seq]`, which is true where a token must not attend to
    /// another.
    #[must_use]
    pub fn mask_attn(mut self, mask: DTensor<3, Bool>) -> Self {
        self.mask_attn = Some(mask);
        self
    }
}

/// Enters each layer that is an FSDP unit as a unit.
impl DTensorForward<TransformerEncoderInput> for TransformerEncoder {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, input: TransformerEncoderInput) -> DTensor<3> {
        let TransformerEncoderInput {
            tensor,
            mask_pad,
            mask_attn,
        } = input;
        self.layers.iter().fold(tensor, |x, layer| {
            unit(layer, x, |layer, tensor| {
                let mask_pad = mask_pad.clone();
                let mask_attn = mask_attn.clone();
                layer.forward_dtensor(TransformerEncoderInput {
                    tensor,
                    mask_pad,
                    mask_attn,
                })
            })
        })
    }
}

impl DTensorForward<TransformerEncoderInput> for TransformerEncoderLayer {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, input: TransformerEncoderInput) -> DTensor<3> {
        let TransformerEncoderInput {
            tensor: x,
            mask_pad,
            mask_attn,
        } = input;
        let attend = |x| {
            let input = MhaInput::self_attn(x).with_masks(mask_pad, mask_attn);
            self.dropout
                .forward_dtensor(self.mha.forward_dtensor(input).context)
        };
        let feed = |x| self.dropout.forward_dtensor(self.pwff.forward_dtensor(x));
        if self.norm_first {
            let x = x.clone() + attend(self.norm_2.forward_dtensor(x));
            x.clone() + feed(self.norm_1.forward_dtensor(x))
        } else {
            let x = self.norm_1.forward_dtensor(x.clone() + attend(x));
            self.norm_2.forward_dtensor(x.clone() + feed(x))
        }
    }
}
