//! Collectives and hooks that the program puts in the place of a unit's, or behind them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{
    Call, CollectivePlan, Communicator, Launch, Op, ReduceOp, Work, World, launch,
};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, ParamExt, UnitCollectives, full_model, fully_shard, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::{Error, Result};
use parking_lot::Mutex;

use super::collective_counts::{BLOCKS, Stack, WIDTH, stack};
use super::support::{Holder, on_device, tensor, values};
use crate::launched;

fn config() -> FullyShard {
    FullyShard::new().with_units(["blocks.*"])
}

pub fn sharded(model: &Stack, world: &World, mesh: &DeviceMesh) -> Result<Stack> {
    fully_shard(
        on_device(model, &world.device().clone().autodiff()),
        mesh,
        config(),
    )
}

pub fn step(model: &Stack, world: &World) -> Result<BTreeMap<String, Vec<f32>>> {
    let device = world.device().clone().autodiff();
    let loss = model
        .forward(tensor(world.rank() as u64 + 1, [2, WIDTH], &device))
        .square()
        .sum();
    let mut grads = GradientsParams::from_grads(loss.backward(), model);
    Ok(values(
        &full_model(&model.clone().map(&mut Holder(&mut grads)))?,
        None,
    ))
}

/// A program may give its duplicates of a mesh's groups any name: its calls do not meet those of
/// units. Rank 0 calls before backward, rank 1 after it.
#[test]
fn duplicates_of_any_name_are_apart_from_those_of_units() {
    let model = stack(&Device::flex());
    let all = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let (model, comm) = (sharded(&model, world, &mesh)?, mesh.communicator(0)?);
        let own = ["reduced", "gathered again"].map(|name| comm.duplicate(name));
        let post = || own.each_ref().map(|comm| comm.barrier("own".into()));
        let early = (world.rank() == 0).then(post);
        step(&model, world)?;
        Ok(early
            .unwrap_or_else(post)
            .into_iter()
            .try_for_each(Work::wait)?)
    });
    all.unwrap();
}

/// Reduce-scatter as an all-reduce of everything, of which each rank keeps its part; writes down
/// what else is called.
#[derive(Default)]
struct Substitute(Arc<Mutex<Vec<String>>>);

impl UnitCollectives for Substitute {
    fn all_gather(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        shards: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        self.0.lock().push(format!("{} {}", plan.op(), call.label));
        group.execute_plan(call, plan, shards)
    }

    fn reduce_scatter(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        self.0.lock().push(format!("{} {}", plan.op(), call.label));
        let (plan, ranks, rank) = (plan.clone(), group.group().size(), group.group().rank());
        let op = plan.reduce().expect("it reduces");
        group.all_reduce(call, full_tensors, op).then(move |sums| {
            let part = |(sum, (dim, sizes)): (DispatchTensor, &(usize, ShardSizes))| {
                let range = sizes.range(ranks, rank);
                match sum.shape().num_dims() {
                    1 => Tensor::<1>::from_dispatch(sum)
                        .slice_dim(*dim, range)
                        .into_dispatch(),
                    _ => Tensor::<2>::from_dispatch(sum)
                        .slice_dim(*dim, range)
                        .into_dispatch(),
                }
            };
            sums.into_iter().zip(plan.shardings()).map(part).collect()
        })
    }
}

#[test]
fn collectives_of_the_program_take_the_place_of_the_groups() {
    let model = stack(&Device::flex());
    let all = launch(Launch::threads(3), |world| {
        let sharded = sharded(&model, world, &DeviceMesh::new(world, [3], ["shard"])?)?;
        let expected = step(&sharded, world)?;
        let calls = Arc::new(Mutex::default());
        FsdpModule::of(&sharded)?.set_collectives(Substitute(calls.clone()));
        world.ledger().reset();
        let grads = step(&sharded, world)?;
        let reduced = (
            world.ledger().calls(Op::ReduceScatter),
            world.ledger().calls(Op::AllReduce),
        );
        assert_eq!(reduced, (0, BLOCKS as u64 + 1));
        FsdpModule::of(&sharded)?.remove_collectives();
        assert_eq!(step(&sharded, world)?, expected);
        let calls = std::mem::take(&mut *calls.lock());
        Ok((grads, expected, calls))
    });
    for (grads, expected, calls) in launched::values(all.unwrap()) {
        assert_eq!(grads, expected);
        let of = |op: &str| calls.iter().filter(|call| call.starts_with(op)).count();
        // Forward's, backward's but for the root's, which keeps its parameters, and those that show
        // the gradients whole.
        let gathers = 3 * BLOCKS + 2;
        assert_eq!(
            (of("all_gather"), of("reduce_scatter"), calls.len()),
            (gathers, BLOCKS + 1, gathers + BLOCKS + 1)
        );
        assert!(
            calls.contains(&"reduce_scatter blocks.1".to_string()),
            "{calls:?}"
        );
    }
}

