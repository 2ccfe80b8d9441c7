//! The mesh fixture, as a downstream crate uses it.

use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Op};
use burn_dtensor::testing::MeshTest;

#[test]
fn every_rank_returns_its_value_and_has_a_ledger() {
    let barriers = MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| {
        mesh.communicator(mesh.dim("shard")?)?.barrier("test".into()).wait()?;
        let sum = Tensor::<1>::ones([4], mesh.device()).sum().into_scalar::<f32>();
        Ok((mesh.coordinate().unwrap().to_vec(), sum, mesh.world().ledger().calls(Op::Barrier)))
    });
    let expected = [[0, 0], [0, 1], [1, 0], [1, 1]].map(|coordinate| (coordinate.to_vec(), 4.0, 1));
    assert_eq!(barriers, expected);
}

#[test]
#[should_panic(expected = "on mesh dp=2: launch failed at rank 1: no batch left")]
fn a_failing_rank_fails_the_test_with_its_message() {
    MeshTest::new([2], "dp").run(|mesh| if mesh.rank() == 1 { Err(Error::other("no batch left")) } else { Ok(()) });
}

#[test]
fn a_rank_that_never_comes_ends_at_the_deadline() {
    let started = Instant::now();
    let error = MeshTest::new([2], "dp").deadline(Duration::from_millis(200)).run_failing(|mesh| {
        if mesh.rank() == 0 {
            mesh.communicator(0)?.barrier("alone".into()).wait()?;
        } else {
            std::thread::sleep(Duration::from_millis(600));
        }
        Ok(())
    });
    assert!(matches!(error.cause, Error::Comm(CommError::DeadlineExceeded { .. })), "{error}");
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
#[should_panic(expected = "every rank succeeded, a failure was expected")]
fn an_expected_failure_that_does_not_come_fails_the_test() {
    MeshTest::new([1], "dp").run_failing(|_| Ok(()));
}
