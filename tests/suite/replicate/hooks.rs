//! Gradient hooks beside PyTorch's: `tests/golden/gradient_hooks.json`, made by the script of the same name.

use std::sync::Arc;

use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Shape, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::{Call, Communicator, Launch, Op, ReduceOp, Work, World, launch};
use burn_dtensor::fsdp::{FsdpModule, FullyShard, full_model, fully_shard};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::replicate::{
    Compress, DataParallel, GradientBucket, GradientHook, PlainAllReduce, PowerSgd, Quantized,
    replicate,
};
use half::{bf16, f16};
use serde_json::Value;

use crate::fsdp::collective_counts::{WIDTH, stack};
use crate::fsdp::support::{furthest, on_device, tensor, values};
use crate::launched;

fn golden() -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/golden/gradient_hooks.json"
    );
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    let list = value.as_array().expect("a list").iter();
    list.map(|number| number.as_f64().expect("a number") as f32)
        .collect()
}

/// Reduces gradients of these shapes by a hook on each of two ranks. Returns what both have.
fn reduced(
    world: &World,
    hook: &dyn GradientHook,
    grads: Vec<(&str, Vec<usize>, Vec<f32>)>,
    op: ReduceOp,
) -> Result<Vec<Vec<f32>>> {
    let device = world.device();
    let bucket = GradientBucket {
        call: Call::new("gradients"),
        params: grads.iter().map(|(name, ..)| Arc::from(*name)).collect(),
        shapes: grads
            .iter()
            .map(|(_, shape, _)| Shape::from(shape.clone()))
            .collect(),
        grads: grads
            .into_iter()
            .map(|(.., values)| Tensor::from_data(TensorData::from(&values[..]), device))
            .collect(),
        op,
    };
    let reduced = hook.reduce(&world.all(), bucket)?.wait()?;
    Ok(reduced
        .into_iter()
        .map(|grad| grad.into_data().try_to_vec().unwrap())
        .collect())
}

/// What two ranks have of the gradient of `case` by a hook.
fn of_case(case: &Value, hook: impl GradientHook + Clone) -> Vec<f32> {
    let inputs = [0, 1].map(|rank| numbers(&case["inputs"][rank]));
    let ranks = launch(Launch::threads(2), |world| {
        let own = inputs[world.rank()].clone();
        let grads = vec![("weight", vec![own.len()], own)];
        Ok(reduced(world, &hook.clone(), grads, ReduceOp::Avg)?.remove(0))
    });
    let mut ranks = launched::values(ranks.unwrap());
    let bits = |values: &[f32]| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    assert_eq!(bits(&ranks[0]), bits(&ranks[1]), "ranks agree");
    ranks.remove(0)
}

#[test]
fn compressed_gradients_are_rounded_once_and_within_a_step_of_pytorchs() {
    let golden = golden();
    type Round = fn(f32) -> f32;
    let cases: [(_, _, Round, f32); 2] = [
        (
            "bf16_compress",
            FloatDType::BF16,
            |x| bf16::from_f32(x).to_f32(),
            1.0 / 128.0,
        ),
        (
            "fp16_compress",
            FloatDType::F16,
            |x| f16::from_f32(x).to_f32(),
            1.0 / 1024.0,
        ),
    ];
    for (name, dtype, round, step) in cases {
        let case = &golden[name];
        let found = of_case(case, Compress::new(dtype));
        let [first, second] = [0, 1].map(|rank| numbers(&case["inputs"][rank]));
        let pytorch = numbers(&case["result"]);
        let mut compared = 0;
        for (at, found) in found.into_iter().enumerate() {
            let mean = round((round(first[at]) + round(second[at])) / 2.0);
            assert_eq!(found.to_bits(), mean.to_bits(), "{name} {at}");
            // PyTorch rounds the halves and their sum.
            let largest = first[at].abs().max(second[at].abs());
            if (mean - pytorch[at]).is_finite() && largest > 1e-3 {
                compared += 1;
                assert!(
                    (mean - pytorch[at]).abs() <= step * largest,
                    "{name} {at}: {mean}, {}",
                    pytorch[at]
                );
            }
        }
        assert!(compared > 20, "{compared}");
    }
}

