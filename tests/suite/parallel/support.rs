//! A small transformer of burn's layers, and ways to distribute it.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, RmsNorm,
    RmsNormConfig,
};
use burn::optim::GradientsParams;
use burn::tensor::activation::{gelu, log_softmax};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_dtensor::fsdp::NamedParameter;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::support::values;

pub const VOCAB: usize = 11;
pub const DIM: usize = 8;
pub const HEADS: usize = 4;
/// Not divisible by the ranks.
pub const HIDDEN: usize = 13;
const ROWS: usize = 2;
const SEQ: usize = 5;

#[derive(Module, Debug)]
pub struct Net {
    pub embedding: Embedding,
    pub blocks: Vec<Block>,
    pub norm: LayerNorm,
    pub head: Linear,
}

#[derive(Module, Debug)]
pub struct Block {
    pub norm: RmsNorm,
    pub attention: MultiHeadAttention,
    pub up: Linear,
    pub down: Linear,
}

impl Net {
    pub fn new(device: &Device) -> Self {
        device.seed(5);
        let block = || Block {
            norm: RmsNormConfig::new(DIM).init(device),
            attention: MultiHeadAttentionConfig::new(DIM, HEADS)
                .with_dropout(0.0)
                .init(device),
            up: LinearConfig::new(DIM, HIDDEN).init(device),
            down: LinearConfig::new(HIDDEN, DIM).init(device),
        };
        let net = Self {
            embedding: EmbeddingConfig::new(VOCAB, DIM).init(device),
            blocks: (0..2).map(|_| block()).collect(),
            norm: LayerNormConfig::new(DIM).init(device),
            head: LinearConfig::new(DIM, VOCAB).init(device),
        };
        // Draw now, on one thread.
        let _ = values(&net, None);
        net
    }

    /// Tokens `[batch, seq]` to the mean cross entropy of the next ones.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let logits = unit(self, tokens, |net, tokens| {
            let mut x = net.embedding.forward(tokens);
            for block in &net.blocks {
                x = unit(block, x, |block, x| {
                    let h = block.norm.forward(x.clone());
                    let x = x + block.attention.forward(MhaInput::self_attn(h)).context;
                    x.clone() + block.down.forward(gelu(block.up.forward(x)))
                });
            }
            net.head.forward(net.norm.forward(x))
        });
        log_softmax(logits, 2)
            .gather(2, targets.unsqueeze_dim::<3>(2))
            .mean()
            .neg()
    }

    /// The loss on the data of one data-parallel rank.
    pub fn loss_on(&self, step: usize, rank: usize, device: &Device) -> Tensor<1> {
        let tokens = |shift: usize| {
            let data =
                (0..ROWS * SEQ).map(|i| ((i * 5 + step * 3 + rank * 7 + shift) % VOCAB) as i64);
            Tensor::from_data(
                TensorData::new(data.collect::<Vec<_>>(), [ROWS, SEQ]),
                device,
            )
        };
        self.loss(tokens(0), tokens(1))
    }
}

pub fn plan() -> Plan {
    Plan::new()
        .with_style("embedding", Style::rowwise())
        .with_style("blocks.*.attention.*", Style::colwise().with_heads(HEADS))
        .with_style(
            "blocks.*.attention.output",
            Style::rowwise().with_heads(HEADS),
        )
        .with_style("blocks.*.up", Style::colwise())
        .with_style("blocks.*.down", Style::rowwise())
        .with_style("head", Style::colwise())
        .with_units(["blocks.*"])
}

/// Tensor parallel on the dimension `tp`, fully sharded over all others, a unit per block.
pub fn distribute<M: Module>(
    model: M,
    mesh: &DeviceMesh,
    plan: Plan,
    reshard: ReshardAfterForward,
) -> Result<M> {
    distribute_with(
        model,
        mesh,
        plan,
        FullyShard::new()
            .with_units(["blocks.*"])
            .with_reshard_after_forward(reshard),
    )
}

pub fn distribute_with<M: Module>(
    model: M,
    mesh: &DeviceMesh,
    plan: Plan,
    config: FullyShard,
) -> Result<M> {
    let model = parallelize(model, &mesh.slice("tp")?, plan)?;
    let data: Vec<_> = mesh.names().iter().filter(|name| *name != "tp").collect();
    if data.is_empty() {
        return Ok(model);
    }
    fully_shard(model, &mesh.slice(data)?, config)
}

/// The calling rank's number among the data-parallel ranks, and how many there are.
pub fn data_rank(mesh: &DeviceMesh) -> (usize, usize) {
    let coordinate = mesh.coordinate().expect("a member");
    let dims = (0..mesh.ndim()).filter(|&dim| mesh.names()[dim] != "tp");
    dims.fold((0, 1), |(rank, size), dim| {
        (
            rank * mesh.size_of(dim) + coordinate[dim],
            size * mesh.size_of(dim),
        )
    })
}

/// Tensor parallelism alone, with FSDP, with HSDP, and with its dimension first.
pub fn meshes() -> [MeshTest; 4] {
    [
        MeshTest::new([2], ["tp"]),
        MeshTest::new([2, 2], ["shard", "tp"]),
        MeshTest::new([2, 2], ["tp", "shard"]),
        MeshTest::new([2, 2, 2], ["replicate", "shard", "tp"]),
    ]
}

pub fn devices(mesh: &DeviceMesh) -> [Device; 2] {
    let device = mesh.device().clone().autodiff();
    [device.clone(), device.gradient_checkpointing()]
}

/// The gradient of every parameter, gathered.
pub fn full_grads<M: Module>(
    model: &M,
    grads: &GradientsParams,
) -> Result<BTreeMap<String, Vec<f32>>> {
    fn full<const D: usize>(param: &NamedParameter, grads: &GradientsParams) -> Result<Vec<f32>> {
        let shard = param.shard::<D>().expect("the number of dimensions");
        let zeros = || shard.local().clone().inner().zeros_like();
        let grad = grads.get::<D>(param.id).unwrap_or_else(zeros);
        let (layout, shape) = (param.spec.layout().clone(), param.spec.shape().clone());
        let grad = DTensor::from_local_with_layout(grad, param.spec.mesh(), layout, shape)?
            .full_tensor()?;
        Ok(grad.into_data().try_to_vec().expect("f32"))
    }
    let grad = |param: NamedParameter| {
        let full = match param.spec.shape().num_dims() {
            1 => full::<1>(&param, grads)?,
            2 => full::<2>(&param, grads)?,
            3 => full::<3>(&param, grads)?,
            4 => full::<4>(&param, grads)?,
            5 => full::<5>(&param, grads)?,
            dims => panic!("no parameter here has {dims} dimensions"),
        };
        Ok((param.path, full))
    };
    named_parameters(model)
        .unwrap()
        .into_iter()
        .map(grad)
        .collect()
}
