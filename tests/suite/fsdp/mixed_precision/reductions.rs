//! Gradients of `bf16` weights, to the bit as sums by hand in the element type that they are
//! reduced in.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, MixedPrecisionPolicy, ParamExt, fully_shard, unit,
};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;
use half::bf16;

use crate::fsdp::support::on_device;

const WIDTH: usize = 5;

/// One dimension shards; of two the first replicates.
const MESHES: [&[usize]; 3] = [&[2], &[3], &[2, 2]];

/// Element types set by the policy, and those that gradients of `f32` parameters are then reduced
/// in.
const POLICIES: [(Option<DType>, DType); 3] = [
    (Some(DType::F32), DType::F32),
    (None, DType::F32),
    (Some(DType::BF16), DType::BF16),
];

fn layer() -> Linear {
    LinearConfig::new(WIDTH, WIDTH)
        .with_bias(false)
        .init(&Device::flex())
}

fn sharded(layer: &Linear, mesh: &DeviceMesh, reduce: Option<DType>) -> Result<Linear> {
    let policy = MixedPrecisionPolicy::new().with_param_dtype(DType::BF16);
    let policy = reduce
        .into_iter()
        .fold(policy, MixedPrecisionPolicy::with_reduce_dtype);
    fully_shard(
        on_device(layer, &mesh.device().clone().autodiff()),
        mesh,
        FullyShard::new().with_mixed_precision(policy),
    )
}

/// The gradient of the weight's elements in a row, of one batch of a rank: a number that `bf16`
/// has. The sum of the first and any of the others needs more digits than `bf16` has and no more
/// than `f32` has.
fn term(ranks: usize, rank: usize, batch: usize, row: usize) -> f32 {
    let first = if (rank, batch) == (0, 0) {
        1.0
    } else {
        1.0 / 4096.0
    };
    first * (ranks * (row + 1)) as f32
}

/// Runs a forward and a backward that have these gradients.
fn backward(model: &Linear, mesh: &DeviceMesh, batch: usize) -> Gradients {
    let terms: Vec<_> = (0..WIDTH)
        .map(|row| term(mesh.size(), mesh.rank(), batch, row))
        .collect();
    let x = Tensor::<2>::from_data(
        TensorData::new(terms, [1, WIDTH]),
        &mesh.device().clone().autodiff(),
    );
    unit(model, x, |layer, x| layer.forward(x))
        .cast(DType::F32)
        .sum()
        .backward()
}

fn full(model: &Linear, grads: &Gradients) -> Result<Vec<f32>> {
    Ok(model
        .weight
        .full_grad(grads)?
        .expect("it is used")
        .into_data()
        .try_to_vec()
        .expect("f32"))
}

/// What the gradients of all ranks become, divided by `divisor`: each sum is rounded to `reduce`,
/// the one of a rank's batches, of the ranks that shard, and of the replicas.
fn by_hand(mesh: &[usize], batches: usize, divisor: f32, reduce: DType) -> Vec<f32> {
    let round = |x: f32| {
        if reduce == DType::BF16 {
            bf16::from_f32(x).to_f32()
        } else {
            x
        }
    };
    let (ranks, sharding) = (mesh.iter().product(), mesh[mesh.len() - 1]);
    let of_row = |row| {
        let own = |rank| {
            round(
                (0..batches)
                    .map(|batch| term(ranks, rank, batch, row))
                    .sum(),
            )
        };
        let replica = |first| round((first..first + sharding).map(own).sum());
        round((0..ranks).step_by(sharding).map(replica).sum::<f32>() / divisor)
    };
    (0..WIDTH).flat_map(|row| [of_row(row); WIDTH]).collect()
}

fn on_meshes(check: impl Fn(&[usize], &DeviceMesh, &Linear) -> Result<()> + Sync) {
    let layer = layer();
    let _ = layer.weight.val();
    for shape in MESHES {
        let names = &["replicate", "shard"][2 - shape.len()..];
        MeshTest::new(shape, names).run(|mesh| check(shape, mesh, &layer));
    }
}

#[test]
fn the_stored_type_is_reduced_in_unless_a_policy_sets_another() {
    on_meshes(|shape, mesh, layer| {
        let ranks = mesh.size();
        assert_ne!(
            by_hand(shape, 1, ranks as f32, DType::F32),
            by_hand(shape, 1, ranks as f32, DType::BF16)
        );
        for (set, reduce) in POLICIES {
            let model = sharded(layer, mesh, set)?;
            mesh.world().ledger().reset();
            let grads = backward(&model, mesh, 0);
            // The gradients, and a number for each rank that shards.
            let elements = WIDTH * WIDTH + shape[shape.len() - 1];
            let sent = mesh.world().ledger().bytes(Op::ReduceScatter) as usize;
            let expected = (
                elements * reduce.size(),
                by_hand(shape, 1, ranks as f32, reduce),
            );
            assert_eq!(
                (sent, full(&model, &grads)?),
                expected,
                "{shape:?}, {set:?}"
            );
        }
        Ok(())
    });
}

/// The unit knows no trained parameter in its first forward.
#[test]
fn a_unit_that_is_trained_after_a_frozen_forward_reduces_in_the_same_type() {
    on_meshes(|shape, mesh, layer| {
        for (set, reduce) in POLICIES {
            let frozen = sharded(layer, mesh, set)?.no_grad();
            let x = Tensor::<2>::ones([1, WIDTH], &mesh.device().clone().autodiff());
            assert!(!frozen.weight.base().is_require_grad());
            drop(unit(&frozen, x, |layer, x| layer.forward(x)));
            let model = frozen.set_require_grad(true);
            mesh.world().ledger().reset();
            let grads = backward(&model, mesh, 0);
            let elements = WIDTH * WIDTH + shape[shape.len() - 1];
            let expected = by_hand(shape, 1, mesh.size() as f32, reduce);
            assert_eq!(
                (
                    mesh.world().ledger().bytes(Op::ReduceScatter) as usize,
                    full(&model, &grads)?
                ),
                (elements * reduce.size(), expected),
                "{shape:?}, {set:?}"
            );
        }
        Ok(())
    });
}

