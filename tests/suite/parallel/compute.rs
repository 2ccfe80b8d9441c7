//! Layers that compute with the tensor-parallel shards, written out by hand.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::ops;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{data_rank, devices, distribute, distribute_with, full_grads, meshes};
use crate::fsdp::support::{max_diff, on_device, tensor, values};

use Placement::{Partial, Shard as S};

const SUM: Placement = Partial(PartialOp::Sum);
const ROWS: usize = 5;
const DIM: usize = 6;
/// Not divisible by the ranks.
const HIDDEN: usize = 9;

#[derive(Module, Debug)]
struct Stack {
    blocks: Vec<Mlp>,
}

#[derive(Module, Debug)]
struct Mlp {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

fn stack(device: &Device) -> Stack {
    device.seed(9);
    let mlp = |seed| {
        let mut norm = LayerNormConfig::new(DIM).init(device);
        norm.beta = Some(Param::from_tensor(tensor(seed, [DIM], device)));
        let (up, down) = (
            LinearConfig::new(DIM, HIDDEN).init(device),
            LinearConfig::new(HIDDEN, DIM).init(device),
        );
        Mlp { norm, up, down }
    };
    let stack = Stack {
        blocks: (0..2).map(mlp).collect(),
    };
    // Draw now, on one thread.
    let _ = values(&stack, None);
    stack
}

fn plan() -> Plan {
    Plan::new()
        .with_style("**.norm", Style::sequence_parallel().with_input(S(0)))
        .with_style("**.up", Style::colwise())
        .with_style("**.down", Style::rowwise().with_output(S(0)))
        .with_units(["blocks.*"])
}

fn normalize(x: Tensor<2>, gamma: Tensor<1>, beta: Tensor<1>) -> Tensor<2> {
    let (var, mean) = x.clone().var_mean_bias(1);
    (x - mean) / (var + 1e-5).sqrt() * gamma.unsqueeze() + beta.unsqueeze()
}

impl Mlp {
    fn plain(&self, x: Tensor<2>) -> Tensor<2> {
        let beta = self.norm.beta.as_ref().expect("a bias").val();
        let h = normalize(x.clone(), self.norm.gamma.val(), beta);
        x + self.down.forward(gelu(self.up.forward(h)))
    }

    /// Rows over the ranks between layers, features inside: sequence parallelism.
    fn parallel(&self, x: DTensor<2>) -> Result<DTensor<2>> {
        let (mesh, shape) = (x.mesh().clone(), x.shape());
        let bias = |linear: &Linear| linear.bias.as_ref().expect("a bias").dtensor();
        let rows = |local| DTensor::from_local_with_shape(local, &mesh, &[S(0)], shape.clone());

        // Each rank has its own rows: gradients of the norm and of the last bias are terms.
        let beta = self
            .norm
            .beta
            .as_ref()
            .expect("a bias")
            .dtensor()?
            .vary(&[0])?;
        let h = normalize(
            x.local().clone(),
            self.norm.gamma.dtensor()?.vary(&[0])?,
            beta,
        );
        let h = rows(h)?.all_gather_varying(&[0])?;
        let h =
            h.matmul(self.up.weight.dtensor()?.to_local()) + bias(&self.up)?.to_local().unsqueeze();
        let terms = gelu(h).matmul(self.down.weight.dtensor()?.to_local());
        let h = DTensor::from_local(terms, &mesh, &[SUM])?.redistribute(&[S(0)])?;
        rows(x.to_local() + h.to_local() + bias(&self.down)?.vary(&[0])?.unsqueeze())
    }
}

impl Stack {
    fn plain_loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.blocks.iter().fold(x, |x, mlp| mlp.plain(x));
        x.square().sum() / ROWS as f32
    }

    fn parallel_loss(&self, x: Tensor<2>, mesh: &DeviceMesh, in_units: bool) -> Result<Tensor<1>> {
        let tp = mesh.slice("tp")?;
        let mut x = DTensor::distribute_replicated(x, &tp, &[S(0)])?;
        for mlp in &self.blocks {
            let forward = |mlp: &Mlp, x| mlp.parallel(x).unwrap_or_else(|error| error.unwind());
            x = if in_units {
                unit(mlp, x, forward)
            } else {
                forward(mlp, x)
            };
        }
        let terms = x.to_local().square().sum() / ROWS as f32;
        DTensor::from_local(terms, &tp, &[SUM])?.full_tensor()
    }
}

fn input(rank: usize, device: &Device) -> Tensor<2> {
    tensor(rank as u64 + 20, [ROWS, DIM], device)
}

