//! Shards in host memory, computed with on a GPU.

use std::sync::LazyLock;

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param, ParamGroup};
use burn::nn::PositionalEncodingConfig;
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig,
    PositionalEncoding,
};
use burn::optim::{
    AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, MuonConfig,
};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_dtensor::comm::{CommError, ReduceOp};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, GradScaler, MixedPrecisionPolicy, NormType, OffloadPolicy, ParamExt,
    ReshardAfterForward, checkpoint_activations, clip_grad_norm, full_model, fully_shard,
    named_parameters, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::optim::{load_optimizer_state, optimizer_state, sharded};
use burn_dtensor::placement::Placement;
use burn_dtensor::testing::{MeshTest, gpu};
use burn_dtensor::{Error, Result};

use super::{backend, rounding};
use crate::fsdp::support::{furthest, on_device, values};

/// Lengths that no number of ranks here divides, a frozen layer, buffers, and a tensor that is no
/// parameter.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    position: PositionalEncoding,
    blocks: Vec<Linear>,
    frozen: Linear,
    norm: BatchNorm,
    scale: Param<Tensor<1>>,
    head: Linear,
}

const WIDTH: usize = 14;
const TOKENS: [usize; 2] = [3, 5];

/// Drawn once: ranks that draw at once share the state of the generator.
static NET: LazyLock<Net> = LazyLock::new(|| {
    let device = Device::flex();
    device.seed(3);
    let net = Net {
        embedding: EmbeddingConfig::new(11, WIDTH).init(&device),
        position: PositionalEncodingConfig::new(WIDTH)
            .with_max_sequence_size(8)
            .init(&device),
        blocks: (0..3)
            .map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device))
            .collect(),
        frozen: LinearConfig::new(WIDTH, WIDTH).init(&device).no_grad(),
        norm: BatchNormConfig::new(WIDTH).init(&device),
        scale: Param::from_tensor(Tensor::ones([WIDTH], &device) * 0.7),
        head: LinearConfig::new(WIDTH, 3).init(&device),
    };
    let _ = values(&net, None);
    net
});

impl Net {
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |net, tokens| {
            let x = unit(&net.embedding, tokens, |embedding, tokens| {
                embedding.forward(tokens)
            });
            let x = net.position.forward(x);
            let x = net.blocks.iter().fold(x, |x, block| {
                unit(block, x, |block, x| block.forward(x).tanh())
            });
            let x = unit(&net.frozen, x, |frozen, x| frozen.forward(x));
            net.head.forward(x * net.scale.val().unsqueeze())
        })
    }

    /// With the statistics of the rank's batch, which those of the unsharded model are not.
    fn normed(&self, x: Tensor<3>) -> Tensor<3> {
        self.norm.forward(x)
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        (self.forward(tokens) - 0.3).square().mean()
    }
}

/// A copy with everything on `device`: no visitor of burn sees fields that are not parameters.
fn made(device: &Device) -> Net {
    on_device(&*NET, &device.clone().autodiff()).fork(device)
}

/// What sample `sample` of a step is.
fn tokens(step: usize, sample: usize, device: &Device) -> Tensor<2, Int> {
    let [rows, len] = TOKENS;
    let token = |at: usize| ((at * 7 + step * 3 + sample * 5) % 11) as i32;
    Tensor::<1, Int>::from_data(
        (0..rows * len).map(token).collect::<Vec<_>>().as_slice(),
        device,
    )
    .reshape(TOKENS)
}

fn config(reshard: ReshardAfterForward) -> FullyShard {
    let units = ["embedding", "blocks.*", "frozen"];
    FullyShard::new()
        .with_units(units)
        .with_reshard_after_forward(reshard)
        .with_offload(OffloadPolicy::Cpu)
}

const STEPS: usize = 10;

fn f32(loss: Tensor<1>) -> f32 {
    loss.into_scalar()
}

