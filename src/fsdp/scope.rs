//! [`unit`]: the scope in which a unit is gathered.

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use burn::backend::{Dispatch, DispatchTensor};
use burn::module::Module;
use burn::tensor::Tensor;

use super::graph::{EnterUnit, LeaveUnit, Token, Whole};
use super::io::UnitTensors;
use super::param::DistributedParameter;
use super::pass::Pass;
use super::shards::Shards;
use super::storage;
use super::unit::{Kept, Unit};
use super::varying::Varying;
use super::visit::{Visited, distributed_parameters};
use crate::Error;
use crate::autodiff::{self, Retain};
use crate::dtensor::DTensor;

/// Runs `forward` with the module's unit gathered: one all-gather before, freed at the end unless
/// the unit keeps its parameters, one reduce-scatter in backward.
///
/// Write it around each block of a model, and around the model's own forward for the parameters
/// outside the blocks. Where `module` is no unit (the model is not sharded), it only calls
/// `forward`.
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
/// A parameter read outside its unit's scope, or one whose shard is not the scope's (a stepped or
/// frozen clone of the module), is right too, but is gathered and reduced by itself: reading it is
/// collective then.
///
/// # Collective
/// Every rank of the unit's mesh must run its units in the same order.
///
/// # Panics
/// Unwinds with the typed [`Error`] if a collective fails; [`launch`](crate::comm::launch)
/// returns it.
pub fn unit<M, I, O>(module: &M, input: I, forward: impl FnOnce(&M, I) -> O) -> O
where
    M: Module,
    I: UnitTensors,
    O: UnitTensors,
{
    let Some((unit, shards)) = unit_of(module) else {
        return forward(module, input);
    };
    let (scope, input) = Scope::open(&unit, shards, unit.kept(), true, input);
    // Not when the first parameter is read: a rank that reads none must take part all the same.
    scope.pass.unshard();
    let open = Open::new(scope);
    let output = forward(module, input);
    open.leave(output)
}

/// The unit whose module is exactly `module`, and its shards.
pub(super) fn unit_of<M: Module>(module: &M) -> Option<(Arc<Unit>, Shards)> {
    let visited = distributed_parameters(module);
    let own = |visited: &&Visited| visited.depth == visited.param.info().depth;
    // Parameters that `fully_shard` ignored stay in the unit that `parallelize` made.
    let data_parallel = visited.iter().filter(own).find(|visited| visited.param.is_data_parallel());
    let unit = data_parallel.or_else(|| visited.iter().find(own))?.param.unit.clone();
    let own = visited.into_iter().filter(|visited| Arc::ptr_eq(&visited.param.unit, &unit));
    let shards = Shards::new(own.collect());
    Some((unit, shards))
}

/// One open unit on this rank. Unlike [`Pass`] it holds tensors of the graph, and lives only as
/// long as the scope.
struct Scope {
    pass: Arc<Pass>,
    shards: Shards,
    token: Option<DispatchTensor>,
    /// Parameters read so far: a weight read twice is one node.
    read: Vec<Read>,
}

/// What a parameter was read as so far.
#[derive(Default)]
struct Read {
    /// Gathered over the data-parallel ranks.
    value: OnceCell<DispatchTensor>,
    /// Gathered over the tensor-parallel ranks, too.
    full: OnceCell<DispatchTensor>,
    varying: OnceCell<Arc<Varying>>,
}

