//! burn-nn's transformers, computed by tensor-parallel ranks: outputs and gradients, training with
//! fully sharded weights, and what is sent.

use burn::module::Module;
use burn::nn::attention::{CrossAttention as PlainCrossAttention, CrossAttentionConfig};
use burn::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoder, TransformerDecoderConfig,
    TransformerDecoderInput as PlainDecoderInput, TransformerEncoder, TransformerEncoderConfig,
    TransformerEncoderInput as PlainEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Bool, Device, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::ops::RedistributePolicy;
use burn_dtensor::nn::{CrossAttention, TransformerDecoderInput, TransformerEncoderInput};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::misuse::refused;
use super::same::{same, same_under};
use super::{Only, floats, near};
use crate::fsdp::support::{max_diff, on_device, tensor, values};
use crate::parallel::support::data_rank;

use Op::{AllGather, AllReduce, ReduceScatter};
use Phase::{Backward, Forward};
use Placement::{Replicate as R, Shard as S};

const DIM: usize = 8;
const HEADS: usize = 4;
/// Not divided by the ranks.
const HIDDEN: usize = 11;
const LAYERS: usize = 2;
const SEQ: usize = 5;
const ROWS: usize = 2;
const STEPS: usize = 10;

/// Attention by heads and feed-forward by hidden features, of the layers at `path`.
fn split(path: &str, attentions: &[&str], between: Placement) -> Plan {
    let (into, out) = (Style::colwise(), Style::rowwise().with_output(between));
    let split = |plan: Plan, attention: &&str| {
        plan.with_style(format!("{path}.{attention}.*"), into.with_heads(HEADS))
            .with_style(format!("{path}.{attention}.output"), out.with_heads(HEADS))
    };
    let plan = attentions
        .iter()
        .fold(Plan::new(), split)
        .with_units([path]);
    let plan = plan
        .with_style(format!("{path}.pwff.linear_inner"), into)
        .with_style(format!("{path}.pwff.linear_outer"), out);
    if between == R {
        plan
    } else {
        plan.with_style(format!("{path}.norm_?"), Style::sequence_parallel())
    }
}

/// Nothing split, everything, and the sequence between layers too.
fn plans(attentions: &[&str]) -> [Plan; 3] {
    let path = "layer.layers.*";
    [
        Plan::new(),
        split(path, attentions, R),
        split(path, attentions, S(1)),
    ]
}

fn encoder(norm_first: bool) -> TransformerEncoder {
    let config = TransformerEncoderConfig::new(DIM, HIDDEN, HEADS, LAYERS).with_dropout(0.0);
    config
        .with_norm_first(norm_first)
        .with_layer_norm_eps(1e-3)
        .init(&Device::flex())
}

fn decoder(norm_first: bool) -> TransformerDecoder {
    let config = TransformerDecoderConfig::new(DIM, HIDDEN, HEADS, LAYERS).with_dropout(0.0);
    config
        .with_norm_first(norm_first)
        .with_quiet_softmax(true)
        .init(&Device::flex())
}

/// Later tokens, and the last of the first row.
fn masks(device: &Device) -> (Tensor<2, Bool>, Tensor<3, Bool>) {
    let padded =
        Tensor::<2>::from_data([[0., 0., 0., 0., 1.], [0., 0., 0., 0., 0.]], device).bool();
    (
        padded,
        Tensor::<2, Bool>::tril_mask([SEQ, SEQ], 0, device)
            .unsqueeze::<3>()
            .repeat_dim(0, ROWS),
    )
}

fn replicated<const D: usize>(mask: Tensor<D, Bool>, mesh: &DeviceMesh) -> DTensor<D, Bool> {
    DTensor::distribute_replicated(mask, mesh, &[R]).expect("replicated")
}

#[test]
fn feed_forward_equals_burns() {
    let layer = PositionWiseFeedForwardConfig::new(6, 7)
        .with_dropout(0.0)
        .init(&Device::flex());
    let split = || {
        Plan::new()
            .with_style("layer.linear_inner", Style::colwise())
            .with_style("layer.linear_outer", Style::rowwise())
    };
    same_under!(layer.clone(), [3, 5, 6], [Plan::new(), split()]);
}

