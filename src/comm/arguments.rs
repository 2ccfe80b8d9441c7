//! Checks that a rank can make locally, before it joins a collective.

use burn::backend::{DispatchAutodiffContext, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Shape};

use super::backend::{MAX_DIMS, PairwiseSignature, ShardSignature, TensorSignature, tensor_text};
use super::{CollectivePlan, Group, Op, ReduceOp, ShardedTensor, TensorMeta};
use crate::memory;
use crate::placement::ShardSizes;

/// A problem with an argument, and its remedy: the imperative sentence that follows the problem in
/// the error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    pub problem: String,
    pub remedy: &'static str,
}

type Checked<T> = Result<T, Problem>;

/// Returns the problem that the format describes, unless the condition holds.
macro_rules! ensure {
    ($condition:expr => $problem:literal, $remedy:expr $(,)?) => {
        if !$condition {
            return Err(Problem {
                problem: format!($problem),
                remedy: $remedy,
            });
        }
    };
}

/// Checks that all tensors are on the rank's own device, or all on the host.
pub(super) fn on_own_device<'a>(
    tensors: impl IntoIterator<Item = &'a DispatchTensor>,
    own: &Device,
) -> Checked<()> {
    let mut first: Option<Device> = None;
    for (i, tensor) in tensors.into_iter().enumerate() {
        let device = Device::new(tensor.device());
        ensure!(device == *own || memory::is_host(&device) => "tensor {i} is on {device:?}, but the rank's device is {own:?}",
            "Create tensors on `world.device()`, move them there, or move all tensors of a call to the CPU \
             (`Launch::with_devices` sets the device of each rank)");
        let first = first.get_or_insert_with(|| device.clone());
        ensure!(*first == device => "tensor 0 is on {first:?}, and tensor {i} on {device:?}",
            "Move all tensors of a call to `world.device()`, or all to the CPU");
    }
    Ok(())
}

/// Index, tensor and sharding of one argument of a list.
type ShardArgument<'a> = (usize, (&'a DispatchTensor, &'a (usize, ShardSizes)));

/// Checks the shards of an all-gather. Returns the signatures of the full tensors.
pub(super) fn check_shards(
    tensors: &[DispatchTensor],
    shardings: &[(usize, ShardSizes)],
    group: &Group,
) -> Checked<Vec<TensorSignature>> {
    let block = |(i, (tensor, (dim, sizes))): ShardArgument<'_>| {
        let mut signature = sharded_along(i, plain(i, tensor)?, *dim, sizes, group)?;
        let expected = sizes.range(group.size(), group.rank()).len();
        let found = signature.shape[*dim];
        let shard = || match sizes {
            ShardSizes::Chunked(len) => format!(
                "chunk {} of {len} over {} ranks has",
                group.rank(),
                group.size()
            ),
            ShardSizes::Uneven(lengths) => format!("shard size {} of {lengths:?} is", group.rank()),
        };
        if found != expected {
            let problem = format!(
                "tensor {i} has length {found} in dimension {dim}, but {} {expected}",
                shard()
            );
            return Err(Problem {
                problem,
                remedy: "Shard the full tensor with `placement::ShardSizes`",
            });
        }
        let sharding = signature.sharding;
        signature.shape[*dim] = sizes.total();
        Ok(TensorSignature {
            sharding,
            ..supported(i, signature.shape, signature.dtype)?
        })
    };
    tensors
        .iter()
        .zip(shardings)
        .enumerate()
        .map(block)
        .collect()
}

/// Checks tensors that are to be reduced. Returns their signatures.
pub(super) fn reduced(tensors: &[DispatchTensor], op: ReduceOp) -> Checked<Vec<TensorSignature>> {
    tensors
        .iter()
        .enumerate()
        .map(|(i, tensor)| {
            let signature = plain(i, tensor)?;
            reducible(i, signature.dtype, op)?;
            Ok(signature)
        })
        .collect()
}

/// Checks a shard that is to be resharded along `to_dim`. Returns the signature of the full tensor.
pub(super) fn recut(
    shard: &ShardedTensor,
    to_dim: usize,
    to_sizes: &ShardSizes,
    group: &Group,
) -> Checked<TensorSignature> {
    let ShardedTensor { tensor, dim, sizes } = shard;
    let mut signature = check_shards(
        std::slice::from_ref(tensor),
        &[(*dim, sizes.clone())],
        group,
    )?
    .remove(0);
    in_range(0, to_dim, &signature.shape)?;
    ensure!(to_dim != shard.dim => "`to_dim` is {to_dim}, which is the sharded dimension already",
        "Pass another dimension, or use the tensor as it is");
    one_per_rank(0, to_sizes, group)?;
    check_total(0, &signature.shape, to_dim, to_sizes)?;
    signature.to = Some(ShardSignature::new(to_dim, to_sizes));
    Ok(signature)
}

