//! Options of `replicate`: ignored and frozen parameters, mixed precision with a scaler, buffers, a
//! hook with accumulation, other dimensions of the mesh.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{CommError, Launch, Op, ReplicatedValue, World, launch};
use burn_dtensor::fsdp::{
    BufferSync, FsdpModule, FullyShard, GradScaler, MixedPrecisionPolicy, full_model, fully_shard,
    unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::{Plan, Style, parallelize};
use burn_dtensor::replicate::{DataParallel, PlainAllReduce, replicate};
use burn_dtensor::{Error, Result};

use crate::fsdp::collective_counts::{Stack, WIDTH, stack};
use crate::fsdp::replica_check::Flip;
use crate::fsdp::support::{on_device, tensor, values};
use crate::launched;

type Values = BTreeMap<String, Vec<f32>>;

/// What the ranks have after three steps by a scaler, whose first scale is too large.
fn scaled(
    start: &Stack,
    distribute: impl Fn(Stack, &DeviceMesh) -> Result<Stack> + Sync,
) -> Vec<(Values, f32)> {
    let program = |world: &World| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [world.size()], ["dp"])?;
        let mut model = distribute(on_device(start, &device), &mesh)?;
        let (mut optim, mut scaler) = (
            AdamWConfig::new().init(),
            GradScaler::new()
                .with_init_scale(1e9)
                .with_backoff_factor(1e-3),
        );
        for step in 0..6 {
            let x = tensor((step * 10 + world.rank()) as u64, [3, WIDTH], &device);
            let loss = scaler.scale(model.forward(x).square().mean());
            let mut grads = GradientsParams::from_grads(loss.backward(), &model);
            scaler.unscale(&model, &mut grads)?;
            model = scaler.step(model, grads, |model, grads| {
                Ok(optim.step(1e-2, model, grads))
            })?;
            scaler.update()?;
        }
        Ok((values(&full_model(&model)?, None), scaler.current_scale()))
    };
    launched::values(launch(Launch::threads(2), program).unwrap())
}

/// F50: frozen parameters, mixed precision and a scaler, to the bits of `fully_shard`.
#[test]
fn frozen_and_half_precision_parameters_train_with_a_scaler_as_if_sharded() {
    let mut start = stack(&Device::flex());
    start.blocks[1] = start.blocks[1].clone().no_grad();
    let policy = || {
        let half = MixedPrecisionPolicy::new().with_param_dtype(DType::F16);
        half.with_reduce_dtype(DType::F32)
            .with_output_dtype(DType::F32)
    };
    let sharded = scaled(&start, |model, mesh| {
        let config = FullyShard::new().with_units(["blocks.*"]);
        fully_shard(model, mesh, config.with_mixed_precision(policy()))
    });
    let replicated = scaled(&start, |model, mesh| {
        let config = DataParallel::new().with_units(["blocks.*"]);
        replicate(model, mesh, config.with_mixed_precision(policy()))
    });
    assert!(sharded[0].1 < 1e9, "it has overflowed");
    assert_eq!(replicated, sharded);
    let frozen = values(&start, None);
    assert_eq!(
        replicated[0].0["blocks.1.weight"],
        frozen["blocks.1.weight"]
    );
    assert_ne!(
        replicated[0].0["blocks.2.weight"],
        frozen["blocks.2.weight"]
    );
}

#[test]
fn ignored_parameters_stay_this_ranks_own() {
    let start = stack(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["dp"])?;
        let config = DataParallel::new().with_ignored(["blocks.0.**"]);
        let model = replicate(on_device(&start, &device), &mesh, config)?;
        let x = tensor(world.rank() as u64, [3, WIDTH], &device);
        let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
        let own = grads
            .get::<2>(model.blocks[0].weight.id)
            .expect("it is trained");
        let averaged = grads
            .get::<2>(model.blocks[1].weight.id)
            .expect("it is trained");
        let all = world.all();
        let same = |tensor: Tensor<2>| {
            let bits = tensor.into_data().try_to_vec::<f32>().unwrap();
            let of_ranks = all.all_gather_object("bits".into(), &bits)?;
            Ok::<_, burn_dtensor::Error>(of_ranks[0] == of_ranks[1])
        };
        assert!(!same(own)? && same(averaged)?);
        Ok(())
    })
    .unwrap();
}

/// Gradients of three batches, of which two wait: the hook sees their sum, once.
#[test]
fn gradients_accumulate_with_a_hook() {
    let start = stack(&Device::flex());
    let run = |hook: bool| {
        let ranks = launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [2], ["dp"])?;
            let model = replicate(on_device(&start, &device), &mesh, DataParallel::new())?;
            let units = FsdpModule::of(&model)?;
            if hook {
                units.set_gradient_hook(PlainAllReduce);
            }
            world.ledger().reset();
            let mut grads = GradientsParams::new();
            for batch in 0..3 {
                let _waits = (batch < 2).then(|| units.no_sync());
                let x = tensor((10 * batch + world.rank()) as u64, [3, WIDTH], &device);
                grads =
                    GradientsParams::from_grads(model.forward(x).square().sum().backward(), &model);
            }
            let calls = world.ledger().calls(Op::AllReduce);
            Ok((values(&model, Some(&grads)), calls))
        });
        launched::values(ranks.unwrap()).remove(0)
    };
    let (expected, one) = run(false);
    let (found, two) = run(true);
    assert_eq!(found, expected);
    assert_eq!((one, two), (1, 2), "the flags have a call of their own");
}