impl Scope {
    /// Opens `unit` on the shards of some or all of its parameters, and ties it to its inputs.
    fn open<I: UnitTensors>(unit: &Arc<Unit>, shards: Shards, kept: Kept, in_slots: bool, input: I) -> (Self, I) {
        let mut inputs = Vec::new();
        let input = input.map_floats(&mut |tensor| {
            if Dispatch::is_tracked(&tensor) {
                inputs.push(tensor.clone());
            }
            tensor
        });
        let Shards { members, bases } = &shards;
        let tracked_base = bases.iter().find(|base| Dispatch::is_tracked(base));
        let tracked = tracked_base.is_some() || !inputs.is_empty();
        // Without a backward to come nothing is worth keeping.
        let kept = if tracked { kept } else { Kept::Shard };

        let leaf =
            |base: &DispatchTensor| Dispatch::is_tracked(base).then(|| autodiff::node_id(base.clone())).flatten();
        let pass = Pass::new(
            unit.clone(),
            members.clone(),
            shards.plain(),
            bases.iter().map(leaf).collect(),
            kept,
            in_slots && tracked && kept != Kept::Whole,
        );
        match unit.take_unsharded(&shards) {
            Ok(Some(gathered)) => pass.fill(gathered),
            Ok(None) => {}
            Err(error) => Error::from(error).unwind(),
        }
        let first = tracked_base.or(bases.first()).filter(|_| tracked);
        let token = first.map(|first| token(&pass, first.clone(), &inputs));
        let mut number = 0;
        let input = input.map_floats(&mut |tensor| match &token {
            Some(token) if Dispatch::is_tracked(&tensor) => {
                let op = EnterUnit { pass: pass.clone(), input: number };
                number += 1;
                autodiff::binary(tensor, token.clone(), Arc::new(op))
            }
            _ => tensor,
        });
        let read = bases.iter().map(|_| Read::default()).collect();
        (Self { pass, shards, token, read }, input)
    }

    /// The parameter at `position`, whole over the data-parallel ranks.
    fn value(&self, position: usize) -> DispatchTensor {
        self.read[position].value.get_or_init(|| self.make_value(position)).clone()
    }

    fn make_value(&self, position: usize) -> DispatchTensor {
        let base = self.shards.bases[position].clone();
        let pass = self.pass.clone();
        // A frozen weight is no part of backward if the graph can keep it: then its layer saves no
        // activation for a gradient nobody wants.
        let frozen = !Dispatch::is_tracked(&base) && pass.costs_nothing_kept(position);
        match &self.token {
            Some(token) if !frozen => {
                let retain = self.retain();
                autodiff::binary(base, token.clone(), Arc::new(Whole { pass, position, retain }))
            }
            // Untracked: the graph cannot make the weight again.
            _ => autodiff::unary(base, Arc::new(Whole { pass, position, retain: Retain::Output })),
        }
    }

    /// What the graph keeps of a gathered weight.
    fn retain(&self) -> Retain {
        match self.pass.kept() {
            Kept::Whole => Retain::Output,
            Kept::Part | Kept::Shard => Retain::Recompute,
        }
    }

    /// The parameter at `position` for computations that differ between tensor-parallel ranks;
    /// `None` without a backward to come.
    fn varying(&self, position: usize) -> Option<Arc<Varying>> {
        let token = self.token.clone()?;
        let make = || {
            Arc::new(Varying {
                pass: self.pass.clone(),
                position,
                base: self.shards.bases[position].clone(),
                token,
                value: self.value(position),
                retain: self.retain(),
                handle: OnceLock::new(),
            })
        };
        Some(self.read[position].varying.get_or_init(make).clone())
    }

    fn leave<O: UnitTensors>(&self, output: O) -> O {
        output.map_floats(&mut |tensor| match &self.token {
            Some(token) if Dispatch::is_tracked(&tensor) => {
                let pass = self.pass.clone();
                autodiff::binary(tensor, token.clone(), Arc::new(LeaveUnit { pass }))
            }
            _ => storage::leave(tensor),
        })
    }
}

/// The token of a unit with these tracked inputs: one link an input.
fn token(pass: &Arc<Pass>, first: DispatchTensor, inputs: &[DispatchTensor]) -> DispatchTensor {
    if inputs.is_empty() {
        return autodiff::unary(first, Token::new(pass, None, true));
    }
    inputs.iter().enumerate().fold(first, |token, (k, input)| {
        let number = pass.add_input();
        let link = Token::new(pass, Some((number, input)), k + 1 == inputs.len());
        autodiff::binary(token, input.clone(), link)
    })
}

