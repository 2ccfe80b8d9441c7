//! Checks that one rank can make on its own, before it joins a collective.

use burn::backend::{DispatchAutodiffContext, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Shape};

use super::backend::{PairwiseSignature, ShardSignature, TensorSignature, tensor_text};
use super::{CollectivePlan, Group, Op, ReduceOp, ShardedTensor, TensorMeta};
use crate::memory;
use crate::placement::ShardSizes;

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

/// That every tensor is on the rank's own device, or every one on the host.
pub(super) fn at_home<'a>(tensors: impl IntoIterator<Item = &'a DispatchTensor>, own: &Device) -> Checked<()> {
    let mut first: Option<Device> = None;
    for (i, tensor) in tensors.into_iter().enumerate() {
        let device = Device::new(tensor.device());
        if device != *own && !memory::is_host(&device) {
            return problem(
                format!("tensor {i} is on {device:?}, but the rank's device is {own:?}"),
                "make tensors on `world.device()`, or move them there, or all of a call to the CPU; `Launch::with_devices` \
                 gives each rank its own",
            );
        }
        match &first {
            Some(first) if *first != device => {
                return problem(
                    format!("tensor 0 is on {first:?}, and tensor {i} on {device:?}"),
                    "move all tensors of a call to `world.device()`, or all to the CPU",
                );
            }
            Some(_) => {}
            None => first = Some(device),
        }
    }
    Ok(())
}

/// A tensor of a list, and its cut.
type ShardArgument<'a> = (usize, (&'a DispatchTensor, &'a (usize, ShardSizes)));

/// Prints of the wholes that these pieces are cut from.
pub(super) fn check_shards(
    tensors: &[DispatchTensor],
    shardings: &[(usize, ShardSizes)],
    group: &Group,
) -> Checked<Vec<TensorSignature>> {
    let block = |(i, (tensor, (dim, sizes))): ShardArgument<'_>| {
        let mut print = full_of(i, tensor, *dim, sizes, group)?;
        let expected = sizes.range(group.size(), group.rank()).len();
        let found = print.shape[*dim];
        if found != expected {
            let part = match sizes {
                ShardSizes::Chunked(len) => format!("chunk {} of {len} over {} ranks has", group.rank(), group.size()),
                ShardSizes::Uneven(lengths) => format!("length {} of {lengths:?} is", group.rank()),
            };
            return problem(
                format!("tensor {i} has length {found} in dimension {dim}, but {part} {expected}"),
                "cut the whole with `placement::ShardSizes`",
            );
        }
        print.shape[*dim] = sizes.total();
        Ok(print)
    };
    tensors.iter().zip(shardings).enumerate().map(block).collect()
}

/// Prints of these wholes, to be reduced and cut.
pub(super) fn check_full(
    tensors: &[DispatchTensor],
    shardings: &[(usize, ShardSizes)],
    op: ReduceOp,
    group: &Group,
) -> Checked<Vec<TensorSignature>> {
    let full = |(i, (tensor, (dim, sizes))): ShardArgument<'_>| {
        let print = full_of(i, tensor, *dim, sizes, group)?;
        reducible(i, print.dtype, op)?;
        check_total(i, &print.shape, *dim, sizes)?;
        Ok(print)
    };
    tensors.iter().zip(shardings).enumerate().map(full).collect()
}

/// Prints of tensors that are reduced whole.
pub(super) fn reduced(tensors: &[DispatchTensor], op: ReduceOp) -> Checked<Vec<TensorSignature>> {
    let print = |(i, tensor)| {
        let print = plain(i, tensor)?;
        reducible(i, print.dtype, op)?;
        Ok(print)
    };
    tensors.iter().enumerate().map(print).collect()
}

/// The print of a whole that is re-cut along `to_dim`.
pub(super) fn recut(
    shard: &ShardedTensor,
    to_dim: usize,
    to_sizes: &ShardSizes,
    group: &Group,
) -> Checked<TensorSignature> {
    let ShardedTensor { tensor, dim, sizes } = shard;
    let mut print = check_shards(std::slice::from_ref(tensor), &[(*dim, sizes.clone())], group)?.remove(0);
    in_range(0, to_dim, &print.shape)?;
    if to_dim == shard.dim {
        return problem(
            format!("`to_dim` is {to_dim}, which is the cut dimension already"),
            "name another dimension, or leave the tensor as it is",
        );
    }
    one_per_rank(0, to_sizes, group)?;
    check_total(0, &print.shape, to_dim, to_sizes)?;
    print.to = Some(ShardSignature::new(to_dim, to_sizes));
    Ok(print)
}