#[test]
fn quantized_gradients_are_pytorchs() {
    let golden = golden();
    for (name, hook) in [
        ("quantize_per_tensor", Quantized::per_tensor()),
        ("quantize_per_channel", Quantized::per_group(16)),
    ] {
        let case = &golden[name];
        let (found, expected) = (of_case(case, hook), numbers(&case["result"]));
        let largest = expected.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
        assert!(
            furthest(&found, &expected) <= f64::from(largest) * 1e-6,
            "{name}: {found:?}, {expected:?}"
        );
    }
}

/// Two steps, so that error feedback and warm start are seen.
#[test]
fn power_sgd_is_pytorchs() {
    let golden = golden();
    let case = golden["power_sgd"].clone();
    let shapes = [("a", vec![6, 5]), ("b", vec![4, 3, 2]), ("c", vec![7])];
    let first_q = |device: &Device| {
        let (case, device) = (case["initial_q"].clone(), device.clone());
        move |path: &str, shape: [usize; 2]| {
            let values = numbers(&case[path]);
            Some(Tensor::<2>::from_data(
                TensorData::new(values, shape),
                &device,
            ))
        }
    };
    let ranks = launch(Launch::threads(2), |world| {
        let hook = PowerSgd::new(2)
            .with_min_compression(1.0)
            .with_first_q(first_q(world.device()));
        let mut steps = Vec::new();
        for step in case["iterations"].as_array().unwrap() {
            let own = &step["gradients"][world.rank()];
            let grads = shapes
                .iter()
                .map(|(name, shape)| (*name, shape.clone(), numbers(&own[name])));
            steps.push(reduced(world, &hook, grads.collect(), ReduceOp::Avg)?);
        }
        Ok(steps)
    });
    let ranks = launched::values(ranks.unwrap());
    assert_eq!(ranks[0], ranks[1]);
    for (step, found) in ranks[0].iter().enumerate() {
        for ((name, _), found) in shapes.iter().zip(found) {
            let expected = numbers(&case["iterations"][step]["reduced"][name]);
            let distance = furthest(found, &expected);
            assert!(distance < 2e-6, "{name} in step {step}: {distance}");
        }
    }
    assert_eq!(ranks[0].len(), 2);
}

#[test]
fn power_sgd_compresses_only_after_its_plain_steps() {
    // The mean is exact, and a matrix of rank 3.
    let value = |at: usize, rank: usize| (at * at % 7 + 2 * rank) as f32;
    let mean: Vec<f32> = (0..12)
        .map(|at| (value(at, 0) + value(at, 1)) / 2.0)
        .collect();
    launch(Launch::threads(2), |world| {
        let hook = PowerSgd::new(1)
            .with_min_compression(0.0)
            .with_plain_steps(2);
        for step in 0..3 {
            let own = (0..12).map(|at| value(at, world.rank())).collect();
            let grads = vec![("weight", vec![3, 4], own)];
            let found = reduced(world, &hook, grads, ReduceOp::Avg)?;
            assert_eq!(found[0] == mean, step < 2, "step {step}: {found:?}");
        }
        Ok(())
    })
    .unwrap();
}

