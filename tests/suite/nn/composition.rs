//! A model over DTensors whose parts meet every way there is: tied weights, layers of both
//! parallel and whole weights, units that are freed, ranks of one dimension and of three.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::attention::{
    MhaInput as PlainMhaInput, MultiHeadAttention, MultiHeadAttentionConfig,
};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, LinearLayout,
    RmsNorm, RmsNormConfig,
};
use burn::optim::GradientsParams;
use burn::tensor::activation::{log_softmax, tanh};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_dtensor::dtensor::ops::{activation, loss::cross_entropy};
use burn_dtensor::nn::MhaInput;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::{Only, floats, near};
use crate::fsdp::support::{on_device, tensor, values};
use crate::parallel::support::{data_rank, devices, distribute, full_grads, meshes};

use Placement::{Replicate as R, Shard as S};
use ReshardAfterForward::Always;

const VOCAB: usize = 11;
const DIM: usize = 8;
const HEADS: usize = 4;
const ROWS: usize = 2;
const SEQ: usize = 5;

#[derive(Module, Debug)]
struct Net {
    token: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
}

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    attention: MultiHeadAttention,
    mlp_norm: RmsNorm,
    up: Linear,
    down: Linear,
}

fn net() -> Net {
    let device = Device::flex();
    device.seed(5);
    let block = || Block {
        norm: LayerNormConfig::new(DIM).init(&device),
        attention: MultiHeadAttentionConfig::new(DIM, HEADS)
            .with_dropout(0.0)
            .init(&device),
        mlp_norm: RmsNormConfig::new(DIM).init(&device),
        up: LinearConfig::new(DIM, 13)
            .with_layout(LinearLayout::Col)
            .init(&device),
        down: LinearConfig::new(13, DIM).init(&device),
    };
    let net = Net {
        token: EmbeddingConfig::new(VOCAB, DIM).init(&device),
        blocks: (0..2).map(|_| block()).collect(),
        norm: RmsNormConfig::new(DIM).init(&device),
    };
    let _ = values(&net, None); // Draw now, on one thread.
    net
}

fn plan() -> Plan {
    let sequence = S(1);
    Plan::new()
        .with_style("token", Style::rowwise().with_output(sequence))
        .with_style("blocks.*.*norm", Style::sequence_parallel())
        .with_style("norm", Style::sequence_parallel())
        .with_style("blocks.*.attention.*", Style::colwise().with_heads(HEADS))
        .with_style(
            "blocks.*.attention.output",
            Style::rowwise().with_heads(HEADS).with_output(sequence),
        )
        .with_style("blocks.*.up", Style::colwise())
        .with_style("blocks.*.down", Style::rowwise().with_output(sequence))
        .with_units(["blocks.*"])
}

fn tokens(step: usize, rank: usize, shift: usize, device: &Device) -> Tensor<2, Int> {
    let data = (0..ROWS * SEQ).map(|i| ((i * 5 + step * 3 + rank * 7 + shift) % VOCAB) as i64);
    Tensor::from_data(
        TensorData::new(data.collect::<Vec<_>>(), [ROWS, SEQ]),
        device,
    )
}

impl Net {
    fn plain(&self, step: usize, rank: usize, device: &Device) -> Tensor<1> {
        let mut x = self.token.forward(tokens(step, rank, 0, device));
        for block in &self.blocks {
            let h = block.norm.forward(x.clone());
            x = x + block.attention.forward(PlainMhaInput::self_attn(h)).context;
            let h = block.mlp_norm.forward(x.clone());
            x = x + block.down.forward(tanh(block.up.forward(h)));
        }
        let logits = self
            .norm
            .forward(x)
            .matmul(self.token.weight.val().transpose().unsqueeze());
        let targets = tokens(step, rank, 1, device);
        log_softmax(logits, 2)
            .gather(2, targets.unsqueeze_dim::<3>(2))
            .mean()
            .neg()
    }

    fn parallel(
        &self,
        step: usize,
        mesh: &DeviceMesh,
        device: &Device,
        in_units: bool,
    ) -> Result<Tensor<1>> {
        let (tp, rank) = (mesh.slice("tp")?, data_rank(mesh).0);
        let rows = |shift| DTensor::from_local(tokens(step, rank, shift, device), &tp, &[R]);
        let block = |block: &Block, x: DTensor<3>| {
            let h = block.norm.forward_dtensor(x.clone());
            let x = x + block
                .attention
                .forward_dtensor(MhaInput::self_attn(h))
                .context;
            let h = block.mlp_norm.forward_dtensor(x.clone());
            x + block
                .down
                .forward_dtensor(activation::tanh(block.up.forward_dtensor(h)))
        };
        let model = |net: &Net, tokens| {
            let mut x = net.token.forward_dtensor(tokens);
            for layer in &net.blocks {
                x = if in_units {
                    unit(layer, x, block)
                } else {
                    block(layer, x)
                };
            }
            let table = net.token.weight.dtensor().expect("parallelized");
            net.norm
                .forward_dtensor(x)
                .matmul(table.transpose().unsqueeze())
        };
        let logits = if in_units {
            unit(self, rows(0)?, model)
        } else {
            model(self, rows(0)?)
        };
        cross_entropy(logits, rows(1)?).full_tensor()
    }
}