#[test]
fn encoders_equal_burns_with_and_without_masks() {
    for (norm_first, masked) in [(true, true), (false, true), (false, false)] {
        for plan in plans(&["mha"]) {
            same(
                encoder(norm_first),
                &|| plan.clone(),
                [ROWS, SEQ, DIM],
                |layer, x| {
                    let (pad, attn) = masks(&x.device());
                    let input = PlainEncoderInput::new(x);
                    layer.forward(if masked {
                        input.mask_pad(pad).mask_attn(attn)
                    } else {
                        input
                    })
                },
                |layer, x| {
                    let (mesh, (pad, attn)) = (x.mesh().clone(), masks(x.mesh().device()));
                    let input = TransformerEncoderInput::new(x);
                    let masks = |input: TransformerEncoderInput| {
                        input
                            .mask_pad(replicated(pad, &mesh))
                            .mask_attn(replicated(attn, &mesh))
                    };
                    layer.forward_dtensor(if masked { masks(input) } else { input })
                },
            );
        }
    }
}

#[test]
fn decoders_equal_burns_with_and_without_masks() {
    for (norm_first, masked) in [(true, true), (false, true), (false, false)] {
        for plan in plans(&["self_attn", "cross_attn"]) {
            same(
                decoder(norm_first),
                &|| plan.clone(),
                [ROWS, SEQ, DIM],
                |layer, x| {
                    let (pad, attn) = masks(&x.device());
                    let input = PlainDecoderInput::new(x.clone(), x.square() - 0.2);
                    layer.forward(match masked {
                        true => input
                            .target_mask_pad(pad.clone())
                            .target_mask_attn(attn.clone())
                            .memory_mask_pad(pad)
                            .memory_mask_attn(attn),
                        false => input,
                    })
                },
                |layer, x| {
                    let (mesh, (pad, attn)) = (x.mesh().clone(), masks(x.mesh().device()));
                    let (pad, attn) = (replicated(pad, &mesh), replicated(attn, &mesh));
                    let input = TransformerDecoderInput::new(x.clone(), x.square() - 0.2);
                    layer.forward_dtensor(match masked {
                        true => input
                            .target_mask_pad(pad.clone())
                            .target_mask_attn(attn.clone())
                            .memory_mask_pad(pad)
                            .memory_mask_attn(attn),
                        false => input,
                    })
                },
            );
        }
    }
}

/// burn's layer with the values of this crate's, whose record it reads.
fn burns(
    layer: &CrossAttention,
    config: &CrossAttentionConfig,
    device: &Device,
) -> PlainCrossAttention {
    config.init(device).load_record(layer.clone().into_record())
}

#[test]
fn cross_attention_equals_burns_whose_records_it_has() {
    let device = Device::flex();
    let config = CrossAttentionConfig::new(8, 6, 4, 2, 3).with_dropout(0.0);
    for (config, masked) in [
        (config.clone(), true),
        (config.with_quiet_softmax(true), false),
    ] {
        let layer = CrossAttention::new(&config, &device);
        let _ = values(&layer, None); // Draw now, on one thread.
        let plain = burns(&layer, &config, &device);
        assert_eq!(
            values(&plain, None),
            values(&layer, None),
            "parameters have burn's names"
        );
        let pad =
            |device: &Device| Tensor::<2>::from_data([[0., 0., 1.], [0., 1., 0.]], device).bool();
        let x = tensor::<3>(1, [2, 5, 8], &device);
        let context = tensor::<3>(2, [2, 3, 6], &device);
        let expected =
            floats(plain.forward(x.clone(), context.clone(), masked.then(|| pad(&device))));
        let heads = || {
            Plan::new()
                .with_style("layer.*", Style::colwise())
                .with_style("layer.output", Style::rowwise())
        };
        for (plan, ranks) in [(Plan::new(), 3), (heads(), 2), (heads(), 1)] {
            MeshTest::new([ranks], ["tp"]).run(|mesh| {
                let model = parallelize(
                    Only {
                        layer: layer.clone(),
                    },
                    mesh,
                    plan.clone(),
                )?;
                let mask = masked.then(|| replicated(pad(mesh.device()), mesh));
                let place = |x: &Tensor<3>| DTensor::distribute_replicated(x.clone(), mesh, &[R]);
                let y = model
                    .layer
                    .forward_dtensor((place(&x)?, place(&context)?, mask));
                near(&floats(y.full_tensor()?), &expected, || {
                    format!("{ranks} ranks")
                });
                Ok(())
            });
        }
    }
}

