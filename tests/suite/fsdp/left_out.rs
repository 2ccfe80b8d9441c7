//! Units that the last of several backwards leaves out, such as experts to which no token of a
//! micro-batch is routed: a step has their gradients all the same.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Gradients, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{FsdpModule, checkpoint_activations};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{max_diff, mean, on_device, tensor, values};
use crate::parallel::support::full_grads;

const WIDTH: usize = 3;

/// Which experts each micro-batch enters, step by step.
const STEPS: [&[&[usize]]; 3] = [
    &[&[0, 1], &[1], &[2]],
    &[&[2], &[0]],
    &[&[1, 0], &[0, 2], &[1]],
];

#[derive(Module, Debug)]
struct Experts {
    gate: Linear,
    experts: Vec<Linear>,
}

/// The way in which gradients of micro-batches before the last wait.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Waits {
    /// Whole.
    Unreduced,
    /// Over the replicas.
    Scattered,
    /// The first whole, those after it over the replicas.
    Both,
}

/// The way in which experts are entered.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Entered {
    /// Each by itself.
    Alone,
    /// In the unit of the model.
    InRoot,
    /// The same, and backward computes each again.
    Checkpointed,
    /// None is: each weight is read outside its unit.
    Never,
}

impl Waits {
    fn set(self, model: &Experts, at: usize, is_last: bool) -> Result<()> {
        let units = FsdpModule::of(model)?;
        units.set_requires_gradient_sync(
            is_last || self == Self::Scattered || self == Self::Both && at > 0,
        );
        units.set_requires_all_reduce(is_last || self == Self::Unreduced);
        Ok(())
    }
}

impl Experts {
    fn new(device: &Device) -> Self {
        let layer = |seed| {
            let layer = LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(device);
            Linear {
                weight: layer.weight.map(|_| tensor(seed, [WIDTH, WIDTH], device)),
                ..layer
            }
        };
        Self {
            gate: layer(1),
            experts: (2..5).map(layer).collect(),
        }
    }

    /// Every second rank leaves the weight of an expert unused that it enters second.
    fn loss(&self, x: Tensor<2>, route: &[usize], entered: Entered, rank: usize) -> Tensor<1> {
        let forward = |model: &Self, x: Tensor<2>| {
            let x = if entered == Entered::Alone {
                x
            } else {
                model.gate.forward(x)
            };
            route.iter().enumerate().fold(x, |x, (at, &expert)| {
                let is_used = at == 0 || rank.is_multiple_of(2) || entered == Entered::Never;
                let body = move |expert: &Linear, x: Tensor<2>| {
                    if is_used { expert.forward(x) } else { x }
                };
                let expert = &model.experts[expert];
                match entered {
                    Entered::Never => body(expert, x),
                    Entered::Checkpointed => checkpoint_activations(expert, x, body),
                    Entered::Alone | Entered::InRoot => unit(expert, x, body),
                }
            })
        };
        let y = match entered {
            Entered::InRoot | Entered::Checkpointed => unit(self, x, forward),
            Entered::Alone | Entered::Never => forward(self, x),
        };
        y.square().sum()
    }
}

fn batch(rank: usize, at: usize, device: &Device) -> Tensor<2> {
    tensor((17 * at + rank + 9) as u64, [2, WIDTH], device)
}

type Grads = BTreeMap<String, Vec<f32>>;

/// The gradients of each step, on one device: the mean over ranks of sums over micro-batches.
fn expected(model: &Experts, entered: Entered, ranks: usize) -> Vec<Grads> {
    let device = Device::flex().autodiff();
    let mut model = on_device(model, &device);
    let mut steps = Vec::new();
    for step in STEPS {
        let of_rank = |rank| {
            let of_batch = |(at, route): (usize, &&[usize])| {
                model.loss(batch(rank, at, &device), route, entered, rank)
            };
            let loss = step
                .iter()
                .enumerate()
                .map(of_batch)
                .reduce(|a, b| a + b)
                .expect("a micro-batch");
            GradientsParams::from_grads(loss.backward(), &model)
        };
        steps.push(mean(
            (0..ranks)
                .map(|rank| values(&model, Some(&of_rank(rank))))
                .collect::<Vec<_>>()
                .iter(),
        ));
        let loss = (0..ranks).flat_map(|rank| {
            let (model, device) = (&model, &device);
            let of_batch = move |(at, route): (usize, &&[usize])| {
                model.loss(batch(rank, at, device), route, entered, rank)
            };
            step.iter().enumerate().map(of_batch)
        });
        let loss = loss.reduce(|a, b| a + b).expect("a rank") / ranks as f32;
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = SgdConfig::new().init().step(0.1, model, grads);
    }
    steps
}

fn config(reshard: ReshardAfterForward) -> FullyShard {
    FullyShard::new()
        .with_units(["experts.*"])
        .with_reshard_after_forward(reshard)
}

