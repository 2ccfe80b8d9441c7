//! Replicated values that differ, found where the program passes them.

use burn::tensor::{Bool, Int, Tensor};
use burn_dtensor::comm::{CommError, Launch, LaunchError, Op, ReplicatedValue, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::{Error, Result};

use super::{R, S, SUM};

/// Rows of a batch that only `which` determines.
fn rows(which: usize, mesh: &DeviceMesh) -> Tensor<2> {
    Tensor::full([4, 3], which as f32, mesh.device())
}

#[expect(clippy::result_large_err, reason = "made once per test")]
fn run(
    checks: bool,
    shape: &[usize],
    program: impl Fn(&DeviceMesh) -> Result<()> + Sync,
) -> Result<(), LaunchError> {
    let config = Launch::threads(shape.iter().product());
    let config = if checks {
        config.with_replica_checks()
    } else {
        config
    };
    launch(config, |world| {
        program(&DeviceMesh::new(
            world,
            shape,
            &["dp", "tp"][2 - shape.len()..],
        )?)
    })
    .map(drop)
}

/// The error that every rank has.
fn of_all(error: LaunchError) -> CommError {
    let Error::Comm(cause) = error.cause else {
        panic!("{error}")
    };
    for report in error.others {
        assert!(
            matches!(&report.error, Some(Error::Comm(error)) if *error == cause),
            "rank {}",
            report.rank
        );
    }
    cause
}

type Pass = fn(Tensor<2>, &DeviceMesh) -> Result<DTensor<2>>;

#[test]
fn rows_by_rank_are_found_and_rows_by_coordinate_are_equal() {
    let passes: [Pass; 4] = [
        |rows, mesh| DTensor::from_local(rows, &mesh.slice("tp")?, &[R]),
        |rows, mesh| DTensor::from_local(rows.autodiff().require_grad() * 2.0, mesh, &[S(0), R]),
        |rows, mesh| DTensor::from_local_with_shape(rows, mesh, &[S(0), R], [8, 3]),
        |rows, mesh| DTensor::distribute_replicated(rows, &mesh.slice("tp")?, &[S(0)]),
    ];
    for pass in passes {
        let by_rank = |mesh: &DeviceMesh| pass(rows(mesh.rank(), mesh), mesh).map(drop);
        let by_coordinate = |mesh: &DeviceMesh| {
            let batch = mesh.coordinate().expect("the mesh has all ranks")[0];
            pass(rows(batch, mesh), mesh).map(drop)
        };
        run(false, &[2, 2], by_rank).unwrap();
        run(true, &[2, 2], by_coordinate).unwrap();
        let error = of_all(run(true, &[2, 2], by_rank).unwrap_err());
        let text = error.to_string();
        let CommError::Diverged {
            rank,
            other,
            param,
            of,
            majority: false,
            ..
        } = error
        else {
            panic!("{text}")
        };
        assert!(rank != other && rank / 2 == other / 2, "{text}");
        assert_eq!(
            (of, &*param),
            (
                ReplicatedValue::LocalTensor,
                "[4, 3] f32 on mesh dimension `tp`"
            )
        );
        let says = [
            "different values of the local tensor [4, 3] f32",
            "`mesh.data_shard(..)`",
        ];
        assert!(says.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn of_three_ranks_the_one_that_differs_is_named() {
    let error = of_all(
        run(true, &[3], |mesh| {
            DTensor::from_local(rows(mesh.rank() % 2, mesh), mesh, &[R]).map(drop)
        })
        .unwrap_err(),
    );
    assert!(
        matches!(
            error,
            CommError::Diverged {
                rank: 1,
                other: 0,
                majority: true,
                ..
            }
        ),
        "{error}"
    );
    // Other shapes are no values to compare.
    let error = run(true, &[3], |mesh| {
        let rows = rows(0, mesh).narrow(0, 0, 4 - mesh.rank() / 2);
        DTensor::from_local(rows, mesh, &[R]).map(drop)
    });
    let error = of_all(error.unwrap_err());
    let CommError::Mismatch { differs, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        differs.contains("[4, 3] f32") && differs.contains("[3, 3] f32"),
        "{error}"
    );
}

/// Compares the ranks that survive a failure.
#[test]
fn values_are_compared_after_a_shrink() {
    let ranks = launch(Launch::threads(3).with_replica_checks(), |world| {
        if world.rank() == 1 {
            return Ok(());
        }
        let mesh = DeviceMesh::new(&world.shrink()?, [2], ["dp"])?;
        DTensor::from_local(rows(mesh.rank(), &mesh), &mesh, &[R]).map(drop)
    });
    let error = of_all(ranks.unwrap_err());
    assert!(matches!(error, CommError::Diverged { .. }), "{error}");
}

/// Values of every kind are compared, only where they are replicated, and with one barrier for each
/// dimension.
#[test]
fn what_is_compared() {
    run(true, &[2, 2], |mesh| {
        let own = rows(mesh.rank(), mesh);
        mesh.world().ledger().reset();
        DTensor::from_local(own.clone(), mesh, &[S(0), SUM])?;
        assert_eq!(mesh.world().ledger().calls(Op::Barrier), 0);
        DTensor::from_local(rows(7, mesh), mesh, &[R, R])?;
        DTensor::distribute_replicated(rows(7, mesh), mesh, &[S(0), SUM]).unwrap_err();
        assert_eq!(mesh.world().ledger().calls(Op::Barrier), 2);
        DTensor::distribute_replicated(rows(7, mesh), mesh, &[S(0), S(1)])?;
        assert_eq!(mesh.world().ledger().calls(Op::Barrier), 4);
        Ok(())
    })
    .unwrap();
    let ints =
        |mesh: &DeviceMesh| Tensor::<1, Int>::from_ints([1, mesh.rank() as i32], mesh.device());
    let of_ints = |mesh: &DeviceMesh| DTensor::from_local(ints(mesh), mesh, &[R]).map(drop);
    let of_flags = |mesh: &DeviceMesh| {
        let flags: Tensor<1, Bool> = ints(mesh).equal_elem(1);
        DTensor::from_local(flags, mesh, &[R]).map(drop)
    };
    for error in [run(true, &[2], of_ints), run(true, &[2], of_flags)] {
        assert!(matches!(
            of_all(error.unwrap_err()),
            CommError::Diverged { .. }
        ));
    }
}
