//! From whole tensors to parts and back.

use burn::tensor::{Bool, Device, Int, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::placement::Layout;
use itertools::Itertools;

use super::{MAX, R, S, SUM, devices, on_mesh, placements_of, ramp, tracked_devices, values};

const MESHES: [&[usize]; 6] = [&[1], &[2], &[3], &[2, 2], &[2, 3], &[2, 2, 2]];

/// 5 rows do not divide, one row leaves ranks empty, and so do no rows at all.
const SHAPES: [[usize; 2]; 4] = [[5, 3], [1, 4], [0, 3], [8, 8]];

/// Invariant 3.
#[test]
fn distribute_and_full_round_trip_on_every_mesh() {
    for mesh_shape in MESHES {
        on_mesh(mesh_shape, |world, mesh| {
            for (shape, device) in SHAPES.iter().cartesian_product(devices()) {
                for placements in placements_of(mesh.ndim(), 2) {
                    // Only the first rank's values count.
                    let own = ramp(*shape, 100.0 * world.rank() as f32, &device);
                    let sent = DTensor::distribute_tensor(own, mesh, &placements)?;
                    let first = ramp(*shape, 0.0, &device);
                    let sizes = DTensor::distribute_replicated(first.clone(), mesh, &placements)?;
                    let expected = sent.layout().local_shape(shape, mesh.coordinate().unwrap());
                    assert_eq!(sent.local().dims().to_vec(), expected);
                    assert_eq!(sent.local().to_data(), sizes.local().to_data());
                    assert_eq!(sent.local().device().is_autodiff(), device.is_autodiff());
                    assert_eq!(
                        sent.full_tensor()?.into_data(),
                        first.clone().into_data(),
                        "{placements:?}"
                    );
                    assert_eq!(
                        sizes.full_tensor()?.into_data(),
                        first.into_data(),
                        "{placements:?}"
                    );
                }
            }
            Ok(())
        });
    }
}

#[test]
fn int_and_bool_tensors_move_like_floats() {
    on_mesh(&[2, 2], |_, mesh| {
        for device in devices() {
            let ints: Tensor<1, Int> = Tensor::arange(0..7, &device);
            let bools: Tensor<1, Bool> = ints.clone().greater_elem(2);
            for (from, to) in placements_of(2, 1)
                .iter()
                .cartesian_product(&placements_of(2, 1))
            {
                let moved =
                    DTensor::distribute_tensor(ints.clone(), mesh, from)?.redistribute(to)?;
                assert_eq!(moved.dtype(), ints.dtype());
                assert_eq!(moved.local().device().is_autodiff(), device.is_autodiff());
                assert_eq!(moved.full_tensor()?.into_data(), ints.to_data());
                let moved =
                    DTensor::distribute_tensor(bools.clone(), mesh, from)?.redistribute(to)?;
                assert_eq!(moved.full_tensor()?.into_data(), bools.to_data());
            }
            let terms = DTensor::from_local(ints.clone(), mesh, &[SUM, MAX].map(|_| SUM))?;
            assert_eq!(
                terms.full_tensor()?.into_data(),
                (ints.clone() * 4).into_data()
            );
        }
        Ok(())
    });
}

#[test]
fn distributed_parts_are_leaves_of_their_own() {
    on_mesh(&[2], |_, mesh| {
        for device in tracked_devices() {
            let full = ramp([4, 2], 0.0, &device).require_grad();
            for part in [
                DTensor::distribute_tensor(full.clone(), mesh, &[S(0)])?,
                DTensor::distribute_replicated(full.clone(), mesh, &[S(0)])?,
            ] {
                let local = part.to_local();
                assert!(local.is_require_grad());
                let grads = (local.clone() * 3.0).sum().backward();
                assert_eq!(values(local.grad(&grads).unwrap()), [3.0; 4]);
                assert!(full.grad(&grads).is_none());
            }
        }
        Ok(())
    });
}

#[test]
fn a_shard_does_not_keep_the_full_storage_alive() {
    use burn::backend::Flex;
    on_mesh(&[2], |_, mesh| {
        let bytes = |part: DTensor<2>| {
            let flex = part
                .to_local()
                .inner()
                .try_into_primitive::<Flex>()
                .unwrap();
            flex.bytes().len()
        };
        for device in devices() {
            let full = ramp([8, 4], 0.0, &device);
            for dim in [0, 1] {
                let sizes = DTensor::distribute_replicated(full.clone(), mesh, &[S(dim)])?;
                assert_eq!(bytes(sizes), 64);
                let replicated = DTensor::from_local(full.clone(), mesh, &[R])?;
                assert_eq!(bytes(replicated.redistribute(&[S(dim)])?), 64);
            }
        }
        Ok(())
    });
}

#[test]
fn distribute_sends_no_more_than_its_plan() {
    on_mesh(&[2, 2], |world, mesh| {
        let full = ramp([4, 4], 0.0, &Device::flex());
        world.ledger().reset();
        DTensor::distribute_tensor(full.clone(), mesh, &[S(0), R])?;
        // Only the ranks that are first in the later mesh dimension take part in the scatter.
        let scatters = u64::from(mesh.coordinate().unwrap()[1] == 0);
        assert_eq!(world.ledger().calls(Op::Scatter), scatters);
        assert_eq!(world.ledger().calls(Op::Broadcast), 1);
        assert_eq!(world.ledger().bytes(Op::Broadcast), 32);
        world.ledger().reset();
        DTensor::distribute_replicated(full, mesh, &[S(0), S(1)])?;
        assert_eq!(world.ledger().total(|_| true).calls, 0);
        Ok(())
    });
}

#[test]
fn a_shard_order_is_followed() {
    on_mesh(&[2, 2], |_, mesh| {
        let full = ramp([8, 1], 0.0, &Device::flex());
        let layout = Layout::with_shard_order(&[2, 2], &[S(0), S(0)], &[(0, &[1, 0])])?;
        let sent = DTensor::distribute_tensor_to(full.clone(), mesh, layout.clone())?;
        let sizes = DTensor::distribute_replicated_to(full.clone(), mesh, layout)?;
        let expected = [[0.0, 1.0], [4.0, 5.0], [2.0, 3.0], [6.0, 7.0]][mesh.rank()];
        assert_eq!(values(sent.local().clone()), expected);
        assert_eq!(values(sizes.local().clone()), expected);
        assert_eq!(sent.full_tensor()?.into_data(), full.into_data());
        Ok(())
    });
}
