//! [`UnitGuard`]: the units that are open on this rank.
//!
//! The program opens a unit with [`unit`](super::unit()). Units of inner modules may lack such a call, because
//! their forward is not the program's code. Such a unit is opened by the first read of one of its parameters. It is
//! closed when a unit that is not inside it is opened. So units of layers that run one after another are gathered
//! once each, as if the program had opened them.

use std::mem;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use burn::backend::{Dispatch, DispatchAutodiffContext, DispatchTensor, TensorMetadata};

use super::backward_nodes::{PreBackward, one_graph};
use super::options::cast;
use super::recompute::context;
use super::scope::{ForwardScope, ScopeOptions};
use super::shards::LocalShards;
use super::storage::UnshardedParams;
use super::thread::thread;
use super::unit::Unit;
use super::unit_pass::UnitPass;
use crate::autodiff;
use crate::error::OrUnwind;
use crate::tensor_tree::TensorTree;

/// An entry of the stack: an open unit, or an open module that only encloses units.
struct ActiveUnit {
    /// `None` for a module that only encloses units.
    scope: Option<Rc<ForwardScope>>,
    /// The units of inner modules, with their shards.
    inside: Vec<(Arc<Unit>, LocalShards)>,
    by: OpenedBy,
}

/// Opener of a unit or module, which also determines when it is closed.
enum OpenedBy {
    Program,
    Read,
    /// A module of a group unit opened it. The field holds positions among the scope's parameters: those of modules
    /// that have not run yet.
    Member(Vec<usize>),
}

/// The units open on this thread.
#[derive(Default)]
pub(super) struct UnitStack {
    /// Open units and modules, outermost first.
    stack: Vec<ActiveUnit>,
    /// The token made last, by these units and by those opened inside them.
    last: Option<DispatchTensor>,
    /// Number of passes entered on this thread that train a parameter.
    reduced: u64,
    /// The unit entered last.
    entered: Option<Weak<Unit>>,
    /// True if that unit is the first entered since the stack was empty.
    is_first: bool,
    /// Scopes through which a running checkpointed block reads units around it. They replace the outermost entries
    /// of the stack.
    around_block: Option<AroundBlock>,
}

/// Units around a checkpointed block.
#[derive(Default)]
struct AroundBlock {
    /// Number of stack entries around the block.
    depth: usize,
    /// The scopes of the units that the block reads, outermost first.
    scopes: Vec<Rc<ForwardScope>>,
}

impl UnitStack {
    /// Records that `scope` is entered.
    fn note_entered(&mut self, scope: &ForwardScope) {
        self.last = scope.token.clone().or(self.last.take());
        self.reduced += u64::from(scope.pass.is_reduced());
        if scope.again {
            return;
        }
        let unit = scope.pass.buffer.unit();
        let before = self.entered.replace(Arc::downgrade(unit));
        self.is_first = before.is_none();
        if let Some(before) = before.and_then(|before| before.upgrade()) {
            before.is_followed_by(unit);
        }
    }

    /// Returns the shards of `unit` for which `holds` returns true, if it belongs to a module inside an open one.
    /// Searches the innermost module first.
    fn inside(&self, unit: &Arc<Unit>, holds: impl Fn(&LocalShards) -> bool) -> Option<LocalShards> {
        let mut inside = self.stack.iter().rev().flat_map(|opened| &opened.inside);
        inside.find(|(other, shards)| Arc::ptr_eq(other, unit) && holds(shards)).map(|(_, shards)| shards.clone())
    }

    /// Returns the pass through the unit opened last.
    fn innermost(&self) -> Option<Arc<UnitPass>> {
        self.stack.iter().rev().find_map(|opened| Some(opened.scope.as_ref()?.pass.clone()))
    }

    /// Returns the stack entries inside the innermost checkpointed block.
    fn in_block(&self) -> &[ActiveUnit] {
        &self.stack[self.around_block.as_ref().map_or(0, |around| around.depth)..]
    }

    fn push(
        &mut self,
        scope: Option<ForwardScope>,
        inside: Vec<(Arc<Unit>, LocalShards)>,
        by: OpenedBy,
    ) -> Option<Rc<ForwardScope>> {
        scope.iter().for_each(|scope| self.note_entered(scope));
        let scope = scope.map(Rc::new);
        self.stack.push(ActiveUnit { scope: scope.clone(), inside, by });
        scope
    }
}

fn stack<T>(f: impl FnOnce(&UnitStack) -> T) -> T {
    thread(|thread| f(&thread.stack.borrow()))
}