/// DDP's `broadcast_buffers`, and its average.
#[test]
fn each_forward_makes_running_statistics_those_of_the_first_rank_or_their_average() {
    for (sync, policy) in [
        (false, BufferSync::FirstRank),
        (true, BufferSync::FirstRank),
        (true, BufferSync::Average),
    ] {
        let ranks = launch(Launch::threads(2), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [2], ["dp"])?;
            let config = DataParallel::new()
                .with_layer_warnings(false)
                .with_forward_sync_buffers(sync)
                .with_buffer_sync(policy);
            let norm: BatchNorm = replicate(BatchNormConfig::new(1).init(&device), &mesh, config)?;
            let mut seen = Vec::new();
            for _ in 0..2 {
                let x = Tensor::<2>::full([2, 1], 10.0 * (1 + world.rank()) as f32, &device);
                // Inside, the forward of this batch has not changed them.
                unit(&norm, x, |norm, x| {
                    seen.push(norm.running_mean.value_sync().into_scalar::<f32>());
                    norm.forward(x)
                });
            }
            Ok(seen)
        });
        let ranks = launched::values(ranks.unwrap());
        let second = [ranks[0][1], ranks[1][1]];
        let expected = match (sync, policy) {
            (false, _) => [1.0, 2.0],
            (true, BufferSync::FirstRank) => [1.0, 1.0],
            (true, BufferSync::Average) => [1.5, 1.5],
        };
        assert_eq!(second, expected, "{sync}, {policy:?}");
    }
}

/// An optimizer that computes other bits on one rank leaves such weights. Gradients do not show
/// them, because they are averages.
#[test]
fn weights_that_differ_between_replicas_are_found() {
    let start = stack(&Device::flex());
    let ranks = launch(Launch::threads(3), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [3], ["dp"])?;
        let config = DataParallel::new()
            .with_replica_check_every(1)
            .with_weight_check(true);
        let mut model = replicate(on_device(&start, &device), &mesh, config)?;
        if world.rank() == 1 {
            model = model.map(&mut Flip::new("blocks.1.weight", 3));
        }
        let x = tensor(world.rank() as u64, [3, WIDTH], &device);
        let _ = model.forward(x).sum().backward();
        Ok(())
    });
    let error = ranks.unwrap_err();
    let Error::Comm(CommError::Diverged {
        rank, param, of, ..
    }) = &error.cause
    else {
        panic!("{error}")
    };
    assert_eq!(
        (*rank, &**param, *of),
        (1, "blocks.1.weight", ReplicatedValue::Weight),
        "{error}"
    );
}

/// The commonest slip: the mesh of all ranks, of which some share the rows.
#[test]
fn a_mesh_with_tensor_parallel_dimensions_is_refused_unless_dimensions_are_named() {
    let start = stack(&Device::flex());
    let ranks = launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let plan = Plan::new().with_style("first", Style::colwise());
        let model = parallelize(on_device(&start, &device), &mesh.slice("tp")?, plan)?;
        let refused = replicate(model.clone(), &mesh, DataParallel::new());
        let text = refused.map(drop).unwrap_err().to_string();
        assert!(text.contains("tp"), "{text}");
        replicate(model, &mesh, DataParallel::new().with_mesh_dims("dp"))?;
        Ok(text)
    });
    let texts = launched::values(ranks.unwrap());
    assert!(texts.iter().all(|text| *text == texts[0]));
}

/// Only some dimensions of a mesh have rows of their own.
#[test]
fn other_dimensions_of_the_mesh_share_the_rows() {
    let start = stack(&Device::flex());
    let ranks = launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let config = DataParallel::new().with_mesh_dims("dp");
        let model = replicate(on_device(&start, &device), &mesh, config)?;
        let row = world.rank() / 2;
        let x = tensor(row as u64, [3, WIDTH], &device);
        let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
        Ok(values(&model, Some(&grads)))
    });
    let ranks = launched::values(ranks.unwrap());
    assert!(ranks.iter().all(|rank| *rank == ranks[0]));
    let pair = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["dp"])?;
        let model = replicate(on_device(&start, &device), &mesh, DataParallel::new())?;
        let x = tensor(world.rank() as u64, [3, WIDTH], &device);
        let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
        Ok(values(&model, Some(&grads)))
    });
    assert_eq!(ranks[0], launched::values(pair.unwrap())[0]);
}
