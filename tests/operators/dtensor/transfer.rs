//! From one mesh to another.

use burn::tensor::{DType, Int, Tensor};
use burn_dtensor::comm::{CommError, Launch, Op, Phase, World, launch};
use burn_dtensor::dtensor::{CrossMeshRedistribute, DTensor, DTensorError};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{Layout, Placement};
use burn_dtensor::{Error, Result};
use itertools::Itertools;

use super::{R, S, SUM, error_of, names, part, placements_of, ramp, tracked_devices, values};

const SHAPE: [usize; 2] = [5, 4];

/// Shape and ranks of a mesh.
type Ranks = (&'static [usize], &'static [usize]);

fn mesh(world: &World, (shape, ranks): Ranks) -> Result<DeviceMesh> {
    DeviceMesh::from_ranks(world, ranks, shape, names(shape.len()))
}

/// Runs `program` on six ranks, with both meshes and every pair of layouts on them.
fn every_pair(
    from: Ranks,
    to: Ranks,
    program: impl Fn(&World, [(&DeviceMesh, Layout); 2]) -> Result<()> + Sync,
) {
    let run = launch(Launch::threads(6), |world| {
        let meshes = [mesh(world, from)?, mesh(world, to)?];
        for (a, b) in placements_of(from.0.len(), 2)
            .into_iter()
            .cartesian_product(placements_of(to.0.len(), 2))
        {
            let layouts = [Layout::new(from.0, &a)?, Layout::new(to.0, &b)?];
            let [x, y] = layouts;
            program(world, [(&meshes[0], x), (&meshes[1], y)])?;
        }
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
}

/// A part on the ranks of the mesh.
fn part_on(full: Tensor<2>, mesh: &DeviceMesh, layout: &Layout) -> Result<Option<DTensor<2>>> {
    match mesh.coordinate() {
        Some(_) => DTensor::distribute_replicated_to(full, mesh, layout.clone()).map(Some),
        None => Ok(None),
    }
}

/// Elements that the rank at `place` of a mesh holds.
fn held(layout: &Layout, mesh: &DeviceMesh) -> Vec<Vec<usize>> {
    let Some(coordinate) = mesh.coordinate() else {
        return Vec::new();
    };
    layout
        .local_slices(&SHAPE, coordinate)
        .into_iter()
        .multi_cartesian_product()
        .collect()
}

/// Disjoint, overlapping and equal sets of ranks, of which some are in neither; values of burn's
/// own slices, and of bytes each rank gets what it lacks.
#[test]
fn a_tensor_arrives_on_other_ranks_and_nothing_is_sent_twice() {
    let pairs: [(Ranks, Ranks); 5] = [
        ((&[2], &[0, 1]), (&[2], &[4, 3])),
        ((&[3], &[0, 1, 2]), (&[2, 2], &[1, 5, 2, 3])),
        ((&[2, 2], &[3, 1, 0, 2]), (&[4], &[0, 1, 2, 3])),
        ((&[1], &[5]), (&[2, 3], &[0, 1, 2, 3, 4, 5])),
        ((&[2, 3], &[0, 1, 2, 3, 4, 5]), (&[1], &[2])),
    ];
    for (from, to) in pairs {
        every_pair(from, to, |world, [(a, from), (b, to)]| {
            let full = ramp(SHAPE, 1.0, world.device());
            let transfer =
                CrossMeshRedistribute::new(SHAPE, DType::F32, (a, from.clone()), (b, to.clone()))?;
            let x = part_on(full.clone(), a, &from)?;
            world.ledger().reset();
            let y = transfer.run(x)?;
            assert_eq!(y.is_some(), b.coordinate().is_some());
            if let Some(y) = y {
                assert_eq!((y.mesh(), y.layout()), (b, &to));
                assert_eq!(
                    values(y.local().clone()),
                    part(full, &y),
                    "{from} on {a} -> {to} on {b}"
                );
            }
            let own = held(&from, a);
            let lacks = held(&to, b)
                .iter()
                .filter(|element| !own.contains(element))
                .count();
            let (calls, given) = (
                world.ledger().calls(Op::AllToAllList),
                world.ledger().bytes(Op::AllToAllList),
            );
            assert_eq!(
                world.ledger().total(|_| true).calls,
                calls,
                "one kind of collective"
            );
            let sums = Tensor::<1, Int>::from_ints(
                [lacks as i64 * 4 - given as i64, i64::from(calls > 1)],
                world.device(),
            );
            let work = world.all().all_reduce(
                "sums".into(),
                vec![sums.into_dispatch()],
                burn_dtensor::comm::ReduceOp::Sum,
            );
            let sums = Tensor::<1, Int>::from_dispatch(work.wait()?.remove(0));
            assert_eq!(
                sums.into_data().iter::<i64>().collect::<Vec<_>>(),
                [0, 0],
                "{from} on {a} -> {to} on {b}"
            );
            Ok(())
        });
    }
}

/// `loss = sum(w * tanh(2 x))`, through the other mesh, against the single-device gradient.
#[test]
fn gradients_come_back_between_meshes_of_the_same_ranks() {
    for device in tracked_devices() {
        let reference = {
            let x = ramp(SHAPE, -9.0, &device).div_scalar(10.0).require_grad();
            let grads = ((x.clone() * 2.0).tanh() * ramp(SHAPE, 1.0, &device))
                .sum()
                .backward();
            x.grad(&grads).expect("a leaf")
        };
        for (from, to) in [
            (
                (&[4][..], &[0, 1, 2, 3][..]),
                (&[2, 2][..], &[2, 0, 3, 1][..]),
            ),
            ((&[2, 3], &[0, 1, 2, 3, 4, 5]), (&[6], &[5, 4, 3, 2, 1, 0])),
        ] {
            every_pair(from, to, |world, [(a, from), (b, to)]| {
                if a.coordinate().is_none() {
                    return Ok(());
                }
                let full = ramp(SHAPE, -9.0, &device).div_scalar(10.0).require_grad();
                let x = DTensor::distribute_replicated_to(full, a, from.clone())?;
                let doubled = DTensor::from_local_with_layout(
                    x.local().clone() * 2.0,
                    a,
                    from.clone(),
                    SHAPE,
                )?;
                let y = CrossMeshRedistribute::new(SHAPE, DType::F32, (a, from), (b, to.clone()))?
                    .run(Some(doubled))?;
                let y = y.expect("every rank is in both");
                let w = DTensor::distribute_replicated_to(ramp(SHAPE, 1.0, &device), b, to)?;
                world.ledger().reset();
                let grads = (y.to_local().tanh() * w.to_local()).sum().backward();
                assert!(
                    world
                        .ledger()
                        .total(|key| key.phase == Phase::Backward)
                        .calls
                        <= 1
                );
                let grad = x.grad(&grads).expect("a leaf");
                assert_eq!(values(grad.local().clone()), part(reference.clone(), &grad));
                Ok(())
            });
        }
    }
}

#[test]
fn terms_of_a_sum_are_added_up_on_their_own_mesh() {
    let run = launch(Launch::threads(4), |world| {
        let device = &tracked_devices()[0];
        let (a, b) = (
            mesh(world, (&[2, 2], &[0, 1, 2, 3]))?,
            mesh(world, (&[4], &[3, 2, 1, 0]))?,
        );
        let (from, to) = (
            Layout::new(&[2, 2], &[SUM, S(1)])?,
            Layout::new(&[4], &[S(0)])?,
        );
        let local = Tensor::<2>::full([5, 2], 1.0 + world.rank() as f32, device).require_grad();
        let x = DTensor::from_local(local, &a, &[SUM, S(1)])?;
        let y = CrossMeshRedistribute::new(SHAPE, DType::F32, (&a, from), (&b, to))?
            .run(Some(x.clone()))?
            .expect("in both");
        // 1 + 3 on the left, 2 + 4 on the right.
        let rows = y.local().dims()[0];
        assert_eq!(values(y.local().clone()), [4.0, 4.0, 6.0, 6.0].repeat(rows));
        let grads = y.to_local().mul_scalar(3.0).sum().backward();
        let grad = x.grad(&grads).expect("a leaf");
        assert_eq!(
            (grad.placements(), values(grad.local().clone())),
            (&[R, S(1)][..], vec![3.0; 10])
        );
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
}

fn transfer_error(error: &Error) -> &DTensorError {
    match error {
        Error::DTensor(error) => error,
        error => panic!("{error}"),
    }
}

#[test]
fn what_cannot_be_transferred_is_refused_with_a_remedy() {
    let run = launch(Launch::threads(3), |world| {
        let (a, b) = (mesh(world, (&[2], &[0, 1]))?, mesh(world, (&[2], &[1, 2]))?);
        let rows = || Layout::new(&[2], &[S(0)]).expect("fits");
        let transfer = CrossMeshRedistribute::new(SHAPE, DType::F32, (&a, rows()), (&b, rows()))?;
        let x = |shape: [usize; 2], placement: Placement| {
            DTensor::<2>::ones(shape, &a, &[placement], world.device())
        };
        if a.coordinate().is_some() {
            for wrong in [
                None,
                Some(x([4, 4], S(0))?),
                Some(x(SHAPE, S(1))?),
                Some(x(SHAPE, S(0))?.cast(DType::F16)),
            ] {
                let error = error_of(transfer.run(wrong));
                assert!(
                    matches!(transfer_error(&error), DTensorError::TransferOf { .. }),
                    "{error}"
                );
            }
            let device = world.device().clone().autodiff();
            let leaf = DTensor::<2>::ones(SHAPE, &a, &[S(0)], &device)?.require_grad();
            let error = error_of(transfer.run(Some(leaf.clone())));
            assert!(
                matches!(transfer_error(&error), DTensorError::TransferTracked { .. }),
                "{error}"
            );
            assert!(error.to_string().contains("`detach` the tensor"), "{error}");
            transfer.run(Some(DTensor::from_local_with_shape(
                leaf.to_local().inner(),
                &a,
                &[S(0)],
                SHAPE,
            )?))?;
        } else {
            // It has no tensor that would tell.
            let error = error_of(transfer.run::<2, Int>(None));
            let DTensorError::TransferOf { found, .. } = transfer_error(&error) else {
                panic!("{error}")
            };
            assert_eq!(found, "a tensor of kind Int");
            assert_eq!(
                transfer
                    .run::<2, burn::tensor::Float>(None)?
                    .expect("in the second")
                    .local()
                    .dims(),
                [2, 4]
            );
        }
        let partial = CrossMeshRedistribute::new(
            SHAPE,
            DType::F32,
            (&a, rows()),
            (&b, Layout::new(&[2], &[SUM])?),
        );
        assert!(matches!(
            transfer_error(&error_of(partial)),
            DTensorError::Partial {
                operation: "CrossMeshRedistribute",
                ..
            }
        ));
        let other = CrossMeshRedistribute::new(
            SHAPE,
            DType::F32,
            (&a, Layout::new(&[3], &[R])?),
            (&b, rows()),
        );
        assert!(matches!(
            transfer_error(&error_of(other)),
            DTensorError::LayoutMesh { .. }
        ));
        Ok(())
    });
    run.unwrap_or_else(|error| panic!("{error}"));
}

/// The ranks that wait for the one that refuses get its error.
#[test]
fn a_rank_that_refuses_leaves_none_waiting() {
    let error = launch(Launch::threads(3), |world| {
        let (a, b) = (mesh(world, (&[1], &[0]))?, mesh(world, (&[2], &[1, 2]))?);
        let (from, to) = (Layout::replicate(&[1])?, Layout::replicate(&[2])?);
        let transfer = CrossMeshRedistribute::new(SHAPE, DType::F32, (&a, from), (&b, to))?;
        transfer.run::<2, burn::tensor::Float>(None).map(drop)
    });
    let error = error.expect_err("rank 0 has a part");
    assert!(
        matches!(
            &error.cause,
            Error::DTensor(DTensorError::TransferOf { rank: 0, .. })
        ),
        "{error}"
    );
    assert!(error.others.iter().all(|other| matches!(
        &other.error,
        Some(Error::Comm(CommError::RankFailed { rank: 0, .. }))
    )));
}
