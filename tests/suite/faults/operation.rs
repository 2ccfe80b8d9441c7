//! Every operation, called with these arguments.

use burn::tensor::{DType, Shape, Tensor};
use burn_dtensor::comm::{CommError, Communicator, ReduceOp, ShardedTensor, TensorMeta, World};
use burn_dtensor::placement::ShardSizes;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    AllGather,
    ReduceScatter,
    AllReduce,
    AllToAll,
    AllToAllList,
    Broadcast,
    Scatter,
    Reduce,
    Gather,
    Barrier,
    /// Each rank sends to the next, and receives from the one before.
    Messages,
}

pub const OPERATIONS: [Operation; 11] = [
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::AllReduce,
    Operation::AllToAll,
    Operation::AllToAllList,
    Operation::Broadcast,
    Operation::Scatter,
    Operation::Reduce,
    Operation::Gather,
    Operation::Barrier,
    Operation::Messages,
];

/// What ranks must agree on.
#[derive(Debug, Clone, Copy)]
pub struct Arguments {
    pub label: &'static str,
    pub width: usize,
    pub dtype: DType,
}

impl Arguments {
    pub fn new(label: &'static str) -> Self {
        Self {
            label,
            width: 3,
            dtype: DType::F32,
        }
    }
}

impl Operation {
    /// Calls it, and waits for it.
    pub fn call(
        self,
        world: &World,
        comm: &Communicator,
        arguments: Arguments,
    ) -> Result<(), CommError> {
        let Arguments {
            label,
            width,
            dtype,
        } = arguments;
        let (rank, size) = (comm.group().rank(), comm.group().size());
        let tensor = |rows: usize| {
            Tensor::<2>::ones([rows, width], world.device())
                .cast(dtype)
                .into_dispatch()
        };
        let meta = |rows: usize| TensorMeta {
            shape: Shape::from([rows, width]),
            dtype,
        };
        let (full, of_root) = (2 * size, rank == 0);
        let shard = |rows: usize| {
            vec![ShardedTensor {
                tensor: tensor(rows),
                dim: 0,
                sizes: ShardSizes::Chunked(full),
            }]
        };
        let call = label.into();
        match self {
            Self::AllGather => comm.all_gather(call, shard(2)).wait().map(drop),
            Self::ReduceScatter => comm
                .reduce_scatter(call, shard(full), ReduceOp::Sum)
                .wait()
                .map(drop),
            Self::AllReduce => comm
                .all_reduce(call, vec![tensor(5)], ReduceOp::Sum)
                .wait()
                .map(drop),
            Self::AllToAll => comm
                .all_to_all(call, shard(2).remove(0), 1, ShardSizes::Chunked(width))
                .wait()
                .map(drop),
            Self::AllToAllList => comm
                .all_to_all_list(call, vec![Some(tensor(1)); size], vec![Some(meta(1)); size])
                .wait()
                .map(drop),
            Self::Broadcast => comm
                .broadcast(call, of_root.then(|| vec![tensor(4)]), vec![meta(4)], 0)
                .wait()
                .map(drop),
            Self::Scatter => {
                let shardings = vec![(0, ShardSizes::Chunked(full))];
                comm.scatter(
                    call,
                    of_root.then(|| vec![tensor(full)]),
                    vec![meta(full)],
                    shardings,
                    0,
                )
                .wait()
                .map(drop)
            }
            Self::Reduce => comm
                .reduce(call, vec![tensor(4)], ReduceOp::Max, 0)
                .wait()
                .map(drop),
            Self::Gather => comm
                .gather(call, tensor(2), of_root.then(|| vec![meta(2); size]), 0)
                .wait()
                .map(drop),
            Self::Barrier => comm.barrier(call).wait(),
            Self::Messages => {
                let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
                let sent = comm.send(call, vec![tensor(2)], next, 7);
                comm.receive(label.into(), Some(vec![meta(2)]), before, 7)
                    .wait()?;
                sent.wait()
            }
        }
    }

    /// One that it cannot be taken for.
    pub fn other(self) -> Self {
        if self == Self::Barrier {
            Self::AllGather
        } else {
            Self::Barrier
        }
    }
}