#[test]
fn cross_attention_refuses_a_context_of_another_batch() {
    let layer = CrossAttention::new(&CrossAttentionConfig::new(8, 6, 4, 2, 3), &Device::flex());
    let _ = values(&layer, None);
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let model = parallelize(
            Only {
                layer: layer.clone(),
            },
            mesh,
            Plan::new(),
        )?;
        for [batch, other] in [[2, 1], [1, 2]] {
            let x = DTensor::<3>::ones([batch, 5, 8], mesh, &[R], mesh.device())?;
            let context = DTensor::<3>::ones([other, 3, 6], mesh, &[R], mesh.device())?;
            let error = refused(|| model.layer.forward_dtensor((x, context, None)));
            assert!(
                error.to_string().contains("values of equal batches"),
                "{error}"
            );
        }
        Ok(())
    });
}

/// Gradients of this crate's layer on one rank, where nothing is distributed, and on two.
#[test]
fn the_gradients_of_cross_attention_are_those_of_one_rank() {
    let layer = CrossAttention::new(
        &CrossAttentionConfig::new(8, 8, 4, 2, 2).with_dropout(0.0),
        &Device::flex(),
    );
    let _ = values(&layer, None);
    let run = |ranks: usize, plan: Plan| {
        let grads = MeshTest::new([ranks], ["tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = parallelize(
                Only {
                    layer: on_device(&layer, &device),
                },
                mesh,
                plan.clone(),
            )?;
            let x = DTensor::distribute_replicated(tensor::<3>(3, [2, 5, 8], &device), mesh, &[R])?
                .require_grad();
            let leaf = x.local().clone();
            let y = model
                .layer
                .forward_dtensor((x.clone(), x.square(), None))
                .full_tensor()?;
            let grads = super::same::loss(y).backward();
            let x = floats(leaf.grad(&grads).expect("in the loss"));
            let grads = crate::parallel::support::full_grads(
                &model,
                &GradientsParams::from_grads(grads, &model),
            )?;
            Ok((x, grads.into_values().collect::<Vec<_>>().concat()))
        });
        grads.into_iter().next().expect("a rank")
    };
    let one = run(1, Plan::new());
    let heads = Plan::new()
        .with_style("layer.*", Style::colwise())
        .with_style("layer.output", Style::rowwise());
    let two = run(2, heads);
    near(&two.0, &one.0, || "the input's gradient".into());
    near(&two.1, &one.1, || "the parameters' gradients".into());
}

/// A model around burn's encoder.
#[derive(Module, Debug)]
struct Net {
    embed: Linear,
    encoder: TransformerEncoder,
    head: Linear,
}

fn net(norm_first: bool) -> Net {
    let device = Device::flex();
    device.seed(12);
    let net = Net {
        embed: LinearConfig::new(3, DIM).init(&device),
        encoder: encoder(norm_first),
        head: LinearConfig::new(DIM, 2).init(&device),
    };
    let _ = values(&net, None); // Draw now, on one thread.
    net
}

fn rows(step: usize, rank: usize, device: &Device) -> Tensor<3> {
    tensor((100 * step + rank) as u64, [ROWS, SEQ, 3], device)
}

/// Losses of each step in burn alone, on the rows of all ranks, and the weights after the last.
fn expected(model: &Net, data_ranks: usize) -> (Vec<f32>, Net) {
    let device = Device::flex().autodiff();
    let mut model = on_device(model, &device);
    let mut optim = AdamWConfig::new().init();
    let step = |step| {
        let x = Tensor::cat(
            (0..data_ranks)
                .map(|rank| rows(step, rank, &device))
                .collect(),
            0,
        );
        let h = model
            .encoder
            .forward(PlainEncoderInput::new(model.embed.forward(x)));
        let loss = (model.head.forward(h) - 0.5).square().mean();
        let grads = GradientsParams::from_grads(loss.clone().backward(), &model);
        model = optim.step(1e-2, model.clone(), grads);
        loss.inner().into_scalar::<f32>()
    };
    ((0..STEPS).map(step).collect(), model)
}

