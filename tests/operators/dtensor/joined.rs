//! Steps of one kind on several mesh dimensions: one collective of all their ranks.

use burn::tensor::Tensor;
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::{Layout, Placement};

use super::{R, S, SUM, on_mesh, part, ramp, tracked_devices, values};

/// Lengths that are chunks of chunks: of 7, over (2, 3), ranks have 2, 2, 0, 1, 1 and 1.
const SHAPE: [usize; 2] = [7, 5];

struct Case {
    mesh: &'static [usize],
    from: Vec<Placement>,
    to: Vec<Placement>,
    /// The order of cuts of dimension 0, in both.
    order: &'static [usize],
    /// Collectives with the ranks that each has.
    forward: &'static [(Op, usize)],
    backward: &'static [(Op, usize)],
}

fn cases() -> Vec<Case> {
    use Op::{
        AllGather as Gather, AllReduce as Reduce, AllToAll as Exchange, ReduceScatter as Scatter,
    };
    let case = |mesh, from: &[Placement], to: &[Placement], order, forward, backward| Case {
        mesh,
        from: from.to_vec(),
        to: to.to_vec(),
        order,
        forward,
        backward,
    };
    let mut cases = Vec::new();
    for (mesh, ranks) in [(&[2, 2][..], 4), (&[2, 3], 6)] {
        let gather: &[(Op, usize)] = if ranks == 4 {
            &[(Gather, 4)]
        } else {
            &[(Gather, 6)]
        };
        let scatter: &[(Op, usize)] = if ranks == 4 {
            &[(Scatter, 4)]
        } else {
            &[(Scatter, 6)]
        };
        let reduce: &[(Op, usize)] = if ranks == 4 {
            &[(Reduce, 4)]
        } else {
            &[(Reduce, 6)]
        };
        for order in [&[0, 1], &[1, 0]] {
            cases.push(case(mesh, &[S(0), S(0)], &[R, R], order, gather, &[]));
            cases.push(case(mesh, &[R, R], &[S(0), S(0)], order, &[], gather));
            cases.push(case(
                mesh,
                &[SUM, SUM],
                &[S(0), S(0)],
                order,
                scatter,
                gather,
            ));
        }
        cases.push(case(mesh, &[SUM, SUM], &[R, R], &[], reduce, &[]));
    }
    let three: &[usize] = &[2, 1, 3];
    cases.push(case(
        three,
        &[S(0), S(0), S(0)],
        &[R, R, R],
        &[2, 1, 0],
        &[(Gather, 6)],
        &[],
    ));
    cases.push(case(
        &[2, 2, 2],
        &[S(0), S(0), S(0)],
        &[R, R, R],
        &[1, 2, 0],
        &[(Gather, 8)],
        &[],
    ));
    cases.push(case(
        &[2, 2, 2],
        &[SUM, S(1), SUM],
        &[S(0), R, S(0)],
        &[2, 0],
        &[(Scatter, 4), (Gather, 2)],
        &[(Gather, 4)],
    ));
    // What is cut of different dimensions takes a collective each.
    cases.push(case(
        &[2, 2],
        &[S(0), S(1)],
        &[R, R],
        &[0],
        &[(Gather, 2), (Gather, 2)],
        &[],
    ));
    cases.push(case(
        &[2, 2],
        &[S(0), S(0)],
        &[S(1), S(0)],
        &[0, 1],
        &[(Gather, 2), (Exchange, 2)],
        &[(Gather, 2), (Exchange, 2)],
    ));
    cases
}

fn layout(mesh: &DeviceMesh, placements: &[Placement], order: &[usize]) -> Layout {
    let shardings: Vec<_> = order
        .iter()
        .copied()
        .filter(|&sizes| placements[sizes] == S(0))
        .collect();
    Layout::with_shard_order(mesh.shape(), placements, &[(0, &shardings)]).unwrap()
}

