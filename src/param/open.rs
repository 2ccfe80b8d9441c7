//! [`Open`]: the units that are open on this rank.
//!
//! The program opens a unit with [`unit`](super::unit()). Inside, a unit of a module further in that the program
//! does not open, because its forward is not the program's own, is opened by the first read of one of its
//! parameters, and closed when another that is not inside it is opened: a unit of layers that run one after
//! another is gathered once, as if each had been opened.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use burn::backend::{Dispatch, DispatchAutodiffContext, DispatchTensor};

use super::buffer::UnitBuffer;
use super::graph::{LeaveUnit, one_graph};
use super::io::UnitTensors;
use super::scope::{Opening, Scope};
use super::shards::Shards;
use super::unit::Unit;
use crate::autodiff;

/// A unit or module that is open.
struct Opened {
    /// `None` for a module that only encloses units.
    scope: Option<Rc<Scope>>,
    /// The units of modules inside, with their shards.
    inside: Vec<(Arc<Unit>, Shards)>,
    /// Whether a read opened it.
    by_read: bool,
}

/// The units open on this thread.
#[derive(Default)]
struct OpenUnits {
    /// Outermost first.
    stack: Vec<Opened>,
    /// The token made last, of these units and of those opened while they were.
    last: Option<DispatchTensor>,
    /// How many passes that train a parameter were entered, ever.
    reduced: u64,
}

impl OpenUnits {
    /// `scope` is entered.
    fn enter(&mut self, scope: &Scope) {
        self.last = scope.token.clone().or(self.last.take());
        self.reduced += u64::from(scope.pass.is_reduced());
    }

    fn push(&mut self, scope: Option<Scope>, inside: Vec<(Arc<Unit>, Shards)>, by_read: bool) -> Option<Rc<Scope>> {
        scope.iter().for_each(|scope| self.enter(scope));
        let scope = scope.map(Rc::new);
        self.stack.push(Opened { scope: scope.clone(), inside, by_read });
        scope
    }
}

/// How much deeper in the graph a unit that a read opens lies than what was entered before it: as deep as a
/// module's operations, so that these come up first in backward. See the end of [`graph`](super::graph).
const DEEPER: usize = 96;

thread_local! {
    static OPEN: RefCell<OpenUnits> = RefCell::default();
}

/// The first open scope, innermost first, of which `f` makes something.
pub(super) fn find<T>(f: impl FnMut(&Rc<Scope>) -> Option<T>) -> Option<T> {
    OPEN.with_borrow(|open| open.stack.iter().rev().filter_map(|opened| opened.scope.as_ref()).find_map(f))
}

/// Makes the token of `scope`, which is not kept open, the last one of the units around it.
pub(super) fn follow(scope: &Scope) {
    OPEN.with_borrow_mut(|open| {
        if !open.stack.is_empty() {
            open.enter(scope);
        }
    });
}

/// How the program opens `unit` here.
pub(super) fn opening(unit: &Unit) -> Opening {
    OPEN.with_borrow(|open| Opening {
        kept: unit.kept(),
        lone: false,
        label: unit.label(),
        tracked: true,
        enclosed: !open.stack.is_empty(),
        earlier: open.last.clone(),
        deeper: 0,
    })
}

/// Opens the unit of which `shards` makes those at hand, if a module around its own is open: until
/// another is read, or that module is left.
pub(super) fn by_read(unit: &Arc<Unit>, holds: impl Fn(&Shards) -> bool) -> Option<Rc<Scope>> {
    let shards = OPEN.with_borrow(|open| {
        let mut inside = open.stack.iter().rev().flat_map(|opened| &opened.inside);
        inside.find(|(other, shards)| Arc::ptr_eq(other, unit) && holds(shards)).map(|(_, shards)| shards.clone())
    })?;
    close_read(unit);
    let (scope, ()) = Scope::open(unit, shards, Opening { deeper: DEEPER, ..opening(unit) }, ());
    scope.pass.buffer.gather();
    OPEN.with_borrow_mut(|open| open.push(Some(scope), Vec::new(), true))
}

/// Closes the units opened last that reads have opened, but for those that enclose `unit`.
pub(super) fn close_read(unit: &Unit) {
    let done = |opened: &mut Opened| {
        let scope = opened.scope.as_ref().filter(|_| opened.by_read);
        scope.is_some_and(|scope| !scope.pass.buffer.unit().encloses(unit))
    };
    while let Some(closed) = OPEN.with_borrow_mut(|open| open.stack.pop_if(done)) {
        closed.scope.iter().for_each(|scope| scope.close(true));
    }
}

/// Keeps a unit open, also when `forward` unwinds.
pub(super) struct Open {
    /// How many are open around it.
    depth: usize,
    /// [`OpenUnits::reduced`] before it.
    reduced: u64,
}

impl Open {
    /// A unit, if not a module without one of its own, and the units inside.
    pub(super) fn new(scope: Option<Scope>, inside: Vec<(Arc<Unit>, Shards)>) -> Self {
        OPEN.with_borrow_mut(|open| {
            let (depth, reduced) = (open.stack.len(), open.reduced);
            open.push(scope, inside, false);
            Self { depth, reduced }
        })
    }

    /// Closes it; ties its outputs to all that was entered inside: rule 8 of [`graph`](super::graph).
    pub(super) fn leave<O: UnitTensors>(self, output: O) -> O {
        let (scope, last, trains) = OPEN
            .with_borrow(|open| (open.stack[self.depth].scope.clone(), open.last.clone(), open.reduced > self.reduced));
        let mut tracked = false;
        let output = output.map_floats(&mut |tensor| {
            tracked |= Dispatch::is_tracked(&tensor);
            tensor
        });
        let pass = scope.map(|scope| scope.pass.clone());
        // A rank that uses no weight must take part all the same, as the others do.
        let all = !tracked && trains;
        output.map_floats(&mut |tensor| {
            let tie = Dispatch::is_tracked(&tensor) || all && tensor.autodiff != DispatchAutodiffContext::Disabled;
            let last = last.clone().filter(|last| tie && one_graph(last, &tensor));
            match last {
                Some(last) => autodiff::binary(tensor, last, LeaveUnit::new(pass.clone())),
                None => UnitBuffer::copy_out(tensor),
            }
        })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let (closed, _last) = OPEN.with_borrow_mut(|open| {
            let closed = open.stack.split_off(self.depth.min(open.stack.len()));
            (closed, open.stack.is_empty().then(|| open.last.take()))
        });
        // A rank that unwinds issues nothing: the others may have come no further.
        let backward = !thread::panicking();
        closed.iter().rev().filter_map(|opened| opened.scope.as_ref()).for_each(|scope| scope.close(backward));
    }
}