/// Calls of one step over both dimensions. Of attention and feed-forward each layer makes one pair
/// of collectives a pass; the sequence is gathered once more at its end, and cut at its beginning.
/// Units come on top: each gathers its shards and reduces gradients, and where sequences are cut
/// adds up its norms' first; what `shard` does not cut is averaged.
fn formula(between: Placement) -> [(Op, Phase, u64); 6] {
    let (layers, sequence) = (LAYERS as u64, u64::from(between != R));
    let (pairs, units) = (2 * layers, layers + 1);
    [
        (AllReduce, Forward, pairs * (1 - sequence)),
        (AllGather, Forward, pairs * sequence + sequence + units),
        (ReduceScatter, Forward, pairs * sequence),
        (
            AllReduce,
            Backward,
            pairs * (1 - sequence) + sequence * layers,
        ),
        (AllGather, Backward, pairs * sequence + sequence + layers),
        (ReduceScatter, Backward, pairs * sequence + units),
    ]
}

#[test]
fn burns_encoder_trains_in_two_dimensions_as_on_one_device() {
    for (norm_first, between) in [(false, R), (true, R), (false, S(1)), (true, S(1))] {
        let model = net(norm_first);
        let (losses, trained) = expected(&model, 2);
        let weights = values(&trained, None);
        MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
            let (tp, device) = (mesh.slice("tp")?, mesh.device().clone().autodiff());
            let model = parallelize(
                on_device(&model, &device),
                &tp,
                split("encoder.layers.*", &["mha"], between),
            )?;
            let units = FullyShard::new().with_units(["encoder.layers.*"]);
            let mut model = fully_shard(model, &mesh.slice("shard")?, units)?;
            let mut optim = AdamWConfig::new().init();
            let ledger = mesh.world().ledger();
            for (step, expected) in losses.iter().enumerate() {
                ledger.reset();
                let x = DTensor::from_local(rows(step, data_rank(mesh).0, &device), &tp, &[R])?;
                let y = RedistributePolicy::Deny.run(|| {
                    unit(&model, x, |model, x| {
                        let h = model
                            .embed
                            .forward_dtensor(x)
                            .redistribute(&[between])
                            .expect("cut");
                        let h = model
                            .encoder
                            .forward_dtensor(TransformerEncoderInput::new(h));
                        model
                            .head
                            .forward_dtensor(h.redistribute(&[R]).expect("whole"))
                    })
                });
                let loss = (y - 0.5).square().mean().full_tensor()?;
                let value = loss.clone().inner();
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                for (op, phase, calls) in formula(between) {
                    assert_eq!(
                        ledger.calls_in(op, phase),
                        calls,
                        "{op} in {phase}, {between} between layers"
                    );
                }
                model = optim.step(1e-2, model, grads);
                let mean: f32 = mesh.all_reduce(value.into_scalar::<f32>(), ReduceOp::Avg)?;
                assert!(
                    (mean - expected).abs() < 1e-5,
                    "step {step}, {between}: {mean}, expected {expected}"
                );
            }
            let off = max_diff(&values(&full_model(&model)?, None), &weights);
            assert!(
                off < 1e-4,
                "weights are {off} off, {between} between layers"
            );
            Ok(())
        });
    }
}

/// Attention weights, hidden features and what is added to `x` are dropped by their place in the
/// whole.
#[test]
fn dropout_inside_an_encoder_repeats_on_every_mesh() {
    let config = TransformerEncoderConfig::new(DIM, HIDDEN, HEADS, 1).with_dropout(0.3);
    let layer = config.init(&Device::flex());
    let _ = values(&layer, None);
    let run = |ranks: usize, plan: Plan| {
        let outputs = MeshTest::new([ranks], ["tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            burn_dtensor::dtensor::ops::random::seed(4);
            let model = parallelize(
                Only {
                    layer: on_device(&layer, &device),
                },
                mesh,
                plan.clone(),
            )?;
            let x =
                DTensor::distribute_replicated(tensor(3, [ROWS, SEQ, DIM], &device), mesh, &[R])?;
            let y = model.layer.forward_dtensor(TransformerEncoderInput::new(x));
            Ok(floats(y.full_tensor()?.inner()))
        });
        outputs.into_iter().next().expect("a rank")
    };
    let [alone, by_heads, by_sequence] = plans(&["mha"]);
    let one = run(1, alone);
    near(&run(2, by_heads), &one, || "heads on two ranks".into());
    near(&run(4, by_sequence), &one, || {
        "parts of the sequence on four".into()
    });
}