/// Losses on one CPU with the samples of all ranks, and the weights.
fn reference(ranks: usize) -> (Vec<f32>, Vec<f32>) {
    let device = Device::flex().autodiff();
    let mut model = on_device(&*NET, &device);
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let terms = (0..ranks).map(|rank| model.loss(tokens(step, rank, &device)));
        let mean = terms.reduce(|a, b| a + b).unwrap() / ranks as f32;
        losses.push(f32(mean.clone()));
        let grads = GradientsParams::from_grads(mean.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    (
        losses,
        values(&model, None).into_values().flatten().collect(),
    )
}

fn is_on_cpu<const D: usize>(tensor: &Tensor<D>) -> bool {
    tensor.device() == Device::flex()
}

/// Ten steps, sharded; the optimizer's state is saved and loaded on the way.
fn trained(
    mesh: &DeviceMesh,
    start: &Device,
    reshard: ReshardAfterForward,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let device = mesh.device().clone().autodiff();
    let mut model = fully_shard(made(start), mesh, config(reshard))?;
    let mut optim: ModuleOptimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = model.loss(tokens(step, mesh.rank(), &device));
        losses.push(mesh.all_reduce(f32(loss.clone()), ReduceOp::Avg)?);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grad = grads
            .get::<2>(model.blocks[0].weight.id)
            .expect("a gradient");
        assert!(is_on_cpu(&grad) && is_on_cpu(&model.blocks[0].weight.base()));
        model = optim.step(1e-2, model, grads);
        if step == 4 {
            let state = optimizer_state(&optim, &model)?;
            optim = load_optimizer_state(AdamWConfig::new().init(), &model, state)?;
        }
    }
    let full = full_model(&model)?;
    assert!(
        is_on_cpu(&full.head.weight.base()),
        "a whole model need not fit the device"
    );
    Ok((
        losses,
        values(&full, None).into_values().flatten().collect(),
    ))
}

fn is_as_unsharded(test: &MeshTest, start: &Device, reshard: ReshardAfterForward) {
    let (losses, weights) = reference(test.ranks());
    test.clone().with_device(gpu()).run(|mesh| {
        let found = trained(mesh, start, reshard)?;
        assert!(
            furthest(&found.0, &losses) < rounding(1e-4),
            "{:?} {losses:?}",
            found.0
        );
        assert!(
            furthest(&found.1, &weights) < rounding(1e-3),
            "{}",
            furthest(&found.1, &weights)
        );
        Ok(())
    });
}

#[test]
fn a_rank_alone_trains_with_its_weights_on_the_cpu() {
    is_as_unsharded(
        &MeshTest::new([1], ["shard"]),
        &Device::flex(),
        ReshardAfterForward::Auto,
    );
}

#[test]
fn ten_steps_are_those_of_the_unsharded_model_on_the_cpu() {
    is_as_unsharded(
        &MeshTest::new([2], ["shard"]),
        &Device::flex(),
        ReshardAfterForward::Always,
    );
    is_as_unsharded(
        &MeshTest::new([3], ["shard"]),
        &gpu(),
        ReshardAfterForward::Auto,
    );
    if crate::effort::is_long() {
        is_as_unsharded(
            &MeshTest::new([4], ["shard"]),
            &Device::flex(),
            ReshardAfterForward::Ranks(2),
        );
        is_as_unsharded(
            &MeshTest::new([8], ["shard"]),
            &Device::flex(),
            ReshardAfterForward::Auto,
        );
    }
}

#[test]
fn replicas_train_identically_and_compare_their_shards() {
    is_as_unsharded(
        &MeshTest::new([2, 2], ["replicate", "shard"]),
        &Device::flex(),
        ReshardAfterForward::Never,
    );
}

/// No tensor of such a block is on the GPU before it computes.
#[test]
fn a_checkpointed_block_of_indices_computes_on_the_gpu() {
    let embedded = |net: &Net, tokens: Tensor<2, Int>| {
        let output = unit(net, tokens, |net, tokens| {
            let x = checkpoint_activations(&net.embedding, tokens, |embedding, tokens| {
                embedding.forward(tokens)
            });
            net.head.forward(x)
        });
        output.square().mean()
    };
    let cpu = Device::flex().autodiff();
    let plain = on_device(&*NET, &cpu);
    let grads = embedded(&plain, tokens(0, 0, &cpu)).backward();
    let floats = |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
    let expected = floats(plain.embedding.weight.grad(&grads).expect("a gradient"));
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let model = fully_shard(
                made(&Device::flex()),
                mesh,
                config(ReshardAfterForward::Always),
            )?;
            let loss = embedded(&model, tokens(0, 0, &mesh.device().clone().autodiff()));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let found = floats(
                model
                    .embedding
                    .weight
                    .full_grad(&grads)?
                    .expect("a gradient"),
            );
            assert!(
                furthest(&found, &expected) < rounding(1e-4),
                "{found:?} {expected:?}"
            );
            Ok(())
        });
}