thread_local! {
    /// The units open on this rank, outermost first.
    static OPEN: RefCell<Vec<Rc<Scope>>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a scope on the stack, also when `forward` unwinds.
struct Open;

impl Open {
    fn new(scope: Scope) -> Self {
        OPEN.with_borrow_mut(|open| open.push(Rc::new(scope)));
        Self
    }

    fn leave<O: UnitTensors>(self, output: O) -> O {
        let scope = OPEN.with_borrow_mut(Vec::pop).expect("scopes nest");
        let output = scope.leave(output);
        scope.pass.reshard();
        // Dropping `self` would pop the enclosing scope.
        std::mem::forget(self);
        output
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        OPEN.with_borrow_mut(Vec::pop);
    }
}

/// The whole weight: gathered over the data-parallel ranks in its unit's open scope, or else by
/// itself, and over the tensor-parallel ranks.
pub(super) fn value<const D: usize>(param: &DistributedParameter, base: Tensor<D>) -> Tensor<D> {
    let spec = param.tensor_spec(base.dtype());
    let full = read(param, base.into_dispatch(), |scope, position| {
        let gather = || match spec {
            None => scope.value(position),
            Some(spec) => {
                let local = Tensor::<D>::from_dispatch(scope.value(position));
                let full = DTensor::from_parts(local, spec).full_tensor();
                full.unwrap_or_else(|error| error.unwind()).into_dispatch()
            }
        };
        scope.read[position].full.get_or_init(gather).clone()
    });
    Tensor::from_dispatch(full)
}

/// The weight on its tensor-parallel mesh, gathered over the data-parallel ranks; `None` if it was
/// not parallelized.
pub(super) fn dtensor<const D: usize>(param: &DistributedParameter, base: Tensor<D>) -> Option<DTensor<D>> {
    let spec = param.tensor_spec(base.dtype())?;
    let replicated: Vec<usize> = (0..spec.mesh().ndim()).filter(|&dim| spec.placements()[dim].is_replicate()).collect();
    let (local, varying) = read(param, base.into_dispatch(), |scope, position| {
        let varying = (!replicated.is_empty()).then(|| scope.varying(position)).flatten();
        (scope.value(position), varying)
    });
    let dtensor = DTensor::from_parts(Tensor::from_dispatch(local), spec);
    Some(match varying {
        None => dtensor,
        Some(varying) => dtensor.with_varied(&replicated, Arc::new(move || Tensor::from_dispatch(varying.get()))),
    })
}

/// Reads a parameter with `f` in its unit's open scope, or in one of its own.
fn read<T>(param: &DistributedParameter, base: DispatchTensor, f: impl FnOnce(&Scope, usize) -> T) -> T {
    let open = OPEN.with_borrow(|open| {
        let mut scopes = open.iter().rev().filter(|scope| Arc::ptr_eq(&scope.pass.unit, &param.unit));
        scopes.find_map(|scope| Some((scope.clone(), scope.shards.position(param.index, &base)?)))
    });
    if let Some((scope, position)) = open {
        return f(&scope, position);
    }
    let kept = match param.unit.kept() {
        Kept::Part => Kept::Shard,
        kept => kept,
    };
    // Nothing says when the caller is done with the value: it cannot be in a slot.
    let (scope, ()) = Scope::open(&param.unit, Shards::one(param.index, base), kept, false, ());
    let result = f(&scope, 0);
    scope.pass.reshard();
    result
}

/// Runs `f` with these units open at once.
pub(super) fn open_all<T>(units: Vec<(Arc<Unit>, Shards)>, f: impl FnOnce() -> T) -> T {
    let open = units.into_iter().map(|(unit, shards)| {
        let (scope, ()) = Scope::open(&unit, shards, Kept::Whole, false, ());
        Open::new(scope)
    });
    let _open: Vec<_> = open.collect();
    f()
}
