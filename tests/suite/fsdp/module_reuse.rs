//! Models that reuse their modules, compared with the unsharded model over some steps: modules that
//! run twice, other methods than forward, a model that is cast after it was sharded. `tied` and
//! `frozen` run it too.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{Cast, elements, fill, furthest, on_device};

/// No multiple of the ranks.
const WORDS: usize = 11;
const WIDTH: usize = 5;
const SEQ: usize = 2;
/// Before which step some parts are frozen.
const MIDDLE: usize = 2;

/// Returns the number of steps that are trained: some before [`MIDDLE`], and more after it.
fn steps() -> usize {
    if crate::effort::is_long() { 10 } else { 5 }
}

#[derive(Module, Debug)]
struct Net {
    table: Embedding,
    block: Block,
    frozen: Linear,
    head: Head,
}

#[derive(Module, Debug)]
struct Block {
    up: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Head {
    mix: Linear,
}

/// What a model does, in each of its steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Use {
    /// The unit of the table gives its weight to the head, and the block reads its own twice.
    Tied,
    /// The block runs twice, and then a part of it.
    Twice,
    /// Half of the block is frozen, and a unit of its own.
    Frozen,
    /// The table and half of the block are frozen before a step.
    FrozenLater,
    /// All is single precision, and then double.
    Cast,
}

#[cfg(feature = "mpi")]
const USES: [Use; 5] = [
    Use::Tied,
    Use::Twice,
    Use::Frozen,
    Use::FrozenLater,
    Use::Cast,
];

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        unit(self, x, |block, x| {
            block.down.forward(block.up.forward(x).tanh())
        })
    }

    /// Another way through it, which reads one of its layers, and of that the transpose too.
    fn backwards(&self, x: Tensor<3>) -> Tensor<3> {
        unit(self, x, |block, x| {
            let up = block.up.weight.val();
            x.matmul(up.clone().unsqueeze())
                .tanh()
                .matmul(up.transpose().unsqueeze())
        })
    }
}

impl Net {
    /// In double precision, the same in every process.
    fn init(of: Use, device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let net = Self {
            table: EmbeddingConfig::new(WORDS, WIDTH).init(device),
            block: Block {
                up: linear(WIDTH, 7),
                down: linear(7, WIDTH),
            },
            frozen: linear(WIDTH, WIDTH),
            head: Head {
                mix: linear(WIDTH, WIDTH),
            },
        };
        let mut net = net.map(&mut Fill {
            dtype: if of == Use::Cast {
                DType::F32
            } else {
                DType::F64
            },
            seed: 0,
        });
        if of == Use::Frozen {
            net.block.up = net.block.up.no_grad();
            net.frozen = net.frozen.no_grad();
        }
        net
    }

    fn loss(&self, of: Use, rank: usize, step: usize, device: &Device) -> Tensor<1> {
        let words: Vec<i64> = (0..2 * SEQ)
            .map(|at| ((at * 5 + rank * 3 + step) % WORDS) as i64)
            .collect();
        let words = Tensor::<2, Int>::from_data(TensorData::new(words, [2, SEQ]), device);
        let y = unit(self, words, |net, words| {
            let (x, weight) = unit(&net.table, words, |table, words| {
                (table.forward(words), table.weight.val())
            });
            let mut x = net.block.forward(x);
            if of == Use::Twice {
                x = net.block.backwards(net.block.forward(x).tanh());
            }
            let x = unit(&net.frozen, x, |layer, x| layer.forward(x).tanh());
            let x = unit(&net.head, (x, weight), |head, (x, weight)| {
                let x = head.mix.forward(x);
                if of == Use::Tied {
                    x.matmul(weight.transpose().unsqueeze())
                } else {
                    x
                }
            });
            if of == Use::Tied {
                net.block.backwards(x.slice([0..2, 0..SEQ, 0..WIDTH]))
            } else {
                x
            }
        });
        let elements = y.shape().num_elements();
        let weights: Vec<f64> = (0..elements)
            .map(|at| 0.5 + (at % 7) as f64 / 7.0)
            .collect();
        let weights = Tensor::from_data(TensorData::new(weights, y.shape()), (device, y.dtype()));
        (y.tanh() * weights).mean()
    }

