//! Training that is interrupted, and continued from a checkpoint on the same mesh and on others.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::checkpoint::{CheckpointManager, LoadOptions, State};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::optim::{FullOptimizerState, ShardedOptimizer, parameter_specs, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;
use itertools::Itertools;

use super::folder::Folder;
use crate::fsdp::support::{max_diff, on_device, tensor, values};
use crate::parallel::support::data_rank;

/// Rows of a batch: a multiple of all numbers of data-parallel ranks here.
const ROWS: usize = 24;
const STEPS: u64 = 10;

/// The largest difference of weights after as many steps on two meshes, which sum gradients in
/// different orders.
const BOUND: f64 = 1e-6;

/// Neither layer divides evenly, and the second bias has fewer elements than there are ranks.
#[derive(Module, Debug)]
struct Net {
    up: Linear,
    down: Linear,
}

struct Run {
    net: Net,
    optimizer: ShardedOptimizer,
}

type Values = BTreeMap<String, Vec<f32>>;

impl Net {
    fn new() -> Self {
        let device = Device::flex();
        device.seed(3);
        let net = Self {
            up: LinearConfig::new(5, 7).init(&device),
            down: LinearConfig::new(7, 3).init(&device),
        };
        // Draw now, on one thread.
        let _ = values(&net, None);
        net
    }

    fn distribute(&self, mesh: &DeviceMesh) -> Result<Self> {
        let net = on_device(self, &mesh.device().clone().autodiff());
        let named = |is: fn(&str) -> bool| {
            mesh.names()
                .iter()
                .filter(|name| is(name))
                .cloned()
                .collect::<Vec<_>>()
        };
        let (data, shard) = (
            named(|name| name != "tp"),
            named(|name| name.starts_with("shard")),
        );
        let config = FullyShard::new().with_units(["up"]).with_shard_dims(shard);
        let config = config.with_replicate_dims(named(|name| name == "replicate"));
        let net = match tp(mesh)? {
            Some(tp) => {
                let plan = Plan::new()
                    .with_style("up", Style::colwise())
                    .with_style("down", Style::rowwise());
                parallelize(net, &tp, plan)?
            }
            None => net,
        };
        if data.is_empty() {
            Ok(net)
        } else {
            fully_shard(net, &mesh.slice(data)?, config)
        }
    }

    fn loss(&self, step: u64, mesh: &DeviceMesh) -> Result<Tensor<1>> {
        let device = mesh.device().clone().autodiff();
        let (rank, ranks) = data_rank(mesh);
        let own = rank * (ROWS / ranks)..(rank + 1) * (ROWS / ranks);
        let rows = |seed| tensor::<2>(seed, [ROWS, 5], &device).slice([own.clone()]);
        let tp = tp(mesh)?;
        let y = unit(self, rows(2 * step), |net, x| match &tp {
            None => net
                .down
                .forward(unit(&net.up, x, |up, x| up.forward(x)).tanh()),
            Some(tp) => {
                let x = DTensor::from_local(x, tp, &[Placement::Replicate])
                    .unwrap_or_else(|error| error.unwind());
                let h = unit(&net.up, x, |up, x| up.forward_dtensor(x)).tanh();
                net.down
                    .forward_dtensor(h)
                    .full_tensor()
                    .unwrap_or_else(|error| error.unwind())
            }
        });
        Ok((y - rows(2 * step + 1).slice([0..ROWS / ranks, 0..3]))
            .square()
            .mean())
    }
}

fn tp(mesh: &DeviceMesh) -> Result<Option<DeviceMesh>> {
    mesh.names()
        .iter()
        .any(|name| name == "tp")
        .then(|| mesh.slice("tp"))
        .transpose()
}

impl Run {
    fn new(net: Net) -> Self {
        Self {
            net,
            optimizer: sharded(AdamWConfig::new().with_weight_decay(0.1)),
        }
    }

    fn train(mut self, steps: Range<u64>, mesh: &DeviceMesh) -> Result<Self> {
        for step in steps {
            let grads =
                GradientsParams::from_grads(self.net.loss(step, mesh)?.backward(), &self.net);
            // The rate is another in every step: one that is repeated or left out shows.
            self.net = self
                .optimizer
                .step(1e-2 / (step + 1) as f64, self.net, grads)?;
        }
        Ok(self)
    }

    /// Returns all state as one device has it.
    fn full(&self) -> Result<(Net, FullOptimizerState)> {
        Ok((
            full_model(&self.net)?,
            self.optimizer.state(&self.net)?.full()?,
        ))
    }

