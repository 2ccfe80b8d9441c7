//! Inputs and outputs of blocks, as a plan prepares them: values, gradients, what is sent, and
//! errors.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::DTensorError;
use burn_dtensor::nn::{apply_io_layouts, apply_io_layouts_local, local_heads};
use burn_dtensor::parallel::{ParallelError, PrepareModuleInputOutput};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::misuse::refused;
use super::{floats, near};
use crate::fsdp::support::{max_diff, on_device, tensor, values};
use crate::parallel::support::full_grads;

use Op::{AllGather, AllReduce, ReduceScatter};
use Phase::{Backward, Forward};
use Placement::{Replicate as R, Shard as S};

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    block: Block,
    last: Linear,
}

/// Two inputs, of which the second scales the hidden features, and two outputs.
#[derive(Module, Debug)]
struct Block {
    up: Linear,
    gate: Linear,
    down: Linear,
}

fn net() -> Net {
    let device = Device::flex();
    device.seed(8);
    let linear = |d_in, d_out| LinearConfig::new(d_in, d_out).init(&device);
    let block = Block {
        up: linear(6, 8),
        gate: linear(6, 8),
        down: linear(8, 6),
    };
    let net = Net {
        first: linear(6, 6),
        block,
        last: linear(6, 3),
    };
    // Draw now, on one thread.
    let _ = values(&net, None);
    net
}

impl Block {
    fn plain(&self, x: Tensor<3>, scale: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        let h = (self.up.forward(x.clone()) * scale).tanh() * self.gate.forward(x);
        (self.down.forward(h.clone()), h)
    }

    /// Layers with placements and no input of their own.
    fn parallel(&self, x: DTensor<3>, scale: DTensor<3>) -> (DTensor<3>, DTensor<3>) {
        let h = (self.up.forward_dtensor(x.clone()) * scale).tanh() * self.gate.forward_dtensor(x);
        (self.down.forward_dtensor(h.clone()), h)
    }
}

fn split() -> Plan {
    let columns = |plan: Plan, layer: &str| {
        plan.with_style(format!("{layer}.weight"), S(1))
            .with_style(format!("{layer}.bias"), S(0))
    };
    let plan = columns(columns(Plan::new(), "block.up"), "block.gate");
    plan.with_style("block.down.weight", S(0))
}

/// Between shards of the sequence.
fn between_shards() -> PrepareModuleInputOutput {
    PrepareModuleInputOutput::new()
        .with_input(S(1), R)
        .with_input(None, S(2))
        .with_output(None, S(1))
        .with_output(S(2), None)
}

const SHAPE: [usize; 3] = [2, 4, 6];

fn inputs(device: &Device) -> (Tensor<3>, Tensor<3>) {
    (tensor(1, SHAPE, device), tensor(2, [2, 4, 8], device))
}

#[test]
fn a_block_between_shards_of_the_sequence_gathers_once_and_scatters_once_each_way() {
    let plain = net();
    let (y, h) = {
        let (x, scale) = inputs(&Device::flex());
        plain.block.plain(x, scale)
    };
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = parallelize(
            on_device(&plain, &device),
            mesh,
            split().with_io("block", between_shards()),
        )?;
        let (x, scale) = inputs(&device);
        let x = DTensor::distribute_replicated(x, mesh, &[S(1)])?.require_grad();
        let scale = DTensor::distribute_replicated(scale, mesh, &[R])?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let (y_found, h_found) =
            apply_io_layouts(&model.block, (x.clone(), scale), |block, (x, scale)| {
                assert_eq!(
                    (x.placements(), scale.placements()),
                    (&[R][..], &[S(2)][..])
                );
                block.parallel(x, scale)
            });
        assert_eq!(
            (y_found.placements(), h_found.placements()),
            (&[S(1)][..], &[S(2)][..])
        );
        let loss = y_found.local().clone().square().sum() + h_found.local().clone().sum();
        let grads = loss.backward();
        let sent = [AllGather, ReduceScatter, AllReduce]
            .map(|op| [Forward, Backward].map(|phase| ledger.calls_in(op, phase)));
        assert_eq!(
            sent,
            [[1, 1], [1, 1], [0, 0]],
            "of all-gathers, reduce-scatters and all-reduces"
        );
        near(
            &floats(y_found.detach().full_tensor()?.inner()),
            &floats(y.clone()),
            || "y".into(),
        );
        near(
            &floats(h_found.detach().full_tensor()?.inner()),
            &floats(h.clone()),
            || "h".into(),
        );

        let full = device.clone();
        let (x_full, scale) = inputs(&full);
        let x_full = x_full.require_grad();
        let (y, h) = on_device(&plain, &full).block.plain(x_full.clone(), scale);
        let expected = x_full
            .grad(&(y.square().sum() + h.sum()).backward())
            .expect("a leaf");
        let found = x.local().grad(&grads).expect("a leaf");
        near(
            &floats(DTensor::from_local(found, mesh, &[S(1)])?.full_tensor()?),
            &floats(expected),
            || "x".into(),
        );
        Ok(())
    });
}

