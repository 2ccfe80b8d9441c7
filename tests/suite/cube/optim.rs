//! Steps of sharded models on the GPU, against burn's steps of the same shards there.

use burn::grad_clipping::GradientClipping;
use burn::module::{Module, Param, ParamGroup};
use burn::nn::Linear;
use burn::optim::{
    AdamWConfig, GradientsParams, LearningRate, LionConfig, ModuleOptimizer, Optimizer, SgdConfig,
};
use burn::tensor::{Device, Tensor};
use burn_dtensor::fsdp::{FullyShard, full_model, fully_shard, unit};
use burn_dtensor::optim::{ExactOnShards, FusedAdamW, ShardedOptimizer, sharded};
use burn_dtensor::testing::{MeshTest, gpu};

use super::rounding;
use crate::fsdp::support::{max_diff, tensor, values};

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |at: u64| Linear {
            weight: Param::from_tensor(tensor(10 * at, [6, 6], device)),
            bias: Some(Param::from_tensor(tensor(10 * at + 1, [6], device))),
        };
        Self {
            layers: (0..5).map(layer).collect(),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        unit(self, x, |net, x| {
            net.layers.iter().fold(x, |x, layer| {
                unit(layer, x, |layer, x| layer.forward(x).tanh())
            })
        })
        .square()
        .mean()
    }
}

/// AdamW whose weights stay in a range. It reads the result of a fused step.
#[derive(Clone)]
struct Clamped<O>(O);

impl<O: Optimizer> Optimizer for Clamped<O> {
    type State<const D: usize> = O::State<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        param: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let (param, state) = self.0.step(lr, param, grad, state);
        (param.clamp(-0.5, 0.5), state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        O::to_device(state, device)
    }
}

impl ExactOnShards for Clamped<FusedAdamW> {
    type Optimizer = Self;

    fn build(self) -> (Self, Option<GradientClipping>) {
        (self, None)
    }
}

/// Six steps of each, on the same batches.
fn agree(ours: fn() -> ShardedOptimizer, burns: fn() -> ModuleOptimizer) {
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let made = || {
                let config = FullyShard::new().with_units(["layers.*"]);
                fully_shard(Net::new(&device), mesh, config)
            };
            let (mut after, mut inside, mut expected) = (made()?, made()?, made()?);
            let (mut optim_after, mut optim_inside, mut optim) = (ours(), ours(), burns());
            for step in 0..6 {
                let x = || tensor(100 + 10 * step + mesh.rank() as u64, [4, 6], &device);
                let grads = |net: &Net| GradientsParams::from_grads(net.loss(x()).backward(), net);
                let grads_after = grads(&after);
                after = optim_after.step(0.05, after, grads_after)?;
                let loss = inside.loss(x());
                inside = optim_inside.backward(0.05, inside, loss)?;
                let grads_expected = grads(&expected);
                expected = optim.step(0.05, expected, grads_expected);
                let wanted = values(&full_model(&expected)?, None);
                for net in [&after, &inside] {
                    let apart = max_diff(&values(&full_model(net)?, None), &wanted);
                    assert!(apart < rounding(1e-5), "step {step}: {apart}");
                }
            }
            Ok(())
        });
}

#[test]
fn lists_of_shards_step_as_with_burns_operations() {
    agree(
        || sharded(AdamWConfig::new().with_weight_decay(0.1)),
        || AdamWConfig::new().with_weight_decay(0.1).init(),
    );
    fn bias() -> ParamGroup {
        ParamGroup::from_predicate("bias")
    }
    agree(
        || sharded(SgdConfig::new()).with_group(bias(), LionConfig::new()),
        || {
            SgdConfig::new()
                .init()
                .with_group(bias(), LionConfig::build(&LionConfig::new()), None)
        },
    );
}

/// An optimizer of a program may compute with the result of a fused one.
#[test]
fn an_own_optimizer_reads_what_a_fused_one_has_stepped() {
    agree(
        || sharded(Clamped(FusedAdamW::from(&AdamWConfig::new()))),
        || ModuleOptimizer::from(Clamped(AdamWConfig::build(&AdamWConfig::new()))),
    );
}