/// Writes down what each reduction makes of the ranks' values, and has the groups do it.
#[derive(Default)]
struct Reductions(Arc<Mutex<Vec<(Op, ReduceOp)>>>);

impl Reductions {
    fn planned(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        self.0
            .lock()
            .push((plan.op(), plan.reduce().expect("it reduces")));
        group.execute_plan(call, plan, tensors)
    }
}

impl UnitCollectives for Reductions {
    fn reduce_scatter(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        self.planned(group, call, plan, full_tensors)
    }

    fn all_reduce(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        self.planned(group, call, plan, tensors)
    }
}

/// From one step to the next, over the ranks that shard and over the replicas.
#[test]
fn units_ask_for_sums_while_they_are_forced() {
    let model = stack(&Device::flex());
    for (shape, ops) in [
        (&[2][..], &[Op::ReduceScatter][..]),
        (&[2, 2], &[Op::ReduceScatter, Op::AllReduce]),
    ] {
        launch(Launch::threads(shape.iter().product()), |world| {
            let mesh = DeviceMesh::new(world, shape, &["replicate", "shard"][2 - shape.len()..])?;
            let sharded = sharded(&model, world, &mesh)?;
            let reductions = Arc::new(Mutex::default());
            FsdpModule::of(&sharded)?.set_collectives(Reductions(reductions.clone()));
            let reduced = || {
                let grads = step(&sharded, world)?;
                let reductions: Vec<(Op, ReduceOp)> = std::mem::take(&mut *reductions.lock());
                let of = |op| {
                    reductions
                        .iter()
                        .filter(|(found, _)| *found == op)
                        .map(|&(_, reduce)| reduce)
                        .collect()
                };
                let by_op: Vec<Vec<ReduceOp>> = ops.iter().map(|&op| of(op)).collect();
                assert_eq!(
                    by_op.iter().map(Vec::len).sum::<usize>(),
                    reductions.len(),
                    "{shape:?}: {reductions:?}"
                );
                Ok::<_, Error>((by_op, grads))
            };
            let each = |reduce| vec![vec![reduce; BLOCKS + 1]; ops.len()];
            let (before, grads) = reduced()?;
            assert_eq!(before, each(ReduceOp::Avg), "{shape:?}");
            for (force, reduce) in [(true, ReduceOp::Sum), (false, ReduceOp::Avg)] {
                FsdpModule::of(&sharded)?.set_force_sum_reduction(force);
                // To the bit: the number of ranks is a power of two.
                assert_eq!(
                    reduced()?,
                    (each(reduce), grads.clone()),
                    "{shape:?}, forced: {force}"
                );
            }
            Ok(())
        })
        .unwrap();
    }
}

