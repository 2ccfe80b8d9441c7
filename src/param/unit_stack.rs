//! [`UnitGuard`]: the units that are open on this rank.
//!
//! The program opens a unit with [`unit`](super::unit()). Units of inner modules may lack such a
//! call, because their forward is not the program's code. Such a unit is opened by the first read
//! of one of its parameters. It is closed when a unit that is not inside it is opened. So units of
//! layers that run one after another are gathered once each, as if the program had opened them.

use std::cell::RefCell;
use std::mem;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use burn::backend::{Dispatch, DispatchAutodiffContext, DispatchTensor, TensorMetadata};

use super::backward_nodes::{PreBackward, one_graph};
use super::begin_pass::Enclosing;
use super::options::cast;
use super::recompute::context;
use super::scope::ForwardScope;
use super::shards::LocalShards;
use super::storage::persistent_copy;
use super::unit::Unit;
use super::unit_pass::UnitPass;
use crate::autodiff;
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
    /// A module of a group unit opened it. The field holds positions among the scope's parameters:
    /// those of modules that have not run yet.
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
    /// Scopes through which a running checkpointed block reads units around it. They replace the
    /// outermost entries of the stack.
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
        // A read of stored values is no forward: the ranks that keep the model stay in the unit,
        // and the others do not.
        if scope.is_recomputed || scope.pass.unsharded.source.stored {
            return;
        }
        let unit = scope.pass.unsharded.unit();
        let before = self.entered.replace(Arc::downgrade(unit));
        self.is_first = before.is_none();
        if let Some(before) = before.and_then(|before| before.upgrade()) {
            *before.follower.lock() = Some(Arc::downgrade(unit));
        }
    }

    /// Returns the shards of `unit` for which `holds` returns true, if it belongs to a module
    /// inside an open one. Searches the innermost module first.
    fn inside(
        &self,
        unit: &Arc<Unit>,
        holds: impl Fn(&LocalShards) -> bool,
    ) -> Option<LocalShards> {
        let mut inside = self.stack.iter().rev().flat_map(|opened| &opened.inside);
        inside
            .find(|(other, shards)| Arc::ptr_eq(other, unit) && holds(shards))
            .map(|(_, shards)| shards.clone())
    }

    /// Returns the stack entries inside the innermost checkpointed block.
    fn in_block(&self) -> &[ActiveUnit] {
        &self.stack[self.around_block.as_ref().map_or(0, |around| around.depth)..]
    }

    fn push(&mut self, scope: ForwardScope, by: OpenedBy) -> Rc<ForwardScope> {
        self.note_entered(&scope);
        let scope = Rc::new(scope);
        self.stack.push(ActiveUnit {
            scope: Some(scope.clone()),
            inside: Vec::new(),
            by,
        });
        scope
    }
}

thread_local! {
    static STACK: RefCell<UnitStack> = RefCell::default();
}

fn stack<T>(f: impl FnOnce(&UnitStack) -> T) -> T {
    STACK.with_borrow(f)
}

fn stack_mut<T>(f: impl FnOnce(&mut UnitStack) -> T) -> T {
    STACK.with_borrow_mut(f)
}

