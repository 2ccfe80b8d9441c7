//! Checks that one rank can make on its own, before it joins a collective.

use burn::backend::{DispatchAutodiffContext, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};

use super::fingerprint::TensorPrint;
use crate::comm::{Group, ReduceOp, Sharded, TensorMeta};
use crate::placement::chunk;

/// What is wrong with an argument, and what to do instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    pub problem: String,
    pub remedy: &'static str,
}

type Checked<T> = Result<T, Problem>;

fn problem<T>(problem: String, remedy: &'static str) -> Checked<T> {
    Err(Problem { problem, remedy })
}

/// Prints of the wholes that these pieces are cut from.
pub(super) fn pieces(shards: &[Sharded], group: &Group) -> Checked<Vec<TensorPrint>> {
    let piece = |(i, shard): (usize, &Sharded)| {
        let mut print = whole_of(i, shard)?;
        let expected = chunk(shard.len, group.size(), group.rank()).len();
        let found = print.shape[shard.dim];
        if found != expected {
            return problem(
                format!(
                    "tensor {i} has length {found} in dimension {}, but chunk {} of {} over {} ranks has {expected}",
                    shard.dim,
                    group.rank(),
                    shard.len,
                    group.size()
                ),
                "cut the whole with `placement::chunk`",
            );
        }
        print.shape[shard.dim] = shard.len;
        Ok(print)
    };
    shards.iter().enumerate().map(piece).collect()
}

/// Prints of these wholes, to be reduced and cut.
pub(super) fn wholes(shards: &[Sharded], op: ReduceOp) -> Checked<Vec<TensorPrint>> {
    let whole = |(i, shard): (usize, &Sharded)| {
        let print = whole_of(i, shard)?;
        reducible(i, print.dtype, op)?;
        let found = print.shape[shard.dim];
        if found != shard.len {
            return problem(
                format!("tensor {i} has length {found} in dimension {}, but `len` is {}", shard.dim, shard.len),
                "pass the whole tensor and its length in the cut dimension",
            );
        }
        Ok(print)
    };
    shards.iter().enumerate().map(whole).collect()
}

/// Prints of tensors that are reduced whole.
pub(super) fn reduced(tensors: &[DispatchTensor], op: ReduceOp) -> Checked<Vec<TensorPrint>> {
    let print = |(i, tensor)| {
        let print = plain(i, tensor)?;
        reducible(i, print.dtype, op)?;
        Ok(print)
    };
    tensors.iter().enumerate().map(print).collect()
}

/// The print of a whole that is re-cut along `to_dim`.
pub(super) fn recut(shard: &Sharded, to_dim: usize, group: &Group) -> Checked<TensorPrint> {
    let mut print = pieces(std::slice::from_ref(shard), group)?.remove(0);
    in_range(0, to_dim, &print.shape)?;
    if to_dim == shard.dim {
        return problem(
            format!("`to_dim` is {to_dim}, which is the cut dimension already"),
            "name another dimension, or leave the tensor as it is",
        );
    }
    print.to_dim = Some(to_dim);
    Ok(print)
}

/// Prints of what the root holds, checked against its tensors if this rank is the root.
pub(super) fn rooted(
    tensors: Option<&[DispatchTensor]>,
    metas: &[TensorMeta],
    root: usize,
    group: &Group,
) -> Checked<Vec<TensorPrint>> {
    if root >= group.size() {
        return problem(
            format!("root {root} is outside a group of {} ranks", group.size()),
            "`root` is a position in the group, not a global rank",
        );
    }
    if root == group.rank() {
        let Some(tensors) = tensors else {
            return problem("the root passes no tensors".into(), "pass `Some(tensors)` on the root");
        };
        if tensors.len() != metas.len() {
            return problem(
                format!("{} tensors, but {} `metas`", tensors.len(), metas.len()),
                "describe every tensor in `metas`",
            );
        }
        for (i, (tensor, meta)) in tensors.iter().zip(metas).enumerate() {
            let print = plain(i, tensor)?;
            if print.shape != meta.shape || print.dtype != meta.dtype {
                return problem(
                    format!(
                        "tensor {i} is {:?} {}, but `metas` says {:?} {}",
                        &print.shape[..],
                        print.dtype.name(),
                        &meta.shape[..],
                        meta.dtype.name()
                    ),
                    "describe the root's tensors as they are",
                );
            }
        }
    }
    let print =
        |meta: &TensorMeta| TensorPrint { shape: meta.shape.clone(), dtype: meta.dtype, dim: None, to_dim: None };
    Ok(metas.iter().map(print).collect())
}

/// Adds the dimensions that a scatter cuts.
pub(super) fn scattered(prints: &mut [TensorPrint], dims: &[usize]) -> Checked<()> {
    if prints.len() != dims.len() {
        return problem(format!("{} tensors, but {} `dims`", prints.len(), dims.len()), "name one dimension a tensor");
    }
    for (i, (print, dim)) in prints.iter_mut().zip(dims).enumerate() {
        in_range(i, *dim, &print.shape)?;
        print.dim = Some(*dim);
    }
    Ok(())
}

/// The print of `shard.tensor`, with its dimension checked.
fn whole_of(i: usize, shard: &Sharded) -> Checked<TensorPrint> {
    let mut print = plain(i, &shard.tensor)?;
    in_range(i, shard.dim, &print.shape)?;
    print.dim = Some(shard.dim);
    Ok(print)
}

fn plain(i: usize, tensor: &DispatchTensor) -> Checked<TensorPrint> {
    if tensor.autodiff != DispatchAutodiffContext::Disabled {
        return problem(
            format!("tensor {i} belongs to an autodiff device"),
            "pass `tensor.inner()`, or go through an operation that has a gradient",
        );
    }
    let dtype = tensor.dtype();
    if matches!(dtype, DType::QFloat(_)) {
        return problem(format!("tensor {i} is quantized"), "dequantize it first");
    }
    Ok(TensorPrint { shape: tensor.shape(), dtype, dim: None, to_dim: None })
}

fn in_range(i: usize, dim: usize, shape: &Shape) -> Checked<()> {
    if dim < shape.num_dims() {
        return Ok(());
    }
    problem(
        format!("tensor {i} has {} dimensions, so dimension {dim} is out of range", shape.num_dims()),
        "count dimensions from 0",
    )
}

fn reducible(i: usize, dtype: DType, op: ReduceOp) -> Checked<()> {
    if dtype.is_bool() && matches!(op, ReduceOp::Sum | ReduceOp::Avg) {
        return problem(
            format!("tensor {i} is bool, which has no {op:?}"),
            "use Max (any), Min (all), or convert it to int",
        );
    }
    Ok(())
}
