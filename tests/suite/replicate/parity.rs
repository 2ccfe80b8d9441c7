//! Trainings by `replicate` beside those of `fully_shard`, of whole gradients averaged by hand, and
//! of one process on the global batch.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, Op, World, launch};
use burn_dtensor::fsdp::{FsdpModule, FullyShard, full_model, fully_shard};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::replicate::{DataParallel, replicate};
#[cfg(feature = "mpi")]
use burn_dtensor::testing::ProcessTest;

use crate::fsdp::ddp_fsdp_hsdp_parity::{AllReduce, batch, gpt};
use crate::fsdp::support::{max_diff, on_device, tensor, values};
use crate::launched;

const STEPS: usize = 4;

#[derive(Debug, Clone, Copy)]
enum Mode {
    ByHand,
    FullyShard,
    Replicate {
        buckets: [usize; 2],
        dims: &'static [usize],
    },
}

/// Weights after some steps, of each rank, and the number of all-reduces of the last step.
fn train(
    world: &World,
    mode: Mode,
    tied: bool,
    checkpointing: bool,
) -> Result<(BTreeMap<String, Vec<f32>>, u64)> {
    let device = world.device().clone().autodiff();
    let device = match checkpointing {
        false => device,
        true => device.gradient_checkpointing(),
    };
    let mut model = gpt(tied, &device);
    model = match mode {
        Mode::ByHand => model,
        Mode::FullyShard => {
            let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
            fully_shard(model, &mesh, FullyShard::new().with_units(["layers.*"]))?
        }
        Mode::Replicate { buckets, dims } => {
            let names = ["a", "b"][..dims.len()].to_vec();
            let mesh = DeviceMesh::new(world, dims, names)?;
            let config = DataParallel::new()
                .with_units(["layers.*"])
                .with_bucket_bytes(buckets[0], buckets[1]);
            replicate(model, &mesh, config)?
        }
    };
    let mut optim = AdamWConfig::new().init();
    for step in 0..STEPS {
        world.ledger().reset();
        let (x, y) = (
            batch(step, world.rank(), 0, &device),
            batch(step, world.rank(), 1, &device),
        );
        let loss = model.loss(x, y);
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        if let Mode::ByHand = mode {
            let mut reduce = AllReduce { world, grads };
            model = model.map(&mut reduce);
            grads = reduce.grads;
        }
        model = optim.step(1e-2, model, grads);
    }
    let calls = world.ledger().calls(Op::AllReduce);
    Ok((values(&full_model(&model)?, None), calls))
}

/// The weights that all ranks have, and the number of all-reduces of a step.
fn trained(
    ranks: usize,
    mode: Mode,
    tied: bool,
    checkpointing: bool,
) -> (BTreeMap<String, Vec<f32>>, u64) {
    let program = |world: &World| train(world, mode, tied, checkpointing);
    let of_ranks = launched::values(launch(Launch::threads(ranks), program).unwrap());
    let mut of_ranks = of_ranks.into_iter();
    let first = of_ranks.next().unwrap();
    assert!(
        of_ranks.all(|other| other == first),
        "{mode:?}: ranks agree"
    );
    first
}

#[test]
fn replicate_has_the_bits_of_fully_shard_and_of_gradients_averaged_by_hand() {
    for (ranks, dims) in [(2, &[2][..]), (4, &[4]), (4, &[2, 2])] {
        for (tied, checkpointing) in [(false, false), (true, false), (false, true)] {
            let run = |mode| trained(ranks, mode, tied, checkpointing);
            let (expected, _) = run(Mode::ByHand);
            assert_eq!(run(Mode::FullyShard).0, expected);
            // Each unit alone, two buckets, and one for all.
            let mut calls = Vec::new();
            for buckets in [[0, 0], [1 << 10, 8 << 10], [1 << 20, 25 << 20]] {
                let (found, reduced) = run(Mode::Replicate { buckets, dims });
                assert_eq!(found, expected, "{ranks} ranks, {buckets:?}, tied {tied}");
                calls.push(reduced);
            }
            assert!(
                calls[0] > calls[1] && calls[1] > calls[2] && calls[2] == 1,
                "{calls:?}"
            );
        }
    }
}

