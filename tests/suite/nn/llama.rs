//! The model and plan of `examples/llama_3d`: losses beside burn's own layers, and what is sent.

#[path = "../../../examples/llama_3d/generate.rs"]
mod generate;
#[path = "../../../examples/llama_3d/model.rs"]
mod model;
#[path = "../../../examples/llama_3d/plan.rs"]
mod plan;
#[path = "llama_reference.rs"]
mod reference;
#[path = "../../../examples/llama_3d/weights.rs"]
mod weights;
#[path = "llama_weights.rs"]
mod weights_of_hugging_face;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::ops::RedistributePolicy;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::support::{on_device, values};
use model::{Llama, LlamaConfig};

use Op::{AllGather, AllReduce, ReduceScatter};
use Phase::{Backward, Forward};

const BLOCKS: usize = 2;
const STEPS: usize = 4;
const ROWS: usize = 2;
const SEQ: usize = 6;
/// Neither is divided by the ranks.
const VOCAB: usize = 13;
const HIDDEN: usize = 11;

fn config() -> LlamaConfig {
    LlamaConfig {
        vocab: VOCAB,
        seq: SEQ,
        dim: 16,
        layers: BLOCKS,
        heads: 4,
        kv_heads: 2,
        hidden: HIDDEN,
        norm_epsilon: 1e-5,
        rope_theta: 10_000.0,
    }
}

fn llama() -> (LlamaConfig, Llama) {
    let config = config();
    let device = Device::flex();
    device.seed(8);
    let model = config.init(&device);
    let _ = values(&model, None); // Draw now, on one thread.
    (config, model)
}

/// Rows of one data-parallel rank, shifted by one for the targets.
fn tokens(step: usize, rank: usize, shift: usize, device: &Device) -> Tensor<2, Int> {
    let token = |at: usize| ((at * 7 + at / SEQ + step * 5 + rank * 3 + shift) % VOCAB) as i64;
    Tensor::from_data(
        TensorData::new((0..ROWS * SEQ).map(token).collect::<Vec<_>>(), [ROWS, SEQ]),
        device,
    )
}

/// Losses of the model in burn alone, on the rows of all ranks.
fn expected(model: &Llama, data_ranks: usize) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model = on_device(model, &device);
    let mut optim = AdamWConfig::new().init();
    let step = |step| {
        let rows = |shift| {
            Tensor::cat(
                (0..data_ranks)
                    .map(|rank| tokens(step, rank, shift, &device))
                    .collect(),
                0,
            )
        };
        let loss = reference::loss(&model, rows(0), rows(1));
        let grads = GradientsParams::from_grads(loss.clone().backward(), &model);
        model = optim.step(1e-2, model.clone(), grads);
        loss.inner().into_scalar::<f32>()
    };
    (0..STEPS).map(step).collect()
}

#[test]
fn the_plan_trains_as_one_device_and_sends_what_the_formula_says() {
    let (config, model) = llama();
    for (shape, names) in [
        (vec![2], vec!["tp"]),
        (vec![2, 2], vec!["shard", "tp"]),
        (vec![2, 2, 2], vec!["replicate", "shard", "tp"]),
    ] {
        let data_ranks = shape[..shape.len() - 1].iter().product();
        let expected = expected(&model, data_ranks);
        MeshTest::new(&shape, names).run(|mesh| {
            let (tp, device) = (mesh.slice("tp")?, mesh.device().clone().autodiff());
            let mut model = plan::parallel(on_device(&model, &device), &config, mesh)?;
            let mut optim = AdamWConfig::new().init();
            let rank = mesh.rank() / tp.size();
            let ledger = mesh.world().ledger();
            for (step, &expected) in expected.iter().enumerate() {
                ledger.reset();
                let rows = |shift| {
                    DTensor::from_local(
                        tokens(step, rank, shift, &device),
                        &tp,
                        &[Placement::Replicate],
                    )
                };
                // What moves is what the plan says.
                let (tokens, targets) = (rows(0)?, rows(1)?);
                let loss = RedistributePolicy::Deny
                    .run(|| model.loss(tokens, targets))
                    .full_tensor()?;
                let value = loss.clone().inner();
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                for (op, phase, calls) in formula(mesh) {
                    assert_eq!(
                        ledger.calls_in(op, phase),
                        calls,
                        "{op} in {phase} on {mesh}"
                    );
                }
                model = optim.step(1e-2, model, grads);
                let means = mesh.names().iter().map(|name| match name.as_str() {
                    "tp" => Placement::Replicate,
                    _ => Placement::Partial(PartialOp::Avg),
                });
                let mean =
                    DTensor::from_local(value, mesh, &means.collect::<Vec<_>>())?.full_tensor()?;
                let mean = mean.into_scalar::<f32>();
                assert!(
                    (mean - expected).abs() < 1e-5,
                    "step {step} on {mesh}: {mean}, expected {expected}"
                );
            }
            Ok(())
        });
    }
}