fn stack_mut<T>(f: impl FnOnce(&mut UnitStack) -> T) -> T {
    thread(|thread| f(&mut thread.stack.borrow_mut()))
}

/// Returns the shards of `unit`, if it belongs to a module inside an open one, and is not open itself.
pub(super) fn shards_inside(unit: &Arc<Unit>) -> Option<LocalShards> {
    stack(|open| {
        let is_open = |opened: &ActiveUnit| opened.scope.as_ref().is_some_and(|scope| scope.is_of(unit));
        if open.stack.iter().any(is_open) { None } else { open.inside(unit, |_| true) }
    })
}

/// Returns true if a unit is open, or a module that encloses units.
pub(super) fn is_any() -> bool {
    stack(|open| !open.stack.is_empty())
}

/// Returns true if the unit entered last is the first entered since the stack was empty.
pub(super) fn is_first() -> bool {
    stack(|open| open.is_first)
}

/// The innermost open unit.
pub(super) struct InnermostUnit {
    pub(super) unit: Arc<Unit>,
    /// True if a read opened it, so that its forward may be over.
    pub(super) may_be_over: bool,
    /// The units of modules inside it.
    pub(super) inside: Vec<Arc<Unit>>,
}

/// Returns the innermost open unit.
pub(super) fn innermost_unit() -> Option<InnermostUnit> {
    let of = |scope: &Rc<ForwardScope>, may_be_over, inside: &[(Arc<Unit>, LocalShards)]| InnermostUnit {
        unit: scope.pass.buffer.unit().clone(),
        may_be_over,
        inside: inside.iter().map(|(unit, _)| unit.clone()).collect(),
    };
    stack(|open| {
        let opened = open.in_block().iter().rev();
        let by = |opened: &ActiveUnit| matches!(opened.by, OpenedBy::Read);
        let mut scopes = opened.filter_map(|opened| Some(of(opened.scope.as_ref()?, by(opened), &opened.inside)));
        let around = || open.around_block.iter().flat_map(|around| around.scopes.iter().rev());
        scopes.next().or_else(|| around().next().map(|scope| of(scope, false, &[])))
    })
}

/// Calls `f` on the open scopes, innermost first, and returns its first result that is not `None`.
pub(super) fn find<T>(f: impl FnMut(&Rc<ForwardScope>) -> Option<T>) -> Option<T> {
    stack(|open| {
        let around = open.around_block.iter().flat_map(|around| around.scopes.iter().rev());
        open.in_block().iter().rev().filter_map(|opened| opened.scope.as_ref()).chain(around).find_map(f)
    })
}

/// Returns the open passes through one of these units, each with its shards, outermost first.
pub(super) fn passes_of(units: &[Arc<Unit>]) -> Vec<(Arc<UnitPass>, LocalShards)> {
    let mut passes = Vec::new();
    find(|scope| {
        if units.iter().any(|unit| scope.is_of(unit)) {
            passes.push((scope.pass.clone(), scope.shards.clone()));
        }
        None::<()>
    });
    passes.reverse();
    passes
}

/// Returns the pass through the innermost open unit.
pub(super) fn innermost_pass() -> Option<Arc<UnitPass>> {
    stack(UnitStack::innermost)
}

/// Returns the token made last, by the open units and by those opened inside them.
pub(super) fn last_token() -> Option<DispatchTensor> {
    stack(|open| open.last.clone())
}

/// Makes `token` the last one.
pub(super) fn set_last_token(token: DispatchTensor) {
    stack_mut(|open| open.last = Some(token));
}

/// Guard that exists while a checkpointed block computes. Dropping it restores the stack.
pub(super) struct InBlock(Restored);

enum Restored {
    AroundBlock(Option<AroundBlock>),
    All(Box<UnitStack>),
}

impl InBlock {
    /// Begins the first computation of a block, in forward. The block reads open units through `scopes`.
    pub(super) fn first(scopes: Vec<Rc<ForwardScope>>) -> Self {
        stack_mut(|open| {
            let depth = open.stack.len();
            Self(Restored::AroundBlock(open.around_block.replace(AroundBlock { depth, scopes })))
        })
    }

    /// Begins the recomputation of a block, in backward, where none of the units around it is open. The block reads
    /// them through `scopes`.
    pub(super) fn again(scopes: Vec<Rc<ForwardScope>>) -> Self {
        let around_block = Some(AroundBlock { depth: 0, scopes });
        let inside = UnitStack { around_block, ..UnitStack::default() };
        Self(Restored::All(Box::new(stack_mut(|open| mem::replace(open, inside)))))
    }
}

