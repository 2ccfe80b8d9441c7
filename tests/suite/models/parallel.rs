//! The goldens' GPT over DTensors: what a plan has split, computed in parts.

use burn::module::Param;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Int, Tensor};
use burn_dtensor::dtensor::ops::{activation, loss, module};
use burn_dtensor::nn::apply_style;
use burn_dtensor::prelude::*;

use super::{Affine, Block, Gpt, GptSize, Norm, Table};

/// The placements of the golden runs. Between layers, activations are whole, or parts of the
/// sequence; logits are gathered, or left split by vocabulary for the loss.
pub fn plan(size: GptSize, sequence_parallel: bool, loss_parallel: bool) -> Plan {
    use Placement::{Replicate, Shard};
    let between = if sequence_parallel {
        Shard(1)
    } else {
        Replicate
    };
    // Weights are `[out, in]`.
    let colwise = Style::placed(Shard(0)).with_input(Replicate);
    let rowwise = Style::placed(Shard(1)).with_output(between);
    let norm = if sequence_parallel {
        Style::sequence_parallel()
    } else {
        Style::placed(Replicate)
    };
    let plan = Plan::new()
        .with_style("tok", Style::placed(Shard(0)).with_output(between))
        .with_style("**.norm?", norm)
        .with_style("norm", norm)
        .with_style("layers.*.w[qkv]", colwise.with_heads(size.heads))
        .with_style("layers.*.wo", rowwise.with_heads(size.heads))
        .with_style("layers.*.w1", colwise)
        .with_style("layers.*.w2", rowwise)
        .with_style("layers.*.w2.bias", Style::placed(Replicate))
        .with_units(["layers.*"]);
    match size.tied {
        true => plan,
        false => plan.with_style(
            "head",
            if loss_parallel {
                colwise
            } else {
                colwise.with_output(Replicate)
            },
        ),
    }
}

fn read<const D: usize>(param: &Param<Tensor<D>>) -> DTensor<D> {
    param.dtensor().unwrap_or_else(|error| error.unwind())
}

impl Affine {
    fn forward_dtensor<const D: usize>(&self, x: DTensor<D>) -> DTensor<D> {
        apply_style(&self.weight, x, |x, weight| {
            module::linear(x, weight.transpose(), self.bias.as_ref().map(read))
        })
    }
}

impl Norm {
    fn forward_dtensor(&self, x: DTensor<3>) -> DTensor<3> {
        apply_style(&self.weight, x, |x, weight| {
            module::layer_norm(x, weight, Some(read(&self.bias)), 1e-5)
        })
    }
}

impl Table {
    fn forward_dtensor(&self, tokens: DTensor<2, Int>) -> DTensor<3> {
        apply_style(&self.weight, tokens, |tokens, weight| {
            module::embedding(weight, tokens)
        })
    }
}

impl Block {
    fn forward_dtensor(&self, x: DTensor<3>) -> DTensor<3> {
        let [batch, seq, dim] = x.dims();
        let split = |t: DTensor<3>| {
            t.reshape([batch, seq, self.heads, dim / self.heads])
                .swap_dims(1, 2)
        };
        let h = self.norm1.forward_dtensor(x.clone());
        let [q, k, v] =
            [&self.wq, &self.wk, &self.wv].map(|affine| split(affine.forward_dtensor(h.clone())));
        let options = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        let attended = module::attention(q, k, v, None, None, options)
            .swap_dims(1, 2)
            .reshape([batch, seq, dim]);
        let x = x + self.wo.forward_dtensor(attended);
        let h = self
            .w1
            .forward_dtensor(self.norm2.forward_dtensor(x.clone()));
        x + self.w2.forward_dtensor(activation::gelu(h))
    }
}

impl Gpt {
    /// Tokens `[batch, seq]` to logits `[batch, seq, vocab]`.
    fn forward_dtensor(&self, tokens: DTensor<2, Int>) -> DTensor<3> {
        unit(self, tokens, |gpt, tokens| {
            let [_, seq] = tokens.dims();
            let pos = read(&gpt.pos.weight).narrow(0, 0, seq).unsqueeze();
            let mut x = gpt.tok.forward_dtensor(tokens) + pos;
            for block in &gpt.layers {
                x = unit(block, x, |block, x| block.forward_dtensor(x));
            }
            let x = gpt.norm.forward_dtensor(x);
            match &gpt.head {
                Some(head) => head.forward_dtensor(x),
                None => x.matmul(read(&gpt.tok.weight).transpose().unsqueeze()),
            }
        })
    }

    /// [`loss`](Self::loss), computed by the ranks of `mesh` together.
    pub fn loss_on(
        &self,
        mesh: &DeviceMesh,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>> {
        let place = |tokens| DTensor::distribute_replicated(tokens, mesh, &[Placement::Replicate]);
        loss::cross_entropy(self.forward_dtensor(place(tokens)?), place(targets)?).full_tensor()
    }
}