/// Calls of one step. Each block has two pairs of products, and each pair gathers the sequence
/// before and scatters it after; so does the root, which embeds and has the head. The loss reduces
/// its maximum and its terms. Units come on top; the norms' gradients are added up over `tp`, and
/// averaged over `shard`, which does not cut them.
fn formula(mesh: &DeviceMesh) -> [(Op, Phase, u64); 6] {
    let has = |name: &str| u64::from(mesh.names().iter().any(|other| other == name));
    let (shard, replicate) = (has("shard"), has("replicate"));
    let (blocks, pairs) = (BLOCKS as u64, 2 * BLOCKS as u64 + 1);
    let units = blocks + 1;
    [
        (AllGather, Forward, pairs + shard * units),
        (ReduceScatter, Forward, pairs),
        (AllReduce, Forward, 2),
        (AllGather, Backward, pairs + shard * blocks),
        (ReduceScatter, Backward, pairs + shard * units),
        (AllReduce, Backward, units * (1 + shard + replicate)),
    ]
}

/// Without a launch, layers read their ordinary parameters.
#[test]
fn the_same_model_trains_on_one_device() {
    let (_, model) = llama();
    let expected = expected(&model, 1);
    let device = Device::flex().autodiff();
    let mut model = on_device(&model, &device);
    let mut optim = AdamWConfig::new().init();
    for (step, &expected) in expected.iter().enumerate() {
        let loss = model.loss(
            tokens(step, 0, 0, &device).into(),
            tokens(step, 0, 1, &device).into(),
        );
        let value = loss.local().clone().inner().into_scalar::<f32>();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
        assert!(
            (value - expected).abs() < 1e-5,
            "step {step}: {value}, expected {expected}"
        );
    }
}

#[test]
fn one_device_samples_the_tokens_of_a_mesh() {
    let (config, model) = llama();
    let sizes = (SEQ, 40);
    let alone = generate::generate(
        &model,
        &DeviceMesh::single_device(&Device::flex()),
        &[1, 2],
        sizes,
        5,
    )
    .unwrap();
    let other = generate::generate(
        &model,
        &DeviceMesh::single_device(&Device::flex()),
        &[1, 2],
        sizes,
        6,
    )
    .unwrap();
    assert!(
        !generate::Agreement::new(&alone, &other).passes(),
        "another seed samples others"
    );
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let model = plan::parallel(model.clone(), &config, mesh)?;
        let sampled = generate::generate(&model, &mesh.slice("tp")?, &[1, 2], sizes, 5)?;
        let agreement = generate::Agreement::new(&alone, &sampled);
        assert!(agreement.passes(), "{agreement}");
        Ok(())
    });
}

/// Tokens are drawn with the probabilities of the reference model: over many seeds, each as often
/// as its softmax says.
#[test]
fn a_token_has_the_greatest_logit_with_noise() {
    let (_, model) = llama();
    let device = Device::flex();
    let prompt = [3u32, 1, 4];
    let mut counts = [0usize; VOCAB];
    const SAMPLES: usize = 4000;
    for seed in 0..SAMPLES as u64 {
        let sampled = generate::generate(
            &model,
            &DeviceMesh::single_device(&device),
            &prompt,
            (SEQ, 1),
            seed * 977,
        )
        .unwrap();
        counts[sampled[0].token as usize] += 1;
    }
    let tokens = Tensor::<1, Int>::from_data(prompt.map(i64::from), &device).unsqueeze::<2>();
    let logits = reference::logits(&model, tokens).slice_dim(1, prompt.len() - 1);
    let likely = burn::tensor::activation::softmax(logits, 2).into_data();
    for (token, (count, likely)) in counts.iter().zip(likely.iter::<f64>()).enumerate() {
        let (mean, deviation) = (
            SAMPLES as f64 * likely,
            (SAMPLES as f64 * likely * (1.0 - likely)).sqrt(),
        );
        let off = (*count as f64 - mean).abs();
        assert!(
            off < 5.0 * deviation,
            "token {token} was sampled {count} times, expected {mean:.0}"
        );
    }
}