/// A hook has the result that is asked for, whatever the divisor.
#[test]
fn hooks_follow_the_reduction_that_is_asked_for() {
    let hooks: [fn() -> Box<dyn GradientHook>; 4] = [
        || Box::new(PlainAllReduce),
        || Box::new(Compress::new(FloatDType::F16)),
        || Box::new(PowerSgd::new(3).with_min_compression(0.0)),
        || Box::new(Quantized::per_group(1)),
    ];
    launch(Launch::threads(3), |world| {
        for hook in hooks {
            for (op, factor) in [
                (ReduceOp::Avg, 1.0),
                (ReduceOp::Sum, 3.0),
                (ReduceOp::premul_sum(0.5), 1.5),
            ] {
                let own = vec![1.0 + world.rank() as f32; 9];
                let grads = vec![
                    ("a", vec![3, 3], own.clone()),
                    ("b", vec![9], own),
                    ("empty", vec![0], vec![]),
                ];
                let found = reduced(world, &*hook(), grads, op)?;
                assert_eq!(found[2], [0.0_f32; 0]);
                for found in &found[..2] {
                    let distance = furthest(found, &[2.0 * factor; 9]);
                    assert!(distance < 1e-2, "{op:?}: {found:?}");
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

/// A gradient of zeros, as of a layer behind zeros in the first step, or one that is not finite
/// stops nothing: the ones after it are approximated as by a new hook.
#[test]
fn power_sgd_continues_after_zeros_and_after_infinities() {
    launch(Launch::threads(2), |world| {
        for first in [0.0, f32::INFINITY] {
            let hook = PowerSgd::new(2).with_min_compression(0.0);
            let weight = |value: Vec<f32>| vec![("weight", vec![3, 4], value)];
            reduced(world, &hook, weight(vec![first; 12]), ReduceOp::Avg)?;
            // Of rank 2.
            let values: Vec<f32> = (0..12)
                .map(|at| (at % 4) as f32 + (at / 4) as f32)
                .collect();
            let found = reduced(world, &hook, weight(values.clone()), ReduceOp::Avg)?;
            let distance = furthest(&found[0], &values);
            assert!(distance < 1e-4, "after {first}: {distance}");
        }
        Ok(())
    })
    .unwrap();
}

/// Rank threads, and models, share a hook and not its state.
#[test]
fn one_hook_serves_several_ranks_and_models() {
    let start = stack(&Device::flex());
    let run = |shared: bool| {
        let common = Arc::new(PowerSgd::new(1));
        let ranks = launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [2], ["dp"])?;
            let mut weights = Vec::new();
            let mut models = Vec::new();
            for _ in 0..2 {
                let hook = if shared {
                    common.clone()
                } else {
                    Arc::new(PowerSgd::new(1))
                };
                let config = DataParallel::new().with_gradient_hook(hook);
                models.push(replicate(on_device(&start, &device), &mesh, config)?);
            }
            for (number, mut model) in models.into_iter().enumerate() {
                let mut optim = SgdConfig::new().init();
                for step in 0..3 {
                    let seed = (step * 10 + world.rank() + 100 * number) as u64;
                    let loss = model
                        .forward(tensor(seed, [3, WIDTH], &device))
                        .square()
                        .sum();
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    model = optim.step(1e-2, model, grads);
                }
                weights.push(values(&full_model(&model)?, None));
            }
            Ok(weights)
        });
        launched::values(ranks.unwrap())
    };
    assert_eq!(run(true), run(false));
}

/// Returns other gradients than it was given.
struct Wrong(Change);

type Change = fn(Tensor<1>) -> Vec<Tensor<1>>;

impl GradientHook for Wrong {
    fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>> {
        let wrong = self.0;
        let work = bucket.all_reduce(group);
        Ok(work.then(move |grads| {
            let mut grads = grads.into_iter();
            let first = grads.next().into_iter().flat_map(wrong);
            first.chain(grads).collect()
        }))
    }
}

#[test]
fn a_hook_that_returns_other_gradients_is_an_error() {
    let start = stack(&Device::flex());
    let wrongs: [(Change, &str); 3] = [
        (|_| vec![], "it returned 7 tensors for 8 gradients"),
        (
            |grad| vec![grad.narrow(0, 0, 1)],
            "1 elements of F32 instead of",
        ),
        (
            |grad| vec![grad.cast(FloatDType::F16)],
            "elements of F16 instead of",
        ),
    ];
    for (wrong, expected) in wrongs {
        let ranks = launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [2], ["dp"])?;
            let config = DataParallel::new().with_gradient_hook(Wrong(wrong));
            let model = replicate(on_device(&start, &device), &mesh, config)?;
            let _ = model
                .forward(tensor(1, [3, WIDTH], &device))
                .sum()
                .backward();
            Ok(())
        });
        let text = ranks.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
}

/// Counts the buckets that it reduces.
#[derive(Clone)]
struct Counted(Arc<std::sync::Mutex<Vec<Vec<String>>>>);

impl GradientHook for Counted {
    fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>> {
        let params = bucket.params.iter().map(ToString::to_string).collect();
        self.0.lock().unwrap().push(params);
        Ok(bucket.all_reduce(group))
    }
}

#[test]
fn a_hook_that_loses_nothing_has_the_bits_of_none_in_buckets_and_over_replicas() {
    let start = stack(&Device::flex());
    for hsdp in [false, true] {
        let run = |with_hook: bool| {
            let ranks = launch(Launch::threads(4), |world| {
                let device = world.device().clone().autodiff();
                let model = on_device(&start, &device);
                let seen = Counted(Arc::default());
                let mut model = if hsdp {
                    let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
                    fully_shard(model, &mesh, FullyShard::new().with_units(["blocks.*"]))?
                } else {
                    let mesh = DeviceMesh::new(world, [4], ["dp"])?;
                    replicate(model, &mesh, DataParallel::new())?
                };
                if with_hook {
                    FsdpModule::of(&model)?.set_gradient_hook(seen.clone());
                }
                let mut optim = SgdConfig::new().init();
                for step in 0..2 {
                    let x = tensor((step * 10 + world.rank()) as u64, [3, WIDTH], &device);
                    let loss = model.forward(x).square().sum();
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    model = optim.step(1e-2, model, grads);
                }
                FsdpModule::of(&model)?.remove_gradient_hook();
                let seen = seen.0.lock().unwrap().clone();
                Ok((values(&full_model(&model)?, None), seen))
            });
            launched::values(ranks.unwrap()).remove(0)
        };
        let (expected, none) = run(false);
        let (found, seen) = run(true);
        assert_eq!((found, none.len()), (expected, 0), "hsdp {hsdp}");
        // One bucket of a step, or one unit after the other.
        assert_eq!(seen.len(), if hsdp { 8 } else { 2 });
        let params: usize = seen.iter().map(Vec::len).sum();
        assert_eq!(params, 16, "each parameter twice");
    }
}

#[test]
fn a_training_with_compressed_gradients_comes_close_and_sends_fewer_bytes() {
    let start = stack(&Device::flex());
    let run = |config: fn() -> DataParallel| {
        let ranks = launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [2], ["dp"])?;
            let mut model = replicate(on_device(&start, &device), &mesh, config())?;
            let mut optim = SgdConfig::new().init();
            let mut bytes = 0;
            for step in 0..10 {
                let x = tensor((step * 10 + world.rank()) as u64, [3, WIDTH], &device);
                let loss = model.forward(x).square().sum();
                world.ledger().reset();
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                bytes = world.ledger().bytes(Op::AllReduce);
                assert!(grads.len() == 8);
                model = optim.step(1e-2, model, grads);
            }
            Ok((
                values(&full_model(&model)?, None)
                    .into_values()
                    .flatten()
                    .collect::<Vec<_>>(),
                bytes,
            ))
        });
        let ranks = launched::values(ranks.unwrap());
        assert_eq!(ranks[0], ranks[1], "ranks agree");
        ranks[0].clone()
    };
    let (exact, bytes) = run(DataParallel::new);
    type Config = fn() -> DataParallel;
    let hooks: [(&str, Config, f64, f64); 3] = [
        (
            "bf16",
            || DataParallel::new().with_gradient_hook(Compress::new(FloatDType::BF16)),
            5e-3,
            0.6,
        ),
        (
            "rank 1",
            || DataParallel::new().with_gradient_hook(PowerSgd::new(1)),
            5e-2,
            0.6,
        ),
        (
            "8 bits",
            || DataParallel::new().with_gradient_hook(Quantized::per_tensor()),
            5e-3,
            0.1,
        ),
    ];
    for (name, config, bound, sent) in hooks {
        let (found, fewer) = run(config);
        let distance = furthest(&found, &exact);
        assert!(0.0 < distance && distance < bound, "{name}: {distance}");
        assert!(
            (fewer as f64) < sent * bytes as f64,
            "{name}: {fewer} of {bytes} bytes"
        );
    }
}
