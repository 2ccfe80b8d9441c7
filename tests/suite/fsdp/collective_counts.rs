//! Calls and bytes of every unit, held to closed formulas.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, Op, Phase, launch};
use burn_dtensor::fsdp::{
    FullyShard, NormType, ReshardAfterForward, clip_grad_norm, fully_shard, unit,
};
use burn_dtensor::mesh::DeviceMesh;

use super::support::{on_device, tensor, values};

#[derive(Module, Debug)]
pub struct Stack {
    pub first: Linear,
    pub blocks: Vec<Linear>,
    /// Placed `Replicate`: every rank holds it whole.
    norm: Option<RmsNorm>,
}

pub const WIDTH: usize = 6;
pub const BLOCKS: usize = 3;
/// Bytes of one linear layer with bias.
const LAYER: u64 = (WIDTH * WIDTH + WIDTH) as u64 * 4;
/// Bytes that say, a rank, which of its parameters have a gradient.
const FLAGS: u64 = 2 * 4;

pub fn stack(device: &Device) -> Stack {
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
    let stack = Stack {
        first: linear(),
        blocks: (0..BLOCKS).map(|_| linear()).collect(),
        norm: None,
    };
    let _ = values(&stack, None);
    stack
}

impl Stack {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |stack, x| {
            let mut x = stack.first.forward(x);
            for block in &stack.blocks {
                x = unit(block, x, |block, x| block.forward(x).tanh());
            }
            match &stack.norm {
                Some(norm) => norm.forward(x),
                None => x,
            }
        })
    }
}

/// `(reshard, all-gathers in backward)` for N blocks and a root.
fn modes() -> [(ReshardAfterForward, u64); 5] {
    let n = BLOCKS as u64;
    [
        (ReshardAfterForward::Always, n + 1),
        (ReshardAfterForward::Auto, n),
        (ReshardAfterForward::Never, 0),
        (ReshardAfterForward::Ranks(2), n + 1),
        (ReshardAfterForward::Ranks(1), 0),
    ]
}

#[test]
fn one_all_gather_and_one_reduce_scatter_a_unit() {
    check_counts(false, &[false, true]);
}

