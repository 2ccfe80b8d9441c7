//! Tensors made in place.

use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::dtensor::{DTensor, Kind};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement;
use itertools::Itertools;

use super::{S, on_mesh, placements_of, tracked_devices, values};

fn everywhere<const D: usize, K: Kind>(
    shape: [usize; D],
    make: impl Fn(&DeviceMesh, &[Placement]) -> Result<DTensor<D, K>> + Sync,
) -> TensorData {
    let mut all = Vec::new();
    for mesh_shape in [&[1][..], &[2], &[4], &[2, 2]] {
        all.extend(on_mesh(mesh_shape, |_, mesh| {
            let made = placements_of(mesh.ndim(), D).into_iter().map(|placements| {
                let tensor = make(mesh, &placements)?;
                assert_eq!(tensor.dims(), shape);
                Ok(tensor.full_tensor()?.into_data())
            });
            made.collect::<Result<Vec<_>>>()
        }));
    }
    all.into_iter().flatten().all_equal_value().unwrap()
}

#[test]
fn factories_make_the_same_tensor_on_every_mesh() {
    let device = &Device::flex();
    let shape = [5, 7];
    let zeros = everywhere(shape, |mesh, p| DTensor::<2>::zeros(shape, mesh, p, device));
    assert_eq!(zeros, Tensor::<2>::zeros(shape, device).into_data());
    let ones = everywhere(shape, |mesh, p| {
        DTensor::<2, Int>::ones(shape, mesh, p, device)
    });
    assert_eq!(ones, Tensor::<2, Int>::ones(shape, device).into_data());
    let full = everywhere(shape, |mesh, p| {
        DTensor::<2>::full(shape, 2.5, mesh, p, (device, DType::F16))
    });
    assert_eq!(
        full,
        Tensor::<2>::full(shape, 2.5, (device, DType::F16)).into_data()
    );
    let falses = everywhere(shape, |mesh, p| {
        DTensor::<2, Bool>::zeros(shape, mesh, p, device)
    });
    assert_eq!(falses, Tensor::<2, Bool>::zeros(shape, device).into_data());
    // Whatever the values are, these are shape, element type and kind.
    let empty = everywhere(shape, |mesh, p| {
        Ok(DTensor::<2, Int>::empty(shape, mesh, p, (device, DType::I32))?.mul_scalar(0))
    });
    assert_eq!(
        empty,
        Tensor::<2, Int>::zeros(shape, (device, DType::I32)).into_data()
    );
    let range = everywhere([9], |mesh, p| {
        DTensor::<1, Int>::arange(-4..5, mesh, p, device)
    });
    assert_eq!(range, Tensor::<1, Int>::arange(-4..5, device).into_data());
    for (range, step) in [(-4_i64..5, 2), (0..7, 3), (3..4, 9), (2..2, 1)] {
        let len = range.end.abs_diff(range.start).div_ceil(step as u64) as usize;
        let steps = everywhere([len], |mesh, p| {
            DTensor::<1, Int>::arange_step(range.clone(), step, mesh, p, device)
        });
        let expected: Vec<i64> = range.step_by(step).collect();
        assert_eq!(steps.iter::<i64>().collect_vec(), expected);
    }
    let eye = everywhere([5, 5], |mesh, p| DTensor::<2>::eye(5, mesh, p, device));
    assert_eq!(eye, Tensor::<2>::eye(5, device).into_data());
    let eye = everywhere([3, 3], |mesh, p| {
        DTensor::<2, Int>::eye(3, mesh, p, (device, DType::I8))
    });
    assert_eq!(
        eye.convert::<i64>(),
        Tensor::<2, Int>::eye(3, device)
            .into_data()
            .convert::<i64>()
    );
    let grid = everywhere([3, 1, 5, 3], |mesh, p| {
        DTensor::<3, Int>::cartesian_grid([3, 1, 5], mesh, p, device)
    });
    assert_eq!(
        grid,
        Tensor::<3, Int>::cartesian_grid::<_, 4>([3, 1, 5], device).into_data()
    );
    on_mesh(&[3], |_, mesh| {
        let any = DTensor::<2>::empty(shape, mesh, &[S(0)], device)?;
        assert_eq!(
            (any.dims(), any.local().dims()),
            (shape, if mesh.rank() < 2 { [2, 7] } else { [1, 7] })
        );
        Ok(())
    });

    for distribution in [
        Distribution::Default,
        Distribution::Uniform(-1.0, 3.0),
        Distribution::Normal(1.0, 0.5),
        Distribution::Bernoulli(0.4),
    ] {
        let draw = |seed| {
            everywhere(shape, move |mesh, p| {
                DTensor::<2>::random(shape, distribution, seed, mesh, p, device)
            })
        };
        assert_ne!(draw(1), draw(2), "{distribution:?}");
    }
    let tokens = everywhere(shape, |mesh, p| {
        DTensor::<2, Int>::random_range(shape, 0..50, 3, mesh, p, device)
    });
    assert!(tokens.iter::<i64>().all(|token| (0..50).contains(&token)));
}

/// Frozen values, computed by a second implementation: a change of generator or of the numbering
/// must not go unnoticed.
#[test]
fn random_values_do_not_move() {
    on_mesh(&[1], |_, mesh| {
        let draw = |distribution| -> Result<Vec<f32>> {
            Ok(values(
                DTensor::<1>::random([6], distribution, 7, mesh, &[S(0)], &Device::flex())?
                    .to_local(),
            ))
        };
        assert_eq!(draw(Distribution::Default)?, FROZEN_UNIFORM);
        assert_eq!(draw(Distribution::Normal(0.0, 1.0))?, FROZEN_NORMAL);
        Ok(())
    });
}

const FROZEN_UNIFORM: [f32; 6] = [
    0.9545971,
    0.7501522,
    0.114177346,
    0.085657835,
    0.40696037,
    0.79528403,
];
const FROZEN_NORMAL: [f32; 6] = [
    0.0002914693,
    -0.30484697,
    1.7887576,
    1.0678722,
    0.37640348,
    -1.2870117,
];

#[test]
fn factories_follow_the_device_into_autodiff() {
    on_mesh(&[2], |_, mesh| {
        for device in tracked_devices() {
            let x = DTensor::<1>::ones([4], mesh, &[S(0)], &device)?.require_grad();
            let leaf = x.local().clone();
            let grads = x.full_tensor()?.powi_scalar(2).sum().backward();
            assert_eq!(values(leaf.grad(&grads).unwrap()), [2.0; 2]);
        }
        Ok(())
    });
}