/// What this rank gives to each rank of the group, and what it says it gets of each.
pub(super) fn listed(
    parts: &[Option<DispatchTensor>],
    metas: Vec<Option<TensorMeta>>,
    group: &Group,
) -> Checked<PairwiseSignature> {
    let (size, member) = (group.size(), group.rank());
    if parts.len() != size || metas.len() != size {
        return problem(
            format!("{} parts and {} `metas` in a group of {size} ranks", parts.len(), metas.len()),
            "give one of each per rank of the group, `None` where nothing goes",
        );
    }
    let meta = |(i, part): (usize, &Option<DispatchTensor>)| {
        let print = part.as_ref().map(|part| plain(i, part)).transpose()?;
        Ok(print.map(|TensorSignature { shape, dtype, .. }| TensorMeta { shape, dtype }))
    };
    let given: Vec<_> = parts.iter().enumerate().map(meta).collect::<Checked<_>>()?;
    if given[member] != metas[member] {
        return problem(
            format!(
                "its own part is {}, but `metas` says {}",
                tensor_text(&given[member]),
                tensor_text(&metas[member])
            ),
            "describe the part that the rank keeps as it is",
        );
    }
    Ok(PairwiseSignature { member, given, taken: metas })
}

/// Prints of what the root holds, checked against its tensors if this rank is the root.
pub(super) fn rooted(
    tensors: Option<&[DispatchTensor]>,
    metas: &[TensorMeta],
    root: usize,
    group: &Group,
) -> Checked<Vec<TensorSignature>> {
    member("root", root, group)?;
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
    Ok(metas.iter().map(described).collect())
}

/// The print of a tensor that is known by its description.
pub(super) fn described(meta: &TensorMeta) -> TensorSignature {
    TensorSignature { shape: meta.shape.clone(), dtype: meta.dtype, sharding: None, to: None }
}

/// Prints of tensors that go as they are.
pub(super) fn sent(tensors: &[DispatchTensor]) -> Checked<Vec<TensorSignature>> {
    tensors.iter().enumerate().map(|(i, tensor)| plain(i, tensor)).collect()
}

/// That `name` is a place in the group.
pub(super) fn member(name: &str, place: usize, group: &Group) -> Checked<()> {
    if place < group.size() {
        return Ok(());
    }
    problem(
        format!("{name} {place} is outside a group of {} ranks", group.size()),
        "name a position in the group, not a global rank",
    )
}

/// That the root, and nobody else, has `name`.
pub(super) fn on_root(name: &str, is_given: bool, root: usize, group: &Group) -> Checked<()> {
    member("root", root, group)?;
    match (root == group.rank(), is_given) {
        (true, false) => problem(format!("the root passes no {name}"), "pass `Some` on the root"),
        (false, true) => {
            problem(format!("group rank {} passes {name}, the root is {root}", group.rank()), "pass `None` there")
        }
        _ => Ok(()),
    }
}

/// That there is one for each rank.
pub(super) fn one_each(name: &str, count: usize, group: &Group) -> Checked<()> {
    if count == group.size() {
        return Ok(());
    }
    problem(format!("{count} {name} in a group of {} ranks", group.size()), "give one per rank of the group")
}

/// That the rows of `tensor` are what the ranks are given of it.
pub(super) fn split(
    tensor: &DispatchTensor,
    given: &[usize],
    taken: &[usize],
    group: &Group,
) -> Checked<TensorSignature> {
    let print = plain(0, tensor)?;
    one_each("splits given", given.len(), group)?;
    one_each("splits taken", taken.len(), group)?;
    let (rows, sum) = (print.shape[0], given.iter().sum::<usize>());
    if rows != sum {
        return problem(format!("the tensor has {rows} rows, but {given:?} are {sum}"), "give every row to a rank");
    }
    let (kept, own) = (given[group.rank()], taken[group.rank()]);
    if kept != own {
        return problem(format!("it gives itself {kept} rows, but takes {own}"), "take what it keeps");
    }
    Ok(print)
}

/// That a tensor has a row for each index.
pub(super) fn rows_of(dims: &[usize], indices: usize) -> Checked<()> {
    if dims[0] == indices {
        return Ok(());
    }
    problem(format!("{indices} indices for values of shape {dims:?}"), "give one index a row")
}

/// Adds the cuts that a scatter makes.
pub(super) fn scattered(
    prints: &mut [TensorSignature],
    shardings: &[(usize, ShardSizes)],
    group: &Group,
) -> Checked<()> {
    if prints.len() != shardings.len() {
        return problem(format!("{} tensors, but {} `cuts`", prints.len(), shardings.len()), "give one cut a tensor");
    }
    for (i, (print, (dim, sizes))) in prints.iter_mut().zip(shardings).enumerate() {
        in_range(i, *dim, &print.shape)?;
        one_per_rank(i, sizes, group)?;
        check_total(i, &print.shape, *dim, sizes)?;
        print.sharding = Some(ShardSignature::new(*dim, sizes));
    }
    Ok(())
}

