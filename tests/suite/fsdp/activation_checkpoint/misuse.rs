//! What a block must not do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::{Block, RECOMPUTED, Tower, batch, config};

/// The first rank's error, of a program that fails on all in the same way.
fn error(program: impl Fn(&Tower, Tensor<2>) -> Tensor<2> + Sync) -> Error {
    let failed = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(Tower::new(&device), mesh, config())?;
        program(&model, batch(1, &device).require_grad())
            .sum()
            .backward();
        Ok(())
    });
    failed.cause
}

#[test]
fn what_is_captured_and_tracked_is_an_error() {
    let captured = error(|tower, x| {
        let aside = x.clone();
        checkpoint_activations(&tower.blocks[0], x, move |block, x| {
            block.compute(x, RECOMPUTED) + aside.clone()
        })
    });
    let Error::Param(ParamError::CapturedTrackedTensor { block }) = &captured else {
        panic!("{captured}")
    };
    assert_eq!(block, "blocks.0");
    assert!(
        captured.to_string().contains("Pass it in `input`"),
        "{captured}"
    );

    let of_another = error(|tower, x| {
        let other: Block = tower.blocks[1].clone();
        checkpoint_activations(&tower.blocks[0], x, move |_, x| {
            other.compute(x, RECOMPUTED)
        })
    });
    assert!(
        matches!(
            of_another,
            Error::Param(ParamError::CapturedTrackedTensor { .. })
        ),
        "{of_another}"
    );

    let by_itself = error(|tower, x| {
        let other: Linear = tower.head.clone();
        checkpoint_activations(&tower.blocks[0], x, move |block, x| {
            block.compute(x, RECOMPUTED) * other.bias.as_ref().unwrap().val().unsqueeze()
        })
    });
    assert!(
        matches!(
            by_itself,
            Error::Param(ParamError::CapturedTrackedTensor { .. })
        ),
        "{by_itself}"
    );
}

/// What a block does each time, which it is told.
type Program = fn(&Block, Tensor<2>, usize) -> Tensor<2>;

/// Runs a block that does another thing every time.
fn changing(compute: Program) -> Error {
    error(|tower, x| {
        let count = Arc::new(AtomicUsize::new(0));
        checkpoint_activations(&tower.blocks[0], x, move |block, x| {
            compute(block, x, count.fetch_add(1, Relaxed))
        })
    })
}

#[test]
fn a_block_that_computes_other_things_again_is_an_error() {
    let programs: [(Program, _); 3] = [
        (
            |block, x, time| block.up.forward(x) * (1.0 + time as f32),
            "computes other values",
        ),
        (
            |block, x, time| {
                if time == 0 {
                    fed(block, x)
                } else {
                    block.up.forward(x)
                }
            },
            "enters fewer units",
        ),
        (
            |block, x, time| {
                if time == 0 {
                    block.up.forward(x)
                } else {
                    fed(block, x)
                }
            },
            "enters other units",
        ),
    ];
    for (program, expected) in programs {
        let error = changing(program);
        let Error::Param(ParamError::NondeterministicRecompute { differs, .. }) = &error else {
            panic!("{error}")
        };
        assert_eq!(*differs, expected);
    }
}

fn fed(block: &Block, x: Tensor<2>) -> Tensor<2> {
    unit(&block.feed, x, |feed, x| feed.down.forward(x))
}

/// A rank that fails as it computes again fails as one that fails in backward: the others are told.
#[test]
fn the_others_are_told_of_a_rank_that_fails_again() {
    let failed = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(Tower::new(&device), mesh, config())?;
        let (rank, count) = (mesh.rank(), Arc::new(AtomicUsize::new(0)));
        let x = unit(&model, batch(1, &device), |model, x| {
            let x = model.first.forward(x);
            checkpoint_activations(&model.blocks[0], x, move |block, x| {
                assert!(rank == 0 || count.fetch_add(1, Relaxed) == 0, "planted");
                block.compute(x, RECOMPUTED)
            })
        });
        x.sum().backward();
        Ok(())
    });
    assert_eq!(failed.rank, 1, "{failed}");
    assert!(failed.to_string().contains("planted"), "{failed}");
}
