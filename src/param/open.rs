//! [`Open`]: the units that are open on this rank.

use std::cell::RefCell;
use std::rc::Rc;
use std::thread;

use burn::backend::{Dispatch, DispatchAutodiffContext, DispatchTensor};

use super::buffer::UnitBuffer;
use super::graph::{LeaveUnit, one_graph};
use super::io::UnitTensors;
use super::scope::Scope;
use crate::autodiff;

/// The units open on this thread.
#[derive(Default)]
struct OpenUnits {
    /// Outermost first; `None` for a module that only encloses units.
    scopes: Vec<Option<Rc<Scope>>>,
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
}

thread_local! {
    static OPEN: RefCell<OpenUnits> = RefCell::default();
}

/// The first open scope, innermost first, of which `f` makes something.
pub(super) fn find<T>(f: impl FnMut(&Rc<Scope>) -> Option<T>) -> Option<T> {
    OPEN.with_borrow(|open| open.scopes.iter().rev().flatten().find_map(f))
}

/// Whether a unit is open.
pub(super) fn is_any() -> bool {
    OPEN.with_borrow(|open| !open.scopes.is_empty())
}

/// The last token made inside the open units.
pub(super) fn last_token() -> Option<DispatchTensor> {
    OPEN.with_borrow(|open| open.last.clone())
}

/// Makes the token of `scope`, which is not kept open, the last one of the units around it.
pub(super) fn follow(scope: &Scope) {
    OPEN.with_borrow_mut(|open| {
        if !open.scopes.is_empty() {
            open.enter(scope);
        }
    });
}

/// Keeps a unit open, also when `forward` unwinds.
pub(super) struct Open {
    /// How many are open around it.
    depth: usize,
    /// [`OpenUnits::reduced`] before it.
    reduced: u64,
}

impl Open {
    pub(super) fn unit(scope: Scope) -> Self {
        Self::new(Some(scope))
    }

    /// A module without a unit of its own that holds units.
    pub(super) fn around() -> Self {
        Self::new(None)
    }

    fn new(scope: Option<Scope>) -> Self {
        OPEN.with_borrow_mut(|open| {
            let (depth, reduced) = (open.scopes.len(), open.reduced);
            scope.iter().for_each(|scope| open.enter(scope));
            open.scopes.push(scope.map(Rc::new));
            Self { depth, reduced }
        })
    }

    /// Closes it; ties its outputs to all that was entered inside: rule 8 of [`graph`](super::graph).
    pub(super) fn leave<O: UnitTensors>(self, output: O) -> O {
        let (scope, last, trains) =
            OPEN.with_borrow(|open| (open.scopes[self.depth].clone(), open.last.clone(), open.reduced > self.reduced));
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
            let closed = open.scopes.split_off(self.depth.min(open.scopes.len()));
            (closed, open.scopes.is_empty().then(|| open.last.take()))
        });
        // A rank that unwinds issues nothing: the others may have come no further.
        let backward = !thread::panicking();
        closed.iter().rev().flatten().for_each(|scope| scope.close(backward));
    }
}
