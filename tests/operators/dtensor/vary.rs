//! Values that ranks use differently (invariant 2).

use burn::tensor::{Device, Tensor, Tolerance};
use burn_dtensor::Result;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::placement::Placement;
use itertools::Itertools;

use super::{AVG, MAX, PRODUCT, R, S, SUM, on_mesh, placements_of, ramp, tracked_devices, values};

/// Invariant 4, and the cache: three projections of one replicated activation, each rank with its
/// own columns.
#[test]
fn q_k_and_v_share_one_all_reduce() {
    for device in tracked_devices() {
        let weight = |seed: f32| ramp([3, 4], seed, &device).div_scalar(10.0);
        let (reference_loss, reference_grad) = {
            let x = ramp([2, 3], 0.0, &device).require_grad();
            let qkv = [1.0, 2.0, 3.0].map(|seed| x.clone().matmul(weight(seed)).tanh().sum());
            let loss = qkv.into_iter().reduce(|a, b| a + b).unwrap();
            let grads = loss.backward();
            (loss.into_scalar::<f32>(), values(x.grad(&grads).unwrap()))
        };
        on_mesh(&[2], |world, mesh| {
            let leaf = ramp([2, 3], 0.0, &device).require_grad();
            // A second step over the same leaf needs a new handle: the first one's node is spent.
            let x = DTensor::from_local(leaf.clone(), mesh, &[R])?;
            for _ in 0..2 {
                world.ledger().reset();
                let mut loss = None;
                for (x, seed) in [x.clone(), x.clone(), x.clone()]
                    .into_iter()
                    .zip([1.0, 2.0, 3.0])
                {
                    let columns = DTensor::distribute_replicated(weight(seed), mesh, &[S(1)])?;
                    let y = x.vary(&[0])?.matmul(columns.to_local()).tanh().sum();
                    loss = Some(loss.map_or(y.clone(), |loss| loss + y));
                }
                let loss = DTensor::from_local(loss.unwrap(), mesh, &[SUM])?.full_tensor()?;
                let grads = loss.backward();
                let ledger = world.ledger();
                assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Backward), 1);
                assert_eq!(
                    ledger.calls_in(Op::AllReduce, Phase::Forward),
                    1,
                    "the loss"
                );
                assert_eq!(ledger.total(|_| true).calls, 2);
                assert!((loss.into_scalar::<f32>() - reference_loss).abs() < 1e-5);
                let grad = values(leaf.grad(&grads).unwrap());
                assert!(
                    grad.iter()
                        .zip(&reference_grad)
                        .all(|(a, b)| (a - b).abs() < 1e-5),
                    "{grad:?}"
                );
            }
            Ok(())
        });
    }
}

/// The same from a row-sharded activation (sequence parallel): FSDP's row of the table.
#[test]
fn gather_vary_is_one_all_gather_and_one_reduce_scatter() {
    for device in tracked_devices() {
        let weight = ramp([3, 4], 1.0, &device).div_scalar(10.0);
        let reference = {
            let x = ramp([5, 3], 0.0, &device).div_scalar(20.0).require_grad();
            let loss = x.clone().matmul(weight.clone()).tanh().powi_scalar(2).sum();
            x.grad(&loss.backward()).unwrap()
        };
        for mesh_shape in [&[2][..], &[2, 2]] {
            on_mesh(mesh_shape, |world, mesh| {
                let tp = mesh.ndim() - 1;
                let mut placements = vec![R; mesh.ndim()];
                placements[tp] = S(0);
                let full = ramp([5, 3], 0.0, &device).div_scalar(20.0).require_grad();
                let x = DTensor::distribute_replicated(full, mesh, &placements)?;
                let leaf = x.local().clone();
                placements[tp] = S(1);
                let columns =
                    DTensor::distribute_replicated(weight.clone(), mesh, &placements)?.to_local();
                world.ledger().reset();
                let clone = x.clone();
                let half = |x: &DTensor<2>, columns: Tensor<2>| -> Result<Tensor<1>> {
                    Ok(x.all_gather_varying(&[tp])?
                        .matmul(columns)
                        .tanh()
                        .powi_scalar(2)
                        .sum()
                        .mul_scalar(0.5))
                };
                let loss = half(&x, columns.clone())? + half(&clone, columns)?;
                let grads = loss.backward();
                let ledger = world.ledger();
                assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
                assert_eq!(ledger.calls_in(Op::ReduceScatter, Phase::Backward), 1);
                assert_eq!(ledger.total(|_| true).calls, 2);
                placements[tp] = S(0);
                let expected =
                    DTensor::distribute_replicated(reference.clone(), mesh, &placements)?
                        .to_local();
                let (grad, expected) = (values(leaf.grad(&grads).unwrap()), values(expected));
                assert!(
                    grad.iter()
                        .zip(&expected)
                        .all(|(a, b)| (a - b).abs() < 1e-5),
                    "{grad:?} {expected:?}"
                );
                Ok(())
            });
        }
    }
}