/// Checks the tensors that this rank sends to each rank of the group, and the descriptions of those
/// that it receives. Returns their signature.
pub(super) fn listed(
    parts: &[Option<DispatchTensor>],
    metas: Vec<Option<TensorMeta>>,
    group: &Group,
) -> Checked<PairwiseSignature> {
    let size = group.size();
    let member = group.rank();
    let [tensors, descriptions] = [parts.len(), metas.len()];
    ensure!([tensors, descriptions] == [size; 2] => "{tensors} parts and {descriptions} `metas` in a group of {size} ranks",
        "Pass one of each per rank of the group, `None` for a rank without a tensor");
    let meta = |(i, part): (usize, &Option<DispatchTensor>)| {
        let signature = part.as_ref().map(|part| plain(i, part)).transpose()?;
        Ok(signature.map(|TensorSignature { shape, dtype, .. }| TensorMeta { shape, dtype }))
    };
    let sent: Vec<_> = parts.iter().enumerate().map(meta).collect::<Checked<_>>()?;
    metas.iter().enumerate().try_for_each(|(i, meta)| {
        meta.as_ref()
            .map_or(Ok(()), |meta| described(i, meta).map(drop))
    })?;
    let [own, meta] = [&sent[member], &metas[member]].map(tensor_text);
    ensure!(own == meta => "this rank's tensor for itself is {own}, but `metas` describes {meta}",
        "Describe in `metas` the tensor that this rank passes for itself");
    Ok(PairwiseSignature {
        member,
        sent,
        received: metas,
    })
}

/// Checks the tensors of the root. Returns their signatures, which come from `metas`; on the root,
/// `metas` must describe the tensors.
pub(super) fn rooted(
    tensors: Option<&[DispatchTensor]>,
    metas: &[TensorMeta],
    root: usize,
    group: &Group,
) -> Checked<Vec<TensorSignature>> {
    member("root", root, group)?;
    let signatures = all_described(metas)?;
    if root == group.rank() {
        let remedy = "Pass `Some(tensors)` on the root";
        let tensors = tensors.ok_or_else(|| Problem {
            problem: "the root passes no tensors".into(),
            remedy,
        })?;
        let given = tensors.len();
        let described = metas.len();
        ensure!(given == described => "{given} tensors, but {described} `metas`", "Describe every tensor in `metas`");
        for (i, (tensor, expected)) in tensors.iter().zip(&signatures).enumerate() {
            let [found, expected] = [&plain(i, tensor)?, expected].map(text);
            ensure!(found == expected => "tensor {i} is {found}, but `metas` describes {expected}",
                "Describe the root's tensors in `metas` on every rank");
        }
    }
    Ok(signatures)
}

/// Returns the signatures of the tensors that `metas` describes.
pub(super) fn all_described(metas: &[TensorMeta]) -> Checked<Vec<TensorSignature>> {
    metas
        .iter()
        .enumerate()
        .map(|(i, meta)| described(i, meta))
        .collect()
}

fn described(i: usize, meta: &TensorMeta) -> Checked<TensorSignature> {
    supported(i, meta.shape.clone(), meta.dtype)
}

/// Checks tensors that are sent unchanged. Returns their signatures.
pub(super) fn sent(tensors: &[DispatchTensor]) -> Checked<Vec<TensorSignature>> {
    tensors
        .iter()
        .enumerate()
        .map(|(i, tensor)| plain(i, tensor))
        .collect()
}

/// Checks that the argument `name`, with the value `place`, is a rank of the group.
pub(super) fn member(name: &str, place: usize, group: &Group) -> Checked<()> {
    let size = group.size();
    ensure!(place < size => "{name} {place} is outside a group of {size} ranks", "Pass a group rank, not a global rank");
    Ok(())
}

/// Checks that the root, and no other rank, passes `name`.
pub(super) fn on_root(name: &str, is_given: bool, root: usize, group: &Group) -> Checked<()> {
    member("root", root, group)?;
    let (rank, is_root) = (group.rank(), root == group.rank());
    ensure!(is_given || !is_root => "the root passes no {name}", "Pass `Some` on the root");
    ensure!(is_root || !is_given => "group rank {rank} passes {name}, the root is {root}", "Pass `None` there");
    Ok(())
}

