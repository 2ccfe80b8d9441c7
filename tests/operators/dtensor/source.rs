//! Whose values are distributed.

use burn::tensor::Device;
use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Op};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::{DeviceMesh, MeshError};
use burn_dtensor::placement::Layout;
use burn_dtensor::testing::MeshTest;

use super::{R, S, error_of, names, on_mesh, placements_of, ramp, values};

/// Uneven and empty parts, on every mesh, under every placement and in every order of cuts.
#[test]
fn any_rank_may_hold_what_is_distributed() {
    for mesh_shape in [&[2][..], &[3], &[2, 2], &[2, 3]] {
        on_mesh(mesh_shape, |world, mesh| {
            let own = |rank: usize| ramp([5, 2], 100.0 * rank as f32, &Device::flex());
            for placements in placements_of(mesh.ndim(), 2) {
                let mut layouts = vec![Layout::new(mesh.shape(), &placements)?];
                if placements == [S(0), S(0)] {
                    layouts.push(Layout::with_shard_order(
                        mesh.shape(),
                        &placements,
                        &[(0, &[1, 0])],
                    )?);
                }
                for (layout, source) in layouts
                    .iter()
                    .flat_map(|layout| (0..mesh.size()).map(move |at| (layout, at)))
                {
                    let x = DTensor::distribute_tensor_from(
                        own(world.rank()),
                        mesh,
                        layout.clone(),
                        source,
                    )?;
                    assert_eq!(x.layout(), layout);
                    assert_eq!(
                        x.full_tensor()?.into_data(),
                        own(source).into_data(),
                        "{layout} from {source}"
                    );
                }
            }
            Ok(())
        });
    }
}

/// Positions are the mesh's own, so a program on slices says the same on all of them.
#[test]
fn a_source_is_counted_in_its_slice() {
    on_mesh(&[2, 2], |world, mesh| {
        let mesh = DeviceMesh::from_ranks(
            world,
            mesh.ranks().iter().rev().copied().collect::<Vec<_>>(),
            [2, 2],
            names(2),
        )?;
        let slice = mesh.slice("b")?;
        let own = ramp([4], 10.0 * world.rank() as f32, &Device::flex());
        world.ledger().reset();
        let layout = Layout::new(&[2], &[R])?;
        let x = DTensor::distribute_tensor_from(own, &slice, layout, 1)?;
        assert_eq!(world.ledger().calls(Op::Broadcast), 1);
        assert_eq!(
            values(x.to_local())[0],
            [0.0, 0.0, 20.0, 20.0][world.rank()]
        );
        Ok(())
    });
}

#[test]
fn sources_that_are_none_or_differ_are_errors() {
    on_mesh(&[2, 2], |_, mesh| {
        let layout = Layout::new(mesh.shape(), &[S(0), R])?;
        let error = error_of(DTensor::distribute_tensor_from(
            ramp([4], 0.0, &Device::flex()),
            mesh,
            layout,
            4,
        ));
        assert!(
            matches!(
                error,
                Error::Mesh(MeshError::PositionOutOfRange {
                    position: 4,
                    size: 4,
                    ..
                })
            ),
            "{error:?}"
        );
        assert!(error.to_string().contains("from 0, row-major"), "{error}");
        Ok(())
    });
    let error = MeshTest::new([2], ["a"]).run_failing(|mesh| {
        let layout = Layout::new(mesh.shape(), &[S(0)])?;
        DTensor::distribute_tensor_from(ramp([4], 0.0, mesh.device()), mesh, layout, mesh.rank())
    });
    assert!(
        matches!(error.cause, Error::Comm(CommError::Mismatch { .. })),
        "{error}"
    );
}
