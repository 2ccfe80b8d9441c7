//! [`unit`]: marks the beginning and end of a unit's forward.

use std::any::type_name;
use std::sync::Arc;

use burn::backend::{DispatchAutodiffContext, TensorMetadata};
use burn::module::Module;
use burn::tensor::{DType, Shape};
use smallvec::SmallVec;

use super::begin_pass::UnitAccess;
use super::buffers::sync_buffers;
use super::events::ProbedUnit;
use super::options::cast;
use super::panicked::noting_panics;
use super::prefetch::prefetch;
use super::scope::ForwardScope;
use super::shards::LocalShards;
use super::sweep::sweep;
use super::unit::Unit;
use super::unit_stack::{self, GroupUnit, UnitGuard};
use super::visit::check_not_replaced;
use super::visit::{Visited, walk};
use super::{ModelScan, ParamError};
use crate::error::OrUnwind;
use crate::tensor_tree::{TensorTree, visit_plain};
use crate::{Result, burn_compat, watch};

/// Runs `forward` as the forward of an FSDP unit. One all-gather runs before it, and one
/// reduce-scatter in backward. The gathered parameters are freed after `forward` unless the unit
/// keeps them.
///
/// Call it around each block of a model, and around the model's own forward for the parameters
/// outside the blocks. If `module` is not a unit, only `forward` runs; units inside `module` are
/// then enclosed by this call.
///
/// ```
/// # use burn::{nn::Linear, module::Module, tensor::Tensor};
/// # use burn_dtensor::fsdp::unit;
/// # #[derive(Module, Debug)]
/// # struct Stack { blocks: Vec<Linear>, head: Linear }
/// impl Stack {
///     pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         unit(self, x, |stack, mut x| {
///             for block in &stack.blocks {
///                 x = unit(block, x, |block, x| block.forward(x));
///             }
///             stack.head.forward(x)
///         })
///     }
/// }
/// ```
///
/// **Implicit units.** A unit inside `module` that `forward` does not enter with `unit`, for
/// example because the loop over its layers is inside burn, is entered by the first read of one of
/// its parameters. It is left when a unit that is not inside it is entered, or together with
/// `module`. So patterns and one call of `unit` are enough for a model of burn's own layers. The
/// collectives are those of explicitly entered units, and so is the memory on the CPU (on a GPU
/// gathered parameters may stay in memory until backward):
///
/// ```
/// # use burn::{nn::transformer::*, module::Module, tensor::Tensor};
/// # use burn_dtensor::fsdp::unit;
/// // Sharded with the units `layers.*`; the loop over them is inside burn.
/// fn forward(encoder: &TransformerEncoder, x: Tensor<3>) -> Tensor<3> {
///     unit(encoder, x, |encoder, x| encoder.forward(TransformerEncoderInput::new(x)))
/// }
/// ```
///
/// Every rank must read such units in the same order. A unit that is read a second time after it
/// was left is gathered, and its gradients are reduced, a second time. With burn's gradient
/// checkpointing such units are gathered earlier in backward than needed, so more of them are in
/// memory at once.
///
/// **Reads outside a unit.** A parameter that is read while neither its unit nor a module around
/// the unit is entered is gathered and reduced separately, so the read is collective. It causes a
/// warning, or an error if
/// [`with_implicit_unshard(false)`](crate::fsdp::FullyShard::with_implicit_unshard) was set. Inside
/// its unit the same happens without a warning to a parameter whose shard is not the one that was
/// gathered (a stepped or frozen clone of the module). Reading a parameter that was kept after its
/// unit was left may be collective too: it waits for the unit's all-gather for backward.
///
/// **One backward.** All outputs of a call share one backward. Two outputs, or two losses computed
/// inside, cannot be differentiated separately, even if they share only leaves
/// ([`ParamError::SecondBackward`]). Add the losses up, or use one unit per head: units over a
/// detached input have separate backwards.
///
/// **Explicit inputs.** Pass tracked tensors in `input`. Captured ones get correct gradients, but
/// keep parameters unsharded longer.
///
/// **Tracked outputs.** All outputs of a unit that trains a parameter are tracked, even if none of
/// them depends on a parameter. Call `detach()` outside to get a constant.
///
/// # Collective
/// Every rank of the unit's mesh must enter its units in the same order. Ranks may compute
/// different things inside, on different batches. Backward follows the order of forward, whatever
/// the autodiff graph: the outermost unit last, the others in reverse. It is an error if the output
/// of a unit is used in the loss of only some ranks, unless another unit encloses it.
///
/// # Panics
/// Unwinds with [`ParamError::EmptyInput`] if a tensor in `input` is an empty batch, such as `[0,
/// seq, d_model]`, or token ids or a mask `[0, seq]` without floats that have elements or are rows:
/// burn's layers read foreign memory with it. Rows of features, `[0, d_model]`, are accepted,
/// except by a module with running statistics. DTensors may have empty local tensors.
///
/// If `forward` panics, the report of [`launch`](crate::comm::launch) names the innermost open
/// unit. Unwinds with the typed [`Error`](crate::Error) if a collective fails, and with
/// [`ParamError::Replaced`] if a parameter of the module was replaced after it was distributed;
/// [`launch`](crate::comm::launch) returns the error. If a second backward reaches a graph that the
/// first consumed, burn panics, and `launch` returns [`ParamError::SecondBackward`].
#[track_caller]
pub fn unit<M, I, O>(module: &M, input: I, forward: impl FnOnce(&M, I) -> O) -> O
where
    M: Module,
    I: TensorTree,
    O: TensorTree,
{
    in_unit(module, input, |module, input, _| forward(module, input))
}