/// All that reads stored values, on the CPU, beside the same on a GPU.
#[test]
fn what_reads_shards_and_gradients_gives_the_same_on_the_cpu() {
    let run = |offload: OffloadPolicy| {
        MeshTest::new([2, 2], ["replicate", "shard"])
            .with_device(gpu())
            .run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let config = config(ReshardAfterForward::Ranks(2))
                    .with_offload(offload)
                    .with_replica_check_every(1)
                    .with_weight_check(true);
                let half = MixedPrecisionPolicy::new()
                    .with_param_dtype(DType::F16)
                    .with_reduce_dtype(DType::F32)
                    .with_output_dtype(DType::F32);
                let config = if device.supports_dtype(DType::F16) {
                    config.with_mixed_precision_for(["blocks.*"], half)
                } else {
                    config
                };
                let model = fully_shard(made(mesh.device()), mesh, config)?;
                let mut scaler = GradScaler::new().with_init_scale(8.0);
                let mut sum = GradientsAccumulator::new();
                for batch in 0..3 {
                    FsdpModule::of(&model)?.set_requires_gradient_sync(batch != 0);
                    FsdpModule::of(&model)?.set_requires_all_reduce(batch != 1);
                    let loss =
                        scaler.scale(model.loss(tokens(0, 3 * mesh.rank() + batch, &device)));
                    sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
                }
                let mut grads = sum.grads();
                assert!(scaler.unscale(&model, &mut grads)?, "nothing overflows");
                let norm = clip_grad_norm(&model, &mut grads, 0.1, NormType::L2)?;
                let weight = &model.blocks[1].weight;
                let full = weight.full_grad(&grads)?.expect("a gradient");
                let named = named_parameters(&model)?;
                let shard = named[0].shard::<2>().expect("a matrix").full_tensor()?;
                assert_eq!(is_on_cpu(&full), offload == OffloadPolicy::Cpu);
                assert_eq!(is_on_cpu(&shard), offload == OffloadPolicy::Cpu);
                let floats =
                    |tensor: Tensor<2>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
                // In validation, too, and a weight read by itself.
                let valid = model.valid();
                let output = f32(valid.loss(tokens(1, 0, mesh.device())));
                let alone = floats(model.blocks[2].weight.val().inner());
                Ok([
                    floats(full),
                    floats(shard.inner()),
                    alone,
                    vec![output, norm as f32],
                ])
            })
    };
    for (found, expected) in run(OffloadPolicy::Cpu)
        .iter()
        .flatten()
        .zip(run(OffloadPolicy::Never).iter().flatten())
    {
        assert!(furthest(found, expected) < 2e-3, "{found:?} {expected:?}");
    }
}

/// The gradients of one unit are in host memory, and those of the others on the GPU. The last rank
/// has no rows of any matrix.
#[test]
fn units_on_two_devices_are_scaled_clipped_and_stepped_together() {
    let run = |offload: OffloadPolicy| {
        MeshTest::new([8], ["shard"])
            .with_device(gpu())
            .run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let config = config(ReshardAfterForward::Auto).with_offload(OffloadPolicy::Never);
                let config = config.with_offload_for(["blocks.1"], offload);
                let mut model = fully_shard(made(mesh.device()), mesh, config)?;
                let adam =
                    AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.01)));
                let matrices = ParamGroup::from_paths(vec!["blocks.0.weight", "blocks.1.weight"]);
                let mut optim = sharded(adam).with_muon(matrices, MuonConfig::new());
                let mut scaler = GradScaler::new().with_init_scale(8.0);
                for step in 0..2 {
                    let loss = scaler.scale(model.loss(tokens(step, mesh.rank(), &device)));
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    model =
                        scaler.step(model, grads, |model, grads| optim.step(1e-2, model, grads))?;
                    scaler.update()?;
                }
                assert_eq!(
                    is_on_cpu(&model.blocks[1].weight.base()),
                    offload == OffloadPolicy::Cpu
                );
                assert!(!is_on_cpu(&model.blocks[0].weight.base()));
                Ok(values(&full_model(&model)?, None)
                    .into_values()
                    .flatten()
                    .collect::<Vec<f32>>())
            })
    };
    for (found, expected) in run(OffloadPolicy::Cpu)
        .iter()
        .zip(&run(OffloadPolicy::Never))
    {
        assert!(
            furthest(found, expected) < rounding(1e-3),
            "{}",
            furthest(found, expected)
        );
    }
}

