//! The collectives, as a program calls them: the result is new each time.

use std::hint::black_box;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use burn_dtensor::comm::{ReduceOp, ShardedTensor, Work, World};
use burn_dtensor::placement::ShardSizes;

const COLUMNS: usize = 1024;

/// One call on one rank.
pub type Step = Box<dyn FnMut()>;

/// The same, not waited for.
pub type Post = Box<dyn FnMut() -> Work<Vec<DispatchTensor>>>;

fn waited(mut post: Post) -> Step {
    Box::new(move || drop(black_box(post().wait().expect("all ranks make the call"))))
}

pub fn barrier(world: &World) -> Step {
    let comm = world.all();
    Box::new(move || {
        comm.barrier("barrier".into())
            .wait()
            .expect("all ranks meet")
    })
}

/// An all-reduce of `bytes` on every rank.
pub fn all_reduce(bytes: usize, dtype: DType, world: &World) -> Step {
    let tensor =
        Tensor::<1>::full([bytes / dtype.size()], 1.0, (world.device(), dtype)).into_dispatch();
    let comm = world.all();
    waited(Box::new(move || {
        comm.all_reduce("reduce".into(), vec![tensor.clone()], ReduceOp::Sum)
    }))
}

/// A matrix of `bytes`.
pub fn matrix(bytes: usize, dtype: DType) -> [usize; 2] {
    let columns = COLUMNS.min(bytes / dtype.size() / 8);
    [bytes / dtype.size() / columns, columns]
}

/// This rank's part of it, cut along `dim`.
fn part(bytes: usize, dim: usize, dtype: DType, world: &World) -> ShardedTensor {
    let mut shape = matrix(bytes, dtype);
    let sizes = ShardSizes::Chunked(shape[dim]);
    shape[dim] = sizes.range(world.size(), world.rank()).len();
    ShardedTensor {
        tensor: Tensor::<2>::full(shape, 1.0, (world.device(), dtype)).into_dispatch(),
        dim,
        sizes,
    }
}

/// An all-gather of a matrix of `bytes`.
pub fn gather(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    waited(post_gather(bytes, dim, dtype, world))
}

/// The same, not waited for.
pub fn post_gather(bytes: usize, dim: usize, dtype: DType, world: &World) -> Post {
    let (shard, comm) = (part(bytes, dim, dtype, world), world.all());
    Box::new(move || comm.all_gather("gather".into(), vec![shard.clone()]))
}

/// A matrix of `bytes`, cut along `dim`, is cut along the other dimension.
pub fn all_to_all(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    let (shard, comm) = (part(bytes, dim, dtype, world), world.all());
    let sizes = ShardSizes::Chunked(matrix(bytes, dtype)[1 - dim]);
    Box::new(move || {
        let work = comm.all_to_all("cut anew".into(), shard.clone(), 1 - dim, sizes.clone());
        drop(black_box(work.wait().expect("all ranks exchange")));
    })
}

/// As many rows for every rank.
pub fn rows_to_all(bytes: usize, dtype: DType, world: &World) -> Step {
    let [rows, columns] = matrix(bytes / world.size(), dtype);
    let (rows, comm) = (rows / world.size(), world.all());
    let tensor = Tensor::<2>::full([rows * world.size(), columns], 1.0, (world.device(), dtype))
        .into_dispatch();
    let splits = vec![rows; world.size()];
    Box::new(move || {
        let work = comm.all_to_all_single("rows".into(), tensor.clone(), &splits, &splits);
        drop(black_box(work.wait().expect("all ranks exchange")));
    })
}

/// A reduce-scatter of a matrix of `bytes`.
pub fn scatter(bytes: usize, dim: usize, dtype: DType, world: &World) -> Step {
    waited(post_scatter(bytes, dim, dtype, world))
}

/// The same, not waited for.
pub fn post_scatter(bytes: usize, dim: usize, dtype: DType, world: &World) -> Post {
    let shape = matrix(bytes, dtype);
    let tensor = Tensor::<2>::full(shape, 1.0, (world.device(), dtype)).into_dispatch();
    let (complete, comm) = (
        ShardedTensor {
            tensor,
            dim,
            sizes: ShardSizes::Chunked(shape[dim]),
        },
        world.all(),
    );
    Box::new(move || comm.reduce_scatter("scatter".into(), vec![complete.clone()], ReduceOp::Sum))
}
