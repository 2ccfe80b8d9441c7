//! The handle of a collective under way: waited for, asked, or dropped.

use burn::tensor::Tensor;
use burn_dtensor::comm::{Call, OpTiming, ReduceOp, TransferTiming};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{into_data, run};

#[test]
fn works_may_be_waited_for_in_any_order_or_not_at_all() {
    run(4, |world| {
        let comm = world.all();
        for round in 0..20 {
            let mut rng = StdRng::seed_from_u64(round * 4 + world.rank() as u64);
            let issue = |value: usize| {
                let tensor =
                    Tensor::<1>::full([value + 1], value as f32, world.device()).into_dispatch();
                (
                    value,
                    comm.all_reduce(Call::default(), vec![tensor], ReduceOp::Sum),
                )
            };
            let mut works: Vec<_> = (0..10).map(issue).collect();
            while !works.is_empty() {
                let (value, work) = works.swap_remove(rng.random_range(0..works.len()));
                if rng.random_bool(0.3) {
                    continue;
                }
                let sum = into_data(work.wait()?.remove(0))
                    .try_to_vec::<f32>()
                    .unwrap();
                assert_eq!(sum, vec![4.0 * value as f32; value + 1]);
            }
        }
        Ok(())
    });
}

#[test]
fn a_work_says_when_all_have_joined() {
    run(2, |world| {
        let (comm, pair) = (world.all(), world.group(&[1, 0])?);
        if world.rank() == 0 {
            let work = comm.barrier("late".into());
            assert!(!work.is_complete());
            pair.barrier("go".into()).wait()?;
            pair.barrier("gone".into()).wait()?;
            assert!(work.is_complete());
            work.wait()?;
        } else {
            pair.barrier("go".into()).wait()?;
            let work = comm.barrier("late".into());
            pair.barrier("gone".into()).wait()?;
            work.wait()?;
        }
        Ok(())
    });
}

#[test]
fn among_threads_the_rank_that_waits_copies() {
    run(2, |world| {
        let tensor = Tensor::<1>::ones([3], world.device()).into_dispatch();
        let (_, course) = world
            .all()
            .all_reduce(Call::default(), vec![tensor], ReduceOp::Sum)
            .wait_with_timing()?;
        let course = course.expect("there are two ranks");
        let OpTiming {
            posted,
            transfer:
                TransferTiming {
                    send_started,
                    started,
                    completed,
                },
            requested,
        } = course;
        assert_eq!(send_started, Some(posted));
        assert!(
            [posted, requested, started, completed].is_sorted(),
            "{course:?}"
        );
        let (_, alone) = world
            .group(&[world.rank()])?
            .barrier(Call::default())
            .wait_with_timing()?;
        assert_eq!(alone, None, "nothing has moved");
        Ok(())
    });
}