/// The print of `tensor`, with its cut checked.
fn full_of(
    i: usize,
    tensor: &DispatchTensor,
    dim: usize,
    sizes: &ShardSizes,
    group: &Group,
) -> Checked<TensorSignature> {
    sharded_along(i, plain(i, tensor)?, dim, sizes, group)
}

/// A print with its cut, which is checked.
fn sharded_along(
    i: usize,
    mut print: TensorSignature,
    dim: usize,
    sizes: &ShardSizes,
    group: &Group,
) -> Checked<TensorSignature> {
    in_range(i, dim, &print.shape)?;
    one_per_rank(i, sizes, group)?;
    print.sharding = Some(ShardSignature::new(dim, sizes));
    Ok(print)
}

/// Prints of wholes that are known by their descriptions, and cut.
pub(super) fn check_described(
    full_tensors: &[(TensorMeta, usize, ShardSizes)],
    group: &Group,
) -> Checked<Vec<TensorSignature>> {
    let full = |(i, (meta, dim, sizes)): (usize, &(TensorMeta, usize, ShardSizes))| {
        let print = sharded_along(i, described(meta), *dim, sizes, group)?;
        check_total(i, &print.shape, *dim, sizes)?;
        Ok(print)
    };
    full_tensors.iter().enumerate().map(full).collect()
}

/// That all can be reduced.
pub(super) fn all_reducible(prints: &[TensorSignature], op: ReduceOp) -> Checked<()> {
    prints.iter().enumerate().try_for_each(|(i, print)| reducible(i, print.dtype, op))
}

/// That the tensors are those of a plan for this group.
pub(super) fn as_planned(plan: &CollectivePlan, tensors: &[DispatchTensor], group: &Group) -> Checked<()> {
    if plan.ranks != group.size() {
        let (planned, found) = (plan.ranks, group.size());
        return problem(format!("a plan for {planned} ranks in a group of {found}"), "make a plan of the group's own");
    }
    let (planned, given) = (plan.tensors.len(), tensors.len());
    if planned != given {
        return problem(format!("{given} tensors, but a plan for {planned}"), REPLAN);
    }
    for (i, (tensor, of_plan)) in tensors.iter().zip(&*plan.tensors).enumerate() {
        let print = plain(i, tensor)?;
        let mut shape = of_plan.shape.clone();
        if let Some((dim, sizes)) = plan.shardings().get(i) {
            one_per_rank(i, sizes, group)?;
            if plan.op() == Op::AllGather {
                shape[*dim] = sizes.range(group.size(), group.rank()).len();
            }
        }
        if print.dtype != of_plan.dtype || print.shape != shape {
            let says = |shape, dtype| tensor_text(&Some(TensorMeta { shape, dtype }));
            let (found, expected) = (says(print.shape, print.dtype), says(shape, of_plan.dtype));
            return problem(format!("tensor {i} is {found}, but the plan is for {expected}"), REPLAN);
        }
    }
    Ok(())
}

const REPLAN: &str = "make a plan for tensors of these shapes, dtypes and number";

fn plain(i: usize, tensor: &DispatchTensor) -> Checked<TensorSignature> {
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
    Ok(TensorSignature { shape: tensor.shape(), dtype, sharding: None, to: None })
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

fn one_per_rank(i: usize, sizes: &ShardSizes, group: &Group) -> Checked<()> {
    let lengths = sizes.lengths().filter(|lengths| lengths.len() != group.size());
    lengths.map_or(Ok(()), |lengths| {
        problem(
            format!("tensor {i} is cut into the {} lengths {lengths:?} over {} ranks", lengths.len(), group.size()),
            "give one length per rank of the group",
        )
    })
}

fn check_total(i: usize, shape: &Shape, dim: usize, sizes: &ShardSizes) -> Checked<()> {
    let (found, total) = (shape[dim], sizes.total());
    if found == total {
        return Ok(());
    }
    problem(
        format!("tensor {i} has length {found} in dimension {dim}, but its cut is of {total}"),
        "pass the whole tensor, and a cut of its length in the cut dimension",
    )
}

fn reducible(i: usize, dtype: DType, op: ReduceOp) -> Checked<()> {
    let no = |remedy| problem(format!("tensor {i} is {}, which has no {op:?}", dtype.name()), remedy);
    match op {
        ReduceOp::Sum | ReduceOp::Avg if dtype.is_bool() => no("use Max (any), Min (all), or convert it to int"),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor if dtype.is_float() => {
            no("bitwise reductions are of integers and bools")
        }
        ReduceOp::PremulSum(_) if !dtype.is_float() => no("reduce a product, or floats"),
        _ => Ok(()),
    }
}