/// Whatever is no parameter is where the rank computes, wherever the model was made; what is
/// ignored stays.
#[test]
fn other_tensors_go_to_the_device() {
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let placed = config(ReshardAfterForward::Auto)
                .with_ignored(["frozen.*", "norm.*"])
                .with_offload_for(["blocks.2"], OffloadPolicy::Cpu);
            let model = fully_shard(made(&Device::flex()), mesh, placed)?;
            let own = mesh.device();
            assert_eq!(model.norm.running_mean.value().device(), *own);
            assert!(
                is_on_cpu(&model.frozen.weight.base()) && is_on_cpu(&model.norm.gamma.base()),
                "ignored"
            );
            assert!(
                model.blocks[0].weight.base().is_require_grad()
                    && is_on_cpu(&model.blocks[0].weight.base())
            );
            assert!(!model.frozen.weight.base().is_require_grad());
            let x = Tensor::<3>::ones([1, 2, WIDTH], own);
            assert_eq!(model.position.forward(x).device(), *own);

            // Replicated, as gamma is, it is a copy on the device where it is computed with.
            let model = fully_shard(
                made(&Device::flex()),
                mesh,
                config(ReshardAfterForward::Auto),
            )?;
            let x = Tensor::<3>::ones([2, WIDTH, 3], &own.clone().autodiff());
            assert_eq!(unit(&model, x, |model, x| model.normed(x)).device(), *own);
            assert!(is_on_cpu(&model.norm.gamma.base()));
            assert_eq!(
                model.norm.gamma.shard().expect("a shard").placements(),
                [Placement::Replicate]
            );
            Ok(())
        });
}

#[test]
fn a_model_elsewhere_is_refused_with_both_devices_and_the_remedy() {
    MeshTest::new([2], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let refused = |config: FullyShard| {
                let error = fully_shard(made(&Device::flex()), mesh, config)
                    .map(|_| ())
                    .unwrap_err();
                let Error::Param(ParamError::Device { param, device, own }) = &error else {
                    panic!("{error}")
                };
                assert!(
                    device.contains("Flex") && own.contains(backend()),
                    "{error}"
                );
                assert!(
                    error
                        .to_string()
                        .contains("FullyShard::with_offload(OffloadPolicy::Cpu)"),
                    "{error}"
                );
                param.clone()
            };
            let offloaded = || config(ReshardAfterForward::Auto);
            assert_eq!(
                refused(offloaded().with_offload(OffloadPolicy::Never)),
                "embedding.weight"
            );
            assert_eq!(
                refused(offloaded().with_offload_for(["blocks.1"], OffloadPolicy::Never)),
                "blocks.1.weight"
            );
            Ok(())
        });
}

/// An input of a unit, tracked or not, of the model as of a block.
#[test]
fn an_input_elsewhere_is_refused_with_both_devices_and_the_remedy() {
    for (tracked, offload) in [(false, OffloadPolicy::Cpu), (true, OffloadPolicy::Never)] {
        let failure = MeshTest::new([2], ["shard"])
            .with_device(gpu())
            .run_failing(|mesh| {
                let made = on_device(&NET.head, &mesh.device().clone().autodiff());
                let head = fully_shard(made, mesh, FullyShard::new().with_offload(offload))?;
                let x = Tensor::<2>::ones([2, WIDTH], &Device::flex().autodiff())
                    .set_require_grad(tracked);
                let _ = unit(&head, x, |head, x| head.forward(x));
                Ok(())
            });
        let text = failure.to_string();
        assert!(
            ["`root`", "Flex", backend(), "x.to_device(world.device())"]
                .iter()
                .all(|word| text.contains(word)),
            "{text}"
        );
    }
}

