//! What programs do with blocks, sharded: gradients are those without checkpointing, to the bit.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::super::support::{on_device, tensor};
use super::{Block, How, KEPT, RECOMPUTED, Tower, WAYS, WIDTH, batch, config, full_grads};

/// A program's loss, of one rank.
type Loss = fn(&Tower, &Device, usize, How) -> Tensor<1>;

/// On meshes of several ranks.
fn compare(config: FullyShard, prepare: fn(Tower) -> Tower, loss: Loss) {
    for (shape, names) in [
        (vec![2], vec!["shard"]),
        (vec![3], vec!["shard"]),
        (vec![2, 2], vec!["replicate", "shard"]),
    ] {
        MeshTest::new(shape, names).run(|mesh| {
            for checkpointing in [false, true] {
                let device = mesh.device().clone().autodiff();
                let device = if checkpointing {
                    device.gradient_checkpointing()
                } else {
                    device
                };
                let model = prepare(on_device(&Tower::new(&Device::flex()), &device));
                let model = fully_shard(model, mesh, config.clone())?;
                let grads = |how| full_grads(&model, loss(&model, &device, mesh.rank(), how));
                let expected: BTreeMap<_, _> = grads(KEPT)?;
                assert!(expected.values().flatten().any(|grad| *grad != 0.0));
                for how in WAYS {
                    assert_eq!(
                        grads(how)?,
                        expected,
                        "{mesh}, {how:?}, gradient checkpointing {checkpointing}"
                    );
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_block_runs_twice() {
    compare(
        config(),
        |tower| tower,
        |tower, device, rank, how| {
            let x = unit(tower, batch(rank as u64, device), move |tower, x| {
                let x = tower.blocks[0].forward(tower.first.forward(x), how);
                tower.blocks[0].forward(tower.blocks[1].forward(x, how), how)
            });
            x.square().sum()
        },
    );
}

/// FSDP2's `double_forward_with_nested_fsdp_and_checkpoint`.
#[test]
fn two_forwards_before_a_backward() {
    compare(
        config(),
        |tower| tower,
        |tower, device, rank, how| {
            let [first, second] =
                [1, 2].map(|at| tower.forward(batch(10 * at + rank as u64, device), how));
            first.square().sum() + second.sum()
        },
    );
}

/// Of two towers inside a unit one is deeper; and one rank does not use the second's output.
#[test]
fn towers_that_ranks_use_or_not() {
    compare(
        config(),
        |tower| tower,
        |tower, device, rank, how| {
            let x = unit(tower, batch(rank as u64, device), move |tower, x| {
                let x = tower.first.forward(x);
                let a = tower.blocks[0].forward(x.clone().tanh().tanh(), how);
                let b = tower.blocks[1].forward(x, how);
                if rank == 0 { a } else { a + b }
            });
            x.square().sum()
        },
    );
}

#[test]
fn frozen_parameters_next_to_trained_ones() {
    let freeze = |mut tower: Tower| {
        tower.blocks[1] = tower.blocks[1].clone().no_grad();
        tower.blocks[2].feed = tower.blocks[2].feed.clone().no_grad();
        tower
    };
    compare(config(), freeze, |tower, device, rank, how| {
        tower
            .forward(batch(rank as u64, device), how)
            .square()
            .sum()
    });
}

#[test]
fn units_of_one_module_and_of_several() {
    let grouped = FullyShard::new()
        .with_units(["blocks.0"])
        .with_group_unit(["blocks.1", "blocks.2"]);
    for config in [
        FullyShard::new(),
        FullyShard::new().with_units(["blocks.*.feed"]),
        grouped,
    ] {
        let loss: Loss = |tower, device, rank, how| {
            tower
                .forward(batch(rank as u64, device), how)
                .square()
                .sum()
        };
        compare(config, |tower| tower, loss);
    }
}

/// Inner modules that no program opens are opened by the block's reads.
#[test]
fn units_that_reads_open() {
    let only_blocks = |tower: &Tower, device: &Device, rank: usize, how: How| {
        let x = unit(tower, batch(rank as u64, device), move |tower, x| {
            let compute =
                |block: &Block, x: Tensor<2>| block.feed.down.forward(block.up.forward(x).tanh());
            tower
                .blocks
                .iter()
                .fold(x, |x, block| match how.checkpointed {
                    true => checkpoint_activations(block, x, compute),
                    false => unit(block, x, compute),
                })
        });
        x.square().sum()
    };
    compare(
        FullyShard::new().with_units(["blocks.*", "blocks.*.up", "blocks.*.feed"]),
        |tower| tower,
        only_blocks,
    );
}

/// Whole modules of several blocks compute again, and blocks inside do so too.
#[test]
fn blocks_inside_blocks() {
    compare(
        config(),
        |tower| tower,
        |tower, device, rank, how| {
            let compute = move |tower: &Tower, x| {
                let x = tower.first.forward(x);
                tower
                    .blocks
                    .iter()
                    .fold(x, |x, block| block.forward(x, how))
            };
            let x = batch(rank as u64, device).require_grad();
            let y = if how.checkpointed {
                checkpoint_activations(tower, x, compute)
            } else {
                unit(tower, x, compute)
            };
            y.square().sum()
        },
    );
}

#[derive(Module, Debug)]
struct Tied {
    table: Param<Tensor<2>>,
    block: Reader,
}

/// Reads a weight of the unit around it, in a module of its own.
#[derive(Module, Debug)]
struct Reader {
    scale: Param<Tensor<1>>,
}

impl Tied {
    fn loss(&self, x: Tensor<2>, again: bool) -> Tensor<1> {
        unit(self, x, |tied, x| {
            let embed = |tied: &Self, x: Tensor<2>| {
                x.matmul(tied.table.val()) * tied.block.scale.val().unsqueeze()
            };
            let head = |tied: &Self, x: Tensor<2>| x.tanh().matmul(tied.table.val().transpose());
            let inside = |tied: &Self, x: Tensor<2>| {
                unit(&tied.block, x, |block, x| x + block.scale.val().unsqueeze())
            };
            match again {
                true => checkpoint_activations(
                    tied,
                    checkpoint_activations(tied, checkpoint_activations(tied, x, embed), inside),
                    head,
                ),
                false => unit(tied, unit(tied, unit(tied, x, embed), inside), head),
            }
        })
        .square()
        .sum()
    }
}

/// One weight read by two blocks, and by the unit around them: what each has of its gradient is
/// added up.
#[test]
fn a_weight_that_two_blocks_read() {
    for ranks in [1, 2, 3] {
        MeshTest::new([ranks], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let tied = Tied {
                table: Param::from_tensor(tensor(1, [WIDTH, WIDTH], &device)),
                block: Reader {
                    scale: Param::from_tensor(tensor(2, [WIDTH], &device)),
                },
            };
            let x = || batch(mesh.rank() as u64, &device);
            let plain = full_grads(&tied, tied.loss(x(), false))?;
            assert_eq!(full_grads(&tied, tied.loss(x(), true))?, plain, "unsharded");
            let sharded = fully_shard(tied, mesh, FullyShard::new().with_units(["block"]))?;
            let expected = full_grads(&sharded, sharded.loss(x(), false))?;
            assert_eq!(full_grads(&sharded, sharded.loss(x(), true))?, expected);
            Ok(())
        });
    }
}

/// Modules of a unit that are none themselves: two blocks read one weight of the unit around them,
/// which reads it too.
#[test]
fn a_weight_of_the_unit_around_that_blocks_read() {
    let loss: Loss = |tower, device, rank, how| {
        let x = unit(tower, batch(rank as u64, device), move |tower, x| {
            let through = |x| match how.checkpointed {
                true => checkpoint_activations(&tower.first, x, |first, x| first.forward(x).tanh()),
                false => tower.first.forward(x).tanh(),
            };
            through(tower.first.forward(through(x)))
        });
        x.square().sum()
    };
    compare(FullyShard::new(), |tower| tower, loss);
    compare(
        FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Always),
        |tower| tower,
        loss,
    );
}

/// A block whose output is in no loss takes part in its reductions all the same, as without.
#[test]
fn a_block_in_the_loss_of_no_rank() {
    compare(
        config(),
        |tower| tower,
        |tower, device, rank, how| {
            let (x, _) = unit(tower, batch(rank as u64, device), move |tower, x| {
                let x = tower.first.forward(x);
                let aside = tower.blocks[1].forward(x.clone(), how);
                (tower.blocks[0].forward(x, how), aside)
            });
            x.square().sum()
        },
    );
}

/// Gradients of microbatches wait in the unit, whichever way they were computed.
#[test]
fn gradients_that_wait_are_those_without() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(Tower::new(&device), mesh, config())?;
        let grads = |how| {
            let guard = burn_dtensor::fsdp::FsdpModule::of(&model)?.no_sync();
            model
                .forward(batch(mesh.rank() as u64, &device), how)
                .sum()
                .backward();
            drop(guard);
            full_grads(
                &model,
                model
                    .forward(batch(9 + mesh.rank() as u64, &device), how)
                    .square()
                    .sum(),
            )
        };
        assert_eq!(grads(RECOMPUTED)?, grads(KEPT)?);
        Ok(())
    });
}
