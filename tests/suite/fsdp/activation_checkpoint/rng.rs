//! Random numbers: those of forward, again. Burn's state is the process's, so that these tests have
//! one each.

use std::thread;

use burn::nn::{DropoutConfig, Linear};
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use burn_dtensor::dtensor::ops::random;
use burn_dtensor::fsdp::FsdpModule;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::{Drops, KEPT, Tower, WAYS, batch, config, full_grads, linear};
use crate::own_process::own_process;

/// burn's `Dropout`, in blocks inside blocks too: the same elements are dropped as without
/// checkpointing, before and after.
#[test]
fn burns_dropout_drops_the_same_again() {
    own_process(
        "fsdp::activation_checkpoint::rng::burns_dropout_drops_the_same_again",
        || {
            MeshTest::new([1], ["shard"]).run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let model = fully_shard(Tower::new(&device), mesh, config())?;
                let run = |on: bool, how| {
                    FsdpModule::of(&model)?.set_activation_checkpointing(on);
                    mesh.device().seed(11);
                    let grads =
                        full_grads(&model, model.forward(batch(1, &device), how).square().sum())?;
                    Ok::<_, Error>(grads)
                };
                for how in WAYS.map(|how| how.drops(Drops::Burns)) {
                    let kept = run(false, how)?;
                    assert_eq!(run(true, how)?, kept, "{how:?}");
                    assert_ne!(run(true, WAYS[0])?, kept, "it drops some");
                }
                // `unit` draws what burn has, and a checkpointed block of its own: both drop.
                assert_ne!(run(true, KEPT.drops(Drops::Burns))?, run(true, KEPT)?);
                Ok(())
            });
        },
    );
}

/// Other blocks drop other elements, and so does the next forward.
#[test]
fn blocks_draw_numbers_of_their_own() {
    own_process(
        "fsdp::activation_checkpoint::rng::blocks_draw_numbers_of_their_own",
        || {
            let device = Device::flex().autodiff();
            let layer = linear(1, &device);
            let drawn = || {
                let compute = |_: &_, x: Tensor<2>| x.random_like(Distribution::Default);
                checkpoint_activations(&layer, batch(1, &device), compute).into_data()
            };
            device.clone().inner().seed(1);
            let [first, second] = [drawn(), drawn()];
            assert_ne!(first, second);
            device.clone().inner().seed(1);
            assert_eq!([drawn(), drawn()], [first, second]);
        },
    );
}

/// Another thread draws between: an error in the place of wrong gradients.
#[test]
fn numbers_that_others_have_drawn_meanwhile_are_an_error() {
    own_process(
        "fsdp::activation_checkpoint::rng::numbers_that_others_have_drawn_meanwhile_are_an_error",
        || {
            let device = Device::flex().autodiff();
            let error = launch(Launch::threads(1), |_| {
                let layer = linear(1, &device);
                let compute = |layer: &burn::nn::Linear, x: Tensor<2>| {
                    // As a rank of the same process does, or one that loads data.
                    std::thread::spawn(|| {
                        static DRAWN: std::sync::Once = std::sync::Once::new();
                        DRAWN.call_once(|| {
                            drop(Tensor::<1>::random(
                                [1],
                                Distribution::Default,
                                &Device::flex(),
                            ))
                        });
                    })
                    .join()
                    .expect("it draws");
                    let noise = x.random_like(Distribution::Default);
                    layer.forward(x + noise)
                };
                checkpoint_activations(&layer, batch(1, &device), compute)
                    .sum()
                    .backward();
                Ok(())
            })
            .unwrap_err();
            match &error.cause {
                Error::Param(ParamError::NondeterministicRecompute { block, differs }) => {
                    assert!(block.ends_with("Linear"), "{block}");
                    assert_eq!(*differs, "computes other values");
                }
                other => panic!("{other}"),
            }
            assert!(error.to_string().contains("nn::dropout"), "{error}");
        },
    );
}

/// The numbers of DTensors, on a rank's own thread and on one that it has started, whichever thread
/// runs backward.
#[test]
fn a_stream_that_begins_in_a_block_repeats_on_every_thread() {
    let device = Device::flex().autodiff();
    let grad = |layer: Linear, loss: Tensor<1>| {
        let grads = loss.backward();
        layer
            .weight
            .val()
            .grad(&grads)
            .expect("it is trained")
            .into_data()
    };
    launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["tp"])?;
        let layer = linear(1, &device);
        let loss = |is_checkpointed: bool| {
            let (layer, mesh, x) = (layer.clone(), mesh.clone(), batch(1, &device));
            move || {
                let dropped = move |layer: &Linear, x: Tensor<2>| {
                    let x = DTensor::from_local(layer.forward(x), &mesh, &[Placement::Replicate]);
                    DropoutConfig::new(0.5)
                        .init()
                        .forward_dtensor(x.expect("on the ranks of the mesh"))
                        .to_local()
                };
                if is_checkpointed {
                    checkpoint_activations(&layer, x, dropped).sum()
                } else {
                    dropped(&layer, x).sum()
                }
            }
        };
        let on_another = |body: Box<dyn FnOnce() -> TensorData + Send>| {
            thread::spawn(body).join().expect("it repeats")
        };
        // The first draw of this thread is in the block.
        let drawn = loss(true)();
        let of_rank = layer.clone();
        let found = on_another(Box::new(move || grad(of_rank, drawn)));
        random::seed(0);
        assert_eq!(found, grad(layer.clone(), loss(false)()));

        let (body, of_rank) = (loss(true), layer.clone());
        on_another(Box::new(move || grad(of_rank, body())));
        let (body, of_rank) = (loss(true), layer.clone());
        let drawn = thread::spawn(body).join().expect("it draws");
        on_another(Box::new(move || grad(of_rank, drawn)));
        Ok(())
    })
    .unwrap();
}