impl Drop for InBlock {
    fn drop(&mut self) {
        match mem::replace(&mut self.0, Restored::AroundBlock(None)) {
            Restored::AroundBlock(around) => stack_mut(|open| open.around_block = around),
            Restored::All(open) => drop(stack_mut(|inside| mem::replace(inside, *open))),
        }
    }
}

/// Makes the token of `scope`, which does not stay open, the last one of the enclosing units.
pub(super) fn follow(scope: &ForwardScope) {
    stack_mut(|open| {
        if !open.stack.is_empty() {
            open.note_entered(scope);
        }
    });
}

/// Returns the options with which the program opens `unit` at this point.
pub(super) fn opening(unit: &Unit) -> ScopeOptions {
    stack(|open| ScopeOptions {
        kept: unit.kept(),
        stored: false,
        lone: false,
        label: unit.label(),
        tracked: true,
        enclosed: !open.stack.is_empty(),
        earlier: open.last.clone(),
        around: open.innermost(),
        by_read: false,
    })
}

/// Opens the unit on those shards for which `holds` returns true, if a module around the unit's own is open. The
/// unit stays open until another unit is read, or that module is left.
pub(super) fn by_read(unit: &Arc<Unit>, holds: impl Fn(&LocalShards) -> bool) -> Option<Rc<ForwardScope>> {
    let shards = stack(|open| open.inside(unit, holds))?;
    close_read(unit);
    let (scope, ()) = ForwardScope::open(unit, shards, ScopeOptions { by_read: true, ..opening(unit) }, ()).or_unwind();
    scope.pass.buffer.gather().or_unwind();
    stack_mut(|open| open.push(Some(scope), Vec::new(), OpenedBy::Read))
}

/// Closes the innermost units that were opened by reads, except those that enclose `unit` or have the same modules.
pub(super) fn close_read(unit: &Unit) {
    let done = |opened: &mut ActiveUnit| {
        let scope = opened.scope.as_ref().filter(|_| matches!(opened.by, OpenedBy::Read));
        let stays = |opened: &Unit| opened.encloses(unit) || opened.is_sibling_of(unit);
        scope.is_some_and(|scope| !stays(scope.pass.buffer.unit()))
    };
    while let Some(closed) = stack_mut(|open| open.stack.pop_if(done)) {
        closed.scope.iter().for_each(|scope| scope.close(true));
    }
}

/// Next action for a module of a unit that is entered.
pub(super) enum UnitEntry {
    /// The module's group unit is already open, as stack entry `at`.
    Joins { at: usize, shards: LocalShards },
    /// The unit must be opened with the shards `all`. If it is a group unit, `one` holds the shards of the module
    /// that is entered.
    Opens { all: LocalShards, one: Option<LocalShards> },
}

impl UnitEntry {
    /// Returns true if the unit can stay open when the module is left.
    pub(super) fn outlives_module(&self) -> bool {
        matches!(self, Self::Joins { .. } | Self::Opens { one: Some(_), .. })
    }
}

/// Returns the next action for a module of `unit` that is entered with these shards.
pub(super) fn entry_of(unit: &Arc<Unit>, shards: LocalShards) -> UnitEntry {
    if !unit.is_group() {
        return UnitEntry::Opens { all: shards, one: None };
    }
    let own = || shards.members.iter().zip(&shards.bases);
    let has = |all: &LocalShards| own().all(|(&member, base)| all.position(member, base).is_some());
    let is_this = |opened: &ActiveUnit| {
        let scope = opened.scope.as_ref().filter(|_| matches!(opened.by, OpenedBy::Member(_)));
        scope.is_some_and(|scope| scope.is_of(unit) && has(&scope.shards))
    };
    let at = stack(|open| {
        let around = open.stack.len() - open.in_block().len();
        open.in_block().iter().rposition(is_this).map(|at| around + at)
    });
    let all = || stack(|open| open.inside(unit, has));
    match at {
        Some(at) => UnitEntry::Joins { at, shards },
        None => match all() {
            Some(all) => UnitEntry::Opens { all, one: Some(shards) },
            None => UnitEntry::Opens { all: shards, one: None },
        },
    }
}

/// Opens a group unit until each of its modules has run, or the enclosing unit is left. Returns its index on the
/// stack.
pub(super) fn open_group(scope: ForwardScope) -> usize {
    stack_mut(|open| {
        let all = (0..scope.shards.members.len()).collect();
        open.push(Some(scope), Vec::new(), OpenedBy::Member(all));
        open.stack.len() - 1
    })
}