/// The gradients of the model on one rank, averaged over data-parallel ranks.
fn expected(model: &Stack, data_ranks: usize) -> BTreeMap<String, Vec<f32>> {
    let device = Device::flex().autodiff();
    let model = on_device(model, &device);
    let losses = (0..data_ranks).map(|rank| model.plain_loss(input(rank, &device)));
    let loss = losses.reduce(|a, b| a + b).expect("a rank") / data_ranks as f32;
    values(
        &model,
        Some(&GradientsParams::from_grads(loss.backward(), &model)),
    )
}

fn gradients_equal(
    mesh_test: &MeshTest,
    reshard: ReshardAfterForward,
    in_units: bool,
    prepare: fn(Stack) -> Stack,
) {
    let model = prepare(stack(&Device::flex()));
    mesh_test.run(|mesh| {
        let (rank, ranks) = data_rank(mesh);
        let expected = expected(&model, ranks);
        for device in devices(mesh) {
            let model = distribute(on_device(&model, &device), mesh, plan(), reshard)?;
            for _ in 0..2 {
                let loss = model.parallel_loss(input(rank, &device), mesh, in_units)?;
                let full = stack_loss(&model, rank, &device)?;
                assert!((loss.clone() - full).abs().into_scalar::<f32>() < 1e-4);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                let diff = max_diff(&full_grads(&model, &grads)?, &expected);
                assert!(
                    diff < 1e-4,
                    "gradients part by {diff} on {mesh}, {reshard:?}, units {in_units}"
                );
            }
        }
        Ok(())
    });
}

/// The loss of the gathered model.
fn stack_loss(model: &Stack, rank: usize, device: &Device) -> Result<Tensor<1>> {
    Ok(full_model(model)?.plain_loss(input(rank, device)).detach())
}

#[test]
fn gradients_are_right_on_every_mesh() {
    for mesh in meshes() {
        for in_units in [true, false] {
            gradients_equal(&mesh, ReshardAfterForward::Auto, in_units, |stack| stack);
        }
    }
}

#[test]
fn gradients_are_right_where_a_mesh_dimension_has_one_rank() {
    for shape in [[2, 1], [1, 2]] {
        let mesh = MeshTest::new(shape, ["shard", "tp"]);
        gradients_equal(&mesh, ReshardAfterForward::Always, true, |stack| stack);
    }
}

#[test]
fn gradients_are_right_whenever_units_are_freed() {
    let mesh = MeshTest::new([4, 2], ["shard", "tp"]);
    for reshard in [
        ReshardAfterForward::Always,
        ReshardAfterForward::Never,
        ReshardAfterForward::Ranks(2),
    ] {
        for in_units in [true, false] {
            gradients_equal(&mesh, reshard, in_units, |stack| stack);
        }
    }
}

#[test]
fn frozen_parameters_have_no_gradient_to_add_up() {
    let mesh = MeshTest::new([2, 2], ["shard", "tp"]);
    for in_units in [true, false] {
        gradients_equal(&mesh, ReshardAfterForward::Always, in_units, |mut stack| {
            stack.blocks[0].norm.gamma = stack.blocks[0].norm.gamma.clone().set_require_grad(false);
            stack.blocks[1].norm = stack.blocks[1].norm.clone().no_grad();
            stack.blocks[1].up = stack.blocks[1].up.clone().no_grad();
            stack
        });
    }
}