    fn save(&self, manager: &CheckpointManager, mesh: &DeviceMesh) -> Result<()> {
        let state = State::new(mesh)
            .with_step(STEPS)
            .with_model("model", &self.net)?;
        let state = state.with_optimizer("optimizer", &self.optimizer.state(&self.net)?)?;
        manager.save(&state.with_value("batches", &STEPS)?)?;
        Ok(())
    }

    /// Continues from files: of the model it begins with, no value is left.
    fn resume(manager: &CheckpointManager, mesh: &DeviceMesh) -> Result<Self> {
        let checkpoint = manager.latest()?.expect("it was saved");
        let first: u64 = checkpoint.value("batches")?;
        let (net, _) =
            checkpoint.load_model("model", Net::new().distribute(mesh)?, &LoadOptions::new())?;
        let Self { net, optimizer } = Self::new(net);
        let optimizer = optimizer.load_state(
            &net,
            checkpoint
                .load_optimizer("optimizer", &net, &LoadOptions::new())?
                .0,
        )?;
        Self { net, optimizer }.train(first..2 * STEPS, mesh)
    }

    /// Continues from full values in memory.
    fn carry((net, state): &(Net, FullOptimizerState), mesh: &DeviceMesh) -> Result<Self> {
        let Self { net, optimizer } = Self::new(net.distribute(mesh)?);
        let optimizer = optimizer.load_state(&net, state.distribute(parameter_specs(&net)?)?)?;
        Self { net, optimizer }.train(STEPS..2 * STEPS, mesh)
    }
}

/// A mesh, by the sizes of its dimensions.
fn mesh(sizes: &[usize], has_tp: bool) -> MeshTest {
    let names: &[&str] = match (sizes.len(), has_tp) {
        (1, false) => &["shard"],
        (2, false) => &["replicate", "shard"],
        (_, false) => &["replicate", "shard", "shard2"],
        (dims, true) => &["replicate", "shard", "tp"][3 - dims..],
    };
    MeshTest::new(sizes, names)
}

/// Trains on one mesh, saves, and continues on all, with and without tensor parallelism.
fn resumes_on_every_mesh(save: &[usize], has_tp: bool) {
    let folder = Folder::new(&format!("resume-{save:?}-{has_tp}"));
    let saved = mesh(save, has_tp).run(|mesh| {
        let half = Run::new(Net::new().distribute(mesh)?).train(0..STEPS, mesh)?;
        half.save(&CheckpointManager::new(&*folder, mesh), mesh)?;
        let full = half.full()?;
        Ok((full, half.train(STEPS..2 * STEPS, mesh)?.full()?))
    });
    let (half, uninterrupted) = &saved[0];
    let values = |net: &Net| -> Values { values(net, None) };
    let moved = max_diff(&values(&uninterrupted.0), &values(&half.0));
    assert!(moved > 1e-3, "the second half moves weights, by {moved}");
    for (sizes, loads_tp) in SIZES.into_iter().cartesian_product([false, true]) {
        let test = mesh(sizes, loads_tp);
        test.run(|mesh| {
            let resumed = Run::resume(&CheckpointManager::new(&*folder, mesh), mesh)?.full()?;
            let carried = Run::carry(half, mesh)?.full()?;
            assert_eq!(values(&resumed.0), values(&carried.0), "weights on {mesh}");
            assert_eq!(resumed.1, carried.1, "optimizer on {mesh}");
            let apart = max_diff(&values(&resumed.0), &values(&uninterrupted.0));
            assert!(
                apart <= BOUND,
                "{apart:.1e} apart from an uninterrupted run on {mesh}"
            );
            if (sizes, loads_tp) == (save, has_tp) {
                assert_eq!(
                    values(&resumed.0),
                    values(&uninterrupted.0),
                    "weights on {mesh}"
                );
                assert_eq!(resumed.1, uninterrupted.1, "optimizer on {mesh}");
            }
            Ok(())
        });
    }
}

const SIZES: [&[usize]; 6] = [&[1], &[2], &[3], &[4], &[2, 2], &[2, 2, 2]];

#[test]
fn a_sharded_run_resumes_on_every_mesh() {
    resumes_on_every_mesh(&[2], false);
}

#[test]
fn a_replicated_run_resumes_on_every_mesh() {
    resumes_on_every_mesh(&[2, 2], false);
}

#[test]
fn a_tensor_parallel_run_resumes_on_every_mesh() {
    resumes_on_every_mesh(&[2, 2], true);
}

/// The last of 4 ranks has nothing of the second bias.
#[test]
fn a_run_with_empty_shards_resumes_on_every_mesh() {
    resumes_on_every_mesh(&[4], false);
}
