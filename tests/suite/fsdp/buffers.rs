//! Running statistics, and what else a model keeps beside its float parameters.

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, RunningState};
use burn::nn::{BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_dtensor::comm::{CommError, Op};
use burn_dtensor::fsdp::{ParamError, remesh};
use burn_dtensor::prelude::*;
use itertools::Itertools;

use super::support::{fill, tensor};
use crate::launched;

const WIDTH: usize = 3;
const MESHES: [&[usize]; 3] = [&[2], &[3], &[2, 2]];
const POLICIES: [BufferSync; 2] = [BufferSync::FirstRank, BufferSync::Average];

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    norm: BatchNorm,
}

#[derive(Module, Debug)]
struct Net {
    stem: BatchNorm,
    blocks: Vec<Block>,
    /// burn shows these to visitors too.
    steps: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
    /// Nothing is known of this one.
    constant: Tensor<1>,
}

impl Net {
    /// With values that no one draws.
    fn new(device: &Device) -> Self {
        let block = |seed| {
            let linear = LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(device);
            let weight = tensor(seed, [WIDTH, WIDTH], device);
            Block {
                linear: Linear {
                    weight: linear
                        .weight
                        .map(|_| weight.set_require_grad(device.is_autodiff())),
                    ..linear
                },
                norm: BatchNormConfig::new(WIDTH).init(device),
            }
        };
        Self {
            stem: BatchNormConfig::new(WIDTH).init(device),
            blocks: vec![block(1), block(2)],
            steps: Param::initialized(
                burn::module::ParamId::new(),
                Tensor::from_data([0, 0], device),
            ),
            mask: Param::initialized(
                burn::module::ParamId::new(),
                Tensor::from_data([false, true], device),
            ),
            constant: Tensor::ones([WIDTH], device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        unit(self, x, |net, x| {
            let mut x = net.stem.forward(x);
            for block in &net.blocks {
                x = unit(block, x, |block, x| {
                    block.norm.forward(block.linear.forward(x).tanh())
                });
            }
            x * net.constant.clone().unsqueeze()
        })
    }

    fn norms(&self) -> impl Iterator<Item = &BatchNorm> {
        std::iter::once(&self.stem).chain(self.blocks.iter().map(|block| &block.norm))
    }

    /// Running means and variances, as a forward in validation sees them.
    fn statistics(&self) -> Vec<f32> {
        let states = self
            .norms()
            .flat_map(|norm| [&norm.running_mean, &norm.running_var]);
        states
            .flat_map(|state| state.value_sync().into_data().try_to_vec::<f32>().unwrap())
            .collect()
    }
}

/// Of this rank and step alone.
fn batch(rank: usize, step: usize, device: &Device) -> Tensor<2> {
    tensor((100 * rank + step) as u64 + 1, [5, WIDTH], device) * 3.0 + rank as f64
}

fn on_mesh<T: Send>(
    shape: &[usize],
    program: impl Fn(&DeviceMesh, &Device) -> Result<T> + Sync,
) -> Vec<T> {
    let names: &[&str] = if shape.len() == 1 {
        &["shard"]
    } else {
        &["replicate", "shard"]
    };
    let ranks = launch(Launch::threads(shape.iter().product()), |world| {
        program(
            &DeviceMesh::new(world, shape, names)?,
            &world.device().clone().autodiff(),
        )
    });
    ranks
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{shape:?}: {error}"))
}

fn sharded(model: Net, mesh: &DeviceMesh, buffers: BufferSync) -> Result<Net> {
    fully_shard(
        model,
        mesh,
        FullyShard::new()
            .with_units(["blocks.*"])
            .with_buffer_sync(buffers),
    )
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    tensor
        .into_data()
        .try_to_vec::<f32>()
        .unwrap()
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

/// Three steps of training with a model that was made before `launch`. What the ranks then
/// validate, save and gather.
fn train(shape: &[usize], buffers: BufferSync) -> Vec<[Vec<u32>; 4]> {
    let model = Net::new(&Device::flex().autodiff());
    on_mesh(shape, |mesh, device| {
        let mut model = sharded(model.clone(), mesh, buffers)?;
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let loss = model
                .forward(batch(mesh.rank(), step, device))
                .square()
                .mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(0.1, model, grads);
        }
        let x = batch(9, 9, &Device::flex());
        let full = full_model(&model)?;
        // Nothing that follows reaches the gathered model.
        model.forward(batch(mesh.rank(), 4, device));
        let gathered = bits(full.valid().forward(x.clone()));
        let again = bits(full.valid().forward(x.clone()));
        sync_buffers(&model)?;
        let valid = model.valid();
        let validated = bits(valid.forward(x));
        let statistics = valid.statistics().into_iter().map(f32::to_bits).collect();
        assert_eq!(gathered, again);
        Ok([
            gathered,
            validated,
            statistics,
            bits(full.stem.running_mean.value()),
        ])
    })
}

/// Statistics differ in training, and nobody who validates, saves or gathers sees it.
#[test]
fn all_ranks_validate_and_gather_one_model() {
    for shape in MESHES {
        for buffers in POLICIES {
            let ranks = train(shape, buffers);
            for rank in &ranks {
                assert_eq!(rank, &ranks[0], "{shape:?}, {buffers:?}");
            }
            for run in 0..2 {
                assert_eq!(
                    train(shape, buffers),
                    ranks,
                    "{shape:?}, {buffers:?}, run {run}"
                );
            }
        }
    }
}

/// Against the same model, unsharded, of which each rank makes one of its own.
#[test]
fn statistics_are_the_first_ranks_or_the_average() {
    for shape in MESHES {
        for buffers in POLICIES {
            let model = Net::new(&Device::flex().autodiff());
            let ranks = on_mesh(shape, |mesh, device| {
                let (plain, sharded) = (Net::new(device), sharded(model.clone(), mesh, buffers)?);
                for step in 0..3 {
                    let x = batch(mesh.rank(), step, device);
                    assert_eq!(bits(sharded.forward(x.clone())), bits(plain.forward(x)));
                }
                let (own, trained) = (plain.valid().statistics(), sharded.statistics());
                sync_buffers(&sharded)?;
                let synced = sharded.statistics();
                // What was made equal goes on from there.
                sharded.forward(batch(mesh.rank(), 7, device));
                assert_ne!(sharded.statistics(), synced);
                Ok((own, trained, synced, full_model(&sharded)?.statistics()))
            });
            for (own, trained, synced, gathered) in &ranks {
                assert_eq!(
                    own, trained,
                    "nothing of another rank is in them, {shape:?}"
                );
                assert_eq!(gathered, &ranks[0].3);
                let average = |at: usize| {
                    ranks
                        .iter()
                        .map(|(own, ..)| f64::from(own[at]))
                        .sum::<f64>()
                        / ranks.len() as f64
                };
                for (at, &synced) in synced.iter().enumerate() {
                    match buffers {
                        BufferSync::FirstRank => assert_eq!(synced, ranks[0].0[at]),
                        BufferSync::Average => {
                            assert!((f64::from(synced) - average(at)).abs() < 1e-6, "{shape:?}")
                        }
                    }
                }
            }
            assert_ne!(ranks[0].0, ranks[1].0, "ranks have seen other batches");
            assert_eq!(
                model.statistics(),
                Net::new(&Device::flex()).statistics(),
                "the model outside is untouched"
            );
        }
    }
}

/// As a model of ranks that survive a failure.
#[test]
fn statistics_are_averaged_on_another_mesh_too() {
    let means = on_mesh(&[2], |mesh, device| {
        let config = FullyShard::new().with_buffer_sync(BufferSync::Average);
        let norm: BatchNorm = fully_shard(BatchNormConfig::new(2).init(device), mesh, config)?;
        let norm = remesh(norm, &DeviceMesh::new(mesh.world(), [2], ["again"])?)?;
        let x = Tensor::<2>::full([4, 2], 10.0 * (1 + mesh.rank()) as f32, device);
        unit(&norm, x, |norm, x| norm.forward(x));
        sync_buffers(&norm)?;
        Ok(norm.running_mean.value_sync().into_data())
    });
    // Momentum 0.1, of 10 and 20.
    assert_eq!(means, vec![TensorData::from([1.5_f32; 2]); 2]);
}

/// As a checkpoint that only one rank loads.
#[test]
fn only_the_first_rank_has_the_buffers_and_all_get_them() {
    for shape in MESHES {
        let ranks = on_mesh(shape, |mesh, device| {
            let mut model = Net::new(device);
            if mesh.rank() == 0 {
                model.stem.running_mean =
                    RunningState::new(Tensor::from_data([1.0, 2.0, 3.0], device));
                model.blocks[1].norm.running_var =
                    RunningState::new(Tensor::from_data(fill(9, &[WIDTH]), device));
                model.steps = model.steps.map(|steps| steps + 41);
                model.mask = model.mask.map(|mask| mask.bool_not());
            }
            let model = sharded(model, mesh, BufferSync::Average)?;
            let valid = model.valid();
            assert_eq!(
                valid.stem.running_mean.value().into_data(),
                TensorData::from([1.0f32, 2.0, 3.0])
            );
            assert_eq!(
                valid.blocks[1].norm.running_var.value().into_data(),
                fill(9, &[WIDTH])
            );
            assert_eq!(
                model.steps.val().into_data().try_to_vec::<i32>().unwrap(),
                [41, 41]
            );
            assert_eq!(
                model.mask.val().into_data().try_to_vec::<bool>().unwrap(),
                [true, false]
            );
            Ok(model.forward(batch(0, 0, device)).into_data())
        });
        assert!(ranks.iter().all(|output| *output == ranks[0]), "{shape:?}");
    }
}

#[test]
fn buffers_of_tensor_parallel_ranks_are_the_first_ones() {
    on_mesh(&[2], |mesh, device| {
        let mut model = Net::new(device);
        if mesh.rank() == 0 {
            model.stem.running_mean = RunningState::new(Tensor::full([WIDTH], 7.0, device));
        }
        let model = parallelize(model, mesh, Plan::new())?;
        assert_eq!(
            model.stem.running_mean.value().into_data(),
            TensorData::from([7.0f32; WIDTH])
        );
        Ok(())
    });
}

/// A transition to validation and back, which makes new statistics, would change all of these.
#[test]
fn nothing_else_changes_when_buffers_become_a_ranks_own() {
    let ranks = on_mesh(&[2], |mesh, _| {
        let device = mesh.device().clone().autodiff().gradient_checkpointing();
        let lazy = LinearConfig::new(2, 2)
            .with_initializer(Initializer::Constant { value: 1.0 })
            .init(&device);
        let mut net = Net::new(&device);
        (net.stem, net.blocks[0]) = (net.stem.freeze(), net.blocks[0].clone().no_grad());
        let model = (net, lazy);
        let ids = |(net, lazy): &(Net, Linear)| {
            let stem = [net.stem.gamma.id, net.stem.training.id];
            let block = &net.blocks[0];
            [
                stem[0],
                stem[1],
                block.linear.weight.id,
                block.norm.training.id,
                net.steps.id,
                net.mask.id,
                lazy.weight.id,
            ]
        };
        let before = ids(&model);
        let model = fully_shard(model, mesh, FullyShard::new().with_ignored(["1.*"]))?;
        assert_eq!(ids(&model), before);
        assert!(
            !model.1.weight.is_initialized(),
            "an ignored parameter stays lazy"
        );
        let net = &model.0;
        assert!(
            !net.blocks[0].linear.weight.is_require_grad() && !net.stem.gamma.is_require_grad()
        );
        assert!(net.blocks[0].norm.training.is_enabled() && !net.stem.training.is_enabled());
        let strategy = |tensor: Tensor<1>| tensor.gradient_checkpointing_strategy();
        let expected = strategy(Tensor::empty([0], &device));
        assert_eq!(strategy(net.stem.running_mean.value()), expected);
        assert_eq!(strategy(net.blocks[0].norm.running_var.value()), expected);
        let before = net.statistics();
        // Constants of a field take part, with gradient checkpointing too.
        net.forward(batch(0, 0, &device)).sum().backward();
        let after = net.statistics();
        let frozen = 2 * WIDTH;
        assert_eq!(
            before[..frozen],
            after[..frozen],
            "a frozen norm keeps its statistics"
        );
        assert_ne!(before[frozen..], after[frozen..]);
        let trained = net.clone().unfreeze();
        assert!(trained.stem.training.is_enabled() && trained.stem.gamma.is_require_grad());
        Ok(())
    });
    assert_eq!(ranks.len(), 2);
}

#[test]
fn buffers_of_a_call_travel_together_and_none_without() {
    on_mesh(&[2, 2], |mesh, device| {
        let ledger = mesh.world().ledger();
        let calls = |op| ledger.calls(op);
        let model = sharded(Net::new(device), mesh, BufferSync::Average)?;
        ledger.reset();
        sync_buffers(&model)?;
        assert_eq!((calls(Op::AllReduce), calls(Op::Broadcast)), (1, 0));
        let linear = fully_shard(
            LinearConfig::new(3, 3).init(device),
            mesh,
            FullyShard::new(),
        )?;
        ledger.reset();
        sync_buffers(&linear)?;
        sync_buffers(&Net::new(device))?;
        assert_eq!((calls(Op::AllReduce), calls(Op::Broadcast)), (0, 0));
        Ok(())
    });
}

/// Of inner modules that are sharded over other ranks, with another policy.
#[test]
fn buffers_follow_the_call_that_sharded_their_module() {
    let ranks = on_mesh(&[2, 2], |mesh, device| {
        let mut model = Net::new(device);
        let rank = mesh.rank() as f32;
        for norm in model.norms_mut() {
            norm.running_mean = RunningState::new(Tensor::full([WIDTH], rank, device));
        }
        model.steps = model.steps.map(|steps| steps + rank as i32);
        let inner = FullyShard::new().with_buffer_sync(BufferSync::Average);
        let blocks = model.blocks.into_iter();
        model.blocks = blocks
            .map(|block| fully_shard(block, &mesh.slice("shard")?, inner.clone()))
            .collect::<Result<_>>()?;
        model = fully_shard(model, mesh, FullyShard::new())?;
        let means = |model: &Net| -> Vec<f32> {
            model
                .norms()
                .map(|norm| {
                    norm.running_mean
                        .value()
                        .into_data()
                        .try_to_vec::<f32>()
                        .unwrap()[0]
                })
                .collect()
        };
        let taken = means(&model);
        // As near to every module: it goes with the first parameter, of the outer call.
        assert_eq!(
            model.steps.val().into_data().try_to_vec::<i32>().unwrap(),
            [0, 0]
        );
        for norm in model.norms_mut() {
            norm.running_mean = RunningState::new(Tensor::full([WIDTH], rank, device));
        }
        sync_buffers(&model)?;
        Ok((taken, means(&model)))
    });
    for (rank, (taken, synced)) in ranks.into_iter().enumerate() {
        let pair = (rank / 2 * 2) as f32;
        assert_eq!(
            taken,
            [0.0, pair, pair],
            "the first of the ranks that shard the module"
        );
        assert_eq!(
            synced,
            [0.0, pair + 0.5, pair + 0.5],
            "and the average over them"
        );
    }
}

/// A module that is not distributed keeps its own; one of whose parameters some are does not.
#[test]
fn buffers_of_ignored_modules_are_left_alone() {
    let ranks = on_mesh(&[2], |mesh, device| {
        let mut model = Net::new(device);
        let rank = mesh.rank() as f32;
        for norm in model.norms_mut() {
            norm.running_mean = RunningState::new(Tensor::full([WIDTH], rank, device));
        }
        let config = FullyShard::new()
            .with_ignored(["blocks.0.**", "blocks.1.norm.gamma"])
            .with_buffer_sync(BufferSync::Average);
        let model = fully_shard(model, mesh, config)?;
        let means = |model: &Net| {
            model
                .norms()
                .map(|norm| norm.running_mean.value().max().into_scalar())
                .collect_vec()
        };
        let taken: Vec<f32> = means(&model);
        sync_buffers(&model)?;
        Ok([taken, means(&model)])
    });
    assert_eq!(ranks[1], [[0.0, 1.0, 0.0]; 2]);
}

impl Net {
    fn norms_mut(&mut self) -> impl Iterator<Item = &mut BatchNorm> {
        std::iter::once(&mut self.stem).chain(self.blocks.iter_mut().map(|block| &mut block.norm))
    }
}

#[test]
fn ranks_with_other_buffers_are_told() {
    let error = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let device = world.device().clone().autodiff();
        let mut model = Net::new(&device);
        if world.rank() == 1 {
            model.stem.running_mean = RunningState::new(Tensor::zeros([WIDTH + 1], &device));
        }
        sharded(model, &mesh, BufferSync::FirstRank).map(|_| ())
    })
    .expect_err("their statistics have other shapes");
    assert!(
        matches!(&error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{error}"
    );
    assert!(
        error.to_string().contains("fully_shard, buffers"),
        "{error}"
    );
}

/// A module written by hand that shows visitors what it hides from mappers.
#[derive(Debug, Clone)]
struct Hidden(RunningState<Tensor<1>>);

impl Module for Hidden {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.collect_devices(devices)
    }

    fn to_device(self, device: &Device) -> Self {
        Self(self.0.to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        Self(self.0.fork(device))
    }

    fn valid(&self) -> Self {
        Self(self.0.valid())
    }

    fn train(self) -> Self {
        Self(self.0.train())
    }

    fn materialize(self) -> Self {
        self
    }
}

#[test]
fn buffers_that_mappers_do_not_see_are_refused() {
    on_mesh(&[2], |mesh, device| {
        let hidden = || Hidden(RunningState::new(Tensor::zeros([WIDTH], device)));
        let linear = || LinearConfig::new(2, 2).init(device);
        let refused =
            |error: Error| matches!(error, Error::Param(ParamError::ParamNotVisited { .. }));
        assert!(
            fully_shard((linear(), hidden()), mesh, FullyShard::new())
                .map(|_| ())
                .is_err_and(refused)
        );
        let error = fully_shard((hidden(), linear()), mesh, FullyShard::new()).map(|_| ());
        let Err(Error::Param(ParamError::ParamNotVisited { param })) = error else {
            panic!("{error:?}")
        };
        assert_eq!(
            param, "1.weight",
            "the first that was put in another's place"
        );
        Ok(())
    });
}
