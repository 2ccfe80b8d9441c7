//! Ranks that share a GPU write to tensors in place while others read them.

use burn::tensor::Tensor;
use burn_dtensor::comm::ReduceOp;
use burn_dtensor::testing::gpu;

use super::run;

/// What a rank reads of another's tensor is not yet run when the other writes to it: its work waits in a queue.
#[test]
fn a_later_write_in_place_does_not_change_what_others_have_read() {
    for round in 0..4 {
        let found = run(2, &gpu(), |world| {
            let mut x = Tensor::<1>::full([1 << 12], world.rank() as f64 + 1.0, world.device());
            let sums = world.all().all_reduce("sum".into(), vec![x.clone().into_dispatch()], ReduceOp::Sum).wait()?;
            // Both have their results, of which nobody has read anything.
            world.barrier("both")?;
            if world.rank() == round % 2 {
                x = x * 100.0;
                assert_eq!(x.into_data().iter::<f32>().next(), Some((world.rank() as f32 + 1.0) * 100.0));
            }
            world.barrier("written")?;
            let sum = Tensor::<1>::from_dispatch(sums.into_iter().next().expect("one tensor"));
            Ok(sum.into_data().iter::<f32>().collect::<Vec<_>>())
        });
        assert!(
            found.iter().flatten().all(|sum| *sum == 3.0),
            "{:?}",
            found.iter().map(|sums| sums[0]).collect::<Vec<_>>()
        );
    }
}
