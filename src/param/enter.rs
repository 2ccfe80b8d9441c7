//! [`unit`]: where a unit's forward begins and ends.

use std::sync::Arc;

use burn::module::Module;
use smallvec::SmallVec;

use super::ParamError;
use super::io::TensorTree;
use super::precision::cast;
use super::prefetch::prefetch;
use super::replaced::check_not_replaced;
use super::scope::{ForwardScope, sweep_passes};
use super::shards::LocalShards;
use super::unit::Unit;
use super::unit_stack::{self, UnitEntry, UnitGuard};
use super::visit::{Visited, walk};
use crate::Result;
use crate::error::OrUnwind;
use crate::watch;

/// Runs `forward` with the module's unit gathered: one all-gather before, freed at the end unless
/// the unit keeps its parameters, one reduce-scatter in backward.
///
/// Write it around each block of a model, and around the model's own forward for the parameters
/// outside the blocks. Where `module` is no unit it only calls `forward`; if it holds units, it
/// encloses them.
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
/// A unit that `fully_shard` made inside `module` and that `forward` does not open, because the code between is
/// not the program's own, is opened by the first read of one of its parameters, and closed when another one that
/// is not inside it is opened, or with `module`. So patterns and one line suffice for a model of burn's own
/// layers, whose collectives are the same, and memory on the CPU (on a GPU gathered weights may stay until backward):
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
/// There every rank must read the same units in the same order. A unit that is read again after it was closed is
/// gathered, and its gradients reduced, once more. With gradient checkpointing such units are
/// gathered again sooner than needed, and more of them are in memory at once.
///
/// A parameter read outside its unit with no module around that is open is right too, but is gathered and
/// reduced by itself: reading it is collective then. A warning says so, or an error, as
/// [`strict`](crate::fsdp::FullyShard::with_implicit_unshard) has it. Inside its unit the same happens, without a word,
/// to one whose shard is not the scope's (a stepped or frozen clone of the module). Reading one that was kept past its
/// unit may be collective too: it waits for what the unit gathers for backward.
///
/// What a unit returns has **one backward**: two outputs cannot be differentiated apart, nor two
/// losses computed inside, though they share only leaves ([`ParamError::SecondBackward`]).
/// Add them up, or return from two units: heads that are units of their own have a backward each, over an input that
/// is detached. What the unit computes with and is tracked belongs into
/// `input`; a tracked tensor that `forward` captures is right too, but holds weights for longer. Where
/// nothing that a trained unit returns comes from a weight, all of it is tracked all the same: detach
/// it outside.
///
/// # Collective
/// Every rank of the unit's mesh must run its units in the same order; what a rank does inside, and
/// with which batch, is its own affair. Backward follows the order of forward, whatever the graph:
/// the unit around the others last, the rest in reverse. A unit whose output is in the loss of some
/// ranks only is an error, unless another unit encloses it.
///
/// # Panics
/// Unwinds with the typed [`Error`](crate::Error) if a collective fails, and with [`ParamError::Replaced`] if a
/// parameter of the module was replaced after it was distributed; [`launch`](crate::comm::launch) returns it. burn panics
/// where a second backward comes to what a first has consumed: that is returned as [`ParamError::SecondBackward`].
#[track_caller]
pub fn unit<M, I, O>(module: &M, input: I, forward: impl FnOnce(&M, I) -> O) -> O
where
    M: Module,
    I: TensorTree,
    O: TensorTree,
{
    in_unit(module, input, |module, input, _| forward(module, input))
}

/// [`unit`], whose `forward` is told which units the module is.
#[track_caller]
pub(super) fn in_unit<M, I, O>(module: &M, input: I, forward: impl FnOnce(&M, I, &[Arc<Unit>]) -> O) -> O
where
    M: Module,
    I: TensorTree,
    O: TensorTree,
{
    let Some(Scoped { own, inside }) = Scoped::of(module).or_unwind() else {
        return forward(module, input, &[]);
    };
    if !unit_stack::is_any() {
        sweep_passes(own.iter().chain(&inside).map(|(unit, _)| unit));
    }
    let Some((first, _)) = own.first() else {
        let open = UnitGuard::new(None, inside);
        let output = forward(module, input, &[]);
        return open.leave(output);
    };
    let label = first.label();
    let _inside = watch::entered(|| Some(label));
    let (mut input, mut inside) = (input, inside);
    // What is entered next is posted with what follows.
    inside.extend(own.iter().skip(1).filter(|(unit, _)| !unit.is_group()).cloned());
    let mut inside = Some(inside);
    let units: SmallVec<[Arc<Unit>; 1]> = own.iter().map(|(unit, _)| unit.clone()).collect();
    // One inside the other. A unit of several modules stays open when this one is left, so all of these come first.
    let mut entered: SmallVec<[EnteredUnit; 1]> = SmallVec::new();
    for (unit, shards) in own {
        unit_stack::close_read(&unit);
        let (next, tied) = enter(&unit, shards, &mut inside, input);
        input = tied;
        entered.push(next);
    }
    let open: SmallVec<[UnitGuard; 1]> = entered
        .into_iter()
        .map(|entered| match entered {
            EnteredUnit::Open(open) => open,
            EnteredUnit::Member { at, shards } => UnitGuard::member(at, shards, inside.take().unwrap_or_default()),
        })
        .collect();
    let output = forward(module, input, &units);
    open.into_iter().rev().fold(output, |output, open| open.leave(output))
}