/// In every reshard mode; over replicas of two ranks that shard if `hsdp`.
pub fn check_counts(hsdp: bool, checkpointing: &[bool]) {
    let model = stack(&Device::flex());
    for &checkpointing in checkpointing {
        for (reshard, backward) in modes() {
            launch(Launch::threads(4), |world| {
                let device = world.device().clone().autodiff();
                let device = if checkpointing {
                    device.gradient_checkpointing()
                } else {
                    device
                };
                let mesh = match hsdp {
                    false => DeviceMesh::new(world, [4], ["shard"])?,
                    true => DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?,
                };
                let model = on_device(&model, &device);
                let config = FullyShard::new()
                    .with_units(["blocks.*"])
                    .with_reshard_after_forward(reshard);
                let model = fully_shard(model, &mesh, config)?;
                let ledger = world.ledger();
                for _ in 0..2 {
                    ledger.reset();
                    let loss = model.forward(tensor(1, [2, WIDTH], &device)).sum();
                    assert_eq!(
                        ledger.calls_in(Op::AllGather, Phase::Forward),
                        BLOCKS as u64 + 1
                    );
                    assert_eq!(
                        ledger.bytes_in(Op::AllGather, Phase::Forward),
                        (BLOCKS as u64 + 1) * LAYER
                    );
                    let mut grads = GradientsParams::from_grads(loss.backward(), &model);
                    // The shard group of a 2 x 2 mesh has 2 ranks: Ranks(2) is Always there.
                    let context =
                        format!("{reshard:?}, hsdp {hsdp}, checkpointing {checkpointing}");
                    assert_eq!(
                        ledger.calls_in(Op::AllGather, Phase::Backward),
                        backward,
                        "{context}"
                    );
                    assert_eq!(
                        ledger.bytes_in(Op::AllGather, Phase::Backward),
                        backward * LAYER,
                        "{context}"
                    );
                    assert_eq!(
                        ledger.calls(Op::ReduceScatter),
                        BLOCKS as u64 + 1,
                        "{context}"
                    );
                    let shards = mesh.shape()[mesh.ndim() - 1] as u64;
                    let reduced = (BLOCKS as u64 + 1) * (LAYER + shards * FLAGS);
                    assert_eq!(ledger.bytes(Op::ReduceScatter), reduced, "{context}");
                    let all_reduces = if hsdp { BLOCKS as u64 + 1 } else { 0 };
                    assert_eq!(ledger.calls(Op::AllReduce), all_reduces, "{context}");
                    for other in [Op::AllToAll, Op::Broadcast, Op::Scatter, Op::Barrier] {
                        assert_eq!(ledger.calls(other), 0, "{context}");
                    }
                    clip_grad_norm(&model, &mut grads, 1.0, NormType::L2)?;
                    assert_eq!(
                        ledger.calls(Op::AllReduce),
                        all_reduces + 1,
                        "one number a mesh"
                    );
                }
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn one_rank_makes_no_collective() {
    let model = stack(&Device::flex());
    launch(Launch::threads(1), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        let model = on_device(&model, &device);
        let model = fully_shard(model, &mesh, FullyShard::new().with_units(["blocks.*"]))?;
        let loss = model.forward(tensor(1, [2, WIDTH], &device)).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        assert_eq!(grads.len(), 2 * (BLOCKS + 1));
        for op in [
            Op::AllGather,
            Op::ReduceScatter,
            Op::AllReduce,
            Op::Broadcast,
            Op::Scatter,
        ] {
            assert_eq!(world.ledger().calls(op), 0);
        }
        Ok(())
    })
    .unwrap();
}

/// Bytes of frozen parameters are gathered, and never reduced; of a unit that trains nothing,
/// nothing is.
#[test]
fn a_reduce_scatter_carries_what_is_trained() {
    let model = stack(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let mut model = on_device(&model, &device);
        model.blocks[0].weight = model.blocks[0].weight.clone().set_require_grad(false);
        model.blocks[1] = model.blocks[1].clone().no_grad();
        let model = fully_shard(model, &mesh, FullyShard::new().with_units(["blocks.*"]))?;
        let ledger = world.ledger();
        for _ in 0..2 {
            ledger.reset();
            let loss = model
                .forward(model.forward(tensor(1, [2, WIDTH], &device)))
                .sum();
            assert_eq!(
                ledger.bytes_in(Op::AllGather, Phase::Forward),
                2 * (BLOCKS as u64 + 1) * LAYER
            );
            let _ = loss.backward();
            let reduced =
                |unit: &str| ledger.total(|key| key.op == Op::ReduceScatter && &*key.label == unit);
            let bias = WIDTH as u64 * 4;
            let flag = 2 * 4;
            for (unit, calls, bytes) in [
                ("blocks.0", 2, 2 * (bias + flag)),
                ("blocks.1", 0, 0),
                ("blocks.2", 2, 2 * (LAYER + 2 * FLAGS)),
                ("root", 2, 2 * (LAYER + 2 * FLAGS)),
            ] {
                assert_eq!(
                    (reduced(unit).calls, reduced(unit).bytes),
                    (calls, bytes),
                    "{unit}"
                );
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn clip_grad_norm_is_the_unsharded_norm() {
    let norm = Some(RmsNormConfig::new(WIDTH).init(&Device::flex()));
    let model = Stack {
        norm,
        ..stack(&Device::flex())
    };
    for hsdp in [false, true] {
        for (norm, p) in [
            (NormType::L1, 1.0),
            (NormType::L2, 2.0),
            (NormType::P(3.0), 3.0),
            (NormType::P(0.0), 0.0),
            (NormType::Inf, f64::INFINITY),
        ] {
            launch(Launch::threads(4), |world| {
                let device = world.device().clone().autodiff();
                let plain = on_device(&model, &device);
                let mesh = match hsdp {
                    false => DeviceMesh::new(world, [4], ["shard"])?,
                    true => DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?,
                };
                let sharded = fully_shard(
                    plain.clone(),
                    &mesh,
                    FullyShard::new().with_units(["blocks.*"]),
                )?;
                let run = |model: &Stack| {
                    let loss = model.forward(tensor(1, [2, WIDTH], &device)).sum();
                    GradientsParams::from_grads(loss.backward(), model)
                };
                let all: Vec<f64> = values(&plain, Some(&run(&plain)))
                    .into_values()
                    .flatten()
                    .map(f64::from)
                    .collect();
                let expected = match p {
                    0.0 => all.iter().filter(|x| **x != 0.0).count() as f64,
                    f64::INFINITY => all.iter().fold(0.0, |max, x| x.abs().max(max)),
                    p => all
                        .iter()
                        .map(|x| x.abs().powf(p))
                        .sum::<f64>()
                        .powf(1.0 / p),
                };
                let mut grads = run(&sharded);
                let max_norm = expected / 4.0;
                let total = clip_grad_norm(&sharded, &mut grads, max_norm, norm)?;
                assert!(
                    (total - expected).abs() < 1e-4 * expected,
                    "{norm:?}: {total} for {expected}"
                );
                if p != 0.0 {
                    let clipped = clip_grad_norm(&sharded, &mut grads, f64::MAX, norm)?;
                    assert!(
                        (clipped - max_norm).abs() < 1e-3 * max_norm,
                        "{norm:?}: {clipped} for {max_norm}"
                    );
                }
                Ok(())
            })
            .unwrap();
        }
    }
}
