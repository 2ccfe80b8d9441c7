//! `TransformerDecoder` and its layer.

use burn::nn::transformer::{TransformerDecoder, TransformerDecoderLayer};
use burn::tensor::Bool;

use crate::dtensor::DTensor;
use crate::nn::{DTensorForward, MhaInput};
use crate::param::unit;

/// What [`TransformerDecoder`] and [`TransformerDecoderLayer`] read.
#[derive(Debug, Clone)]
pub struct TransformerDecoderInput {
    target: DTensor<3>,
    target_masks: Masks,
    memory: DTensor<3>,
    memory_masks: Masks,
}

crate::tensor_tree! {
    struct TransformerDecoderInput { target, target_masks, memory, memory_masks }
}

/// Of keys, `[batch, seq]`, and of queries and keys.
type Masks = (Option<DTensor<2, Bool>>, Option<DTensor<3, Bool>>);

impl TransformerDecoderInput {
    /// A target `[batch, seq_1, d_model]` that reads a memory `[batch, seq_2, d_model]`.
    pub fn new(target: DTensor<3>, memory: DTensor<3>) -> Self {
        Self { target, target_masks: (None, None), memory, memory_masks: (None, None) }
    }

    /// Tokens of the target not to read, `[batch, seq_1]`.
    #[must_use]
    pub fn target_mask_pad(mut self, mask: DTensor<2, Bool>) -> Self {
        self.target_masks.0 = Some(mask);
        self
    }

    /// Tokens of the target that one of it must not read, `[batch, seq_1, seq_1]`.
    #[must_use]
    pub fn target_mask_attn(mut self, mask: DTensor<3, Bool>) -> Self {
        self.target_masks.1 = Some(mask);
        self
    }

    /// Tokens of the memory not to read, `[batch, seq_2]`.
    #[must_use]
    pub fn memory_mask_pad(mut self, mask: DTensor<2, Bool>) -> Self {
        self.memory_masks.0 = Some(mask);
        self
    }

    /// Tokens of the memory that one of the target must not read, `[batch, seq_1, seq_2]`.
    #[must_use]
    pub fn memory_mask_attn(mut self, mask: DTensor<3, Bool>) -> Self {
        self.memory_masks.1 = Some(mask);
        self
    }
}

/// Each layer that is a unit is opened as one.
impl DTensorForward<TransformerDecoderInput> for TransformerDecoder {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, input: TransformerDecoderInput) -> DTensor<3> {
        let TransformerDecoderInput { target, target_masks, memory, memory_masks } = input;
        self.layers.iter().fold(target, |target, layer| {
            unit(layer, (target, memory.clone()), |layer, (target, memory)| {
                let (target_masks, memory_masks) = (target_masks.clone(), memory_masks.clone());
                layer.forward_dtensor(TransformerDecoderInput { target, target_masks, memory, memory_masks })
            })
        })
    }
}

/// Gives the target; the rest of the input is the caller's for the next layer.
impl DTensorForward<TransformerDecoderInput> for TransformerDecoderLayer {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, input: TransformerDecoderInput) -> DTensor<3> {
        let TransformerDecoderInput { target: x, target_masks, memory, memory_masks } = input;
        let attend = |x| {
            let input = MhaInput::self_attn(x).with_masks(target_masks.0, target_masks.1);
            self.dropout.forward_dtensor(self.self_attn.forward_dtensor(input).context)
        };
        let remember = |x| {
            let input = MhaInput::new(x, memory.clone(), memory).with_masks(memory_masks.0, memory_masks.1);
            self.dropout.forward_dtensor(self.cross_attn.forward_dtensor(input).context)
        };
        let feed = |x| self.dropout.forward_dtensor(self.pwff.forward_dtensor(x));
        if self.norm_first {
            let x = x.clone() + attend(self.norm_3.forward_dtensor(x));
            let x = x.clone() + remember(self.norm_1.forward_dtensor(x));
            x.clone() + feed(self.norm_2.forward_dtensor(x))
        } else {
            let x = self.norm_1.forward_dtensor(x.clone() + attend(x));
            let x = self.norm_2.forward_dtensor(x.clone() + remember(x));
            self.norm_3.forward_dtensor(x.clone() + feed(x))
        }
    }
}