/// With the data-parallel ranks of FSDP around it, and without.
#[test]
fn a_block_over_dtensors_stands_in_an_ordinary_model() {
    let plain = net();
    let loss_of = |y: Tensor<3>| y.square().mean();
    let expected = {
        let device = Device::flex().autodiff();
        let plain = on_device(&plain, &device);
        let (x, scale) = inputs(&device);
        let (y, _) = plain.block.plain(plain.first.forward(x).tanh(), scale);
        let loss = loss_of(plain.last.forward(y));
        values(
            &plain,
            Some(&GradientsParams::from_grads(loss.backward(), &plain)),
        )
    };
    for (shape, names) in [(&[2][..], &["tp"][..]), (&[2, 2], &["shard", "tp"])] {
        MeshTest::new(shape, names).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let tp = mesh.slice("tp")?;
            // Plain inputs, replicated, and whole outputs.
            let prepare = PrepareModuleInputOutput::new()
                .with_input(R, None)
                .with_input(None, S(2))
                .with_output(None, R)
                .with_output(None, None);
            let mut model = parallelize(
                on_device(&plain, &device),
                &tp,
                split().with_io("block", prepare),
            )?;
            if names.contains(&"shard") {
                model = fully_shard(
                    model,
                    &mesh.slice("shard")?,
                    FullyShard::new().with_units(["block"]),
                )?;
            }
            let (x, scale) = inputs(&device);
            let y = unit(&model, (x, scale), |model, (x, scale)| {
                let h = model.first.forward(x).tanh();
                let (y, hidden) = unit(&model.block, (h, scale), |block, inputs| {
                    apply_io_layouts_local(block, inputs, |block, (x, scale)| {
                        block.parallel(x, scale)
                    })
                });
                assert_eq!(
                    (y.dims(), hidden.dims()),
                    ([2, 4, 6], [2, 4, 4]),
                    "this rank's parts"
                );
                model.last.forward(y)
            });
            let grads = GradientsParams::from_grads(loss_of(y).backward(), &model);
            let diff = max_diff(&full_grads(&model, &grads)?, &expected);
            assert!(diff < 1e-5, "gradients part by {diff} on {mesh}");
            Ok(())
        });
    }
}

#[test]
fn a_plan_prepares_on_each_mesh_dimension_and_the_last_entry_counts() {
    let plain = net();
    MeshTest::new([2, 2], ["cp", "tp"]).run(|mesh| {
        let tp = split()
            .with_io(
                "block",
                PrepareModuleInputOutput::new().with_input(S(0), S(0)),
            )
            .with_io("bl*", between_shards());
        let cp = Plan::new().with_io(
            "block",
            PrepareModuleInputOutput::new().with_input(None, S(0)),
        );
        let model = parallelize(
            plain.clone(),
            mesh,
            Plan::new()
                .with_mesh_dim_plan("tp", tp)
                .with_mesh_dim_plan("cp", cp),
        )?;
        let (x, scale) = inputs(mesh.device());
        let x = DTensor::distribute_replicated(x, mesh, &[R, S(1)])?;
        let scale = DTensor::distribute_replicated(scale, mesh, &[R, R])?;
        let (y, _) = apply_io_layouts(&model.block, (x, scale), |block, (x, scale)| {
            assert_eq!(
                (x.placements(), scale.placements()),
                (&[S(0), R][..], &[R, S(2)][..])
            );
            block.parallel(x, scale)
        });
        assert_eq!(y.placements(), [S(0), S(1)]);
        let (x, scale) = inputs(mesh.device());
        near(
            &floats(y.full_tensor()?),
            &floats(plain.block.plain(x, scale).0),
            || "y".into(),
        );
        Ok(())
    });
}

#[test]
fn a_module_that_the_plan_does_not_prepare_is_left_alone() {
    let plain = net();
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let model = parallelize(
            plain.clone(),
            mesh,
            split().with_io("block", between_shards()),
        )?;
        let x = DTensor::distribute_replicated(tensor(1, SHAPE, mesh.device()), mesh, &[S(0)])?;
        let found = apply_io_layouts(&model.last, x, |last, x| {
            assert_eq!(x.placements(), [S(0)]);
            last.forward_dtensor(x)
        });
        assert_eq!(found.placements(), [S(0)]);
        // A plain tensor is one on the mesh of its parameters.
        let full = apply_io_layouts_local(
            &model.last,
            tensor(1, SHAPE, mesh.device()),
            |last, x: DTensor<3>| last.forward_dtensor(x),
        );
        near(&floats(found.full_tensor()?), &floats(full), || {
            "last".into()
        });
        Ok(())
    });
}

