//! [`unit`]: the scope in which a unit is gathered.

use std::cell::RefCell;
use std::sync::Arc;

use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor};
use burn::module::Module;

use super::graph::{EnterUnit, LeaveUnit, Token, Whole};
use super::io::UnitTensors;
use super::param::ShardedParameter;
use super::pass::Pass;
use super::unit::{Kept, Unit};
use super::visit::{Visited, sharded_parameters};
use crate::Error;
use crate::autodiff::{self, Retain};

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
/// A parameter read outside its unit's scope is right too, but is gathered and reduced by itself.
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
    let Some((unit, params)) = unit_of(module) else {
        return forward(module, input);
    };
    let (scope, input) = Scope::open(&unit, bases(params), unit.kept(), true, input);
    // Not when the first parameter is read: a rank that reads none must take part all the same.
    scope.pass.unshard();
    let open = Open::new(scope);
    let output = forward(module, input);
    open.leave(output)
}

/// The unit whose module is exactly `module`, and its parameters in the unit's order.
pub(super) fn unit_of<M: Module>(module: &M) -> Option<(Arc<Unit>, Vec<Visited>)> {
    let visited = sharded_parameters(module);
    let unit = visited
        .iter()
        .find(|param| param.depth == param.sharded.info().depth)
        .map(|param| param.sharded.unit.clone())?;
    let mut params: Vec<_> = visited.into_iter().filter(|param| Arc::ptr_eq(&param.sharded.unit, &unit)).collect();
    params.sort_by_key(|param| param.sharded.index);
    Some((unit, params))
}

/// One open unit on this rank. Unlike [`Pass`] it holds tensors of the graph, and lives only as
/// long as the scope.
struct Scope {
    pass: Arc<Pass>,
    bases: Vec<DispatchTensor>,
    token: Option<DispatchTensor>,
    /// Parameters read so far: a weight read twice is one node.
    values: RefCell<Vec<Option<DispatchTensor>>>,
}

impl Scope {
    /// Opens `unit` on the shards of some or all of its parameters, and ties it to its inputs.
    fn open<I: UnitTensors>(
        unit: &Arc<Unit>,
        params: Vec<(usize, DispatchTensor)>,
        kept: Kept,
        in_slots: bool,
        input: I,
    ) -> (Self, I) {
        let (members, bases): (Vec<_>, Vec<_>) = params.into_iter().unzip();
        let mut inputs = Vec::new();
        let input = input.map_floats(&mut |tensor| {
            if Dispatch::is_tracked(&tensor) {
                inputs.push(tensor.clone());
            }
            tensor
        });
        let tracked_base = bases.iter().find(|base| Dispatch::is_tracked(base));
        let tracked = tracked_base.is_some() || !inputs.is_empty();

        let whole_unit = members.len() == unit.params.len();
        let nodes: Vec<_> = bases.iter().cloned().map(autodiff::node_id).collect();
        let leaves = bases.iter().zip(&nodes).map(|(base, node)| node.filter(|_| Dispatch::is_tracked(base)));
        let pass = Pass::new(
            unit.clone(),
            members,
            bases.iter().cloned().map(plain).collect(),
            leaves.collect(),
            kept,
            in_slots && tracked && kept != Kept::Whole,
        );
        if whole_unit {
            match unit.take_unsharded(&nodes) {
                Ok(Some(gathered)) => pass.fill(gathered),
                Ok(None) => {}
                Err(error) => Error::from(error).unwind(),
            }
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
        let values = RefCell::new(vec![None; bases.len()]);
        (Self { pass, bases, token, values }, input)
    }

    /// The whole parameter at `position`.
    fn value(&self, position: usize) -> DispatchTensor {
        if let Some(value) = &self.values.borrow()[position] {
            return value.clone();
        }
        let base = self.bases[position].clone();
        let pass = self.pass.clone();
        let value = match &self.token {
            Some(token) => {
                let retain = match pass.kept() {
                    Kept::Whole => Retain::Output,
                    Kept::Part | Kept::Shard => Retain::Recompute,
                };
                autodiff::binary(base, token.clone(), Arc::new(Whole { pass, position, retain }))
            }
            // Nothing of the unit is tracked: the graph cannot make the weight again.
            None => autodiff::unary(base, Arc::new(Whole { pass, position, retain: Retain::Output })),
        };
        self.values.borrow_mut()[position] = Some(value.clone());
        value
    }

    fn leave<O: UnitTensors>(&self, output: O) -> O {
        output.map_floats(&mut |tensor| match &self.token {
            Some(token) if Dispatch::is_tracked(&tensor) => {
                let pass = self.pass.clone();
                autodiff::binary(tensor, token.clone(), Arc::new(LeaveUnit { pass }))
            }
            _ => tensor,
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
    static OPEN: RefCell<Vec<Scope>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a scope on the stack; frees the unit when forward is over, also by unwinding.
struct Open;

impl Open {
    fn new(scope: Scope) -> Self {
        OPEN.with_borrow_mut(|open| open.push(scope));
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

/// The value of a sharded parameter: from its unit's open scope, or gathered by itself.
pub(super) fn gathered(param: &ShardedParameter, base: DispatchTensor) -> DispatchTensor {
    let from_scope = OPEN.with_borrow(|open| {
        let scope = open.iter().rev().find(|scope| Arc::ptr_eq(&scope.pass.unit, &param.unit))?;
        Some(scope.value(scope.pass.position(param.index)))
    });
    from_scope.unwrap_or_else(|| {
        let kept = match param.unit.kept() {
            Kept::Part => Kept::Shard,
            kept => kept,
        };
        // Nothing says when the caller is done with the value: it cannot be in a slot.
        let (scope, ()) = Scope::open(&param.unit, vec![(param.index, base)], kept, false, ());
        let value = scope.value(0);
        scope.pass.reshard();
        value
    })
}

/// Runs `f` with these units open at once.
pub(super) fn open_all<T>(units: Vec<(Arc<Unit>, Vec<Visited>)>, f: impl FnOnce() -> T) -> T {
    let open = units.into_iter().map(|(unit, params)| {
        let (scope, ()) = Scope::open(&unit, bases(params), Kept::Whole, false, ());
        Open::new(scope)
    });
    let _open: Vec<_> = open.collect();
    f()
}

/// Index in the unit and shard of each parameter.
fn bases(params: Vec<Visited>) -> Vec<(usize, DispatchTensor)> {
    params.into_iter().map(|param| (param.sharded.index, param.base)).collect()
}

/// The tensor without autodiff.
pub(super) fn plain(tensor: DispatchTensor) -> DispatchTensor {
    match tensor.autodiff {
        burn::backend::DispatchAutodiffContext::Disabled => tensor,
        burn::backend::DispatchAutodiffContext::Enabled(_) => Dispatch::inner(tensor),
    }
}
