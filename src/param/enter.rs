//! [`unit`]: where a unit's forward begins and ends.

use std::sync::Arc;

use burn::module::Module;

use super::ParamError;
use super::io::UnitTensors;
use super::open::{self, Open};
use super::replaced::check_whole;
use super::scope::{Opening, Scope};
use super::shards::Shards;
use super::unit::Unit;
use super::visit::{Visited, walk};
use crate::Result;
use crate::error::OrUnwind;

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
/// A parameter read outside its unit's scope, or one whose shard is not the scope's (a stepped or
/// frozen clone of the module), is right too, but is gathered and reduced by itself: reading it is
/// collective then. So may be reading one that was kept past its unit: it waits for what the unit
/// gathers for backward.
///
/// What a unit returns has **one backward**: two outputs cannot be differentiated apart, nor two
/// losses computed inside, though they share only leaves ("graph tape has already been consumed").
/// Add them up, or return from two units. What the unit computes with and is tracked belongs into
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
/// parameter of the module was replaced after it was distributed; [`launch`](crate::comm::launch) returns it.
pub fn unit<M, I, O>(module: &M, input: I, forward: impl FnOnce(&M, I) -> O) -> O
where
    M: Module,
    I: UnitTensors,
    O: UnitTensors,
{
    let (unit, shards) = match Scoped::of(module).or_unwind() {
        Scoped::Unit(unit, shards) => (unit, shards),
        Scoped::Around => {
            let open = Open::around();
            let output = forward(module, input);
            return open.leave(output);
        }
        Scoped::Nothing => return forward(module, input),
    };
    let opening = Opening {
        kept: unit.kept(),
        lone: false,
        label: unit.label(),
        tracked: true,
        enclosed: open::is_any(),
        earlier: open::last_token(),
    };
    let (scope, input) = Scope::open(&unit, shards, opening, input);
    // Not when the first parameter is read: a rank that reads none must take part all the same.
    scope.pass.buffer.gather();
    let open = Open::unit(scope);
    let output = forward(module, input);
    open.leave(output)
}

/// What a module is to units.
enum Scoped {
    /// The unit whose module it is exactly, and its shards.
    Unit(Arc<Unit>, Shards),
    /// It holds units, or parts of them.
    Around,
    Nothing,
}

impl Scoped {
    fn of<M: Module>(module: &M) -> Result<Self> {
        let walk = walk(module);
        check_whole(module, &walk)?;
        let visited = walk.distributed;
        let own = |visited: &&Visited| visited.depth == visited.param.info().depth;
        // Parameters that `fully_shard` ignored stay in the unit that `parallelize` made.
        let data_parallel = visited.iter().filter(own).find(|visited| visited.param.is_data_parallel());
        let Some(found) = data_parallel.or_else(|| visited.iter().find(own)) else {
            return Ok(if visited.is_empty() { Self::Nothing } else { Self::Around });
        };
        let unit = found.param.unit.clone();
        let own = visited.into_iter().filter(|visited| Arc::ptr_eq(&visited.param.unit, &unit));
        let shards = Shards::new(own.map(Visited::shard));
        Ok(Self::Unit(unit, shards))
    }
}

/// The unit whose module is exactly `module`, and its shards.
///
/// # Errors
/// [`ParamError::NotSharded`] if there is none, [`ParamError::Replaced`].
pub(super) fn unit_of<M: Module>(module: &M) -> Result<(Arc<Unit>, Shards)> {
    match Scoped::of(module)? {
        Scoped::Unit(unit, shards) => Ok((unit, shards)),
        Scoped::Around | Scoped::Nothing => Err(ParamError::NotSharded.into()),
    }
}
