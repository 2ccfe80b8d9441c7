//! Forward of `TransformerDecoder` and its layer over DTensors.

use burn::nn::transformer::{TransformerDecoder, TransformerDecoderLayer};
use burn::tensor::Bool;

use crate::dtensor::DTensor;
use crate::nn::{DTensorForward, MhaInput};
use crate::param::unit;

/// Input of [`TransformerDecoder`] and [`TransformerDecoderLayer`].
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

/// Padding mask over keys, `[batch, seq]`, and attention mask over pairs of queries and keys.
type Masks = (Option<DTensor<2, Bool>>, Option<DTensor<3, Bool>>);

/// Local: an input only holds its tensors.
impl TransformerDecoderInput {
    /// Creates an input whose target `[batch, seq_1, d_model]` attends to a memory `[batch, seq_2,
    /// d_model]`.
    pub fn new(target: DTensor<3>, memory: DTensor<3>) -> Self {
        Self {
            target,
            target_masks: (None, None),
            memory,
            memory_masks: (None, None),
        }
    }

    /// Sets the padding mask of the target, `[batch, seq_1]`, which is true for tokens to ignore.
    #[must_use]
    pub fn target_mask_pad(mut self, mask: DTensor<2, Bool>) -> Self {
        self.target_masks.0 = Some(mask);
        self
    }

    /// Sets the attention mask within the target, `[batch, seq_1, seq_1]`, which is true where a
    /// token must not attend to another.
    #[must_use]
    pub fn target_mask_attn(mut self, mask: DTensor<3, Bool>) -> Self {
        self.target_masks.1 = Some(mask);
        self
    }

    /// Sets the padding mask of the memory, `[batch, seq_2]`, which is true for tokens to ignore.
    #[must_use]
    pub fn memory_mask_pad(mut self, mask: DTensor<2, Bool>) -> Self {
        self.memory_masks.0 = Some(mask);
        self
    }

    /// Sets the attention mask from target to memory, `[batch, seq_1, seq_2]`, which is true where
    /// a target token must not attend to a memory token.
    #[must_use]
    pub fn memory_mask_attn(mut self, mask: DTensor<3, Bool>) -> Self {
        self.memory_masks.1 = Some(mask);
        self
    }
}

/// Enters each layer that is an FSDP unit as a unit.
impl DTensorForward<TransformerDecoderInput> for TransformerDecoder {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, input: TransformerDecoderInput) -> DTensor<3> {
        let TransformerDecoderInput {
            target,
            target_masks,
            memory,
            memory_masks,
        } = input;
        self.layers.iter().fold(target, |target, layer| {
            unit(
                layer,
                (target, memory.clone()),
                |layer, (target, memory)| {
                    let target_masks = target_masks.clone();
                    let memory_masks = memory_masks.clone();
                    layer.forward_dtensor(TransformerDecoderInput {
                        target,
                        target_masks,
                        memory,
                        memory_masks,
                    })
                },
            )
        })
    }
}

/// Returns the new target only. The caller passes memory and masks to the next layer.
impl DTensorForward<TransformerDecoderInput> for TransformerDecoderLayer {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, input: TransformerDecoderInput) -> DTensor<3> {
        let TransformerDecoderInput {
            target: x,
            target_masks,
            memory,
            memory_masks,
        } = input;
        let attend = |x| {
            let input = MhaInput::self_attn(x).with_masks(target_masks.0, target_masks.1);
            self.dropout
                .forward_dtensor(self.self_attn.forward_dtensor(input).context)
        };
        let remember = |x| {
            let input =
                MhaInput::new(x, memory.clone(), memory).with_masks(memory_masks.0, memory_masks.1);
            self.dropout
                .forward_dtensor(self.cross_attn.forward_dtensor(input).context)
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
