//! Training, sharded and not: data parallel, FSDP and HSDP to the bit.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::{Call, Launch, ReduceOp, World, launch};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, full_model, fully_shard};
use burn_dtensor::mesh::DeviceMesh;

use super::support::{Shapes, values};
use crate::launched;
use crate::models::{Gpt, GptSize};

const VOCAB: usize = 13;
const DIM: usize = 6;
const SEQ: usize = 5;
const ROWS: usize = 2;

pub fn gpt(tied: bool, device: &Device) -> Gpt {
    let shapes = Shapes(|path| match path.rsplit_once('.').unwrap() {
        ("tok" | "head", _) => vec![VOCAB, DIM],
        ("pos", _) => vec![SEQ, DIM],
        (parent, _) if parent.contains("norm") => vec![DIM],
        (parent, "weight") if parent.ends_with("w1") => vec![4 * DIM, DIM],
        (parent, "bias") if parent.ends_with("w1") => vec![4 * DIM],
        (parent, "weight") if parent.ends_with("w2") => vec![DIM, 4 * DIM],
        (_, "bias") => vec![DIM],
        _ => vec![DIM, DIM],
    });
    Gpt::new(
        &shapes,
        GptSize {
            layers: 2,
            heads: 2,
            tied,
        },
        device,
    )
}

pub fn batch(step: usize, rank: usize, shift: i64, device: &Device) -> Tensor<2, Int> {
    let data: Vec<i64> = (0..(ROWS * SEQ) as i64)
        .map(|i| (i * 5 + step as i64 * 3 + rank as i64 * 7 + shift) % VOCAB as i64)
        .collect();
    Tensor::from_data(TensorData::new(data, [ROWS, SEQ]), device)
}

/// Averages whole gradients over all ranks: the plainest data parallelism.
pub struct AllReduce<'a> {
    pub world: &'a World,
    pub grads: GradientsParams,
}

impl ModuleMapper for AllReduce<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let all: Vec<_> = (0..self.world.size()).collect();
        let grad = self.grads.remove::<D>(param.id).unwrap().into_dispatch();
        let comm = self.world.group(&all).unwrap();
        let reduced = comm
            .all_reduce(Call::new("data parallel"), vec![grad], ReduceOp::Avg)
            .wait()
            .unwrap();
        self.grads.register(
            param.id,
            Tensor::<D>::from_dispatch(reduced.into_iter().next().unwrap()),
        );
        param
    }
}

#[derive(Clone, Copy, Debug)]
enum Parallel {
    Data,
    Fsdp(ReshardAfterForward),
    Hsdp(ReshardAfterForward),
}

fn train(
    world: &World,
    parallel: Parallel,
    tied: bool,
    checkpointing: bool,
) -> Result<BTreeMap<String, Vec<f32>>> {
    let device = match checkpointing {
        false => world.device().clone().autodiff(),
        true => world.device().clone().autodiff().gradient_checkpointing(),
    };
    let mut model = gpt(tied, &device);
    let config = |reshard| {
        FullyShard::new()
            .with_units(["layers.*"])
            .with_reshard_after_forward(reshard)
    };
    model = match parallel {
        Parallel::Data => model,
        Parallel::Fsdp(reshard) => fully_shard(
            model,
            &DeviceMesh::new(world, [4], ["shard"])?,
            config(reshard),
        )?,
        Parallel::Hsdp(reshard) => {
            let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
            fully_shard(model, &mesh, config(reshard))?
        }
    };
    let mut optim = AdamWConfig::new().init();
    let steps = if crate::effort::is_long() { 10 } else { 4 };
    for step in 0..steps {
        let loss = model.loss(
            batch(step, world.rank(), 0, &device),
            batch(step, world.rank(), 1, &device),
        );
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        if let Parallel::Data = parallel {
            let mut reduce = AllReduce { world, grads };
            model = model.map(&mut reduce);
            grads = reduce.grads;
        }
        model = optim.step(1e-2, model, grads);
    }
    Ok(values(&full_model(&model)?, None))
}

#[test]
fn data_parallel_fsdp_and_hsdp_agree_to_the_bit() {
    for tied in [false, true] {
        for checkpointing in [false, true] {
            let run = |parallel| {
                let ranks = launch(Launch::threads(4), |world| {
                    train(world, parallel, tied, checkpointing)
                });
                let weights = launched::values(ranks.unwrap());
                assert!(
                    weights.iter().all(|rank| *rank == weights[0]),
                    "{parallel:?}: ranks agree"
                );
                weights.into_iter().next().unwrap()
            };
            let expected = run(Parallel::Data);
            assert!(expected.values().flatten().all(|x| x.is_finite()));
            for reshard in [
                ReshardAfterForward::Always,
                ReshardAfterForward::Never,
                ReshardAfterForward::Auto,
                ReshardAfterForward::Ranks(2),
            ] {
                assert_eq!(
                    run(Parallel::Fsdp(reshard)),
                    expected,
                    "fsdp {reshard:?}, tied {tied}, checkpointing {checkpointing}"
                );
                assert_eq!(
                    run(Parallel::Hsdp(reshard)),
                    expected,
                    "hsdp {reshard:?}, tied {tied}, checkpointing {checkpointing}"
                );
            }
        }
    }
}
