//! [`UnitGuard`]: the units that are open on this rank.
//!
//! The program opens a unit with [`unit`](super::unit()). Inside, a unit of a module further in that the program
//! does not open, because its forward is not the program's own, is opened by the first read of one of its
//! parameters, and closed when another that is not inside it is opened: a unit of layers that run one after
//! another is gathered once, as if each had been opened.

use std::cell::RefCell;
use std::mem;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::thread;

use burn::backend::{Dispatch, DispatchAutodiffContext, DispatchTensor, TensorMetadata};

use super::backward_nodes::{PreBackward, one_graph};
use super::io::TensorTree;
use super::precision::cast;
use super::recompute::context;
use super::scope::{ForwardScope, ScopeOptions};
use super::shards::LocalShards;
use super::storage::UnshardedParams;
use super::unit::Unit;
use super::unit_pass::UnitPass;
use crate::autodiff;
use crate::error::OrUnwind;

/// A unit or module that is open.
struct ActiveUnit {
    /// `None` for a module that only encloses units.
    scope: Option<Rc<ForwardScope>>,
    /// The units of modules inside, with their shards.
    inside: Vec<(Arc<Unit>, LocalShards)>,
    by: OpenedBy,
}

/// Who has opened a unit or module, and so closes it.
enum OpenedBy {
    Program,
    Read,
    /// One module of several. Which parameters, as positions among the scope's, are of modules that have not run.
    Member(Vec<usize>),
}

/// The units open on this thread.
#[derive(Default)]
struct UnitStack {
    /// Outermost first.
    stack: Vec<ActiveUnit>,
    /// The token made last, of these units and of those opened while they were.
    last: Option<DispatchTensor>,
    /// How many passes that train a parameter were entered, ever.
    reduced: u64,
    /// The unit entered last.
    entered: Option<Weak<Unit>>,
    /// Whether no other was entered before it, of those that are open together.
    is_first: bool,
    /// What a checkpointed block that computes reads of units around it, in the place of the outermost on the stack.
    around_block: Option<AroundBlock>,
}

/// Units around a checkpointed block.
#[derive(Default)]
struct AroundBlock {
    /// How many units and modules are open around it.
    depth: usize,
    /// The units that it reads, outermost first.
    scopes: Vec<Rc<ForwardScope>>,
}

impl UnitStack {
    /// `scope` is entered.
    fn enter(&mut self, scope: &ForwardScope) {
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

    /// The shards of `unit` of which `holds` is true, innermost first, if it is of a module inside one that is open.
    fn inside(&self, unit: &Arc<Unit>, holds: impl Fn(&LocalShards) -> bool) -> Option<LocalShards> {
        let mut inside = self.stack.iter().rev().flat_map(|opened| &opened.inside);
        inside.find(|(other, shards)| Arc::ptr_eq(other, unit) && holds(shards)).map(|(_, shards)| shards.clone())
    }

    /// The pass through the unit opened last.
    fn innermost(&self) -> Option<Arc<UnitPass>> {
        self.stack.iter().rev().find_map(|opened| Some(opened.scope.as_ref()?.pass.clone()))
    }

    /// Of the stack, what is open in the innermost checkpointed block.
    fn in_block(&self) -> &[ActiveUnit] {
        &self.stack[self.around_block.as_ref().map_or(0, |around| around.depth)..]
    }

    fn push(
        &mut self,
        scope: Option<ForwardScope>,
        inside: Vec<(Arc<Unit>, LocalShards)>,
        by: OpenedBy,
    ) -> Option<Rc<ForwardScope>> {
        scope.iter().for_each(|scope| self.enter(scope));
        let scope = scope.map(Rc::new);
        self.stack.push(ActiveUnit { scope: scope.clone(), inside, by });
        scope
    }
}

thread_local! {
    static OPEN: RefCell<UnitStack> = RefCell::default();
}

/// The shards of `unit`, if it is of a module inside one that is open, and not open itself.
pub(super) fn shards_inside(unit: &Arc<Unit>) -> Option<LocalShards> {
    OPEN.with_borrow(|open| {
        let is_open = |opened: &ActiveUnit| opened.scope.as_ref().is_some_and(|scope| scope.is_of(unit));
        if open.stack.iter().any(is_open) { None } else { open.inside(unit, |_| true) }
    })
}

/// Returns true if a unit is open, or a module around units.
pub(super) fn is_any() -> bool {
    OPEN.with_borrow(|open| !open.stack.is_empty())
}

/// Whether the unit entered last is the first of those that are open together.
pub(super) fn is_first() -> bool {
    OPEN.with_borrow(|open| open.is_first)
}

/// The first open scope, innermost first, of which `f` makes something.
pub(super) fn find<T>(f: impl FnMut(&Rc<ForwardScope>) -> Option<T>) -> Option<T> {
    OPEN.with_borrow(|open| {
        let around = open.around_block.iter().flat_map(|around| around.scopes.iter().rev());
        open.in_block().iter().rev().filter_map(|opened| opened.scope.as_ref()).chain(around).find_map(f)
    })
}

/// The passes that are open through one of these units, each with its shards, outermost first.
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

/// The token made last, of the units that are open and of those opened while they were.
pub(super) fn last_token() -> Option<DispatchTensor> {
    OPEN.with_borrow(|open| open.last.clone())
}

/// Makes `token` the last one.
pub(super) fn set_last_token(token: DispatchTensor) {
    OPEN.with_borrow_mut(|open| open.last = Some(token));
}

/// A checkpointed block computes as long as it lives.
pub(super) struct InBlock(Restored);

enum Restored {
    AroundBlock(Option<AroundBlock>),
    All(Box<UnitStack>),
}

impl InBlock {
    /// For the first time, in forward: of the units that are open it reads these `scopes`.
    pub(super) fn first(scopes: Vec<Rc<ForwardScope>>) -> Self {
        OPEN.with_borrow_mut(|open| {
            let depth = open.stack.len();
            Self(Restored::AroundBlock(open.around_block.replace(AroundBlock { depth, scopes })))
        })
    }

