//! What the ledger counts.

use burn::tensor::{DType, Shape, Tensor};
use burn_dtensor::comm::{Call, Op, PackStats, Phase, ReduceOp, ShardedTensor, TensorMeta};
use burn_dtensor::placement::ShardSizes;

use super::run;

#[test]
fn the_ledger_counts_payload() {
    run(4, |world| {
        let (comm, device) = (world.all(), world.device());
        let tensor = |shape: [usize; 2]| Tensor::<2>::ones(shape, device).into_dispatch();
        let forward = Call::new("block").with_phase(Phase::Forward);
        comm.all_gather(
            forward,
            vec![ShardedTensor {
                tensor: tensor([2, 3]),
                dim: 0,
                sizes: ShardSizes::Chunked(8),
            }],
        )
        .wait()?;
        comm.reduce_scatter(
            "block".into(),
            vec![ShardedTensor {
                tensor: tensor([8, 3]),
                dim: 0,
                sizes: ShardSizes::Chunked(8),
            }],
            ReduceOp::Sum,
        )
        .wait()?;
        comm.all_reduce(
            "norm".into(),
            vec![tensor([1, 1]), tensor([2, 2])],
            ReduceOp::Sum,
        )
        .wait()?;
        comm.all_to_all(
            "a2a".into(),
            ShardedTensor {
                tensor: tensor([2, 3]),
                dim: 0,
                sizes: ShardSizes::Chunked(8),
            },
            1,
            ShardSizes::Chunked(3),
        )
        .wait()?;
        // To itself 9 elements, to each other as many as that one's rank.
        let sizes = |to: usize| if to == world.rank() { 9 } else { to };
        let parts = (0..4).map(|to| Some(tensor([1, sizes(to)]))).collect();
        let meta = |from: usize| {
            let len = if from == world.rank() {
                9
            } else {
                world.rank()
            };
            Some(TensorMeta {
                shape: Shape::from([1, len]),
                dtype: DType::F32,
            })
        };
        comm.all_to_all_list("list".into(), parts, (0..4).map(meta).collect())
            .wait()?;
        for _ in 0..2 {
            comm.barrier("end".into()).wait()?;
        }
        world
            .group(&[world.rank()])?
            .all_reduce("alone".into(), vec![tensor([9, 9])], ReduceOp::Sum)
            .wait()?;
        let ledger = world.ledger();
        assert_eq!(
            (ledger.calls(Op::AllGather), ledger.bytes(Op::AllGather)),
            (1, 8 * 3 * 4)
        );
        assert_eq!(ledger.calls_in(Op::AllGather, Phase::Forward), 1);
        assert_eq!(ledger.bytes(Op::ReduceScatter), 8 * 3 * 4);
        assert_eq!(ledger.bytes(Op::AllReduce), 5 * 4);
        assert_eq!(ledger.bytes(Op::AllToAll), 6 * 4);
        assert_eq!(
            ledger.bytes(Op::AllToAllList),
            (6 - world.rank() as u64) * 4,
            "what it keeps moves nowhere"
        );
        assert_eq!(
            (ledger.calls(Op::Barrier), ledger.bytes(Op::Barrier)),
            (2, 0)
        );
        assert_eq!(ledger.by_label()["block"].calls, 2);
        assert!(
            !ledger.by_label().contains_key("alone"),
            "a group of one moves nothing"
        );
        assert_eq!(ledger.recent().len(), 7);
        Ok(())
    });
}

#[test]
fn the_ledger_names_the_backends_that_ran() {
    run(2, |world| {
        assert!(world.ledger().backends().is_empty());
        let tensor = || Tensor::<1>::ones([2], world.device()).into_dispatch();
        let shards = vec![
            ShardedTensor {
                tensor: tensor(),
                dim: 0,
                sizes: ShardSizes::Chunked(4)
            };
            2
        ];
        world.all().all_gather("gather".into(), shards).wait()?;
        assert_eq!(
            world.ledger().backends().into_iter().collect::<Vec<_>>(),
            ["flex"]
        );
        assert_eq!(
            world.ledger().copied(),
            PackStats::default(),
            "kernels copy on Cube backends alone"
        );
        Ok(())
    });
}