/// Checks that an argument has one element for each rank of the group.
pub(super) fn one_each(name: &str, count: usize, group: &Group) -> Checked<()> {
    let size = group.size();
    ensure!(count == size => "{count} {name} in a group of {size} ranks", "Pass one per rank of the group");
    Ok(())
}

/// Checks the counts of an all-to-all of rows: the send counts must add up to the rows of `tensor`,
/// and this rank must expect from itself as many rows as it sends to itself.
pub(super) fn split(
    tensor: &DispatchTensor,
    given: &[usize],
    taken: &[usize],
    group: &Group,
) -> Checked<TensorSignature> {
    let signature = plain(0, tensor)?;
    one_each("send counts", given.len(), group)?;
    one_each("receive counts", taken.len(), group)?;
    let row = signature.shape[1..]
        .iter()
        .fold(signature.dtype.size(), |bytes, len| {
            bytes.saturating_mul(*len)
        });
    let rows = signature.shape[0];
    let sum = total_rows("send counts", given, row)?;
    total_rows("receive counts", taken, row)?;
    ensure!(rows == sum => "send counts {given:?} add up to {sum}, but the tensor has {rows} rows",
        "Make them add up to the number of rows");
    let kept = given[group.rank()];
    let own = taken[group.rank()];
    ensure!(kept == own => "this rank sends itself {kept} rows but expects {own} from itself", "Make both counts equal");
    Ok(signature)
}

/// Adds up the counts of an argument. Checks that this many rows of `row` bytes can be addressed.
fn total_rows(name: &str, counts: &[usize], row: usize) -> Checked<usize> {
    let rows = counts
        .iter()
        .try_fold(0_usize, |rows, count| rows.checked_add(*count));
    let rows = rows.filter(|rows| rows.checked_mul(row).is_some());
    ensure!(rows.is_some() => "{name} {counts:?} add up to more rows than memory can hold",
        "Pass a number of rows for each rank");
    Ok(rows.unwrap_or_default())
}

/// Checks that a tensor has one row for each index.
pub(super) fn rows_of(dims: &[usize], indices: usize) -> Checked<()> {
    ensure!(dims[0] == indices => "{indices} indices for values of shape {dims:?}", "Pass one index per row");
    Ok(())
}

/// Returns the signatures of full tensors with their shardings, which are checked.
pub(super) fn sharded(
    signatures: Vec<TensorSignature>,
    shardings: &[(usize, ShardSizes)],
    group: &Group,
) -> Checked<Vec<TensorSignature>> {
    let tensors = signatures.len();
    let given = shardings.len();
    ensure!(tensors == given => "{tensors} tensors, but {given} `shardings`", "Pass one sharding per tensor");
    let full =
        |(i, (signature, (dim, sizes))): (usize, (TensorSignature, &(usize, ShardSizes)))| {
            let signature = sharded_along(i, signature, *dim, sizes, group)?;
            check_total(i, &signature.shape, *dim, sizes)?;
            Ok(signature)
        };
    signatures
        .into_iter()
        .zip(shardings)
        .enumerate()
        .map(full)
        .collect()
}

/// Adds a sharding to a signature. Checks it, except for the total of its sizes.
fn sharded_along(
    i: usize,
    mut signature: TensorSignature,
    dim: usize,
    sizes: &ShardSizes,
    group: &Group,
) -> Checked<TensorSignature> {
    in_range(i, dim, &signature.shape)?;
    one_per_rank(i, sizes, group)?;
    signature.sharding = Some(ShardSignature::new(dim, sizes));
    Ok(signature)
}

/// Checks that `op` can reduce the dtypes of all tensors.
pub(super) fn all_reducible(signatures: &[TensorSignature], op: ReduceOp) -> Checked<()> {
    signatures
        .iter()
        .enumerate()
        .try_for_each(|(i, signature)| reducible(i, signature.dtype, op))
}