/// Guard of an open unit or module. Dropping it closes the unit, also when `forward` unwinds.
pub(super) struct UnitGuard {
    /// Number of stack entries around it.
    depth: usize,
    /// Value of [`UnitStack::reduced`] before the unit was opened.
    reduced: u64,
    /// For a module of a group unit: the unit's index on the stack, and the module's shards.
    member_of: Option<(usize, LocalShards)>,
    /// The scope of the group unit, if this module was the last of its modules to run.
    ended: Option<Rc<ForwardScope>>,
}

impl UnitGuard {
    /// Opens a unit with the units inside it, or, without `scope`, a module that only encloses units.
    pub(super) fn new(scope: Option<ForwardScope>, inside: Vec<(Arc<Unit>, LocalShards)>) -> Self {
        stack_mut(|open| {
            let (depth, reduced) = (open.stack.len(), open.reduced);
            open.push(scope, inside, OpenedBy::Program);
            Self { depth, reduced, member_of: None, ended: None }
        })
    }

    /// Opens a module with these `shards` of a group unit, which is open as stack entry `at`, and the units
    /// `inside` the module.
    pub(super) fn member(at: usize, shards: LocalShards, inside: Vec<(Arc<Unit>, LocalShards)>) -> Self {
        let mut open = Self::new(None, inside);
        open.member_of = Some((at, shards));
        open
    }

    /// Records that the module has run. Returns the scope of its group unit, which has ended if this was its last
    /// module.
    fn has_run(&mut self) -> Option<Rc<ForwardScope>> {
        let (at, shards) = self.member_of.as_ref()?;
        stack_mut(|open| {
            let ActiveUnit { scope, by: OpenedBy::Member(left), .. } = &mut open.stack[*at] else { return None };
            let scope = scope.clone()?;
            left.retain(|&position| !shards.members.contains(&scope.shards.members[position]));
            self.ended = left.is_empty().then(|| scope.clone());
            Some(scope)
        })
    }

    /// Ties the unit's outputs to all units that were entered inside, and closes the unit: rule 8 of
    /// [`backward_nodes`](super::backward_nodes).
    pub(super) fn leave<O: TensorTree>(mut self, output: O) -> O {
        let of_several = self.has_run();
        let (scope, last, trains) =
            stack(|open| (open.stack[self.depth].scope.clone(), open.last.clone(), open.reduced > self.reduced));
        let scope = scope.or(of_several);
        let trains = trains || scope.as_ref().is_some_and(|scope| scope.pass.is_reduced());
        let mut tracked = false;
        let output = output.map_floats(&mut |tensor| {
            tracked |= Dispatch::is_tracked(&tensor);
            tensor
        });
        let pass = scope.map(|scope| scope.pass.clone());
        let dtype = pass.as_ref().and_then(|pass| pass.buffer.unit().precision().outputs);
        // A rank that used no weight must participate in the backward as the other ranks do, so all its outputs
        // become tracked.
        let all = !tracked && trains;
        if context::is_first() {
            return output.map_floats(&mut |tensor| UnshardedParams::copy_out(cast(tensor, dtype)));
        }
        output.map_floats(&mut |tensor| {
            let tie = Dispatch::is_tracked(&tensor) || all && tensor.autodiff != DispatchAutodiffContext::Disabled;
            let last = last.clone().filter(|last| tie && one_graph(last, &tensor));
            match last {
                Some(last) => {
                    let leave = PreBackward::new(pass.clone(), tensor.dtype());
                    autodiff::binary(tensor, last, leave)
                }
                None => UnshardedParams::copy_out(cast(tensor, dtype)),
            }
        })
    }
}

impl Drop for UnitGuard {
    fn drop(&mut self) {
        let (closed, last) = stack_mut(|open| {
            let closed = open.stack.split_off(self.depth.min(open.stack.len()));
            if let (Some(_), Some((at, _))) = (&self.ended, &self.member_of) {
                open.stack[*at].scope = None;
            }
            let is_over = open.stack.is_empty();
            if is_over {
                open.entered = None;
            }
            (closed, is_over.then(|| open.last.take()))
        });
        // A rank that unwinds issues no collective, because other ranks may not have reached this point.
        let backward = !std::thread::panicking();
        let scopes = closed.iter().rev().filter_map(|opened| opened.scope.as_ref());
        scopes.chain(&self.ended).for_each(|scope| scope.close(backward));
        // A block that is being recomputed does not use prefetched parameters, so it drops none.
        if last.is_some() && context::anchor().is_none() {
            closed.iter().flat_map(|opened| &opened.inside).for_each(|(unit, _)| unit.copies.forget_prefetched());
        }
    }
}
