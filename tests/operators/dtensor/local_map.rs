//! Local maps: values and gradients against the whole computation, and what they refuse.

use burn::tensor::{Int, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::Phase;
use burn_dtensor::dtensor::ops::LocalMap;
use burn_dtensor::dtensor::{DTensor, DTensorError};
use burn_dtensor::mesh::DeviceMesh;

use super::{R, S, SUM, on_mesh, part, ramp, tracked_devices, unwound, values};

type Pair = (Tensor<2>, Tensor<2>);

/// Of rows that ranks share by a weight that all hold: forward is local, and the weight's gradient
/// a sum.
#[test]
fn values_and_gradients_are_those_of_the_full_tensor() {
    for shape in [&[2][..], &[3], &[2, 2], &[2, 3]] {
        on_mesh(shape, |_, mesh| {
            for device in tracked_devices() {
                let rows = || ramp([7, 4], 1.0, &device).div_scalar(10.0).require_grad();
                let weight = || ramp([4, 3], -5.0, &device).div_scalar(10.0).require_grad();
                let compute = |x: Tensor<2>, w: Tensor<2>| x.matmul(w).tanh();
                let (x, w) = (rows(), weight());
                let y = compute(x.clone(), w.clone());
                let grads = (y.clone() * ramp([7, 3], 0.0, &device)).sum().backward();

                let (by_rows, full) = (vec![S(0); mesh.ndim()], vec![R; mesh.ndim()]);
                let (rows, weight) = (
                    DTensor::distribute_replicated(rows(), mesh, &by_rows)?,
                    DTensor::distribute_replicated(weight(), mesh, &full)?,
                );
                let map = LocalMap::new()
                    .with_input(&by_rows)
                    .with_input_and_grad(&full, vec![SUM; mesh.ndim()])
                    .with_output_of_shape(&by_rows, [7, 3]);
                let found = map.run((rows.clone(), weight.clone()), |(x, w): Pair| compute(x, w));
                assert_eq!(
                    mesh.world()
                        .ledger()
                        .total(|key| key.phase == Phase::Forward)
                        .calls,
                    0
                );
                let factor =
                    DTensor::distribute_replicated(ramp([7, 3], 0.0, &device), mesh, &by_rows)?;
                let back = (found.local().clone() * factor.to_local()).sum().backward();
                assert_eq!(
                    values(found.clone().detach().full_tensor()?.inner()),
                    values(y.clone().inner())
                );
                let near = |found: Vec<f32>, expected: Vec<f32>| {
                    assert_eq!(found.len(), expected.len());
                    assert!(
                        found
                            .iter()
                            .zip(&expected)
                            .all(|(a, b)| (a - b).abs() < 1e-3),
                        "{found:?} for {expected:?}"
                    );
                };
                let of = |x: &DTensor<2>| x.local().grad(&back).map(values).unwrap_or_default();
                near(of(&rows), part(x.grad(&grads).expect("a leaf"), &rows));
                near(of(&weight), values(w.grad(&grads).expect("a leaf")));
                mesh.world().ledger().reset();
            }
            Ok(())
        });
    }
}

/// What is brought there is so once, with its gradient's sum: of a shard that varies one
/// all-gather, one reduce-scatter.
#[test]
fn inputs_are_redistributed_where_that_is_asked_for() {
    use burn_dtensor::comm::Op::{AllGather, ReduceScatter};
    use burn_dtensor::comm::Phase::{Backward, Forward};
    on_mesh(&[2], |world, mesh| {
        let [device, _] = tracked_devices();
        let x = DTensor::distribute_replicated(
            ramp([5, 2], 0.0, &device).require_grad(),
            mesh,
            &[S(0)],
        )?;
        let map = LocalMap::new()
            .with_input_and_grad([R], [SUM])
            .with_output([SUM])
            .with_redistributed_inputs();
        let y = map.run(x.clone(), |x: Tensor<2>| x * (1.0 + mesh.rank() as f32));
        assert_eq!(world.ledger().calls_in(AllGather, Forward), 1);
        let grads = y.to_local().sum().backward();
        assert_eq!(world.ledger().calls_in(ReduceScatter, Backward), 1);
        assert_eq!(world.ledger().total(|_| true).calls, 2);
        assert_eq!(
            values(x.local().grad(&grads).expect("a leaf")),
            vec![3.0; x.local().dims()[0] * 2]
        );
        Ok(())
    });
}

#[test]
fn any_number_and_kind_of_tensors_go_in_and_out() {
    on_mesh(&[2], |world, mesh| {
        let device = world.device();
        let x = DTensor::distribute_replicated(ramp([4, 2], 0.0, device), mesh, &[S(0)])?;
        let tokens = DTensor::<1, Int>::zeros([4], mesh, &[S(0)], device)?;
        let map = LocalMap::new()
            .with_any_input()
            .with_any_input()
            .with_input([S(0)])
            .with_output([S(0)])
            .with_output([R]);
        let (doubled, counts) = map.run(
            (vec![x.clone(), x.clone()], Some(tokens)),
            |(xs, tokens)| {
                let [a, b] = <[Tensor<2>; 2]>::try_from(xs).expect("two");
                (a + b, tokens.expect("some").ones_like().sum())
            },
        );
        assert_eq!((doubled.dims(), counts.dims()), ([4, 2], [1]));
        assert_eq!(
            values(doubled.full_tensor()?),
            values(ramp([4, 2], 0.0, device) * 2.0)
        );
        assert_eq!(counts.to_local().into_scalar::<i64>(), 2);
        // Without inputs the mesh is named.
        let none = Vec::<DTensor<2>>::new();
        let rank = LocalMap::new()
            .with_mesh(mesh)
            .with_output([S(0)])
            .run(none, |_| Tensor::<1>::full([1], mesh.rank() as f32, device));
        assert_eq!(values(rank.full_tensor()?), [0.0, 1.0]);
        Ok(())
    });
}

/// On every rank alike.
#[test]
fn what_a_map_does_not_list_is_a_typed_error() {
    on_mesh(&[2], |world, mesh| {
        let device = world.device();
        let x = DTensor::distribute_replicated(ramp([4, 2], 0.0, device), mesh, &[S(0)])?;
        let run = |map: LocalMap| {
            let x = x.clone();
            unwound(move || map.run((x.clone(), x), |(a, b): Pair| a + b))
        };
        let said = |error: Error, parts: &[&str]| {
            let text = error.to_string();
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        };
        let error = run(LocalMap::new()
            .with_input([R])
            .with_any_input()
            .with_output([R]));
        assert!(
            matches!(
                &error,
                Error::DTensor(DTensorError::MapInput { input: 0, .. })
            ),
            "{error}"
        );
        said(error, &["[S(0)]", "[R]", "with_redistributed_inputs"]);
        let error = run(LocalMap::new().with_input([S(0)]).with_output([S(0)]));
        assert!(
            matches!(
                &error,
                Error::DTensor(DTensorError::MapCount {
                    what: "inputs",
                    given: 2,
                    listed: 1
                })
            ),
            "{error}"
        );
        let error = run(LocalMap::new().with_output([S(0)]).with_output([S(0)]));
        assert!(
            matches!(
                &error,
                Error::DTensor(DTensorError::MapCount {
                    what: "outputs",
                    given: 1,
                    listed: 2
                })
            ),
            "{error}"
        );
        let error = run(LocalMap::new()
            .with_input_and_grad([S(0)], [SUM])
            .with_any_input()
            .with_output([S(0)]));
        assert!(
            matches!(&error, Error::DTensor(DTensorError::GradPlacement { .. })),
            "{error}"
        );
        let error = run(LocalMap::new().with_output_of_shape([S(0)], [8, 2]));
        assert!(
            matches!(&error, Error::DTensor(DTensorError::LocalShape { .. })),
            "{error}"
        );
        let other = DeviceMesh::new(world, [2], ["other"])?;
        let error = run(LocalMap::new().with_mesh(&other).with_output([S(0)]));
        assert!(
            matches!(&error, Error::DTensor(DTensorError::MeshMismatch { .. })),
            "{error}"
        );
        let error = unwound(|| {
            LocalMap::new()
                .with_output([R])
                .run(Vec::<DTensor<2>>::new(), |_| ramp([1], 0.0, device))
        });
        assert!(
            matches!(&error, Error::DTensor(DTensorError::MapMesh)),
            "{error}"
        );
        said(error, &[".with_mesh(&mesh)"]);
        Ok(())
    });
}
