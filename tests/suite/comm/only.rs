//! What one rank runs alone.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{CommError, LaunchError, Op};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::run;

#[test]
fn it_runs_on_that_rank_and_no_other() {
    run(3, |world| {
        assert_eq!(
            world.run_on(1, || world.rank() + 10),
            (world.rank() == 1).then_some(11)
        );
        // Before and after, inside each other, and where it unwinds: afterwards all communicate.
        world.barrier("before")?;
        world.run_on(0, || world.run_on(0, || ()));
        world.barrier("between")?;
        world.run_on(2, || {
            std::panic::catch_unwind(|| Error::other("nothing to print").unwind()).is_err()
        });
        world.barrier("after")
    });
}

#[test]
fn a_collective_of_one_rank_needs_no_other() {
    run(2, |world| {
        let own = world.group(&[world.rank()])?;
        world
            .run_on(0, || own.barrier("own".into()).wait())
            .transpose()?;
        Ok(())
    });
}

/// Rank 1 alone runs `wrong`, then all meet: everyone ends with what rank 1 called there.
fn told(wrong: impl Fn(&DeviceMesh, &Linear, Tensor<2>) -> Result<()> + Sync) -> LaunchError {
    let device = Device::flex().autodiff();
    let layer = LinearConfig::new(4, 4).init(&device);
    let error = MeshTest::new([3], ["shard"]).run_failing(|mesh| {
        let layer = fully_shard(layer.clone(), mesh, FullyShard::new())?;
        let x = Tensor::ones([1, 4], &device);
        mesh.world()
            .run_on(1, || wrong(mesh, &layer, x))
            .transpose()?;
        mesh.world().barrier("after")?;
        Ok(())
    });
    let ended = error
        .others
        .iter()
        .filter_map(|report| report.error.as_ref())
        .chain([&error.cause]);
    let inside = ended.filter(|error| {
        matches!(
            error,
            Error::Comm(CommError::CollectiveInRunOn { rank: 1, .. })
        )
    });
    assert_eq!(inside.count(), 3, "{error}");
    error
}

fn called(error: &LaunchError) -> (Op, &str) {
    let Error::Comm(CommError::CollectiveInRunOn { called, .. }) = &error.cause else {
        panic!("{error}")
    };
    (called.op, &called.label)
}

#[test]
fn a_collective_inside_is_an_error_on_all_ranks() {
    assert_eq!(
        called(&told(|mesh, _, _| mesh.world().barrier("inside"))),
        (Op::Barrier, "inside")
    );
    // Also if nobody looks at what it returned.
    let dropped = told(|mesh, _, _| {
        drop(mesh.world().all().barrier("dropped".into()));
        Ok(())
    });
    assert_eq!(called(&dropped), (Op::Barrier, "dropped"));
    let full = told(|_, layer, _| full_model(layer).map(drop));
    assert_eq!(called(&full), (Op::AllGather, "root"));
}

#[test]
fn a_forward_inside_is_an_error_on_all_ranks() {
    let error = told(|_, layer, x| {
        unit(layer, x, |layer, x| layer.forward(x));
        Ok(())
    });
    assert_eq!(called(&error), (Op::AllGather, "root"));
}

#[test]
fn a_backward_inside_is_an_error_on_all_ranks() {
    let device = Device::flex().autodiff();
    let layer = LinearConfig::new(4, 4).init(&device);
    let error = MeshTest::new([3], ["shard"]).run_failing(|mesh| {
        let layer = fully_shard(layer.clone(), mesh, FullyShard::new())?;
        let loss = unit(&layer, Tensor::<2>::ones([1, 4], &device), |layer, x| {
            layer.forward(x)
        })
        .sum();
        mesh.world().run_on(0, || loss.backward());
        mesh.world().barrier("after")?;
        Ok(())
    });
    let Error::Comm(CommError::CollectiveInRunOn { rank: 0, called }) = &error.cause else {
        panic!("{error}")
    };
    assert_eq!((called.op, &*called.label), (Op::ReduceScatter, "root"));
    assert!(error.others.iter().all(|report| matches!(
        report.error,
        Some(Error::Comm(CommError::CollectiveInRunOn { .. }))
    )));
}

/// The rank's other threads do not communicate meanwhile either: nobody could tell whose call it
/// is.
#[test]
fn a_collective_on_a_thread_that_it_starts_is_inside() {
    let error = told(|mesh, _, _| {
        std::thread::scope(|scope| {
            scope
                .spawn(|| mesh.world().barrier("on a thread"))
                .join()
                .expect("no panic")
        })
    });
    assert_eq!(called(&error), (Op::Barrier, "on a thread"));
}

#[test]
fn a_rank_outside_the_world_is_told_on_all_ranks() {
    let error = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        mesh.world().run_on(2, || ());
        Ok(())
    });
    assert!(
        error
            .to_string()
            .contains("rank 2 is outside a world of 2 ranks"),
        "{error}"
    );
    assert!(
        error.at.as_ref().is_some_and(|at| at.contains("only.rs:")),
        "{error}"
    );
}