/// After the division, whoever made it; of one rank too.
#[test]
fn a_hook_sees_averages() {
    let model = stack(&Device::flex());
    for (ranks, replicas) in [(1, 1), (2, 1), (4, 2)] {
        for force_sum in [false, true] {
            let all = launch(Launch::threads(ranks), |world| {
                let mesh = match replicas {
                    1 => DeviceMesh::new(world, [ranks], ["shard"])?,
                    _ => DeviceMesh::new(
                        world,
                        [replicas, ranks / replicas],
                        ["replicate", "shard"],
                    )?,
                };
                let sharded = sharded(&model, world, &mesh)?;
                FsdpModule::of(&sharded)?.set_force_sum_reduction(force_sum);
                let expected = step(&sharded, world)?;
                FsdpModule::of(&sharded)?.set_all_reduce_hook(|grads| {
                    Ok(grads.shards.into_iter().map(|shard| shard * 2.0).collect())
                });
                Ok((step(&sharded, world)?, expected))
            });
            for (grads, expected) in launched::values(all.unwrap()) {
                let doubled = |values: &Vec<f32>| values.iter().map(|value| 2.0 * value).collect();
                let expected = expected
                    .iter()
                    .map(|(path, values)| (path.clone(), doubled(values)))
                    .collect();
                assert_eq!(grads, expected);
            }
        }
    }
}

/// No rank uses the bias of a block, so without a hook it has no gradient.
#[test]
fn a_hook_gets_zeros_for_a_parameter_that_no_rank_used() {
    let model = stack(&Device::flex());
    for replicas in [1, 2] {
        launch(Launch::threads(2 * replicas), |world| {
            let mesh = DeviceMesh::new(world, [replicas, 2], ["replicate", "shard"])?;
            let sharded = sharded(&model, world, &mesh)?;
            let block = &sharded.blocks[0];
            let bias = block.bias.as_ref().expect("it has a bias");
            let bias_grad = || {
                let x = tensor::<2>(1, [2, WIDTH], &world.device().clone().autodiff());
                let y = unit(block, x, |block, x| x.matmul(block.weight.val()));
                let grad = bias.shard_grad(&y.sum().backward())?;
                Some(grad.local().to_data().try_to_vec::<f32>().unwrap())
            };
            assert_eq!(bias_grad(), None);
            FsdpModule::of(block)?.set_all_reduce_hook(|grads| {
                Ok(grads.shards.into_iter().map(|shard| shard + 1.0).collect())
            });
            assert_eq!(bias_grad(), Some(vec![1.0; WIDTH / 2]));
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn gradients_without_a_hook_come_back_when_it_is_removed() {
    let model = stack(&Device::flex());
    launch(Launch::threads(2), |world| {
        let sharded = sharded(&model, world, &DeviceMesh::new(world, [2], ["shard"])?)?;
        let expected = step(&sharded, world)?;
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        FsdpModule::of(&sharded)?.set_all_reduce_hook(move |grads| {
            counted.fetch_add(1, Relaxed);
            Ok(grads.shards.into_iter().map(|shard| shard + 1.0).collect())
        });
        assert_ne!(step(&sharded, world)?, expected);
        assert_eq!(calls.load(Relaxed), BLOCKS + 1);
        FsdpModule::of(&sharded)?.remove_all_reduce_hook();
        assert_eq!(
            (step(&sharded, world)?, calls.load(Relaxed)),
            (expected, BLOCKS + 1)
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_hook_that_returns_something_else_is_told() {
    type Hook = fn(Vec<Tensor<1>>) -> Vec<Tensor<1>>;
    let hooks: [(Hook, &str); 2] = [
        (|_| Vec::new(), "returned 0 tensors for 2"),
        (
            |shards| {
                shards
                    .into_iter()
                    .map(|shard| Tensor::cat(vec![shard.clone(), shard], 0))
                    .collect()
            },
            "elements of",
        ),
    ];
    for (hook, reason) in hooks {
        let error = launch(Launch::threads(2), |world| {
            let sharded = sharded(
                &stack(&Device::flex()),
                world,
                &DeviceMesh::new(world, [2], ["shard"])?,
            )?;
            FsdpModule::of(&sharded)?.set_all_reduce_hook(move |grads| Ok(hook(grads.shards)));
            Error::catch(|| step(&sharded, world)).map(drop)
        });
        let text = error.expect_err("the hook is wrong").to_string();
        assert!(
            text.contains(reason) && text.contains("all-reduce hook of unit `blocks.2`"),
            "{text}"
        );
    }
    let wrong = ParamError::HookResult {
        unit: "root".into(),
        reason: "none".into(),
    };
    assert!(
        wrong
            .to_string()
            .contains("must return one tensor for each that it received")
    );
}
