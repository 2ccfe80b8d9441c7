//! Eight uneven sizes through `fully_shard` on 128 ranks, and backward's gather over a few of them.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{Launch, LedgerEntry, Op, Phase, launch};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, fully_shard, unit, unshard};
use burn_dtensor::mesh::DeviceMesh;

use super::support::fill;

#[derive(Module, Debug)]
struct Group {
    matrices: Vec<Param<Tensor<2>>>,
    vectors: Vec<Param<Tensor<1>>>,
}

fn group(dtype: DType, device: &Device) -> Group {
    let matrix = |shape: [usize; 2]| {
        Param::from_tensor(
            Tensor::<2>::from_data(fill(shape[0] as u64, &shape), device)
                .cast(dtype)
                .detach(),
        )
    };
    let vector = |len: usize| {
        Param::from_tensor(
            Tensor::<1>::from_data(fill(len as u64, &[len]), device)
                .cast(dtype)
                .detach(),
        )
    };
    Group {
        matrices: [[17, 257], [64, 312], [64, 64], [512, 64], [64, 297]]
            .map(matrix)
            .into(),
        vectors: [17, 64, 256].map(vector).into(),
    }
}

/// Sum of squares of every element: a gradient of twice the weight, made from the weight that
/// backward gathers.
fn squares(group: &Group) -> Tensor<1> {
    let matrices = group
        .matrices
        .iter()
        .map(|param| param.val().square().cast(DType::F32).sum());
    let vectors = group
        .vectors
        .iter()
        .map(|param| param.val().square().cast(DType::F32).sum());
    Tensor::cat(matrices.chain(vectors).collect(), 0).sum()
}

#[test]
fn eight_sizes_on_128_ranks() {
    for (dtype, reshard, again) in [
        (DType::F32, ReshardAfterForward::Always, 128),
        (DType::F16, ReshardAfterForward::Always, 128),
        (DType::F32, ReshardAfterForward::Ranks(8), 8),
    ] {
        launch(Launch::threads(128), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, [128], ["shard"])?;
            let plain = group(dtype, &device);
            let sharded = fully_shard(
                plain.clone(),
                &mesh,
                FullyShard::new().with_reshard_after_forward(reshard),
            )?;
            world.ledger().reset();
            // Ahead of forward in one case, by forward in the others.
            if dtype == DType::F16 {
                unshard(&sharded)?.wait()?;
            }
            let prefetch = world.ledger().calls(Op::AllGather);
            let loss = unit(&sharded, (), |group, ()| {
                let read = |param: &Param<Tensor<2>>| param.val().into_data();
                assert!(
                    group
                        .matrices
                        .iter()
                        .map(read)
                        .eq(plain.matrices.iter().map(read))
                );
                let read = |param: &Param<Tensor<1>>| param.val().into_data();
                assert!(
                    group
                        .vectors
                        .iter()
                        .map(read)
                        .eq(plain.vectors.iter().map(read))
                );
                squares(group)
            });
            assert_eq!(
                world.ledger().calls(Op::AllGather),
                1,
                "{prefetch} of them ahead"
            );
            let grads = loss.backward();
            let is_gather =
                |entry: &&LedgerEntry| (entry.op, entry.phase) == (Op::AllGather, Phase::Backward);
            let gathers: Vec<_> = world
                .ledger()
                .recent()
                .iter()
                .filter(is_gather)
                .map(|entry| entry.group_size)
                .collect();
            assert_eq!(gathers, [again]);
            assert_eq!(world.ledger().calls(Op::ReduceScatter), 1);
            // Every rank has the same gradient, twice the weight: so has the average of them.
            for (param, full) in sharded.matrices.iter().zip(&plain.matrices) {
                let grad = param.base().grad(&grads).expect("a gradient shard");
                assert_eq!(
                    grad.into_data(),
                    (param.base() * 2.0).into_data(),
                    "{:?}",
                    full.base().dims()
                );
            }
            for param in &sharded.vectors {
                let grad = param.base().grad(&grads).expect("a gradient shard");
                assert_eq!(grad.into_data(), (param.base() * 2.0).into_data());
            }
            // The shards are the chunks of the originals.
            let rank = world.rank();
            for (param, full) in sharded.matrices.iter().zip(&plain.matrices) {
                let [rows, cols] = full.base().dims();
                let chunk = rows.div_ceil(128);
                let (start, end) = ((rank * chunk).min(rows), ((rank + 1) * chunk).min(rows));
                assert_eq!(param.base().dims(), [end - start, cols]);
                if start < end {
                    let expected = full
                        .base()
                        .inner()
                        .narrow(0, start, end - start)
                        .into_data();
                    assert_eq!(param.base().into_data(), expected);
                }
            }
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{dtype:?}, {reshard:?}: {error}"));
    }
}