#[test]
fn a_step_has_the_gradients_of_units_that_its_last_backward_leaves_out() {
    use Entered::{Alone, Checkpointed, InRoot, Never};
    use Waits::{Both, Scattered, Unreduced};
    let model = Experts::new(&Device::flex());
    let replicas = || MeshTest::new([2, 2], ["replicate", "shard"]);
    for entered in [Alone, InRoot, Checkpointed, Never] {
        let expected = [2, 4].map(|ranks| (ranks, expected(&model, entered, ranks)));
        let cells = [
            (MeshTest::new([2], ["shard"]), Unreduced),
            (replicas(), Unreduced),
            (replicas(), Scattered),
            (replicas(), Both),
        ];
        for (mesh, waits) in cells {
            for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Never] {
                mesh.run(|mesh| {
                    let device = mesh.device().clone().autodiff();
                    let (rank, ranks) = (mesh.rank(), mesh.size());
                    let mut model = fully_shard(on_device(&model, &device), mesh, config(reshard))?;
                    let (_, expected) = expected
                        .iter()
                        .find(|(of, _)| *of == ranks)
                        .expect("2 or 4");
                    for (step, expected) in STEPS.iter().zip(expected) {
                        let mut grads = None;
                        for (at, route) in step.iter().enumerate() {
                            let is_last = at + 1 == step.len();
                            waits.set(&model, at, is_last)?;
                            let loss = model.loss(batch(rank, at, &device), route, entered, rank);
                            let of_batch = GradientsParams::from_grads(loss.backward(), &model);
                            assert!(
                                is_last || of_batch.is_empty(),
                                "gradients that wait are given to nobody"
                            );
                            grads = Some(of_batch);
                        }
                        let grads = grads.expect("a micro-batch");
                        let diff = max_diff(&full_grads(&model, &grads)?, expected);
                        assert!(
                            diff < 1e-4,
                            "{entered:?}, {waits:?}, {reshard:?}: gradients are off by {diff}"
                        );
                        model = SgdConfig::new().init().step(0.1, model, grads);
                    }
                    Ok(())
                });
            }
        }
    }
}

/// One layer of weights that are all 1, whose gradient is 1 where each rank's input is ones.
fn layer(device: &Device) -> Linear {
    LinearConfig::new(2, 1)
        .with_bias(false)
        .with_initializer(Initializer::Ones)
        .init(device)
}

fn backward(layer: &Linear) -> Gradients {
    let x = Tensor::<2>::ones([1, 2], &layer.weight.base().device());
    unit(layer, x, |layer, x| layer.forward(x)).sum().backward()
}

/// The gradient of the first weight, if this rank has it or a replica does.
fn gradient(layer: &Linear, grads: &Gradients) -> Option<f32> {
    layer.weight.shard_grad(grads).map(|grad| {
        grad.full_tensor()
            .unwrap()
            .slice([0..1, 0..1])
            .into_scalar()
    })
}

#[test]
fn a_backward_leaves_gradients_of_other_models_where_they_wait() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let [a, b] = [(); 2].map(|()| fully_shard(layer(&device), mesh, FullyShard::new()));
        let (a, b) = (a?, b?);
        let waiting = FsdpModule::of(&a)?.no_sync();
        backward(&a);
        drop(waiting);
        let grads = backward(&b);
        assert_eq!(
            [gradient(&a, &grads), gradient(&b, &grads)],
            [None, Some(1.0)]
        );
        assert_eq!(
            gradient(&a, &backward(&a)),
            Some(2.0),
            "those of both its backwards"
        );
        Ok(())
    });
}

#[test]
fn units_of_earlier_calls_are_of_the_model_around_them() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let sharded = || fully_shard(layer(&device), mesh, FullyShard::new());
        let model = fully_shard(
            vec![sharded()?, sharded()?, layer(&device)],
            mesh,
            FullyShard::new().with_units(["2"]),
        )?;
        let waiting = FsdpModule::of(&model)?.no_sync();
        backward(&model[0]);
        drop(waiting);
        let grads = backward(&model[1]);
        assert_eq!(
            [0, 1, 2].map(|at| gradient(&model[at], &grads)),
            [Some(1.0), Some(1.0), None]
        );
        Ok(())
    });
}

#[test]
fn each_unit_that_was_left_out_is_reduced_once() {
    for (dims, names, calls) in [
        (&[2][..], &["shard"][..], [0, 3, 1]),
        (&[2, 2], &["replicate", "shard"], [0, 3, 1]),
    ] {
        MeshTest::new(dims, names).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let model = vec![layer(&device), layer(&device), layer(&device)];
            let model = fully_shard(model, mesh, FullyShard::new().with_units(["*"]))?;
            let ledger = mesh.world().ledger();
            let reduced = |entered: &[usize]| {
                ledger.reset();
                entered.iter().for_each(|&at| drop(backward(&model[at])));
                ledger.calls(Op::ReduceScatter)
            };
            let waiting = FsdpModule::of(&model)?.no_sync();
            let before = reduced(&[2, 0, 2]);
            drop(waiting);
            assert_eq!([before, reduced(&[1]), reduced(&[1])], calls);
            Ok(())
        });
    }
}

/// Experts of different models: the last backward cannot know of the other.
#[test]
fn gradients_that_miss_a_step_are_told() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let sharded = || fully_shard(layer(&device), mesh, FullyShard::new());
        let mut experts = vec![sharded()?, sharded()?];
        let all = |experts: &[Linear]| {
            experts
                .iter()
                .map(FsdpModule::of)
                .collect::<Result<Vec<_>>>()
        };
        let waiting: Vec<_> = all(&experts)?.iter().map(|units| units.no_sync()).collect();
        backward(&experts[0]);
        drop(waiting);
        let grads = GradientsParams::from_grads(backward(&experts[1]), &experts);
        experts = SgdConfig::new().init().step(0.1, experts, grads);
        let told = Error::catch(|| Ok(backward(&experts[0])))
            .err()
            .expect("gradients have missed the step");
        assert!(
            matches!(&told, Error::Param(ParamError::PendingGradients { unit }) if unit == "root"),
            "{told}"
        );
        all(&experts)?
            .iter()
            .for_each(|units| units.reset_iter_state());
        assert_eq!(gradient(&experts[0], &backward(&experts[0])), Some(1.0));
        Ok(())
    });
}