#[test]
fn tensors_that_are_not_as_declared() {
    let plain = net();
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let model = parallelize(
            plain.clone(),
            mesh,
            split().with_io("block", between_shards()),
        )?;
        let (x, scale) = inputs(mesh.device());
        let of = |tensor: &Tensor<3>, placement| {
            DTensor::distribute_replicated(tensor.clone(), mesh, &[placement])
        };
        let (shards, full, scale) = (of(&x, S(1))?, of(&x, R)?, of(&scale, R)?);
        let run = |x: DTensor<3>| {
            apply_io_layouts(&model.block, (x, scale.clone()), |block, (x, scale)| {
                block.parallel(x, scale)
            })
        };
        let error = refused(|| run(full.clone()));
        assert!(
            matches!(
                &error,
                Error::Parallel(ParallelError::Layout {
                    what: "input",
                    at: 0,
                    ..
                })
            ),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            ["`block`", "`tp`", "is R", "declares S(1)"]
                .iter()
                .all(|part| text.contains(part)),
            "{text}"
        );
        run(shards.clone());

        let swapped = || {
            apply_io_layouts(
                &model.block,
                (shards.clone(), scale.clone()),
                |_, (x, scale)| (scale, x),
            )
        };
        let error = refused(swapped);
        assert!(
            matches!(
                &error,
                Error::Parallel(ParallelError::Layout {
                    what: "output",
                    at: 1,
                    ..
                })
            ),
            "{error}"
        );

        let error =
            refused(|| apply_io_layouts(&model.block, shards.clone(), |_, x| (x.clone(), x)));
        assert!(
            matches!(
                &error,
                Error::Parallel(ParallelError::Count {
                    what: "input",
                    given: 1,
                    prepared: 2,
                    ..
                })
            ),
            "{error}"
        );
        assert!(
            error.to_string().contains(".with_input(None, None)"),
            "{error}"
        );
        let error = refused(|| {
            apply_io_layouts(&model.block, (shards.clone(), scale.clone()), |_, (x, _)| x)
        });
        assert!(
            matches!(
                &error,
                Error::Parallel(ParallelError::Count {
                    what: "output",
                    given: 1,
                    prepared: 2,
                    ..
                })
            ),
            "{error}"
        );

        let error = refused(|| apply_io_layouts(&plain.block, x.clone(), |_, x| x));
        assert!(
            matches!(
                &error,
                Error::Parallel(ParallelError::NoMesh {
                    what: "input",
                    at: 0
                })
            ),
            "{error}"
        );

        let elsewhere = DeviceMesh::new(mesh.world(), [2], ["other"])?;
        let other = DTensor::distribute_replicated(x.clone(), &elsewhere, &[S(1)])?;
        let error = refused(|| run(other));
        assert!(
            matches!(&error, Error::DTensor(DTensorError::MeshMismatch { .. })),
            "{error}"
        );
        Ok(())
    });
}

#[test]
fn local_parts_have_the_heads_of_their_features() {
    MeshTest::new([2, 2], ["a", "b"]).run(|mesh| {
        let x = |features: usize, placements: &[Placement]| {
            DTensor::<3>::ones([2, 3, features], mesh, placements, mesh.device())
        };
        assert_eq!(local_heads(&x(24, &[S(2), S(2)])?, 8), 2);
        assert_eq!(local_heads(&x(24, &[S(2), S(0)])?, 8), 4);
        assert_eq!(local_heads(&x(24, &[R, S(1)])?, 3), 3);
        // Ragged batches cut no head; features of given lengths may.
        let uneven = |placements: &[Placement], lengths: [usize; 2]| {
            let layout = Layout::new(mesh.shape(), placements)?.with_uneven_sizes(0, lengths)?;
            DTensor::distribute_replicated_to(
                Tensor::<3>::ones([4, 3, 24], mesh.device()),
                mesh,
                layout,
            )
        };
        assert_eq!(local_heads(&uneven(&[S(0), S(2)], [1, 3])?, 8), 4);
        let error =
            refused(|| local_heads(&uneven(&[S(2), R], [9, 15]).expect("it can be cut so"), 8));
        assert!(
            matches!(
                &error,
                Error::DTensor(DTensorError::Operands {
                    operator: "local_heads",
                    ..
                })
            ),
            "{error}"
        );
        for (features, heads) in [(24, 2), (24, 6), (20, 8), (24, 0)] {
            let x = x(features, &[S(2), S(2)])?;
            let error = refused(|| local_heads(&x, heads));
            assert!(
                matches!(
                    &error,
                    Error::DTensor(DTensorError::Operands {
                        operator: "local_heads",
                        ..
                    })
                ),
                "{error}"
            );
            assert!(
                error
                    .to_string()
                    .contains("4 ranks of mesh dimension `a` and `b`"),
                "{error}"
            );
        }
        Ok(())
    });
}