/// Returns the shards of `unit`, if it belongs to a module inside an open one, and is not open
/// itself.
pub(super) fn shards_inside(unit: &Arc<Unit>) -> Option<LocalShards> {
    stack(|open| {
        if open
            .stack
            .iter()
            .any(|opened| opened.scope.as_ref().is_some_and(|scope| scope.is_of(unit)))
        {
            None
        } else {
            open.inside(unit, |_| true)
        }
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

/// Calls `f` with the innermost open unit. Its second argument is true if a read opened the unit,
/// so that its forward may be over. The third are the units of modules inside it.
pub(super) fn with_innermost_unit<T>(
    f: impl FnOnce(&Unit, bool, &[(Arc<Unit>, LocalShards)]) -> T,
) -> Option<T> {
    stack(|open| {
        if let Some(opened) = open
            .in_block()
            .iter()
            .rfind(|opened| opened.scope.is_some())
        {
            let unit = opened.scope.as_ref()?.pass.unsharded.unit();
            return Some(f(unit, matches!(opened.by, OpenedBy::Read), &opened.inside));
        }
        let around = open.around_block.as_ref()?.scopes.last()?;
        Some(f(around.pass.unsharded.unit(), false, &[]))
    })
}

/// Calls `f` on the open scopes, innermost first, and returns its first result that is not `None`.
pub(super) fn find<T>(f: impl FnMut(&Rc<ForwardScope>) -> Option<T>) -> Option<T> {
    stack(|open| {
        let around = open
            .around_block
            .iter()
            .flat_map(|around| around.scopes.iter().rev());
        open.in_block()
            .iter()
            .rev()
            .filter_map(|opened| opened.scope.as_ref())
            .chain(around)
            .find_map(f)
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
    /// Begins the first computation of a block, in forward. The block reads open units through
    /// `scopes`.
    pub(super) fn first(scopes: Vec<Rc<ForwardScope>>) -> Self {
        stack_mut(|open| {
            let depth = open.stack.len();
            Self(Restored::AroundBlock(
                open.around_block.replace(AroundBlock { depth, scopes }),
            ))
        })
    }

    /// Begins the recomputation of a block, in backward, where none of the units around it is open.
    /// The block reads them through `scopes`.
    pub(super) fn recomputation(scopes: Vec<Rc<ForwardScope>>) -> Self {
        let around_block = Some(AroundBlock { depth: 0, scopes });
        let inside = UnitStack {
            around_block,
            ..UnitStack::default()
        };
        Self(Restored::All(Box::new(stack_mut(|open| {
            mem::replace(open, inside)
        }))))
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

/// Returns the units and modules that are open.
pub(super) fn enclosing() -> Enclosing {
    stack(|open| Enclosing {
        is_any: !open.stack.is_empty(),
        last: open.last.clone(),
        innermost: open
            .stack
            .iter()
            .rev()
            .find_map(|opened| Some(opened.scope.as_ref()?.pass.clone())),
    })
}

/// Returns those shards of `unit` for which `holds` returns true, if it belongs to a module inside
/// an open one.
pub(super) fn inside(
    unit: &Arc<Unit>,
    holds: impl Fn(&LocalShards) -> bool,
) -> Option<LocalShards> {
    stack(|open| open.inside(unit, holds))
}

/// Opens a unit of which a parameter is read, until another unit is read, or a module around the
/// unit is left.
pub(super) fn open_by_read(scope: ForwardScope) -> Rc<ForwardScope> {
    stack_mut(|open| open.push(scope, OpenedBy::Read))
}

/// Closes the innermost units that were opened by reads, except those that enclose `unit` or have
/// the same modules.
pub(super) fn close_read(unit: &Unit) {
    let done = |opened: &mut ActiveUnit| {
        let scope = opened
            .scope
            .as_ref()
            .filter(|_| matches!(opened.by, OpenedBy::Read));
        let stays = |opened: &Unit| {
            opened.comm.encloses(&unit.comm) || opened.comm.is_sibling_of(&unit.comm)
        };
        scope.is_some_and(|scope| !stays(scope.pass.unsharded.unit()))
    };
    while let Some(closed) = stack_mut(|open| open.stack.pop_if(done)) {
        closed.scope.iter().for_each(|scope| scope.close(true));
    }
}

/// A group unit that can stay open when one of its modules is left.
pub(super) enum GroupUnit {
    /// It is open, as this entry of the stack.
    Open(usize),
    /// It is to be opened on these shards of all its modules.
    Closed(LocalShards),
}

/// Returns the group unit that `unit` is for a module with these shards, unless the program runs
/// that module outside the modules that enclose the group.
pub(super) fn group_of(unit: &Arc<Unit>, shards: &LocalShards) -> Option<GroupUnit> {
    if !unit.comm.is_group() {
        return None;
    }
    let own = || shards.members.iter().zip(&shards.bases);
    let has = |all: &LocalShards| own().all(|(&member, base)| all.position(member, base).is_some());
    let is_this = |opened: &ActiveUnit| {
        let scope = opened
            .scope
            .as_ref()
            .filter(|_| matches!(opened.by, OpenedBy::Member(_)));
        scope.is_some_and(|scope| scope.is_of(unit) && has(&scope.shards))
    };
    stack(|open| {
        let around = open.stack.len() - open.in_block().len();
        match open.in_block().iter().rposition(is_this) {
            Some(at) => Some(GroupUnit::Open(around + at)),
            None => open.inside(unit, has).map(GroupUnit::Closed),
        }
    })
}

/// Opens a group unit until each of its modules has run, or the enclosing unit is left. Returns its
/// index on the stack.
pub(super) fn open_group(scope: ForwardScope) -> usize {
    stack_mut(|open| {
        let all = (0..scope.shards.members.len()).collect();
        open.push(scope, OpenedBy::Member(all));
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
    /// Opens a unit with the units inside it, or, without `scope`, a module that only encloses
    /// units.
    pub(super) fn new(scope: Option<ForwardScope>, inside: Vec<(Arc<Unit>, LocalShards)>) -> Self {
        stack_mut(|open| {
            let depth = open.stack.len();
            let reduced = open.reduced;
            scope.iter().for_each(|scope| open.note_entered(scope));
            open.stack.push(ActiveUnit {
                scope: scope.map(Rc::new),
                inside,
                by: OpenedBy::Program,
            });
            Self {
                depth,
                reduced,
                member_of: None,
                ended: None,
            }
        })
    }

    /// Opens a module with these `shards` of a group unit, which is open as stack entry `at`, and
    /// the units `inside` the module.
    pub(super) fn member(
        at: usize,
        shards: LocalShards,
        inside: Vec<(Arc<Unit>, LocalShards)>,
    ) -> Self {
        let mut open = Self::new(None, inside);
        open.member_of = Some((at, shards));
        open
    }

    /// Records that the module has run. Returns the scope of its group unit, which has ended if
    /// this was its last module.
    fn has_run(&mut self) -> Option<Rc<ForwardScope>> {
        let (at, shards) = self.member_of.as_ref()?;
        stack_mut(|open| {
            let ActiveUnit {
                scope,
                by: OpenedBy::Member(left),
                ..
            } = &mut open.stack[*at]
            else {
                return None;
            };
            let scope = scope.clone()?;
            left.retain(|&position| !shards.members.contains(&scope.shards.members[position]));
            self.ended = left.is_empty().then(|| scope.clone());
            Some(scope)
        })
    }

    /// Ties the unit's outputs to all units that were entered inside, and closes the unit: rule 8
    /// of [`backward_nodes`](super::backward_nodes).
    pub(super) fn leave<O: TensorTree>(mut self, output: O) -> O {
        let of_several = self.has_run();
        let (scope, last, trains) = stack(|open| {
            (
                open.stack[self.depth].scope.clone(),
                open.last.clone(),
                open.reduced > self.reduced,
            )
        });
        let scope = scope.or(of_several);
        let trains = trains || scope.as_ref().is_some_and(|scope| scope.pass.is_reduced());
        let mut tracked = false;
        let output = output.map_floats(&mut |tensor| {
            tracked |= Dispatch::is_tracked(&tensor);
            tensor
        });
        let pass = scope.map(|scope| scope.pass.clone());
        let dtype = pass
            .as_ref()
            .and_then(|pass| pass.unsharded.unit().spec().precision().outputs);
        // A rank that used no weight must participate in the backward as the other ranks do, so all
        // its outputs become tracked.
        let all = !tracked && trains;
        if context::is_first() {
            return output.map_floats(&mut |tensor| persistent_copy(cast(tensor, dtype)));
        }
        output.map_floats(&mut |tensor| {
            let tie = Dispatch::is_tracked(&tensor)
                || all && tensor.autodiff != DispatchAutodiffContext::Disabled;
            let last = last.clone().filter(|last| tie && one_graph(last, &tensor));
            match last {
                Some(last) => {
                    let leave = PreBackward {
                        pass: pass.clone(),
                        dtype: tensor.dtype(),
                    };
                    autodiff::binary(tensor, last, Arc::new(leave))
                }
                None => persistent_copy(cast(tensor, dtype)),
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
        // A rank that unwinds issues no collective, because other ranks may not have reached this
        // point.
        let backward = !std::thread::panicking();
        let scopes = closed
            .iter()
            .rev()
            .filter_map(|opened| opened.scope.as_ref());
        scopes
            .chain(&self.ended)
            .for_each(|scope| scope.close(backward));
        // A block that is being recomputed does not use prefetched parameters, so it drops none.
        if last.is_some() && context::anchor().is_none() {
            closed
                .iter()
                .flat_map(|opened| &opened.inside)
                .for_each(|(unit, _)| unit.copies.forget_prefetched());
        }
    }
}
