//! Random values are the same on every mesh, to the bit.

use burn::tensor::{Device, Distribution, Tensor};
use burn_dtensor::dtensor::ops::{module, random};
use burn_dtensor::prelude::*;
use itertools::Itertools;

use super::{R, S, SUM, on_mesh, placements_of, ramp, values};

const SHAPE: [usize; 2] = [5, 6];
const MESHES: [&[usize]; 4] = [&[1], &[2], &[4], &[2, 2]];

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

/// What `program` gives on every rank, for every mesh and every placement of shards and replicas:
/// asserted to be one thing.
fn same_everywhere(program: impl Fn(&DeviceMesh, &[Placement]) -> Result<Vec<Vec<u32>>> + Sync) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for mesh_shape in MESHES {
        for placements in placements_of(mesh_shape.len(), 2) {
            for outcome in on_mesh(mesh_shape, |_, mesh| program(mesh, &placements)) {
                all.push((format!("mesh {mesh_shape:?}, {placements:?}"), outcome));
            }
        }
    }
    let (first, expected) = all[0].clone();
    for (at, outcome) in all {
        assert_eq!(outcome, expected, "{at} against {first}");
    }
    expected
}

#[test]
fn initialization_is_bitwise_the_same_on_every_mesh() {
    let distributions = [
        Distribution::Default,
        Distribution::Uniform(-0.1, 0.1),
        Distribution::Normal(0.0, 0.02),
        Distribution::Bernoulli(0.3),
    ];
    let bits = same_everywhere(|mesh, placements| {
        random::seed(7);
        let one = |distribution| {
            let seed = random::next_seed();
            let made = DTensor::<2>::random(SHAPE, distribution, seed, mesh, placements, mesh.device())?;
            let like = made.random_like(distribution);
            Ok([bits(made.full_tensor()?), bits(like.full_tensor()?)])
        };
        let all: Result<Vec<_>> = distributions.into_iter().map(one).collect();
        Ok(all?.into_iter().flatten().collect())
    });
    assert!(bits.iter().all_unique(), "every draw has a seed of its own");
}

#[test]
fn dropout_is_bitwise_the_same_on_every_mesh_forward_and_backward() {
    let bits = same_everywhere(|mesh, placements| {
        let device = mesh.device().clone().autodiff();
        let leaf = |offset| DTensor::distribute_local(ramp(SHAPE, offset, &device), mesh, placements);
        let x = leaf(0.5)?.require_grad();
        let y = module::dropout(x.clone(), 0.3, 11);
        let grads = (y.local().clone() * leaf(-7.25)?.to_local()).sum().backward();
        let grad = DTensor::from_local_with_shape(x.local().grad(&grads).unwrap(), mesh, placements, SHAPE)?;
        Ok(vec![bits(y.full_tensor()?), bits(grad.full_tensor()?)])
    });
    let kept = bits[0].iter().filter(|&&value| value != 0).count();
    assert!((10..30).contains(&kept), "{kept} of 30");
}

/// Every rank drops the same elements of its term of a sum.
#[test]
fn a_pending_sum_passes_dropout() {
    let plain = on_mesh(&[1], |_, mesh| {
        let x = DTensor::distribute_local(ramp(SHAPE, 1.0, &Device::flex()), mesh, &[R])?;
        Ok(values(module::dropout(x, 0.5, 3).full_tensor()?))
    });
    on_mesh(&[2], |_, mesh| {
        let half = ramp(SHAPE, 1.0, &Device::flex()).div_scalar(2.0);
        let y = module::dropout(DTensor::from_local(half, mesh, &[SUM])?, 0.5, 3);
        assert_eq!(y.placements(), [SUM]);
        assert_eq!(values(y.full_tensor()?), plain[0]);
        Ok(())
    });
}

#[test]
fn seeds_are_a_stream_that_starts_alike_on_every_rank() {
    let drawn = on_mesh(&[4], |_, _| {
        let first: [u64; 3] = std::array::from_fn(|_| random::next_seed());
        random::seed(0);
        assert_eq!(std::array::from_fn(|_| random::next_seed()), first, "a rank begins at seed 0");
        random::seed(1);
        let second: [u64; 3] = std::array::from_fn(|_| random::next_seed());
        Ok(first.into_iter().chain(second).chain((0..3).map(|rank| random::fold_in(1, rank))).collect_vec())
    });
    assert!(drawn.iter().all_equal());
    assert!(drawn[0].iter().all_unique(), "{drawn:?}");
}

#[test]
fn a_probability_to_drop_is_below_one() {
    on_mesh(&[1], |_, mesh| {
        let x = DTensor::<2>::ones(SHAPE, mesh, &[S(0)], mesh.device())?;
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| module::dropout(x.clone(), 1.0, 0)));
        let error = refused.expect_err("nothing would be left").downcast::<Error>().expect("a typed error");
        assert!(error.to_string().contains("dropout of 1"), "{error}");
        assert_eq!(values(module::dropout(x, 0.0, 0).to_local()), [1.0; 30]);
        Ok(())
    });
}
