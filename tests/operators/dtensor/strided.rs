//! Strided shards that no order of cuts expresses, against positions counted out one by one. What
//! torch holds of such is in `golden/layout.rs`.

use burn::tensor::{Bool, Device, Int, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::Op;
use burn_dtensor::dtensor::{DTensor, DTensorError};
use burn_dtensor::placement::{PlacementError, StridedPlacement};
use itertools::Itertools;

use super::{R, S, SUM, error_of, on_mesh, ramp, tracked_devices};

fn ss(dim: usize, split_factor: usize) -> StridedPlacement {
    StridedPlacement::Strided { dim, split_factor }
}

/// What the rank at `coordinate` holds of `0..len`: each mesh dimension in turn deals what is left,
/// in `factor` pieces of `ceil(len / factor)`, each in chunks of `ceil(piece / ranks)`.
fn held(len: usize, mesh: &[usize], coordinate: &[usize], factors: &[usize]) -> Vec<usize> {
    let mut left: Vec<usize> = (0..len).collect();
    for ((&ranks, &rank), &factor) in mesh.iter().zip(coordinate).zip(factors) {
        if left.is_empty() {
            break;
        }
        let blocks = left.chunks(left.len().div_ceil(factor));
        let own = blocks.flat_map(|chunk| {
            chunk
                .chunks(chunk.len().div_ceil(ranks))
                .nth(rank)
                .unwrap_or(&[])
                .to_vec()
        });
        left = own.collect();
    }
    left
}

#[test]
fn any_split_factor_on_any_mesh_dimension_is_read_and_written() {
    for mesh_shape in [&[2][..], &[3], &[2, 2], &[2, 3]] {
        on_mesh(mesh_shape, |_, mesh| {
            let coordinate = mesh.coordinate().unwrap();
            for factors in (0..mesh.ndim()).map(|_| 1..=4).multi_cartesian_product() {
                let placements: Vec<_> = factors.iter().map(|&factor| ss(0, factor)).collect();
                for len in [0, 1, 5, 7, 12] {
                    let full = Tensor::<1, Int>::arange(0..len as i64, &Device::flex());
                    let own = held(len, mesh_shape, coordinate, &factors);
                    let shift = |tensor: Tensor<1, Int>| {
                        tensor
                            .into_data()
                            .iter::<i64>()
                            .map(|x| x as usize)
                            .collect_vec()
                    };
                    let local = match (own.first(), own.last()) {
                        (Some(_), Some(_)) => Tensor::from_data(
                            &own.iter().map(|&x| x as i64).collect_vec()[..],
                            &Device::flex(),
                        ),
                        _ => Tensor::empty([0], &Device::flex()),
                    };
                    let read = DTensor::from_strided(local, mesh, &placements, [len])?;
                    assert_eq!(
                        shift(read.clone().full_tensor()?),
                        (0..len).collect_vec(),
                        "{factors:?} of {len}"
                    );
                    assert_eq!(
                        shift(read.to_strided(&placements)?),
                        own,
                        "{factors:?} of {len}"
                    );
                    let uneven =
                        DTensor::distribute_replicated(full, mesh, &vec![S(0); mesh.ndim()])?;
                    assert_eq!(
                        shift(uneven.to_strided(&placements)?),
                        own,
                        "{factors:?} of {len}"
                    );
                }
            }
            Ok(())
        });
    }
}

/// Other dimensions and other shards stay as they are, and so does the kind.
#[test]
fn what_is_not_strided_is_not_moved() {
    on_mesh(&[2, 2, 2], |world, mesh| {
        let full = ramp([6, 8], 0.0, &Device::flex());
        let placements = [S(0).into(), ss(1, 4), R.into()];
        let runs = |rank: usize| [[0, 2, 4, 6], [1, 3, 5, 7]][rank / 2 % 2];
        let columns = Tensor::<1, Int>::from_data(runs(world.rank()), &Device::flex());
        let rows = 3 * (world.rank() / 4);
        let local = full.clone().narrow(0, rows, 3).select(1, columns);
        world.ledger().reset();
        let read = DTensor::from_strided(local.clone(), mesh, &placements, [6, 8])?;
        assert_eq!(read.placements(), [S(0), R, R]);
        let total = world.ledger().total(|_| true);
        // The rows of this rank, whole.
        assert_eq!(
            (
                world.ledger().calls(Op::AllGather),
                total.calls,
                total.bytes
            ),
            (1, 1, 3 * 8 * 4)
        );
        assert_eq!(read.clone().full_tensor()?.into_data(), full.to_data());
        world.ledger().reset();
        assert_eq!(read.to_strided(&placements)?.into_data(), local.to_data());
        assert_eq!(world.ledger().total(|_| true).calls, 0);
        let bools: Tensor<2, Bool> = local.greater_elem(20);
        let read = DTensor::from_strided(bools, mesh, &placements, [6, 8])?;
        assert_eq!(
            read.full_tensor()?.into_data(),
            full.greater_elem(20).into_data()
        );
        Ok(())
    });
}

#[test]
fn parts_of_strided_shards_are_leaves_of_their_own() {
    on_mesh(&[2], |_, mesh| {
        for device in tracked_devices() {
            for factor in [1, 2] {
                let local = ramp([4], 0.0, &device).require_grad();
                let x = DTensor::from_strided(local.clone(), mesh, &[ss(0, factor)], [8])?;
                assert!(x.local().is_require_grad());
                let leaf = x.local().clone();
                let grads = x.clone().sum().full_tensor()?.backward();
                assert!(leaf.grad(&grads).is_some() && local.grad(&grads).is_none());
                assert!(!x.to_strided(&[ss(0, factor)])?.device().is_autodiff());
                let error = error_of(DTensor::from_strided(
                    local * 2.0,
                    mesh,
                    &[ss(0, factor)],
                    [8],
                ));
                assert!(
                    matches!(
                        error,
                        Error::DTensor(DTensorError::NotALeaf {
                            operation: "from_strided"
                        })
                    ),
                    "{error:?}"
                );
            }
        }
        Ok(())
    });
}

#[test]
fn strided_shards_that_do_not_fit_are_typed_errors() {
    on_mesh(&[2], |_, mesh| {
        let read = |placements: &[StridedPlacement], shape: [usize; 1]| {
            error_of(DTensor::from_strided(
                ramp([4], 0.0, &Device::flex()),
                mesh,
                placements,
                shape,
            ))
        };
        let error = read(&[ss(1, 2)], [8]);
        assert!(
            matches!(
                error,
                Error::Placement(PlacementError::DimOutOfRange {
                    dim: 1,
                    ndim: 1,
                    ..
                })
            ),
            "{error:?}"
        );
        let error = read(&[ss(0, 0)], [8]);
        assert!(
            matches!(error, Error::Placement(PlacementError::SplitFactor { .. })),
            "{error:?}"
        );
        let error = read(&[ss(0, 2), ss(0, 2)], [8]);
        assert!(
            matches!(error, Error::Placement(PlacementError::Count { .. })),
            "{error:?}"
        );
        let error = read(&[SUM.into()], [4]);
        assert!(
            matches!(error, Error::DTensor(DTensorError::Partial { .. })),
            "{error:?}"
        );
        let error = read(&[ss(0, 2)], [12]);
        assert!(
            matches!(error, Error::DTensor(DTensorError::LocalShape { .. })),
            "{error:?}"
        );
        assert!(error.to_string().contains("[SS(0,2)]"), "{error}");
        let flat = |placements: &[StridedPlacement]| {
            error_of(DTensor::from_strided(
                ramp([4, 4], 0.0, &Device::flex()),
                mesh,
                placements,
                [8],
            ))
        };
        let error = flat(&[ss(1, 2)]);
        assert!(
            matches!(
                error,
                Error::Placement(PlacementError::DimOutOfRange {
                    dim: 1,
                    ndim: 1,
                    ..
                })
            ),
            "{error:?}"
        );
        let error = flat(&[ss(0, 2)]);
        assert!(
            matches!(error, Error::DTensor(DTensorError::LocalShape { .. })),
            "{error:?}"
        );
        let full = DTensor::distribute_replicated(ramp([8], 0.0, &Device::flex()), mesh, &[R])?;
        let error = full.to_strided(&[ss(2, 2)]).expect_err("must be refused");
        assert!(
            matches!(
                error,
                Error::Placement(PlacementError::DimOutOfRange { dim: 2, .. })
            ),
            "{error:?}"
        );
        Ok(())
    });
}
