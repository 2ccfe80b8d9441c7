//! Meshes over communicators that a program has.

use std::sync::Mutex;

use burn_dtensor::Error;
use burn_dtensor::comm::{Communicator, ReduceOp};
use burn_dtensor::dtensor::{DTensor, DTensorError};
use burn_dtensor::mesh::{DeviceMesh, MeshError};
use burn_dtensor::placement::Placement::{Replicate, Shard};

use super::{error_of, on, values};

#[test]
fn a_line_takes_its_ranks_from_the_group() {
    on(4, |world| {
        if ![3, 1].contains(&world.rank()) {
            return Ok(());
        }
        let group = world.group(&[3, 1])?;
        let mesh = DeviceMesh::from_group(world, group.clone(), "tp")?;
        assert_eq!(
            (mesh.ranks(), mesh.names(), mesh.coordinate()),
            (
                &[3, 1][..],
                &["tp".into()][..],
                Some(&[group.group().rank()][..])
            )
        );
        assert!(mesh.communicator(0)?.is_same(&group));
        // The world's one group of these ranks: the mesh that makes it itself is the same.
        assert_eq!(mesh, DeviceMesh::from_ranks(world, [3, 1], [2], "tp")?);
        assert_eq!(mesh.all_reduce(world.rank() as f64, ReduceOp::Sum)?, 4.0);
        Ok(())
    });
}

#[test]
fn an_array_communicates_over_the_groups_it_was_given() {
    on(6, |world| {
        let (row, column) = (world.rank() / 3, world.rank() % 3);
        // With orders of calls of their own.
        let groups = [
            world.group(&[column, 3 + column])?.duplicate("adopted"),
            world
                .group(&[3 * row, 3 * row + 1, 3 * row + 2])?
                .duplicate("adopted"),
        ];
        let mesh = DeviceMesh::from_groups(
            world,
            groups.clone(),
            (0..6).collect::<Vec<_>>(),
            [2, 3],
            ["dp", "tp"],
        )?;
        assert_eq!(mesh.coordinate(), Some(&[row, column][..]));
        for (dim, group) in groups.iter().enumerate() {
            assert!(mesh.communicator(dim)?.is_same(group));
            let slice = mesh.slice(["dp", "tp"][dim])?;
            assert!(slice.communicator(0)?.is_same(group));
        }
        assert_eq!(
            mesh.slice("tp")?
                .all_reduce(world.rank() as f64, ReduceOp::Sum)?,
            (9 * row + 3) as f64
        );
        assert_eq!(
            mesh.flatten(["dp", "tp"])?.all_reduce(1.0, ReduceOp::Sum)?,
            6.0
        );
        let full = super::tensor([5], (0..5).map(|x| x as f32).collect(), world);
        let x = DTensor::distribute_tensor(full, &mesh, &[Replicate, Shard(0)])?;
        assert_eq!(values(x.clone().full_tensor()?), [0.0, 1.0, 2.0, 3.0, 4.0]);
        // Over other communicators it is another mesh: a collective on one never meets one on the
        // other.
        let own = DeviceMesh::new(world, [2, 3], ["dp", "tp"])?;
        assert_ne!(mesh, own);
        let y = DTensor::<1>::ones([5], &own, &[Replicate, Shard(0)], world.device())?;
        let error = x.spec().check_same_mesh(y.spec()).unwrap_err();
        assert!(
            matches!(error, DTensorError::MeshMismatch { .. }),
            "{error:?}"
        );
        Ok(())
    });
}

#[test]
fn groups_that_are_no_rows_of_the_array_are_refused() {
    let lent: Mutex<Option<Communicator>> = Mutex::default();
    on(4, |world| {
        let rank = world.rank();
        let (row, column) = (rank / 2 * 2, rank % 2);
        let rows = world.group(&[row, row + 1])?;
        let columns = world.group(&[column, column + 2])?;
        let build = |groups: Vec<_>, ranks: [usize; 4]| {
            error_of(DeviceMesh::from_groups(
                world,
                groups,
                ranks,
                [2, 2],
                ["dp", "tp"],
            ))
        };
        let refused = |error: Error, name: &str, message: &str| {
            let Error::Mesh(MeshError::GroupRanks { name: found, .. }) = &error else {
                panic!("{error:?}")
            };
            assert_eq!(found, name);
            assert!(error.to_string().contains(message), "{error}");
        };
        // Given in the other order; of another array; of ranks in another order.
        refused(
            build(vec![rows.clone(), columns.clone()], [0, 1, 2, 3]),
            "dp",
            "its row along `dp`",
        );
        refused(
            build(vec![columns.clone(), rows.clone()], [0, 1, 3, 2]),
            "dp",
            "its row along `dp`",
        );
        let turned = world.group(&[row + 1, row])?;
        refused(
            build(vec![columns.clone(), turned], [0, 1, 2, 3]),
            "tp",
            &format!("world.group(&[{row}, {}])", row + 1),
        );

        for groups in [vec![], vec![columns.clone()]] {
            let error = build(groups, [0, 1, 2, 3]);
            assert!(
                matches!(error, Error::Mesh(MeshError::GroupCount { .. })),
                "{error:?}"
            );
            assert!(
                error
                    .to_string()
                    .contains("one communicator per mesh dimension"),
                "{error}"
            );
        }
        let error = build(vec![columns.clone(), rows.clone()], [0, 1, 2, 7]);
        assert!(
            matches!(
                error,
                Error::Mesh(MeshError::RankOutOfRange { rank: 7, .. })
            ),
            "{error:?}"
        );
        // Of ranks without the caller.
        let others: Vec<usize> = (0..4).filter(|other| *other != rank).collect();
        let error = error_of(DeviceMesh::from_groups(
            world,
            [world.all()],
            others,
            [3],
            "x",
        ));
        assert!(
            matches!(error, Error::Mesh(MeshError::NotAMember { .. })),
            "{error:?}"
        );

        // Another rank's communicator of the very ranks.
        if rank == 0 {
            *lent.lock().unwrap() = Some(world.all());
        }
        world.barrier("lent")?;
        if rank == 1 {
            let group = lent.lock().unwrap().take().expect("rank 0 has lent it");
            let error = error_of(DeviceMesh::from_group(world, group, "x"));
            assert!(
                error
                    .to_string()
                    .contains("belongs to rank 0, but rank 1 needs its own"),
                "{error}"
            );
        }
        world.barrier("taken")?;
        Ok(())
    });
}