/// The whole `loss = sum(w * x)`: values of burn's own slices, the gradient `w`.
#[test]
fn nested_shards_are_gathered_scattered_and_reduced_at_once() {
    for Case {
        mesh: shape,
        from,
        to,
        order,
        forward,
        backward,
    } in cases()
    {
        on_mesh(shape, |world, mesh| {
            let name = format!("{from:?} -> {to:?} on {shape:?}, cut by {order:?}");
            let device = &tracked_devices()[0];
            let (from, to) = (layout(mesh, &from, order), layout(mesh, &to, order));
            let ranks = world.size() as f32;
            let x = match from.has_partial() {
                // Every rank's term is a part of the whole; along a sharded mesh dimension they are
                // cut.
                true => {
                    let terms: f32 = from
                        .placements()
                        .iter()
                        .zip(shape)
                        .filter(|(own, _)| **own == SUM)
                        .map(|(_, &len)| len as f32)
                        .product();
                    let ranges = from.local_slices(&SHAPE, mesh.coordinate().unwrap());
                    let term = ramp(SHAPE, 0.0, device)
                        .slice([ranges[0].clone(), ranges[1].clone()])
                        .div_scalar(terms);
                    DTensor::from_local_with_layout(
                        term.detach().require_grad(),
                        mesh,
                        from.clone(),
                        SHAPE,
                    )?
                }
                false => DTensor::distribute_replicated_to(
                    ramp(SHAPE, 0.0, device).require_grad(),
                    mesh,
                    from.clone(),
                )?,
            };
            world.ledger().reset();
            let y = x.clone().redistribute_to(&to)?;
            let close = |found: Vec<f32>, expected: Vec<f32>| {
                assert_eq!(found.len(), expected.len(), "{name}");
                let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * ranks * b.abs().max(1.0);
                assert!(
                    found.iter().zip(&expected).all(near),
                    "{name}: {found:?}, not {expected:?}"
                );
            };
            close(
                values(y.local().clone()),
                part(ramp(SHAPE, 0.0, device).inner(), &y),
            );
            let w = DTensor::distribute_replicated_to(ramp(SHAPE, 3.0, device), mesh, to)?;
            let grads = (y.to_local() * w.to_local()).sum().backward();
            let grad = x.grad(&grads).expect("a leaf");
            assert_eq!(
                values(grad.local().clone()),
                part(ramp(SHAPE, 3.0, device).inner(), &grad),
                "{name}"
            );
            let issued = |phase| -> Vec<(Op, usize)> {
                let entries = world.ledger().recent();
                entries
                    .iter()
                    .filter(|entry| entry.phase == phase)
                    .map(|entry| (entry.op, entry.group_size))
                    .collect()
            };
            assert_eq!(issued(Phase::Forward), forward, "{name}");
            assert_eq!(issued(Phase::Backward), backward, "{name}");
            Ok(())
        });
    }
}

/// Of one that varies afterwards on all of its mesh dimensions; else each by itself.
#[test]
fn gathered_and_varied_at_once_is_scattered_at_once() {
    on_mesh(&[2, 3], |world, mesh| {
        let device = &tracked_devices()[0];
        for (varying, scattered) in [(&[0, 1][..], vec![6]), (&[0], vec![2]), (&[1], vec![3])] {
            for order in [[0, 1], [1, 0]] {
                let placements = [S(0), S(0)];
                let from = Layout::with_shard_order(&[2, 3], &placements, &[(0, &order)])?;
                let x = DTensor::distribute_replicated_to(
                    ramp(SHAPE, 0.0, device).require_grad(),
                    mesh,
                    from,
                )?;
                let y = match varying {
                    [0, 1] => x.clone().all_gather_varying(varying)?,
                    _ => {
                        let full = x.clone().redistribute(&[R, R])?;
                        world.ledger().reset();
                        full.vary(varying)?
                    }
                };
                let w: Tensor<2> = ramp(SHAPE, 1.0, device).mul_scalar((world.rank() + 1) as f32);
                let grads = (y * w).sum().backward();
                let ranks: Vec<usize> = match varying {
                    [0, 1] => (0..6).collect(),
                    [0] => (0..6).filter(|rank| rank % 3 == world.rank() % 3).collect(),
                    _ => (0..6).filter(|rank| rank / 3 == world.rank() / 3).collect(),
                };
                let times = ranks.iter().map(|&rank| (rank + 1) as f32).sum::<f32>();
                let expected = ramp(SHAPE, 1.0, device).inner().mul_scalar(times);
                assert_eq!(
                    values(x.grad(&grads).expect("a leaf").to_local()),
                    part(expected, &x),
                    "{varying:?} {order:?}"
                );
                let backward = world.ledger().recent();
                let backward = backward
                    .iter()
                    .filter(|entry| entry.phase == Phase::Backward);
                assert_eq!(
                    backward.map(|entry| entry.group_size).collect::<Vec<_>>(),
                    scattered
                );
                world.ledger().reset();
            }
        }
        Ok(())
    });
}

/// A group of the world would not have the deadline: a step for each dimension.
#[test]
fn a_mesh_with_a_deadline_of_its_own_joins_no_steps() {
    on_mesh(&[2, 2], |_, mesh| {
        let own = mesh.with_deadline("a", std::time::Duration::from_secs(60))?;
        for (mesh, groups) in [(mesh, vec![4]), (&own, vec![2, 2])] {
            let x = DTensor::distribute_replicated(
                ramp(SHAPE, 0.0, mesh.device()),
                mesh,
                &[S(0), S(0)],
            )?;
            let ledger = mesh.world().ledger();
            ledger.reset();
            let full = x.full_tensor()?;
            assert_eq!(values(full), values(ramp(SHAPE, 0.0, mesh.device())));
            assert_eq!(
                ledger
                    .recent()
                    .iter()
                    .map(|entry| entry.group_size)
                    .collect::<Vec<_>>(),
                groups
            );
        }
        Ok(())
    });
}