#[test]
fn a_factor_divides_gradients_in_mixed_precision() {
    on_meshes(|shape, mesh, layer| {
        let ranks = mesh.size();
        for (set, reduce) in POLICIES {
            let model = sharded(layer, mesh, set)?;
            for factor in [1, ranks, 2 * ranks] {
                FsdpModule::of(&model)?.set_gradient_divide_factor(factor as f64)?;
                for force_sum in [false, true] {
                    FsdpModule::of(&model)?.set_force_sum_reduction(force_sum);
                    let expected = by_hand(shape, 1, factor as f32, reduce);
                    let found = full(&model, &backward(&model, mesh, 0))?;
                    assert_eq!(
                        found, expected,
                        "{shape:?}, {set:?}, by {factor}, force {force_sum}"
                    );
                }
            }
        }
        Ok(())
    });
}

#[test]
fn batches_without_sync_are_added_up_in_the_type_of_the_reduction() {
    on_meshes(|shape, mesh, layer| {
        for (set, reduce) in POLICIES {
            let model = sharded(layer, mesh, set)?;
            let waiting = FsdpModule::of(&model)?.no_sync();
            assert!(
                model
                    .weight
                    .full_grad(&backward(&model, mesh, 0))?
                    .is_none()
            );
            drop(waiting);
            let expected = by_hand(shape, 2, mesh.size() as f32, reduce);
            assert_eq!(
                full(&model, &backward(&model, mesh, 1))?,
                expected,
                "{shape:?}, {set:?}"
            );
        }
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Weights {
    of_all: Param<Tensor<2>>,
    of_one: Param<Tensor<2>>,
    unused: Param<Tensor<2>>,
}

/// A number that `f16` and `bf16` have.
const SLOPE: f32 = 24576.0;

/// Of one batch, where the first rank alone uses a weight, or of two, where it does so in the first
/// of them and the replicas add up after the second.
fn ranks_differ_in_what_they_use(
    shape: &[usize],
    reduce: DType,
    factor: f64,
    batches: usize,
    sums: bool,
) {
    let names = &["replicate", "shard"][2 - shape.len()..];
    MeshTest::new(shape, names).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let weight = || Param::from_tensor(Tensor::ones([WIDTH, WIDTH], &device));
        let model = Weights {
            of_all: weight(),
            of_one: weight(),
            unused: weight(),
        };
        let policy = MixedPrecisionPolicy::new()
            .with_param_dtype(reduce)
            .with_reduce_dtype(reduce)
            .with_output_dtype(DType::F32);
        let model = fully_shard(model, mesh, FullyShard::new().with_mixed_precision(policy))?;
        FsdpModule::of(&model)?.set_gradient_divide_factor(factor)?;
        FsdpModule::of(&model)?.set_force_sum_reduction(sums);
        let mut grads = None;
        for batch in 0..batches {
            FsdpModule::of(&model)?.set_requires_all_reduce(batch + 1 == batches);
            let y = unit(
                &model,
                Tensor::<2>::ones([WIDTH, WIDTH], &device),
                |model, x| {
                    let y = x.clone() * model.of_all.val();
                    if (mesh.rank(), batch) == (0, 0) {
                        y + x * model.of_one.val()
                    } else {
                        y
                    }
                },
            );
            grads = Some((y * SLOPE).sum().backward());
        }
        let grads = grads.expect("there is a batch");
        let what = format!(
            "{shape:?}, {reduce:?}, by {factor:e}, {batches} batches, sums {sums}, rank {}",
            mesh.rank()
        );
        let shard = model
            .of_one
            .shard_grad(&grads)
            .unwrap_or_else(|| panic!("{what}: a rank has used it"));
        let expected = f64::from(SLOPE) / factor;
        // Half an ulp of either type, or of the subnormal numbers of `f16`.
        let tolerance = (expected / 250.0).max(3e-8);
        for found in shard.local().clone().into_data().iter::<f64>() {
            assert!(
                (found - expected).abs() <= tolerance,
                "{what}: {found} for {expected}"
            );
        }
        assert!(model.unused.shard_grad(&grads).is_none(), "{what}");
        Ok(())
    });
}

/// A number of tokens is a factor by which 1 may become 0 in the type that gradients are reduced
/// in.
#[test]
fn every_rank_has_a_gradient_that_one_rank_has_whatever_divides_it() {
    for shape in [&[3][..], &[2, 2]] {
        for reduce in [DType::F16, DType::BF16, DType::F32] {
            for factor in [1e6, 6.4e7, 1e9] {
                ranks_differ_in_what_they_use(shape, reduce, factor, 1, false);
            }
        }
    }
}

/// The reciprocal of the factor may become 0 there, too, by which sums are multiplied.
#[test]
fn sums_are_divided_by_what_has_no_reciprocal_in_their_type() {
    for reduce in [DType::F16, DType::BF16, DType::F32] {
        for factor in [1e6, 6.4e7, 1e9] {
            ranks_differ_in_what_they_use(&[2], reduce, factor, 1, true);
        }
    }
}

#[test]
fn so_it_has_one_that_waited_for_the_replicas() {
    for reduce in [DType::F16, DType::BF16] {
        for factor in [4.0, 1e9] {
            ranks_differ_in_what_they_use(&[2, 2], reduce, factor, 2, false);
        }
    }
}
