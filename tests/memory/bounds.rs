//! What a rank holds at most in a step, above its shards and gradients: in units, however deep the
//! model.
//!
//! | | in units |
//! |---|---|
//! | weights of the unit that backward is in | 1 |
//! | its gradients | 1 |
//! | gradients of the one before it, which are being reduced | 1 |
//! | gradients of the one before that, where another rank is late to take its part | 1 |
//! | their shard, where a rank of another replica is late, too | 1 / ranks |
//! | a second copy of the last gradient, which burn makes | a part of one |
//! | gradient shards that are not there yet, of units whose gradients are | - 1 / ranks each |
//!
//! Beside these there are the root's own, from the beginning of backward to its end: here they are
//! few. Ranks in step show what is held always, so that 4 and 32 layers can be compared. Where one
//! is late, the others hold the most.

use std::thread;
use std::time::Duration;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::fsdp::FsdpModule;
use burn_dtensor::prelude::*;

use crate::hook::in_backward;
use crate::live::{allocates_for, alone, apart, own, own_peak, restart_peak};

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Block>,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    first: Linear,
    second: Linear,
}

const WIDTH: usize = 512;
const ROWS: usize = 1;
/// Features of the root's own layer.
const CLASSES: usize = 16;
/// Bytes of a unit: a block.
const UNIT: usize = 2 * (WIDTH * WIDTH + WIDTH) * 4;
/// How many blocks the shallow model has, and the deep one.
const DEPTHS: [usize; 2] = [4, 32];

/// Bytes of a whole model.
fn full(blocks: usize) -> usize {
    blocks * UNIT + (WIDTH * CLASSES + CLASSES) * 4
}

/// How ranks keep step.
#[derive(Debug, Clone, Copy)]
enum Pace {
    /// They meet between units, forward and back.
    InStep,
    /// The first sleeps there.
    OneLate,
}

impl Pace {
    fn keep(self, world: &World) {
        match self {
            Self::InStep => world.barrier("in step").unwrap(),
            Self::OneLate if world.rank() == 0 => thread::sleep(Duration::from_millis(1)),
            Self::OneLate => {}
        }
    }
}

impl Net {
    fn new(blocks: usize, device: &Device) -> Self {
        let linear = |width| LinearConfig::new(WIDTH, width).init(device);
        let block = |_| Block {
            first: linear(WIDTH),
            second: linear(WIDTH),
        };
        Self {
            blocks: (0..blocks).map(block).collect(),
            head: linear(CLASSES),
        }
    }

    /// Three-dimensional inputs: burn's `linear` reshapes its weight for them, and the graph keeps
    /// that view.
    fn loss(&self, world: &World, pace: Pace) -> Tensor<1> {
        let x = Tensor::<3>::ones([1, ROWS, WIDTH], &world.device().clone().autodiff());
        unit(self, x, |net, x| {
            let block = |x, block: &Block| {
                pace.keep(world);
                let there = world.clone();
                let x = in_backward(x, move || pace.keep(&there));
                unit(block, x, |block, x| {
                    block.second.forward(block.first.forward(x).tanh()).tanh()
                })
            };
            let x = net.blocks.iter().fold(x, block);
            net.head.forward(x)
        })
        .cast(DType::F32)
        .sum()
    }
}

/// A way to train.
struct Case {
    name: &'static str,
    /// One dimension shards; of two the first replicates.
    mesh: &'static [usize],
    config: fn(FullyShard) -> FullyShard,
    /// What is set once the model is sharded.
    set: fn(&Net) -> Result<()>,
    /// Of a step: all but the last leave their gradients whole with their units.
    batches: usize,
    /// Bytes that a layer may add to the most: nodes of the graph and, where that is at the
    /// beginning of backward, activations.
    layer: usize,
}

const FSDP: Case = Case {
    name: "FSDP",
    mesh: &[2],
    config: |config| config.with_reshard_after_forward(ReshardAfterForward::Always),
    set: |_| Ok(()),
    batches: 1,
    layer: 16 << 10,
};