/// Tensors of a call are on the rank's device, or all on the CPU: their results are where they are.
#[test]
fn collectives_of_tensors_on_the_cpu_stay_there() {
    MeshTest::new([3], ["shard"])
        .with_device(gpu())
        .run(|mesh| {
            let own = |device: &Device| Tensor::<1>::full([5], mesh.rank() as f32, device);
            let sum = mesh.all_reduce(own(&Device::flex()), ReduceOp::Sum)?;
            assert!(is_on_cpu(&sum));
            assert_eq!(sum.into_data().try_to_vec::<f32>().unwrap(), [3.0; 5]);
            let comm = mesh.communicator(0)?;
            let mixed = vec![
                own(&Device::flex()).into_dispatch(),
                own(mesh.device()).into_dispatch(),
            ];
            let refused = comm
                .all_reduce("mixed".into(), mixed, ReduceOp::Sum)
                .wait()
                .map(|_| ())
                .unwrap_err();
            let CommError::InvalidArgument {
                problem, remedy, ..
            } = &refused
            else {
                panic!("{refused}")
            };
            assert!(
                problem.contains("Flex") && problem.contains("tensor 1"),
                "{refused}"
            );
            assert!(remedy.contains("all tensors of a call"), "{refused}");
            Ok(())
        });
}

/// The gradients of the whole weight and bias of a layer that rank 1 does not use, which `moved`
/// has made of the sharded one, and whether they are on the CPU.
fn half_used(
    device: Device,
    offload: OffloadPolicy,
    moved: fn(Linear, &Device) -> Linear,
) -> Vec<(bool, [Vec<f32>; 2])> {
    MeshTest::new([2], ["shard"])
        .with_device(device)
        .run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let head = on_device(&NET.head, &device);
            let head = moved(
                fully_shard(head, mesh, FullyShard::new().with_offload(offload))?,
                &device,
            );
            let x = Tensor::<2>::ones([2, WIDTH], &device) * 0.5;
            let used = mesh.rank() == 0;
            let y = unit(
                &head,
                x,
                |head, x| if used { head.forward(x).tanh() } else { x },
            );
            let grads = y.square().sum().backward();
            let weight = head.weight.full_grad(&grads)?.expect("one rank has one");
            let bias = head
                .bias
                .as_ref()
                .expect("it has one")
                .full_grad(&grads)?
                .expect("one rank has one");
            let are_on_cpu = is_on_cpu(&weight) && is_on_cpu(&bias);
            Ok((
                are_on_cpu,
                [
                    weight.into_data().iter().collect(),
                    bias.into_data().iter().collect(),
                ],
            ))
        })
}

fn are_close(found: &[(bool, [Vec<f32>; 2])], expected: &[(bool, [Vec<f32>; 2])]) -> bool {
    let all = |of: &[(bool, [Vec<f32>; 2])]| {
        of.iter()
            .flat_map(|(_, grads)| grads.concat())
            .collect::<Vec<_>>()
    };
    furthest(&all(found), &all(expected)) < rounding(1e-5)
}

#[test]
fn what_a_rank_does_not_use_counts_as_zeros() {
    let expected = half_used(Device::flex(), OffloadPolicy::Never, |head, _| head);
    let found = half_used(gpu(), OffloadPolicy::Cpu, |head, _| head);
    assert!(
        are_close(&found, &expected) && found[0].1 == found[1].1,
        "{found:?} {expected:?}"
    );
    assert!(found.iter().all(|(are_on_cpu, _)| *are_on_cpu));
}

#[test]
fn a_model_that_is_moved_by_hand_has_its_gradients_where_it_is() {
    let expected = half_used(Device::flex(), OffloadPolicy::Never, |head, _| head);
    let found = half_used(gpu(), OffloadPolicy::Cpu, |head, device| head.fork(device));
    assert!(are_close(&found, &expected), "{found:?} {expected:?}");
    assert!(!found[0].0);
}
