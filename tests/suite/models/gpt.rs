//! The goldens' GPT.

use burn::module::Module;
use burn::tensor::activation::{gelu, log_softmax, softmax};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_dtensor::fsdp::unit;

use super::{Affine, Init, Norm, Table};

#[derive(Debug, Clone, Copy)]
pub struct GptSize {
    pub layers: usize,
    pub heads: usize,
    /// The head is the token table.
    pub tied: bool,
}

#[derive(Module, Debug)]
pub struct Gpt {
    pub tok: Table,
    pub pos: Table,
    pub layers: Vec<Block>,
    pub norm: Norm,
    pub head: Option<Affine>,
}

#[derive(Module, Debug)]
pub struct Block {
    pub norm1: Norm,
    pub wq: Affine,
    pub wk: Affine,
    pub wv: Affine,
    pub wo: Affine,
    pub norm2: Norm,
    pub w1: Affine,
    pub w2: Affine,
    #[module(skip)]
    pub(super) heads: usize,
}

impl Block {
    fn new(init: &impl Init, path: &str, heads: usize, device: &Device) -> Self {
        let affine = |name: &str, bias| Affine::new(init, &format!("{path}.{name}"), bias, device);
        Self {
            norm1: Norm::new(init, &format!("{path}.norm1"), device),
            wq: affine("wq", false),
            wk: affine("wk", false),
            wv: affine("wv", false),
            wo: affine("wo", false),
            norm2: Norm::new(init, &format!("{path}.norm2"), device),
            w1: affine("w1", true),
            w2: affine("w2", true),
            heads,
        }
    }

    /// `[batch, seq, dim]` to the same.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, dim] = x.dims();
        let head = dim / self.heads;
        let h = self.norm1.forward(x.clone());
        let split = |t: Tensor<3>| t.reshape([batch, seq, self.heads, head]).swap_dims(1, 2);
        let q = split(self.wq.forward(h.clone()));
        let k = split(self.wk.forward(h.clone()));
        let v = split(self.wv.forward(h));
        let scores = q.matmul(k.transpose()) / (head as f64).sqrt();
        let future = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &x.device());
        let scores = scores.mask_fill(future.unsqueeze(), f32::NEG_INFINITY);
        let attended = softmax(scores, 3)
            .matmul(v)
            .swap_dims(1, 2)
            .reshape([batch, seq, dim]);
        let x = x + self.wo.forward(attended);
        let h = self
            .w2
            .forward(gelu(self.w1.forward(self.norm2.forward(x.clone()))));
        x + h
    }
}

impl Gpt {
    pub fn new(init: &impl Init, size: GptSize, device: &Device) -> Self {
        let block = |i| Block::new(init, &format!("layers.{i}"), size.heads, device);
        Self {
            tok: Table::new(init, "tok", device),
            pos: Table::new(init, "pos", device),
            layers: (0..size.layers).map(block).collect(),
            norm: Norm::new(init, "norm", device),
            head: (!size.tied).then(|| Affine::new(init, "head", false, device)),
        }
    }

    /// Tokens `[batch, seq]` to logits `[batch, seq, vocab]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |gpt, tokens| {
            let [_, seq] = tokens.dims();
            let pos = gpt.pos.weight.val().narrow(0, 0, seq).unsqueeze();
            let mut x = burn::tensor::module::embedding(gpt.tok.weight.val(), tokens) + pos;
            for block in &gpt.layers {
                x = unit(block, x, |block, x| block.forward(x));
            }
            let x = gpt.norm.forward(x);
            match &gpt.head {
                Some(head) => head.forward(x),
                None => x.matmul(gpt.tok.weight.val().transpose().unsqueeze()),
            }
        })
    }

    /// Mean cross entropy over tokens.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let logits = log_softmax(self.forward(tokens), 2);
        logits.gather(2, targets.unsqueeze_dim::<3>(2)).mean().neg()
    }
}