/// Every placement of a 2-D mesh, gathered on every set of mesh dimensions, where ranks that differ
/// along these weigh the result differently: the gradient is the sum of their terms.
#[test]
fn gather_vary_sums_the_terms_of_every_placement() {
    let shape = [5, 3];
    let device = Device::flex().autodiff();
    let weight = |along: &[usize]| {
        ramp(
            shape,
            along.iter().fold(1.0, |sum, &at| 3.0 * sum + at as f32),
            &device,
        )
    };
    on_mesh(&[2, 2], |_, mesh| {
        for placements in placements_of(2, 2) {
            for dims in [&[0][..], &[1], &[0, 1]] {
                let full = ramp(shape, 0.0, &device).require_grad();
                let x = DTensor::distribute_replicated(full, mesh, &placements)?;
                let leaf = x.local().clone();
                let varied = x.all_gather_varying(dims)?;
                let mut after = placements.clone();
                dims.iter().for_each(|&dim| after[dim] = R);
                let own: Vec<usize> = dims
                    .iter()
                    .map(|&dim| mesh.coordinate().unwrap()[dim])
                    .collect();
                let part = DTensor::distribute_replicated(weight(&own), mesh, &after)?.to_local();
                let grads = (varied * part).sum().backward();
                let all = dims.iter().map(|_| 0..2).multi_cartesian_product();
                let sum = all
                    .map(|along| weight(&along))
                    .reduce(|a, b| a + b)
                    .unwrap();
                let expected = DTensor::distribute_replicated(sum, mesh, &placements)?.to_local();
                let grad = leaf.grad(&grads).unwrap();
                assert_eq!(
                    grad.into_data(),
                    expected.into_data(),
                    "{placements:?} {dims:?}"
                );
            }
        }
        Ok(())
    });
}

#[test]
fn a_partial_value_can_vary_too() {
    on_mesh(&[2], |world, mesh| {
        let device = Device::flex().autodiff();
        let leaf = ramp([3], world.rank() as f32, &device).require_grad();
        let x = DTensor::from_local(leaf.clone(), mesh, &[AVG])?;
        let varied = x.all_gather_varying(&[0])?;
        assert_eq!(values(varied.clone()), [0.5, 1.5, 2.5]);
        let grads = (varied * (world.rank() as f32 + 1.0)).sum().backward();
        assert_eq!(values(leaf.grad(&grads).unwrap()), [1.5; 3]);
        Ok(())
    });
}

#[test]
fn local_gradients_are_summed_where_the_caller_says_so() {
    on_mesh(&[2, 2], |world, mesh| {
        let device = Device::flex().autodiff();
        let run =
            |placements: [Placement; 2], grad_placements: [Placement; 2]| -> Result<Vec<f32>> {
                let leaf = ramp([2], 0.0, &device).require_grad();
                let x = DTensor::from_local(leaf.clone(), mesh, &placements)?;
                let local = x.to_local_with_grad_placements(&grad_placements)?;
                let grads = (local * (world.rank() as f32)).sum().backward();
                Ok(values(leaf.grad(&grads).unwrap()))
            };
        let rank = world.rank();
        assert_eq!(run([R, R], [R, R])?, [rank as f32; 2]);
        assert_eq!(
            run([S(0), R], [S(0), SUM])?,
            [[1.0, 1.0, 5.0, 5.0][rank]; 2]
        );
        assert_eq!(run([R, SUM], [SUM, R])?, [[2.0, 4.0, 2.0, 4.0][rank]; 2]);
        assert_eq!(run([R, SUM], [SUM, SUM])?, [6.0; 2]);
        Ok(())
    });
}

/// Of a value that is partial over two mesh dimensions, or varies over both: forward and backward
/// are one collective of all ranks each, with every reduction's own derivative.
#[test]
fn reductions_over_two_mesh_dimensions_are_one_collective() {
    let device = Device::flex().autodiff();
    let terms = |rank: usize| ramp([2, 3], 1.0 + rank as f32, &device);
    let weights = ramp([2, 3], 5.0, &device);
    for partial in [SUM, AVG, MAX, PRODUCT] {
        on_mesh(&[2, 3], |world, mesh| {
            let leaf = terms(world.rank()).require_grad();
            let x = DTensor::from_local(leaf.clone(), mesh, &[partial, partial])?;
            world.ledger().reset();
            let complete = x.full_tensor()?;
            assert_eq!(
                world
                    .ledger()
                    .total(|key| key.phase == Phase::Forward)
                    .calls,
                1
            );
            let all: Vec<Tensor<2>> = (0..6).map(|rank| terms(rank).inner()).collect();
            let fold = |by: fn(Tensor<2>, Tensor<2>) -> Tensor<2>| {
                all.iter().cloned().reduce(by).expect("six")
            };
            let (others, own) = (
                all.iter()
                    .enumerate()
                    .filter(|(rank, _)| *rank != world.rank())
                    .map(|(_, term)| term.clone()),
                leaf.clone().inner(),
            );
            let w = weights.clone().inner();
            let (value, grad) = match partial {
                SUM => (fold(|a, b| a + b), w),
                AVG => (fold(|a, b| a + b) / 6.0, w / 6.0),
                MAX => {
                    let max = fold(|a, b| a.max_pair(b));
                    let holds = own.equal(max.clone()).float();
                    (max, w * holds)
                }
                _ => (
                    fold(|a, b| a * b),
                    w * others.reduce(|a, b| a * b).expect("five"),
                ),
            };
            let grads = (complete.clone() * weights.clone()).sum().backward();
            let close = |found: Tensor<2>, expected: Tensor<2>| {
                found
                    .into_data()
                    .assert_approx_eq::<f32>(&expected.into_data(), Tolerance::default());
            };
            close(complete.inner(), value);
            close(leaf.grad(&grads).expect("a leaf"), grad);
            Ok(())
        });
    }
    on_mesh(&[2, 3], |world, mesh| {
        let leaf = ramp([2, 3], 0.0, &device).require_grad();
        let x = DTensor::from_local(leaf.clone(), mesh, &[R, R])?;
        let y = x.vary(&[0, 1])? * (1.0 + world.rank() as f32);
        world.ledger().reset();
        let grads = y.sum().backward();
        assert_eq!(world.ledger().calls_in(Op::AllReduce, Phase::Backward), 1);
        let grad = leaf.grad(&grads).expect("a leaf").into_data();
        assert_eq!(
            grad,
            Tensor::<2>::full([2, 3], 21.0, &Device::flex()).into_data()
        );
        Ok(())
    });
}