/// The bits of ranks in processes are those of threads.
#[cfg(feature = "mpi")]
fn in_processes(processes: usize) {
    let mode = Mode::Replicate {
        buckets: [1 << 10, 8 << 10],
        dims: if processes == 2 { &[2] } else { &[2, 2] },
    };
    let digest = |(weights, calls): &(BTreeMap<String, Vec<f32>>, u64)| {
        let bits = weights.values().flatten().map(|value| value.to_bits());
        let sum = bits.fold(0_u64, |sum, bits| sum.rotate_left(5) ^ u64::from(bits));
        format!("weights {sum:016x} by {calls} all-reduces")
    };
    let text = ProcessTest::new(processes).run(|| {
        let ranks = Launch::from_env(processes).unwrap();
        let ranks = launch(ranks, |world| train(world, mode, true, false));
        for (_, trained) in ranks.unwrap() {
            println!("{}", digest(&trained));
        }
    });
    let Some(text) = text else { return };
    let expected = digest(&trained(processes, mode, true, false));
    assert_eq!(
        text.matches(&expected).count(),
        processes,
        "{expected}: {text}"
    );
}

#[cfg(feature = "mpi")]
#[test]
fn two_processes_have_the_bits_of_threads() {
    in_processes(2);
}

#[cfg(feature = "mpi")]
#[test]
fn four_processes_have_the_bits_of_threads() {
    in_processes(4);
}

/// Written for one device: no call of `unit`.
#[derive(Module, Debug)]
struct Plain {
    layers: Vec<Linear>,
    activation: Relu,
    head: Linear,
}

impl Plain {
    fn new(device: &Device) -> Self {
        let model = Self {
            layers: [4, 6]
                .map(|rows| LinearConfig::new(rows, 6).init(device))
                .into(),
            activation: Relu::new(),
            head: LinearConfig::new(6, 3).init(device),
        };
        let _ = values(&model, None);
        model
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let mut x = x;
        for layer in &self.layers {
            x = self.activation.forward(layer.forward(x));
        }
        self.head.forward(x).square().sum()
    }
}

/// This rank's rows of batch `step` in `of` parts; uneven ones: `rank + 1` rows.
fn rows(step: usize, rank: usize, uneven: bool, device: &Device) -> Tensor<2> {
    let count = if uneven { rank + 1 } else { 2 };
    tensor((step * 10 + rank) as u64, [count, 4], device)
}

/// The weights after ten steps of one process on the rows of all ranks.
fn on_the_global_batch(
    model: &Plain,
    ranks: usize,
    steps: usize,
    uneven: bool,
    per_step: usize,
) -> BTreeMap<String, Vec<f32>> {
    let device = Device::flex().autodiff();
    let mut model = on_device(model, &device);
    let mut optim = SgdConfig::new().init();
    for step in 0..steps {
        let parts = (0..per_step).flat_map(|part| (0..ranks).map(move |rank| (part, rank)));
        let all = parts
            .map(|(part, rank)| rows(step * per_step + part, rank, uneven, &device))
            .collect();
        let loss = model.loss(Tensor::cat(all, 0)).div_scalar(ranks as f64);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    values(&model, None)
}

#[test]
fn ten_steps_equal_those_of_one_process_on_the_global_batch() {
    let start = Plain::new(&Device::flex());
    for ranks in [2, 3, 4] {
        for (uneven, per_step) in [(false, 1), (true, 1), (false, 3)] {
            let expected = on_the_global_batch(&start, ranks, 10, uneven, per_step);
            let results = launch(Launch::threads(ranks), |world| {
                let device = world.device().clone().autodiff();
                let mesh = DeviceMesh::new(world, [ranks], ["dp"])?;
                let mut model = replicate(on_device(&start, &device), &mesh, DataParallel::new())?;
                let mut optim = SgdConfig::new().init();
                for step in 0..10 {
                    world.ledger().reset();
                    let mut grads = GradientsParams::new();
                    for part in 0..per_step {
                        // Accumulated without communication, but for the last.
                        let units = FsdpModule::of(&model)?;
                        units.set_requires_gradient_sync(part + 1 == per_step);
                        let x = rows(step * per_step + part, world.rank(), uneven, &device);
                        grads = GradientsParams::from_grads(model.loss(x).backward(), &model);
                        assert_eq!(!grads.is_empty(), part + 1 == per_step);
                        let calls = world.ledger().calls(Op::AllReduce);
                        assert_eq!(calls, u64::from(part + 1 == per_step), "one bucket");
                    }
                    model = optim.step(1e-2, model, grads);
                }
                Ok(values(&full_model(&model)?, None))
            });
            for found in launched::values(results.unwrap()) {
                let diff = max_diff(&found, &expected);
                assert!(
                    diff < 1e-6,
                    "{ranks} ranks, uneven {uneven}, {per_step} parts: {diff}"
                );
            }
        }
    }
}