/// Invariant 3, and the bytes of a unit.
#[test]
fn one_flat_all_reduce_a_unit() {
    let model = stack(&Device::flex());
    for mesh in meshes() {
        mesh.run(|mesh| {
            let (rank, data_ranks) = data_rank(mesh);
            for device in devices(mesh) {
                let model = distribute(
                    on_device(&model, &device),
                    mesh,
                    plan(),
                    ReshardAfterForward::Always,
                )?;
                let ledger = mesh.world().ledger();
                ledger.reset();
                let loss = model.parallel_loss(input(rank, &device), mesh, true)?;
                let _ = GradientsParams::from_grads(loss.backward(), &model);
                let tp = mesh.coordinate().expect("a member")[mesh.dim("tp")?];
                let hidden = [5, 4][tp];
                let unit = 4 * (2 * DIM + (DIM * hidden + hidden) + (hidden * DIM + DIM)) as u64;
                // Both norms, the bias, and whether the rank has terms of each.
                let terms = 4 * (3 * DIM + 3) as u64;
                for label in ["blocks.0", "blocks.1"] {
                    let of = |op| ledger.total(|key| &*key.label == label && key.op == op);
                    let gathers = if data_ranks > 1 { 2 } else { 0 };
                    assert_eq!(
                        (of(Op::AllGather).calls, of(Op::AllGather).bytes),
                        (gathers, gathers * unit)
                    );
                    // HSDP reduces the reduced shards once more.
                    let hsdp = (mesh.ndim() == 3) as u64;
                    let shards = of(Op::AllReduce).bytes - terms;
                    assert_eq!(of(Op::AllReduce).calls, 1 + hsdp, "{label} on {mesh}");
                    assert!(
                        if hsdp == 1 {
                            (1..=unit).contains(&shards)
                        } else {
                            shards == 0
                        },
                        "{label} on {mesh}"
                    );
                }
                // Between the layers: each layer one gather and one scatter a pass.
                let between = |op, phase| {
                    ledger
                        .total(|key| {
                            key.label.starts_with("redistribute")
                                && (key.op, key.phase) == (op, phase)
                        })
                        .calls
                };
                assert_eq!(between(Op::AllGather, Phase::Forward), 2);
                assert_eq!(between(Op::ReduceScatter, Phase::Forward), 2);
                assert_eq!(between(Op::ReduceScatter, Phase::Backward), 2);
                assert_eq!(between(Op::AllGather, Phase::Backward), 2);
                assert_eq!(between(Op::AllReduce, Phase::Forward), 1, "the loss");
                assert_eq!(between(Op::AllReduce, Phase::Backward), 0);
            }
            Ok(())
        });
    }
}

/// In one unit, which tensor-parallel ranks hold whole.
fn distributed(norm: LayerNorm, mesh: &DeviceMesh) -> Result<LayerNorm> {
    let always = FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Always);
    distribute_with(norm, mesh, Plan::new(), always)
}

/// A replicated weight in a computation that is the same on all ranks and in one that is not: its
/// gradient is the one plus the sum of the others.
#[test]
fn both_kinds_of_gradient_add() {
    for mesh in meshes() {
        mesh.run(|mesh| {
            for device in devices(mesh) {
                let model = distributed(LayerNormConfig::new(DIM).init(&device), mesh)?;
                let tp = mesh.coordinate().expect("a member")[mesh.dim("tp")?];
                let ledger = mesh.world().ledger();
                ledger.reset();
                let loss = unit(&model, (), |norm, ()| {
                    let gamma = norm.gamma.dtensor().unwrap_or_else(|error| error.unwind());
                    let same = gamma.clone().to_local().square().sum() + norm.gamma.val().sum();
                    // The same handle, however it is asked for.
                    let [a, b] = [
                        gamma.clone(),
                        norm.gamma.dtensor().unwrap_or_else(|error| error.unwind()),
                    ];
                    let a = a.vary(&[0]).unwrap_or_else(|error| error.unwind());
                    let b = b
                        .to_local_with_grad_placements(&[SUM])
                        .unwrap_or_else(|error| error.unwind());
                    let terms = (a.square() * (tp as f32 + 1.0) / 2.0).sum() + (b * 10.0).sum();
                    (same, terms)
                });
                let (same, terms) = loss;
                let terms =
                    DTensor::from_local(terms, &mesh.slice("tp")?, &[SUM])?.full_tensor()?;
                let grads = GradientsParams::from_grads((same + terms).backward(), &model);
                assert_eq!(
                    full_grads(&model, &grads)?["gamma"],
                    [2.0 + 1.0 + 1.0 + 2.0 + 20.0; DIM]
                );
                let sums = ledger
                    .total(|key| &*key.label == "root" && key.op == Op::AllReduce)
                    .calls;
                assert_eq!(sums, 1 + (mesh.ndim() == 3) as u64, "on {mesh}");
            }
            Ok(())
        });
    }
}