/// Like [`unit`], but passes `forward` the units of the module, too.
#[track_caller]
pub(crate) fn in_unit<M, I, O>(
    module: &M,
    input: I,
    forward: impl FnOnce(&M, I, &[Arc<Unit>]) -> O,
) -> O
where
    M: Module,
    I: TensorTree,
    O: TensorTree,
{
    let Some(ModuleUnits { own, inside }) = ModuleUnits::of(module).or_unwind() else {
        return forward(module, input, &[]);
    };
    let input = check_input(module, &own, input).or_unwind();
    if !unit_stack::is_any() {
        sweep(own.iter().chain(&inside).map(|(unit, _)| unit));
        let units = own.iter().chain(&inside).map(|(unit, _)| unit.spec());
        if units
            .flat_map(|spec| &spec.data)
            .any(|data| data.forward_sync_buffers)
        {
            sync_buffers(module).or_unwind();
        }
    }
    let Some((first, _)) = own.first() else {
        let open = UnitGuard::new(None, inside);
        let output = noting_panics(|| forward(module, input, &[]));
        return open.leave(output);
    };
    let label = first.label();
    let probed = ProbedUnit::begin(&label);
    let _inside = watch::entered(|| Some(label));
    let mut input = input;
    let mut inside = inside;
    // The units inside are prefetched together with the module's other units, which are entered
    // next.
    inside.extend(
        own.iter()
            .skip(1)
            .filter(|(unit, _)| !unit.comm.is_group())
            .cloned(),
    );
    let mut inside = Some(inside);
    let units: SmallVec<[Arc<Unit>; 1]> = own.iter().map(|(unit, _)| unit.clone()).collect();
    let group =
        |(unit, shards): (Arc<Unit>, _)| (unit_stack::group_of(&unit, &shards), unit, shards);
    let mut own: SmallVec<[_; 1]> = own.into_iter().map(group).collect();
    // The module's units are entered one inside the other. A group unit stays entered when this
    // module is left, so group units come first, and all guards are above them on the stack.
    own.sort_by_key(|(group, ..)| group.is_none());
    let mut member_of: SmallVec<[(usize, LocalShards); 1]> = SmallVec::new();
    let mut open: SmallVec<[UnitGuard; 1]> = SmallVec::new();
    for (group, unit, shards) in own {
        match group {
            None => {
                let push = |scope| UnitGuard::new(Some(scope), inside.take().unwrap_or_default());
                let (guard, tied) = pre_forward(&unit, shards, UnitAccess::Forward, input, push);
                open.push(guard);
                input = tied;
            }
            Some(GroupUnit::Closed(all)) => {
                let (at, tied) = pre_forward(
                    &unit,
                    all,
                    UnitAccess::Forward,
                    input,
                    unit_stack::open_group,
                );
                member_of.push((at, shards));
                input = tied;
            }
            Some(GroupUnit::Open(at)) => {
                unit_stack::close_read(&unit);
                member_of.push((at, shards));
                input =
                    input.map_floats(&mut |tensor| cast(tensor, unit.spec().precision().inputs));
            }
        }
    }
    open.extend(
        member_of
            .into_iter()
            .map(|(at, shards)| UnitGuard::member(at, shards, inside.take().unwrap_or_default())),
    );
    let output = noting_panics(|| forward(module, input, &units));
    let output = open
        .into_iter()
        .rev()
        .fold(output, |output, open| open.leave(output));
    match probed {
        Some(probed) => probed.leave(output),
        None => output,
    }
}

