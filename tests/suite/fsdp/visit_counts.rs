//! Visits of a model's modules in one forward.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::fsdp::{FullyShard, fully_shard, unit};
use burn_dtensor::testing::MeshTest;

use super::support::tensor;

/// A module without parameters that counts its visits.
#[derive(Debug, Clone, Default)]
struct Visits(Arc<AtomicUsize>);

impl Module for Visits {
    fn visit<V: ModuleVisitor>(&self, _: &mut V) {
        self.0.fetch_add(1, SeqCst);
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }

    fn materialize(self) -> Self {
        self
    }
}

type Block = (Linear, Visits);

/// The model, its stages and their blocks are units: a block is visited by the call of `unit` for
/// itself, and once more for each of the two around it. Neither reads nor the backward visit it.
#[test]
fn each_call_of_unit_visits_the_modules_inside_once() {
    const WIDTH: usize = 4;
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let block = || -> Block {
            (
                LinearConfig::new(WIDTH, WIDTH).init(&device),
                Visits::default(),
            )
        };
        let stages: Vec<Vec<Block>> = (1..=2)
            .map(|blocks| (0..blocks).map(|_| block()).collect())
            .collect();
        let model = fully_shard(stages, mesh, FullyShard::new().with_units(["*", "*.*"]))?;
        let run =
            |block: &Block, x: Tensor<2>| unit(block, x, |(linear, _), x| linear.forward(x).tanh());
        let stage = |blocks: &Vec<Block>, x: Tensor<2>| {
            unit(blocks, x, |blocks, x| {
                blocks.iter().fold(x, |x, block| run(block, x))
            })
        };
        let forward = |x: Tensor<2>| {
            unit(&model, x, |stages, x| {
                stages.iter().fold(x, |x, blocks| stage(blocks, x))
            })
        };
        for step in 0..3 {
            model
                .iter()
                .flatten()
                .for_each(|(_, visits)| visits.0.store(0, SeqCst));
            let loss = forward(tensor(step, [3, WIDTH], &device)).sum();
            let visits: Vec<_> = model
                .iter()
                .flatten()
                .map(|(_, visits)| visits.0.load(SeqCst))
                .collect();
            assert_eq!(visits, [3; 3], "step {step}");
            drop(loss.backward());
            assert!(
                model
                    .iter()
                    .flatten()
                    .all(|(_, visits)| visits.0.load(SeqCst) == 3),
                "in backward, step {step}"
            );
        }
        Ok(())
    });
}