/// A unit of a module that is entered.
enum EnteredUnit {
    Open(UnitGuard),
    /// One of several modules, of a unit that is open at that place.
    Member {
        at: usize,
        shards: LocalShards,
    },
}

/// Enters `unit` with these `shards` of the module's, and with the units `inside` the module if those are with none yet.
fn enter<I: TensorTree>(
    unit: &Arc<Unit>,
    shards: LocalShards,
    inside: &mut Option<Vec<(Arc<Unit>, LocalShards)>>,
    input: I,
) -> (EnteredUnit, I) {
    match unit_stack::member(unit, shards) {
        UnitEntry::Joins { at, shards } => {
            let dtype = unit.precision().inputs;
            (EnteredUnit::Member { at, shards }, input.map_floats(&mut |tensor| cast(tensor, dtype)))
        }
        UnitEntry::Opens { all, one } => {
            let (scope, input) = ForwardScope::open(unit, all, unit_stack::opening(unit), input).or_unwind();
            // Not when the first parameter is read: a rank that reads none must take part all the same.
            scope.pass.buffer.gather().or_unwind();
            let pass = (!scope.again).then(|| scope.pass.clone());
            let entered = match one {
                Some(shards) => EnteredUnit::Member { at: unit_stack::begin(scope), shards },
                None => EnteredUnit::Open(UnitGuard::new(Some(scope), inside.take().unwrap_or_default())),
            };
            if let Some(pass) = pass {
                prefetch(unit);
                pass.begin();
            }
            (entered, input)
        }
    }
}

/// Units of one module, and its shards.
pub(super) type OwnUnits = SmallVec<[(Arc<Unit>, LocalShards); 1]>;

/// What a module that holds distributed parameters is to units.
pub(super) struct Scoped {
    /// The units whose module it is exactly, and their shards: one, if not of parameters that are on different meshes.
    pub(super) own: OwnUnits,
    /// The data-parallel units of modules inside.
    pub(super) inside: Vec<(Arc<Unit>, LocalShards)>,
}

impl Scoped {
    /// `None` for a module without distributed parameters.
    ///
    /// # Errors
    /// [`ParamError::Replaced`].
    pub(super) fn of<M: Module>(module: &M) -> Result<Option<Self>> {
        let walk = walk(module);
        if walk.distributed.is_empty() {
            return Ok(None);
        }
        check_not_replaced(module, &walk)?;
        let visited = walk.distributed;
        let is_own = |visited: &&Visited| visited.depth == visited.param.info().depth;
        // Parameters that `fully_shard` ignored stay in the unit that `parallelize` made.
        let mut own: SmallVec<[Arc<Unit>; 1]> = SmallVec::new();
        for found in visited.iter().filter(is_own) {
            let is_known = own.iter().any(|unit| Arc::ptr_eq(unit, &found.param.unit));
            if found.param.is_data_parallel() && !is_known {
                own.push(found.param.unit.clone());
            }
        }
        if own.is_empty() {
            own.extend(visited.iter().find(is_own).map(|found| found.param.unit.clone()));
        }
        let mut units: Vec<(Arc<Unit>, Vec<Visited>)> = Vec::new();
        for visited in visited {
            let is_in_own = own.iter().any(|own| Arc::ptr_eq(own, &visited.param.unit));
            // Not of a unit around the module.
            let is_inside = visited.depth > visited.param.info().depth && visited.param.is_data_parallel();
            if !is_in_own && !is_inside {
                continue;
            }
            // A clone inside the same module, frozen perhaps, has shards of its own.
            let index = visited.param.index;
            let lacks = |members: &[Visited]| {
                members.last().is_none_or(|last| last.param.index < index)
                    || members.iter().all(|member| member.param.index != index)
            };
            let group =
                units.iter_mut().rfind(|(unit, members)| Arc::ptr_eq(unit, &visited.param.unit) && lacks(members));
            match group {
                Some((_, members)) => members.push(visited),
                None => units.push((visited.param.unit.clone(), vec![visited])),
            }
        }
        let shards =
            |(unit, members): (_, Vec<Visited>)| (unit, LocalShards::new(members.into_iter().map(Visited::shard)));
        let mut inside: Vec<_> = units.into_iter().map(shards).collect();
        let own = own.iter().filter_map(|own| {
            let at = inside.iter().position(|(unit, _)| Arc::ptr_eq(unit, own))?;
            Some(inside.remove(at))
        });
        Ok(Some(Self { own: own.collect(), inside }))
    }
}

/// The units whose module is exactly `module`, and their shards.
///
/// # Errors
/// [`ParamError::NotSharded`] if there is none, [`ParamError::Replaced`].
pub(super) fn units_of<M: Module>(module: &M) -> Result<OwnUnits> {
    let own = Scoped::of(module)?.map(|scoped| scoped.own).unwrap_or_default();
    if own.is_empty() { Err(ParamError::NotSharded.into()) } else { Ok(own) }
}
