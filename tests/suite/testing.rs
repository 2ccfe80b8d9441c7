//! The mesh fixture, as a downstream crate uses it.

use std::time::{Duration, Instant};

use burn::tensor::{Int, Tensor, Tolerance};
use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Op};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::placement::Placement::{Replicate, Shard};
use burn_dtensor::testing::{MeshTest, assert_full_close, assert_full_eq};

#[test]
fn every_rank_returns_its_value_and_has_a_ledger() {
    let barriers = MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| {
        mesh.communicator(mesh.dim("shard")?)?
            .barrier("test".into())
            .wait()?;
        let sum = Tensor::<1>::ones([4], mesh.device())
            .sum()
            .into_scalar::<f32>();
        Ok((
            mesh.coordinate().unwrap().to_vec(),
            sum,
            mesh.world().ledger().calls(Op::Barrier),
        ))
    });
    let expected = [[0, 0], [0, 1], [1, 0], [1, 1]].map(|coordinate| (coordinate.to_vec(), 4.0, 1));
    assert_eq!(barriers, expected);
}

#[test]
#[should_panic(expected = "on mesh dp=2: launch failed at rank 1: no batch left")]
fn a_failing_rank_fails_the_test_with_its_message() {
    MeshTest::new([2], "dp").run(|mesh| {
        if mesh.rank() == 1 {
            Err(Error::other("no batch left"))
        } else {
            Ok(())
        }
    });
}

#[test]
fn a_rank_that_never_comes_ends_at_the_deadline() {
    let started = Instant::now();
    let error = MeshTest::new([2], "dp")
        .with_deadline(Duration::from_millis(200))
        .run_failing(|mesh| {
            if mesh.rank() == 0 {
                mesh.communicator(0)?.barrier("alone".into()).wait()?;
            } else {
                std::thread::sleep(Duration::from_millis(600));
            }
            Ok(())
        });
    assert!(
        matches!(error.cause, Error::Comm(CommError::DeadlineExceeded { .. })),
        "{error}"
    );
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
#[should_panic(expected = "every rank succeeded, a failure was expected")]
fn an_expected_failure_that_does_not_come_fails_the_test() {
    MeshTest::new([1], "dp").run_failing(|_| Ok(()));
}

#[test]
fn full_values_are_compared_on_every_rank() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let full = [[0.25, -1.0, 2.0], [3.0, 0.5, -4.0], [5.0, 6.0, 7.5]];
        let tensor = Tensor::<2>::from_data(full, mesh.device());
        let sharded = DTensor::distribute_tensor(tensor, mesh, &[Shard(1), Shard(0)])?;
        assert_full_close(&sharded, full, Tolerance::absolute(1e-6));
        let indices = Tensor::<1, Int>::from_data([3, 1, 2], mesh.device());
        assert_full_eq(
            &DTensor::distribute_tensor(indices, mesh, &[Shard(0), Replicate])?,
            [3, 1, 2],
        );
        Ok(())
    });
}

#[test]
#[should_panic(expected = "failed at rank 1: rank 1 panicked: Tensors are not approx eq")]
fn a_replica_that_drifted_is_found() {
    MeshTest::new([2], "dp").run(|mesh| {
        let drift = 1e-3 * mesh.rank() as f64;
        let replica = Tensor::<1>::ones([2], mesh.device()) + drift;
        let replicated = DTensor::from_local(replica, mesh, &[Replicate])?;
        assert_full_close(&replicated, [1.0, 1.0], Tolerance::absolute(1e-6));
        Ok(())
    });
}

#[test]
#[should_panic(expected = "failed at rank 1: rank 1 panicked: Tensors are not eq")]
fn a_replica_of_indices_that_drifted_is_found() {
    MeshTest::new([2], "dp").run(|mesh| {
        let replica = Tensor::<1, Int>::from_data([3, mesh.rank() as i64], mesh.device());
        assert_full_eq(&DTensor::from_local(replica, mesh, &[Replicate])?, [3, 0]);
        Ok(())
    });
}

#[test]
#[should_panic(expected = "Shape is different")]
fn a_full_value_of_another_shape_is_found() {
    MeshTest::new([2], "dp").run(|mesh| {
        let tensor = Tensor::<1>::ones([2], mesh.device());
        assert_full_eq(
            &DTensor::distribute_tensor(tensor, mesh, &[Shard(0)])?,
            [[1.0, 1.0]],
        );
        Ok(())
    });
}