    /// What becomes of it before a step.
    fn before(mut self, of: Use, step: usize) -> Self {
        if of == Use::FrozenLater && step == MIDDLE {
            self.table = self.table.no_grad();
            self.block.down = self.block.down.no_grad();
        }
        if of == Use::Cast && step == 0 {
            self = self.map(&mut Cast(DType::F64));
        }
        self
    }
}

struct Fill {
    dtype: DType,
    seed: u64,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.seed += 1;
        param.map(|base| {
            Tensor::from_data(fill(self.seed, &base.dims()), (&base.device(), self.dtype))
                .require_grad()
        })
    }
}

/// Trains, by the loss of each step, the model as it is before it.
fn train(mut net: Net, of: Use, loss: impl Fn(&Net, usize) -> Tensor<1>) -> Net {
    let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
    for step in 0..steps() {
        net = net.before(of, step);
        let grads = GradientsParams::from_grads(loss(&net, step).backward(), &net);
        net = optim.step(1e-2, net, grads);
    }
    net
}

fn configs() -> [FullyShard; 3] {
    let units = || FullyShard::new().with_units(["table", "block", "frozen", "head"]);
    [
        FullyShard::new(),
        units().with_reshard_after_forward(ReshardAfterForward::Always),
        FullyShard::new()
            .with_units(["block", "head"])
            .with_group_unit(["table", "frozen"])
            .with_reshard_after_forward(ReshardAfterForward::Never),
    ]
}

fn on(device: &Device, checkpointing: bool) -> Device {
    let device = device.clone().autodiff();
    if checkpointing {
        device.gradient_checkpointing()
    } else {
        device
    }
}

/// Trains on one device, by the mean of the losses of the batches of all ranks.
fn alone(of: Use, ranks: usize, checkpointing: bool) -> BTreeMap<String, Vec<f64>> {
    let device = on(&Device::flex(), checkpointing);
    let trained = train(Net::init(of, &device), of, |net, step| {
        let losses = (0..ranks)
            .map(|rank| net.loss(of, rank, step, &device))
            .collect();
        Tensor::cat(losses, 0).mean()
    });
    elements(&trained, None)
}

fn train_as_one_device(
    mesh: &DeviceMesh,
    of: Use,
    expected: &BTreeMap<String, Vec<f64>>,
    checkpointing: bool,
) -> Result<()> {
    let device = on(mesh.device(), checkpointing);
    let start = Net::init(of, &device);
    for (at, config) in configs().into_iter().enumerate() {
        let sharded = fully_shard(on_device(&start, &device), mesh, config)?;
        let trained = train(sharded, of, |net, step| {
            net.loss(of, mesh.rank(), step, &device)
        });
        let found = elements::<f64>(&full_model(&trained)?, None);
        for (path, expected) in expected {
            let off = furthest(&found[path], expected);
            assert!(
                off < 1e-9,
                "{of:?}: `{path}` is off by {off:.1e} on {mesh} with configuration {at}"
            );
        }
    }
    Ok(())
}

/// On any number of ranks, and over replicas.
pub fn trains_as_on_one_device(of: Use) {
    // Of 4 ranks one has no row of a weight of 5 already.
    let most = if crate::effort::is_long() { 8 } else { 4 };
    for ranks in [1, 2, 3, 4, 8].into_iter().filter(|ranks| *ranks <= most) {
        let checkpointing = ranks == 2;
        let expected = alone(of, ranks, checkpointing);
        MeshTest::new([ranks], ["shard"])
            .run(|mesh| train_as_one_device(mesh, of, &expected, checkpointing));
    }
    let expected = alone(of, 4, true);
    MeshTest::new([2, 2], ["replicate", "shard"])
        .run(|mesh| train_as_one_device(mesh, of, &expected, true));
}

#[test]
fn a_module_that_runs_twice_trains_as_on_one_device() {
    trains_as_on_one_device(Use::Twice);
}

#[test]
fn a_model_that_is_cast_trains_as_on_one_device() {
    trains_as_on_one_device(Use::Cast);
}

#[cfg(feature = "mpi")]
#[test]
fn models_train_as_on_one_device_in_processes() {
    let expected = USES.map(|of| (of, alone(of, 3, false)));
    let _ = MeshTest::new([3], ["shard"]).with_processes(3).run(|mesh| {
        expected
            .iter()
            .try_for_each(|(of, expected)| train_as_one_device(mesh, *of, expected, false))
    });
}
