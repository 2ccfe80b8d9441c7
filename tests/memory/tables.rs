//! What tables, caches and collectives under way keep.

use burn::tensor::Tensor;
use burn_dtensor::comm::ShardedTensor;
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::prelude::*;

use crate::live::{alone, live};

/// What stays live of `rounds` rounds of `round`, after as many that warm up.
fn left_by(rounds: usize, mut round: impl FnMut(usize)) -> usize {
    (0..rounds).for_each(&mut round);
    let before = live();
    (rounds..2 * rounds).for_each(&mut round);
    live().saturating_sub(before)
}

#[test]
fn tensors_used_after_their_launch_do_not_keep_its_world() {
    let _alone = alone();
    let left = left_by(100, |_| {
        let parts = launch(Launch::threads(2), |world| {
            let mesh = DeviceMesh::new(world, [2], ["x"])?;
            DTensor::<1>::ones([4], &mesh, &[Placement::Shard(0)], world.device())
        });
        for (_, part) in parts.unwrap() {
            drop((part.clone() * 2.0 + part).sum());
        }
    });
    // A world of two ranks is some 20 KB.
    assert!(left < 100 * 1024, "{left} bytes");
}

#[test]
fn tensors_of_ever_new_shapes_leave_little() {
    let _alone = alone();
    launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["x"])?;
        let left = left_by(4000, |rows| {
            let ones =
                DTensor::<1>::ones([1 + rows], &mesh, &[Placement::Shard(0)], world.device());
            drop((ones.unwrap() * 2.0).sum());
        });
        // Above what the first 4000 left.
        assert!(left < 2 << 20, "{left} bytes");
        Ok(())
    })
    .unwrap();
}

#[test]
fn one_work_that_is_not_waited_for_keeps_no_later_deposits() {
    let _alone = alone();
    launch(Launch::threads(2), |world| {
        let all = world.all();
        let gather = |tensor: Tensor<1>| {
            let len = 2 * tensor.dims()[0];
            all.all_gather(
                "x".into(),
                vec![ShardedTensor {
                    tensor: tensor.into_dispatch(),
                    dim: 0,
                    sizes: ShardSizes::Chunked(len),
                }],
            )
        };
        let ones = |len| Tensor::<1>::ones([len], world.device());
        let held = gather(ones(1));
        world.barrier("begin")?;
        let before = live();
        world.barrier("begun")?;
        for _ in 0..100 {
            drop(gather(ones(16 << 10)).wait()?);
        }
        world.barrier("end")?;
        let left = live().saturating_sub(before);
        world.barrier("ended")?;
        // Each of the hundred deposits of a rank is 64 KiB.
        assert!(left < 1 << 20, "{left} bytes");
        drop(held);
        Ok(())
    })
    .unwrap();
}