/// Has each unit name the two that come next, forward and back.
fn prefetch_two(net: &Net) -> Result<()> {
    let blocks = net
        .blocks
        .iter()
        .map(FsdpModule::of)
        .collect::<Result<Vec<_>>>()?;
    let order: Vec<_> = std::iter::once(FsdpModule::of(net)?.own())
        .chain(blocks)
        .collect();
    for (at, unit) in order.iter().enumerate() {
        unit.set_forward_prefetch(order[at + 1..].iter().take(2).cloned().collect::<Vec<_>>());
        // Backward comes to the root first.
        let end = if at == 0 { order.len() } else { at };
        unit.set_backward_prefetch(
            order[1..end]
                .iter()
                .rev()
                .take(2)
                .cloned()
                .collect::<Vec<_>>(),
        );
    }
    Ok(())
}

impl Case {
    /// What a step takes of a rank, at most, above its shards and gradients: in units, of the rank
    /// that takes most.
    fn transients(&self, blocks: usize, pace: Pace) -> f64 {
        let ranks = self.mesh.iter().product();
        let peaks = launch(apart(ranks), |world| {
            allocates_for(world.rank());
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(
                world,
                self.mesh,
                &["replicate", "shard"][2 - self.mesh.len()..],
            )?;
            let config = (self.config)(FullyShard::new().with_units(["blocks.*"]));
            let net = fully_shard(Net::new(blocks, &device), &mesh, config)?;
            (self.set)(&net)?;
            let mut taken = 0;
            // The first step warms up what is allocated once, and kept.
            for _ in 0..3 {
                world.barrier("step")?;
                let rest = own();
                restart_peak();
                for batch in 1..=self.batches {
                    FsdpModule::of(&net)?.set_requires_gradient_sync(batch == self.batches);
                    drop(GradientsParams::from_grads(
                        net.loss(world, pace).backward(),
                        &net,
                    ));
                }
                taken = own_peak() - rest;
            }
            Ok(taken)
        });
        let most = peaks
            .unwrap()
            .into_iter()
            .map(|(_, taken)| taken)
            .max()
            .expect("a rank");
        let shards = full(blocks) / self.mesh[self.mesh.len() - 1];
        let grads = if self.batches > 1 {
            full(blocks)
        } else {
            shards
        };
        (most as f64 - grads as f64) / UNIT as f64
    }

    /// At most four units, and a shard where ranks of several replicas may be late; as much with 32
    /// layers as with 4, but for what each adds.
    fn check(&self) {
        let _alone = alone();
        let [shallow, deep] = DEPTHS.map(|blocks| self.transients(blocks, Pace::InStep));
        // Held to a bound of its own, at any depth.
        let depth = if crate::is_long() {
            DEPTHS[1]
        } else {
            DEPTHS[1] / 2
        };
        let late = self.transients(depth, Pace::OneLate);
        println!(
            "{}: {shallow:.3} units with 4 layers, {deep:.3} with 32; {late:.3} with one rank late",
            self.name
        );
        let nodes = ((DEPTHS[1] - DEPTHS[0]) * self.layer) as f64 / UNIT as f64;
        assert!(
            (deep - shallow).abs() < nodes,
            "{}: {shallow} units with 4 layers, {deep} with 32",
            self.name
        );
        let shard = if let [_, ranks] = self.mesh {
            1.0 / *ranks as f64
        } else {
            0.0
        };
        assert!(
            deep <= 4.0 && late <= 4.0 + shard,
            "{}: {deep} units, {late} with one rank late",
            self.name
        );
    }
}

#[test]
fn fully_sharded() {
    FSDP.check();
}

#[test]
fn with_replicas() {
    Case {
        name: "HSDP",
        mesh: &[2, 2],
        ..FSDP
    }
    .check();
}

#[test]
fn bf16_parameters_reduced_in_f32() {
    let config = |config| {
        let policy = MixedPrecisionPolicy::new()
            .with_param_dtype(DType::BF16)
            .with_reduce_dtype(DType::F32);
        (FSDP.config)(config).with_mixed_precision(policy)
    };
    Case {
        name: "bf16 reduced in f32",
        config,
        ..FSDP
    }
    .check();
}

#[test]
fn two_prefetched_units() {
    Case {
        name: "prefetch 2",
        set: prefetch_two,
        ..FSDP
    }
    .check();
}

/// What waits are whole gradients, of every unit: they are counted in place of the gradients'
/// shards.
#[test]
fn gradients_that_wait() {
    Case {
        name: "accumulation without sync",
        batches: 3,
        layer: 48 << 10,
        ..FSDP
    }
    .check();
}
