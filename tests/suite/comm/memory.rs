//! Tensors as they lie in memory: views come in, and what goes out nobody else writes to.

use burn::tensor::{DType, Int, Shape, Tensor};
use burn_dtensor::comm::{Launch, ReduceOp, ShardedTensor, TensorMeta, launch};
use burn_dtensor::placement::ShardSizes;

use super::{into_data, run};

#[test]
fn strided_inputs_are_read_as_they_look() {
    run(3, |world| {
        let (comm, device) = (world.all(), world.device());
        let base = |rank: usize| {
            Tensor::<1, Int>::arange(0..60, device)
                .float()
                .reshape([6, 10])
                .mul_scalar(rank as f32 + 1.0)
        };
        let view = |rank: usize| base(rank).transpose().slice([2..8, 1..4]);
        let expected: Vec<f32> = (view(0) + view(1) + view(2))
            .into_data()
            .try_to_vec()
            .unwrap();
        let tensor = view(world.rank()).into_dispatch();
        let sum = comm
            .all_reduce("sum".into(), vec![tensor.clone()], ReduceOp::Sum)
            .wait()?
            .remove(0);
        assert_eq!(into_data(sum).try_to_vec::<f32>().unwrap(), expected);
        let gathered = comm
            .all_gather(
                "gather".into(),
                vec![ShardedTensor {
                    tensor,
                    dim: 0,
                    sizes: ShardSizes::Chunked(18),
                }],
            )
            .wait()?
            .remove(0);
        let expected = Tensor::cat(vec![view(0), view(1), view(2)], 0).into_data();
        assert_eq!(into_data(gathered), expected);
        Ok(())
    });
}

/// What all ranks get alike they have in common, unless they are to have memory of their own; what
/// one of them then writes, each at the same time, no other sees.
#[test]
fn a_rank_that_writes_leaves_alone_what_its_peers_have() {
    const LEN: usize = 300_000;
    for is_separate in [false, true] {
        let config = Launch::threads(3);
        let config = if is_separate {
            config.with_separate_memory()
        } else {
            config
        };
        let ends = launch(config, |world| {
            let (comm, rank) = (world.all(), world.rank());
            let tensor =
                |len: usize| Tensor::<1>::full([len], rank as f32, world.device()).into_dispatch();
            let metas = vec![TensorMeta {
                shape: Shape::from([LEN]),
                dtype: DType::F32,
            }];
            let root = (rank == 1).then(|| vec![tensor(LEN)]);
            let shard = ShardedTensor {
                tensor: tensor(LEN / 3),
                dim: 0,
                sizes: ShardSizes::Chunked(LEN),
            };
            let results = [
                (
                    comm.broadcast("one's".into(), root, metas, 1).wait()?,
                    [1.0; 3],
                ),
                (
                    comm.all_gather("all of it".into(), vec![shard]).wait()?,
                    [0.0, 1.0, 2.0],
                ),
                (
                    comm.all_reduce("sum".into(), vec![tensor(LEN)], ReduceOp::Sum)
                        .wait()?,
                    [3.0; 3],
                ),
            ];
            world.barrier("all have it")?;
            let results = results
                .map(|(mut result, thirds)| (Tensor::<1>::from_dispatch(result.remove(0)), thirds));
            let are_alone = results.each_ref().map(|(result, _)| result.can_mut());
            // Where a sanitizer looks, ranks have memory of their own anyway.
            assert_eq!(are_alone, [is_separate || cfg!(sanitized); 3]);
            for (result, thirds) in results {
                world.barrier("all write")?;
                let values = (result + (rank + 1) as f32).into_data();
                world.barrier("all have written")?;
                for (third, expected) in values
                    .as_slice::<f32>()
                    .unwrap()
                    .chunks(LEN / 3)
                    .zip(thirds)
                {
                    assert!(
                        third
                            .iter()
                            .all(|value| *value == expected + (rank + 1) as f32),
                        "{}",
                        third[0]
                    );
                }
            }
            Ok(())
        });
        ends.unwrap();
    }
}

/// A message, and what one rank has for another, is handed over: of a tensor that the sender has no
/// more, the receiver is the only one who has it, where it was; of a part of a larger one there is
/// a copy.
#[test]
fn full_tensors_are_sent_by_reference() {
    run(2, |world| {
        let (comm, other) = (world.all(), 1 - world.rank());
        let complete = Tensor::<1>::full([6], world.rank() as f32, world.device());
        comm.send(
            "kept".into(),
            vec![complete.clone().into_dispatch()],
            other,
            0,
        )
        .wait()?;
        comm.send(
            "part".into(),
            vec![complete.clone().narrow(0, 1, 3).into_dispatch()],
            other,
            1,
        )
        .wait()?;
        comm.send(
            "given".into(),
            vec![(complete.clone() + 1.0).into_dispatch()],
            other,
            2,
        )
        .wait()?;
        let labels = ["kept", "part", "given"];
        let mut got = Vec::new();
        for (tag, label) in labels.into_iter().enumerate() {
            let mut message = comm
                .receive(label.into(), None, Some(other), tag as u32)
                .wait()?;
            got.push(Tensor::<1>::from_dispatch(message.tensors.remove(0)));
        }
        world.barrier("all have received")?;
        assert_eq!(
            got.iter().map(Tensor::can_mut).collect::<Vec<_>>(),
            [cfg!(sanitized), true, true]
        );
        let values: Vec<_> = got
            .into_iter()
            .map(|got| got.into_data().try_to_vec::<f32>().unwrap())
            .collect();
        let from = other as f32;
        assert_eq!(values, [vec![from; 6], vec![from; 3], vec![from + 1.0; 6]]);
        world.barrier("all have looked")?;
        drop(complete);
        Ok(())
    });
}