/// Checks that no plain tensor of the input is an empty batch with which burn's layers would read
/// foreign memory, or with which they would make running statistics NaN.
///
/// # Errors
/// [`ParamError::EmptyInput`].
fn check_input<M: Module, I: TensorTree>(module: &M, own: &OwnUnits, input: I) -> Result<I> {
    let mut empty = SmallVec::<[(Shape, DType, bool); 1]>::new();
    let mut has_elements = false;
    let input = visit_plain(input, &mut |tensor| {
        let shape = tensor.shape();
        let dtype = tensor.dtype();
        match shape.num_elements() {
            0 => empty.push((
                shape,
                dtype,
                tensor.autodiff != DispatchAutodiffContext::Disabled,
            )),
            _ => has_elements |= dtype.is_float(),
        }
    });
    if empty.is_empty() {
        return Ok(input);
    }
    // Indices and masks that come with rows of features are of these rows.
    let rows = empty
        .iter()
        .find(|(shape, dtype, _)| dtype.is_float() && shape.num_dims() == 2 && shape[0] == 0);
    let is_unsafe = |(shape, dtype, _): &&(Shape, DType, bool)| {
        burn_compat::is_unsafe(shape, *dtype)
            && (dtype.is_float() || rows.is_none() && !has_elements)
    };
    let (shape, problem) = match (
        empty.iter().find(is_unsafe),
        rows.filter(|(.., is_autodiff)| {
            *is_autodiff && !has_elements && ModelScan::of(module).has_running()
        }),
    ) {
        (Some((shape, ..)), _) => (shape, "with which burn's layers would read foreign memory"),
        (None, Some((shape, ..))) => (shape, "with which running statistics would become NaN"),
        (None, None) => return Ok(input),
    };
    let unit = own.first().map_or_else(
        || type_name::<M>().into(),
        |(unit, _)| unit.label().to_string(),
    );
    Err(ParamError::EmptyInput {
        unit,
        shape: shape.to_vec(),
        problem,
    }
    .into())
}

/// Opens `unit` on these shards, gathers it, and lets `push` put it on the stack of open units.
pub(super) fn pre_forward<I: TensorTree, T>(
    unit: &Arc<Unit>,
    shards: LocalShards,
    access: UnitAccess,
    input: I,
    push: impl FnOnce(ForwardScope) -> T,
) -> (T, I) {
    unit_stack::close_read(unit);
    let (scope, input) =
        ForwardScope::open(unit, shards, access, unit_stack::enclosing(), input).or_unwind();
    // Not when the first parameter is read: a rank that reads none must participate in the
    // all-gather too.
    scope.pass.unsharded.gather().or_unwind();
    let pass = (!scope.is_recomputed).then(|| scope.pass.clone());
    let pushed = push(scope);
    if let Some(pass) = pass {
        prefetch(unit);
        pass.begin();
    }
    (pushed, input)
}

