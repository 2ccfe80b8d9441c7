//! A dimension's own deadline.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use burn_dtensor::Error;
use burn_dtensor::comm::{Call, CommError, Launch, ReduceOp, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::{DeviceMesh, MeshError};
use burn_dtensor::placement::Placement::{Replicate, Shard};

use super::{error_of, on, values};

const SHORT: Duration = Duration::from_millis(50);

#[test]
fn a_dimension_has_a_deadline_of_its_own_which_its_slices_and_duplicates_keep() {
    for duplicate in [false, true] {
        let (given_up, wait) = mpsc::channel();
        let wait = Mutex::new(wait);
        // The launch's own is longer by far.
        let error = launch(
            Launch::threads(4).with_deadline(Duration::from_secs(20)),
            |world| {
                let mesh =
                    DeviceMesh::new(world, [2, 2], ["dp", "tp"])?.with_deadline("tp", SHORT)?;
                let tp = mesh.slice("tp")?.communicator(0)?.clone();
                let tp = if duplicate { tp.duplicate("again") } else { tp };
                // Rank 3 is there when rank 2 has given up, and not before.
                if world.rank() == 3 {
                    wait.lock().unwrap().recv().expect("rank 2 gives up");
                    return Ok(());
                }
                let waited = tp.barrier(Call::new("in time")).wait();
                if world.rank() == 2 {
                    given_up.send(()).expect("rank 3 waits");
                }
                Ok(waited?)
            },
        )
        .unwrap_err();
        let Error::Comm(CommError::DeadlineExceeded {
            rank: 2,
            missing,
            deadline,
            ..
        }) = &error.cause
        else {
            panic!("{error}")
        };
        assert_eq!((&missing[..], *deadline), (&[3][..], SHORT));
        assert!(
            error.to_string().contains("`DeviceMesh::with_deadline`"),
            "{error}"
        );
    }
}

/// No clock goes as far as `Duration::MAX`. A wait for a rank that has returned ends nevertheless.
#[test]
fn a_dimension_may_have_no_deadline() {
    let error = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["tp"])?.with_deadline("tp", Duration::MAX)?;
        let tp = mesh.communicator(0)?;
        tp.barrier(Call::new("of both")).wait()?;
        if world.rank() == 0 {
            tp.barrier(Call::new("of one")).wait()?;
        }
        Ok(())
    })
    .unwrap_err();
    let Some(Error::Comm(CommError::RankReturned { rank: 1, .. })) = &error.others[0].error else {
        panic!("{error}")
    };
}

#[test]
fn a_mesh_with_deadlines_is_another_mesh_over_the_same_order_of_calls() {
    on(4, |world| {
        let plain = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let mesh = plain.with_deadline("tp", Duration::from_secs(30))?;
        assert_ne!(mesh, plain);
        assert_eq!(mesh, plain.with_deadline("tp", Duration::from_secs(30))?);
        assert_ne!(mesh, plain.with_deadline("tp", Duration::from_secs(31))?);
        assert_eq!(
            mesh.slice("dp")?.communicator(0)?.group(),
            plain.slice("dp")?.communicator(0)?.group()
        );
        // Calls on one meet calls on the other.
        let tp = [&plain, &mesh][world.rank() % 2].slice("tp")?;
        assert_eq!(tp.all_reduce(1.0, ReduceOp::Sum)?, 2.0);
        let x = DTensor::<1>::ones([5], &mesh, &[Replicate, Shard(0)], world.device())?;
        assert_eq!(values((x.clone() + x).full_tensor()?), [2.0; 5]);
        let error = error_of(plain.with_deadline("pp", SHORT));
        assert!(
            matches!(error, Error::Mesh(MeshError::UnknownName { .. })),
            "{error:?}"
        );
        Ok(())
    });
}

/// The expected meshes get their deadlines after they are built.
#[test]
fn a_dimension_keeps_its_deadline_when_another_is_split() {
    on(8, |world| {
        let (first, second) = (Duration::from_secs(30), Duration::from_secs(40));
        let split =
            |mesh: &DeviceMesh, sizes: [usize; 2]| mesh.unflatten("dp", sizes, ["outer", "inner"]);
        let mesh = DeviceMesh::new(world, [4, 2], ["dp", "tp"])?.with_deadline("tp", first)?;
        let expected = DeviceMesh::new(world, [2, 2, 2], ["outer", "inner", "tp"])?;
        assert_eq!(split(&mesh, [2, 2])?, expected.with_deadline("tp", first)?);
        // Of two dimensions with deadlines, one is split.
        let mesh = DeviceMesh::new(world, [2, 4], ["pp", "dp"])?.with_deadline("pp", first)?;
        let mesh = mesh.with_deadline("dp", second)?;
        let expected = DeviceMesh::new(world, [2, 2, 2], ["pp", "outer", "inner"])?;
        assert_eq!(split(&mesh, [2, 2])?, expected.with_deadline("pp", first)?);
        // It has all ranks on one of the new dimensions.
        let expected = DeviceMesh::new(world, [2, 1, 4], ["pp", "outer", "inner"])?
            .with_deadline("pp", first)?;
        assert_eq!(
            split(&mesh, [1, 4])?,
            expected.with_deadline("inner", second)?
        );
        Ok(())
    });
}
