//! What backward really runs, for tests to compare with what it should.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use super::unit_pass::UnitPass;

/// A node of a unit whose backward has run, and what units hold after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RanNode {
    /// Type of the node: `PostBackward`, `UnshardedParamNode`, ..
    pub node: &'static str,
    /// The unit's path; empty of a module that only encloses units.
    pub unit: String,
    /// How deep it lies in the graph.
    pub depth: usize,
    /// The unit's place in forward; `None` if nothing of it is trained.
    pub place: Option<u64>,
    /// The units that hold whole weights, in order of entry.
    pub weights: Vec<String>,
    /// The units that hold whole gradients, in order of entry.
    pub gradients: Vec<String>,
}

#[derive(Default)]
struct Trace {
    passes: Vec<Weak<UnitPass>>,
    ran: Vec<RanNode>,
}

thread_local! {
    static TRACE: RefCell<Option<Trace>> = const { RefCell::new(None) };
}

/// Runs `program`, a forward and its backward on this thread, and returns the nodes of units that backward
/// ran, in that order.
pub fn trace_backward<T>(program: impl FnOnce() -> T) -> (T, Vec<RanNode>) {
    TRACE.set(Some(Trace::default()));
    let result = program();
    (result, TRACE.take().map_or_else(Vec::new, |trace| trace.ran))
}

/// A pass is made.
pub(super) fn entered(pass: &Arc<UnitPass>) {
    TRACE.with_borrow_mut(|trace| {
        if let Some(trace) = trace {
            trace.passes.push(Arc::downgrade(pass));
        }
    });
}

/// A node of `pass` has run.
pub(super) fn ran(node: &'static str, pass: Option<&Arc<UnitPass>>, depth: usize) {
    TRACE.with_borrow_mut(|trace| {
        let Some(trace) = trace else { return };
        let path = |pass: &Arc<UnitPass>| pass.buffer.unit().label().to_string();
        let alive = |holds: fn(&UnitPass) -> bool| {
            let passes = trace.passes.iter().filter_map(Weak::upgrade);
            passes.filter(|pass| holds(pass)).map(|pass| path(&pass)).collect()
        };
        trace.ran.push(RanNode {
            node,
            unit: pass.map(path).unwrap_or_default(),
            depth,
            place: pass.and_then(|pass| pass.number()),
            weights: alive(|pass| pass.buffer.has_weights()),
            gradients: alive(|pass| pass.buffer.has_gradients()),
        });
    });
}