/// Units of one module, each with this rank's shards of the module's parameters.
pub(crate) type OwnUnits = SmallVec<[(Arc<Unit>, LocalShards); 1]>;

/// The units in which a module's distributed parameters are.
pub(crate) struct ModuleUnits {
    /// Units of exactly this module, with their shards. There is one, unless parameters are on
    /// different meshes.
    pub(crate) own: OwnUnits,
    /// The data-parallel units of modules inside, with their shards.
    pub(crate) inside: Vec<(Arc<Unit>, LocalShards)>,
}

impl ModuleUnits {
    /// Collects the units of `module`. Returns `None` if it has no distributed parameters.
    ///
    /// # Errors
    /// [`ParamError::Replaced`].
    pub(crate) fn of<M: Module>(module: &M) -> Result<Option<Self>> {
        let walk = walk(module);
        if walk.distributed.is_empty() {
            return Ok(None);
        }
        check_not_replaced(module, &walk)?;
        let visited = walk.distributed;
        let is_own = |visited: &&Visited| visited.depth == visited.param.info().depth;
        // If `fully_shard` ignored the parameters, they are still in the unit that `parallelize`
        // made.
        let mut own: SmallVec<[Arc<Unit>; 1]> = SmallVec::new();
        for found in visited.iter().filter(is_own) {
            let is_known = own.iter().any(|unit| Arc::ptr_eq(unit, &found.param.unit));
            if found.param.is_data_parallel() && !is_known {
                own.push(found.param.unit.clone());
            }
        }
        if own.is_empty() {
            own.extend(
                visited
                    .iter()
                    .find(is_own)
                    .map(|found| found.param.unit.clone()),
            );
        }
        let mut units: Vec<(Arc<Unit>, Vec<Visited>)> = Vec::new();
        for visited in visited {
            let is_in_own = own.iter().any(|own| Arc::ptr_eq(own, &visited.param.unit));
            // Skip parameters of a unit of a module around this one.
            let is_inside =
                visited.depth > visited.param.info().depth && visited.param.is_data_parallel();
            if !is_in_own && !is_inside {
                continue;
            }
            // A clone of a parameter inside the same module, for example a frozen one, has separate
            // shards.
            let index = visited.param.index;
            let lacks = |members: &[Visited]| {
                members.last().is_none_or(|last| last.param.index < index)
                    || members.iter().all(|member| member.param.index != index)
            };
            let group = units
                .iter_mut()
                .rfind(|(unit, members)| Arc::ptr_eq(unit, &visited.param.unit) && lacks(members));
            match group {
                Some((_, members)) => members.push(visited),
                None => units.push((visited.param.unit.clone(), vec![visited])),
            }
        }
        let mut inside: Vec<_> = units
            .into_iter()
            .map(|(unit, members)| {
                (
                    unit,
                    LocalShards::new(members.into_iter().map(Visited::shard)),
                )
            })
            .collect();
        let own = own.iter().filter_map(|own| {
            let at = inside.iter().position(|(unit, _)| Arc::ptr_eq(unit, own))?;
            Some(inside.remove(at))
        });
        Ok(Some(Self {
            own: own.collect(),
            inside,
        }))
    }
}

/// Returns the units whose module is exactly `module`, with their shards.
///
/// # Errors
/// [`ParamError::NotSharded`] if there is none, [`ParamError::Replaced`].
pub(crate) fn units_of<M: Module>(module: &M) -> Result<OwnUnits> {
    let own = ModuleUnits::of(module)?
        .map(|scoped| scoped.own)
        .unwrap_or_default();
    if own.is_empty() {
        Err(ParamError::NotSharded.into())
    } else {
        Ok(own)
    }
}