/// Checks that the tensors match a plan, and that the plan was made for a group of this size.
pub(super) fn as_planned(
    plan: &CollectivePlan,
    tensors: &[DispatchTensor],
    group: &Group,
) -> Checked<()> {
    let planned = plan.ranks;
    let found = group.size();
    ensure!(planned == found => "a plan for {planned} ranks in a group of {found}", "Make a plan on this group");
    let planned = plan.tensors.len();
    let given = tensors.len();
    ensure!(planned == given => "{given} tensors, but a plan for {planned}", REPLAN);
    for (i, (tensor, of_plan)) in tensors.iter().zip(&*plan.tensors).enumerate() {
        let signature = plain(i, tensor)?;
        let mut shape = of_plan.shape.clone();
        if let Some((dim, sizes)) = plan.shardings().get(i) {
            one_per_rank(i, sizes, group)?;
            if plan.op() == Op::AllGather {
                shape[*dim] = sizes.range(group.size(), group.rank()).len();
            }
        }
        if signature.dtype != of_plan.dtype || signature.shape != shape {
            let [found, expected] = [
                &signature,
                &TensorSignature {
                    shape,
                    ..of_plan.clone()
                },
            ]
            .map(text);
            let problem = format!("tensor {i} is {found}, but the plan is for {expected}");
            return Err(Problem {
                problem,
                remedy: REPLAN,
            });
        }
    }
    Ok(())
}

const REPLAN: &str = "Make a plan for tensors of these shapes, dtypes and number";

fn plain(i: usize, tensor: &DispatchTensor) -> Checked<TensorSignature> {
    ensure!(tensor.autodiff == DispatchAutodiffContext::Disabled => "tensor {i} belongs to an autodiff device",
        "Pass `tensor.inner()`, or use an operation that has a gradient");
    supported(i, tensor.shape(), tensor.dtype())
}

/// Checks that collectives support tensors of this shape and dtype. Returns the signature of tensor
/// `i`.
fn supported(i: usize, shape: Shape, dtype: DType) -> Checked<TensorSignature> {
    ensure!(!matches!(dtype, DType::QFloat(_)) => "tensor {i} is quantized", "Dequantize it first");
    let dims = shape.num_dims();
    ensure!(dims <= MAX_DIMS => "tensor {i} has {dims} dimensions, but collectives support at most {MAX_DIMS}",
        "Reshape it to fewer dimensions");
    let bytes = shape
        .iter()
        .try_fold(dtype.size(), |bytes, len| bytes.checked_mul(*len));
    let lengths = &shape[..];
    ensure!(bytes.is_some() => "tensor {i} of shape {lengths:?} has more bytes than memory can hold", "Correct its shape");
    Ok(TensorSignature {
        shape,
        dtype,
        sharding: None,
        to: None,
    })
}

fn in_range(i: usize, dim: usize, shape: &Shape) -> Checked<()> {
    let dims = shape.num_dims();
    ensure!(dim < dims => "tensor {i} has {dims} dimensions, so dimension {dim} is out of range", "Count dimensions from 0");
    Ok(())
}

/// Checks that explicit shard sizes are one per rank, and that their sum does not overflow.
fn one_per_rank(i: usize, sizes: &ShardSizes, group: &Group) -> Checked<()> {
    let Some(lengths) = sizes.lengths() else {
        return Ok(());
    };
    let given = lengths.len();
    let size = group.size();
    ensure!(given == size => "tensor {i} has {given} shard sizes {lengths:?} in a group of {size} ranks",
        "Pass one shard size per rank of the group");
    let total = lengths
        .iter()
        .try_fold(0_usize, |total, length| total.checked_add(*length));
    ensure!(total.is_some() => "tensor {i} has shard sizes {lengths:?}, whose sum overflows",
        "Pass the length of each rank's shard");
    Ok(())
}

fn check_total(i: usize, shape: &Shape, dim: usize, sizes: &ShardSizes) -> Checked<()> {
    let found = shape[dim];
    let total = sizes.total();
    ensure!(found == total => "tensor {i} has length {found} in dimension {dim}, but its shard sizes add up to {total}",
        "Pass the full tensor, and shard sizes that add up to its length in that dimension");
    Ok(())
}

fn reducible(i: usize, dtype: DType, op: ReduceOp) -> Checked<()> {
    let remedy = match op {
        ReduceOp::Sum | ReduceOp::Avg if dtype.is_bool() => {
            "Use Max (any), Min (all), or convert it to int"
        }
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor if dtype.is_float() => {
            "Pass integers or bools to a bitwise reduction"
        }
        ReduceOp::PremulSum(_) if !dtype.is_float() => "Multiply before a Sum, or pass floats",
        _ => return Ok(()),
    };
    Err(Problem {
        problem: format!("tensor {i} is {}, which has no {op:?}", dtype.name()),
        remedy,
    })
}

/// Displays shape and dtype of a tensor.
fn text(tensor: &TensorSignature) -> String {
    tensor_text(&Some(TensorMeta {
        shape: tensor.shape.clone(),
        dtype: tensor.dtype,
    }))
}