    /// Again, in backward, where none of the units around it is open: it reads these `scopes` of them.
    pub(super) fn again(scopes: Vec<Rc<ForwardScope>>) -> Self {
        let around_block = Some(AroundBlock { depth: 0, scopes });
        Self(Restored::All(Box::new(OPEN.replace(UnitStack { around_block, ..UnitStack::default() }))))
    }
}

impl Drop for InBlock {
    fn drop(&mut self) {
        match mem::replace(&mut self.0, Restored::AroundBlock(None)) {
            Restored::AroundBlock(around) => OPEN.with_borrow_mut(|open| open.around_block = around),
            Restored::All(open) => drop(OPEN.replace(*open)),
        }
    }
}

/// Makes the token of `scope`, which is not kept open, the last one of the units around it.
pub(super) fn follow(scope: &ForwardScope) {
    OPEN.with_borrow_mut(|open| {
        if !open.stack.is_empty() {
            open.enter(scope);
        }
    });
}

/// How the program opens `unit` here.
pub(super) fn opening(unit: &Unit) -> ScopeOptions {
    OPEN.with_borrow(|open| ScopeOptions {
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

/// Opens the unit of which `shards` makes those at hand, if a module around its own is open: until
/// another is read, or that module is left.
pub(super) fn by_read(unit: &Arc<Unit>, holds: impl Fn(&LocalShards) -> bool) -> Option<Rc<ForwardScope>> {
    let shards = OPEN.with_borrow(|open| open.inside(unit, holds))?;
    close_read(unit);
    let (scope, ()) = ForwardScope::open(unit, shards, ScopeOptions { by_read: true, ..opening(unit) }, ()).or_unwind();
    scope.pass.buffer.gather().or_unwind();
    OPEN.with_borrow_mut(|open| open.push(Some(scope), Vec::new(), OpenedBy::Read))
}

/// Closes the units opened last that reads have opened, but for those that enclose `unit` or are of the same modules.
pub(super) fn close_read(unit: &Unit) {
    let done = |opened: &mut ActiveUnit| {
        let scope = opened.scope.as_ref().filter(|_| matches!(opened.by, OpenedBy::Read));
        let stays = |opened: &Unit| opened.encloses(unit) || opened.is_sibling_of(unit);
        scope.is_some_and(|scope| !stays(scope.pass.buffer.unit()))
    };
    while let Some(closed) = OPEN.with_borrow_mut(|open| open.stack.pop_if(done)) {
        closed.scope.iter().for_each(|scope| scope.close(true));
    }
}

/// What a module of a unit finds.
pub(super) enum UnitEntry {
    /// Its unit, of several modules, is open `at` that place.
    Joins { at: usize, shards: LocalShards },
    /// The unit is to be opened with `all` of these, of which this `one` is a module's if there are others.
    Opens { all: LocalShards, one: Option<LocalShards> },
}

/// What a module of `unit` finds, of which these are the shards.
pub(super) fn member(unit: &Arc<Unit>, shards: LocalShards) -> UnitEntry {
    if !unit.is_group() {
        return UnitEntry::Opens { all: shards, one: None };
    }
    let own = || shards.members.iter().zip(&shards.bases);
    let has = |all: &LocalShards| own().all(|(&member, base)| all.position(member, base).is_some());
    let is_this = |opened: &ActiveUnit| {
        let scope = opened.scope.as_ref().filter(|_| matches!(opened.by, OpenedBy::Member(_)));
        scope.is_some_and(|scope| scope.is_of(unit) && has(&scope.shards))
    };
    let at = OPEN.with_borrow(|open| {
        let around = open.stack.len() - open.in_block().len();
        open.in_block().iter().rposition(is_this).map(|at| around + at)
    });
    let all = || OPEN.with_borrow(|open| open.inside(unit, has));
    match at {
        Some(at) => UnitEntry::Joins { at, shards },
        None => match all() {
            Some(all) => UnitEntry::Opens { all, one: Some(shards) },
            None => UnitEntry::Opens { all: shards, one: None },
        },
    }
}

/// Opens a unit of several modules: until each has run, or what encloses it is left. Returns where it is.
pub(super) fn begin(scope: ForwardScope) -> usize {
    OPEN.with_borrow_mut(|open| {
        let all = (0..scope.shards.members.len()).collect();
        open.push(Some(scope), Vec::new(), OpenedBy::Member(all));
        open.stack.len() - 1
    })
}

/// Keeps a unit open, also when `forward` unwinds.
pub(super) struct UnitGuard {
    /// How many are open around it.
    depth: usize,
    /// [`UnitStack::reduced`] before it.
    reduced: u64,
    /// Of a module of several: where their unit is open, and the module's shards.
    member_of: Option<(usize, LocalShards)>,
    /// The unit of several modules of which it is the last, once it has run.
    ended: Option<Rc<ForwardScope>>,
}

impl UnitGuard {
    /// A unit, if not a module without one of its own, and the units inside.
    pub(super) fn new(scope: Option<ForwardScope>, inside: Vec<(Arc<Unit>, LocalShards)>) -> Self {
        OPEN.with_borrow_mut(|open| {
            let (depth, reduced) = (open.stack.len(), open.reduced);
            open.push(scope, inside, OpenedBy::Program);
            Self { depth, reduced, member_of: None, ended: None }
        })
    }

    /// A module with these `shards` and the units inside, of a unit of several that is open `at` that place.
    pub(super) fn member(at: usize, shards: LocalShards, inside: Vec<(Arc<Unit>, LocalShards)>) -> Self {
        let mut open = Self::new(None, inside);
        open.member_of = Some((at, shards));
        open
    }

    /// The module has run. Returns the scope of the unit of several that it is of; that has ended if it was the last.
    fn has_run(&mut self) -> Option<Rc<ForwardScope>> {
        let (at, shards) = self.member_of.as_ref()?;
        OPEN.with_borrow_mut(|open| {
            let ActiveUnit { scope, by: OpenedBy::Member(left), .. } = &mut open.stack[*at] else { return None };
            let scope = scope.clone()?;
            left.retain(|&position| !shards.members.contains(&scope.shards.members[position]));
            self.ended = left.is_empty().then(|| scope.clone());
            Some(scope)
        })
    }

    /// Closes it; ties its outputs to all that was entered inside: rule 8 of [`graph`](super::backward_nodes).
    pub(super) fn leave<O: TensorTree>(mut self, output: O) -> O {
        let of_several = self.has_run();
        let (scope, last, trains) = OPEN
            .with_borrow(|open| (open.stack[self.depth].scope.clone(), open.last.clone(), open.reduced > self.reduced));
        let scope = scope.or(of_several);
        let trains = trains || scope.as_ref().is_some_and(|scope| scope.pass.is_reduced());
        let mut tracked = false;
        let output = output.map_floats(&mut |tensor| {
            tracked |= Dispatch::is_tracked(&tensor);
            tensor
        });
        let pass = scope.map(|scope| scope.pass.clone());
        let dtype = pass.as_ref().and_then(|pass| pass.buffer.unit().precision().outputs);
        // A rank that uses no weight must take part all the same, as the others do.
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
        let (closed, last) = OPEN.with_borrow_mut(|open| {
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
        // A rank that unwinds issues nothing: the others may have come no further.
        let backward = !thread::panicking();
        let scopes = closed.iter().rev().filter_map(|opened| opened.scope.as_ref());
        scopes.chain(&self.ended).for_each(|scope| scope.close(backward));
        // What is gathered ahead is nothing to a block that computes again.
        if last.is_some() && context::anchor().is_none() {
            closed.iter().flat_map(|opened| &opened.inside).for_each(|(unit, _)| unit.forget_prefetched());
        }
    }
}