/// Gradients of two steps added up, averaged over data-parallel ranks.
fn expected(model: &Net, data_ranks: usize) -> BTreeMap<String, Vec<f32>> {
    let device = Device::flex().autodiff();
    let model = on_device(model, &device);
    let losses =
        (0..data_ranks).flat_map(|rank| [0, 1].map(|step| model.plain(step, rank, &device)));
    let loss = losses.reduce(|a, b| a + b).expect("a rank") / data_ranks as f32;
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    values(&model, Some(&grads))
}

fn same(mesh_test: &MeshTest, reshard: ReshardAfterForward, in_units: bool) {
    let model = net();
    mesh_test.run(|mesh| {
        let expected = expected(&model, data_rank(mesh).1);
        for device in devices(mesh) {
            let model = distribute(on_device(&model, &device), mesh, plan(), reshard)?;
            // Two forwards before one backward.
            let loss = model.parallel(0, mesh, &device, in_units)?
                + model.parallel(1, mesh, &device, in_units)?;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            for (path, grad) in full_grads(&model, &grads)? {
                near(&grad, &expected[&path], || {
                    format!("{path} on {mesh}, {reshard:?}")
                });
            }
        }
        Ok(())
    });
}

#[test]
fn two_forwards_of_a_tied_model_have_the_gradients_of_one_device() {
    for mesh in meshes() {
        same(&mesh, Always, true);
    }
    same(
        &MeshTest::new([2, 2], ["shard", "tp"]),
        ReshardAfterForward::Auto,
        false,
    );
    same(
        &MeshTest::new([4, 2], ["shard", "tp"]),
        ReshardAfterForward::Ranks(2),
        true,
    );
    same(
        &MeshTest::new([2, 1], ["shard", "tp"]),
        ReshardAfterForward::Auto,
        true,
    );
    same(&MeshTest::new([1, 4], ["shard", "tp"]), Always, true);
    same(
        &MeshTest::new([2, 2, 2], ["replicate", "tp", "shard"]),
        ReshardAfterForward::Never,
        true,
    );
}

/// In one scope a weight is read whole, by its part, and by a clone of its module.
#[test]
fn the_gradients_of_all_views_of_a_weight_add_up() {
    let weight = LinearConfig::new(6, 5)
        .with_bias(false)
        .init(&Device::flex());
    let _ = values(
        &Only {
            layer: weight.clone(),
        },
        None,
    );
    let loss = |y: Tensor<2>| y.clone().tanh().sum() + y.clone().square().sum() + y.sum();
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let (tp, shard) = (mesh.slice("tp")?, mesh.slice("shard")?);
        for device in devices(mesh) {
            let plain = Only {
                layer: on_device(&weight, &device),
            };
            let x = tensor::<2>(2, [3, 6], &device);
            let expected = loss(plain.layer.forward(x.clone()));
            let grads = GradientsParams::from_grads(expected.clone().backward(), &plain);
            let expected_grads = values(&plain, Some(&grads));
            for style in [Style::colwise(), Style::rowwise(), Style::placed(R)] {
                let model =
                    parallelize(plain.clone(), &tp, Plan::new().with_style("layer", style))?;
                let model = fully_shard(
                    model,
                    &shard,
                    FullyShard::new().with_reshard_after_forward(Always),
                )?;
                let clone = model.clone();
                let found = unit(&model, x.clone(), |model, x| {
                    let full = model.layer.forward(x.clone()).tanh().sum();
                    let x = DTensor::from_local(x, &tp, &[R])
                        .expect("replicated")
                        .redistribute(&[S(0)])
                        .expect("cut");
                    let part = model.layer.forward_dtensor(x.clone()).square().sum();
                    let sum = part + clone.layer.forward_dtensor(x).sum();
                    full + sum.full_tensor().expect("gathered")
                });
                near(
                    &floats(found.clone().inner()),
                    &floats(expected.clone().inner()),
                    || style.to_string(),
                );
                let grads = GradientsParams::from_grads(found.backward(), &model);
                near(
                    &full_grads(&model, &grads)?["layer.weight"],
                    &expected_grads["layer.weight"],
                    || style.to_string(),
                );
            }
        }
        Ok(())
    });
}