/// An operator that lets replicated weights vary reads them as the unit's: its terms travel
/// together.
#[test]
fn operators_leave_terms_to_the_unit() {
    let model = stack(&Device::flex()).blocks.remove(0).down;
    let full: Tensor<2> = tensor(3, [ROWS, HIDDEN], &Device::flex());
    for mesh in meshes() {
        mesh.run(|mesh| {
            let tp = mesh.slice("tp")?;
            for device in devices(mesh) {
                let x = || Tensor::<2>::from_data(full.to_data(), &device);
                let plain = on_device(&model, &device);
                let grads = plain.forward(x()).square().sum().backward();
                let expected = values(&plain, Some(&GradientsParams::from_grads(grads, &plain)));

                let always =
                    FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Always);
                let model = distribute_with(plain, mesh, Plan::new(), always)?;
                let ledger = mesh.world().ledger();
                ledger.reset();
                // Rows over the ranks, and a replicated layer: each has a term of its gradient.
                let rows = DTensor::distribute_replicated(x(), &tp, &[S(0)])?;
                let output: DTensor<2> = unit(&model, rows, |linear, x| {
                    let bias = linear.bias.as_ref().expect("a bias").dtensor();
                    let read = linear
                        .weight
                        .dtensor()
                        .and_then(|weight| Ok((weight, bias?)));
                    let (weight, bias) = read.unwrap_or_else(|error| error.unwind());
                    ops::module::linear(x, weight, Some(bias))
                });
                assert_eq!(output.placements(), [S(0)]);
                let grads = output.to_local().square().sum().backward();
                let grads = GradientsParams::from_grads(grads, &model);
                let sums = ledger.total(|key| key.op == Op::AllReduce);
                let hsdp = (mesh.ndim() == 3) as u64;
                assert_eq!(sums.calls, 1 + hsdp, "on {mesh}");
                assert!(max_diff(&full_grads(&model, &grads)?, &expected) < 1e-4);
            }
            Ok(())
        });
    }
}

/// Nobody wants the gradient of a frozen weight, in a unit that has others.
#[test]
fn a_frozen_weight_has_no_terms_to_add_up() {
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        for device in devices(mesh) {
            let mut norm = LayerNormConfig::new(DIM).init(&device);
            norm.gamma = norm.gamma.set_require_grad(false);
            let model = distributed(norm, mesh)?;
            let ledger = mesh.world().ledger();
            ledger.reset();
            let loss = unit(&model, (), |norm, ()| {
                let gamma = norm.gamma.dtensor().and_then(|view| view.vary(&[0]));
                let gamma = gamma.unwrap_or_else(|error| error.unwind());
                (gamma * norm.beta.as_ref().expect("a bias").val()).sum()
            });
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            assert!(grads.get::<1>(model.gamma.id).is_none());
            assert_eq!(full_grads(&model, &grads)?["beta"], [1.0; DIM]);
            assert_eq!(ledger.calls(Op::AllReduce), 0);
        }
        Ok(())
    });
}

/// Of what was asked for on all ranks, one used nothing, or none did.
#[test]
fn terms_a_rank_does_not_have_are_zeros() {
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        for device in devices(mesh) {
            let model = distributed(LayerNormConfig::new(DIM).init(&device), mesh)?;
            let tp = mesh.coordinate().expect("a member")[1];
            let x = tensor(1, [DIM], &device).require_grad();
            let loss = unit(&model, x, |norm, x| {
                let vary = |param: &Param<Tensor<1>>| {
                    param
                        .dtensor()
                        .and_then(|view| view.vary(&[0]))
                        .unwrap_or_else(|error| error.unwind())
                };
                let (gamma, _) = (vary(&norm.gamma), vary(norm.beta.as_ref().expect("a bias")));
                if tp == 0 {
                    (x * gamma * 3.0).sum()
                } else {
                    x.sum()
                }
            });
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let grads = full_grads(&model, &grads)?;
            let expected: Vec<f32> = (tensor::<1>(1, [DIM], &device) * 3.0)
                .into_data()
                .try_to_vec()
                .expect("f32");
            assert_eq!(
                (&grads["gamma"], &grads["beta"]),
                (&expected, &vec![0.0; DIM])
            );
        }
        Ok(())
    });
}

/// A unit whose ranks all compute the same makes no tensor-parallel collective.
#[test]
fn replicated_computation_is_free() {
    let model = stack(&Device::flex());
    let expected = expected(&model, 1);
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let [device, _] = devices(mesh);
        let model = parallelize(
            on_device(&model, &device),
            mesh,
            Plan::new().with_units(["blocks.*"]),
        )?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let x = model.blocks.iter().fold(input(0, &device), |x, mlp| {
            unit(mlp, x, |mlp, x| mlp.plain(x))
        });
        let local = model.blocks[0].up.weight.dtensor()?.to_local();
        let grads = GradientsParams::from_grads(
            (x.square().sum() / ROWS as f32 + local.sum() * 0.0).backward(),
            &model,
        );
        assert_eq!(ledger.total(|_| true).calls, 0);
        assert!(max_diff(&full_grads(&model, &grads)?, &expected) < 1e-4);
        Ok(())
    });
}
