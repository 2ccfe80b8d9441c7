//! Record of the nodes that backward runs, for tests to compare with the expected order.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use super::unit_pass::UnitPass;

/// A node of a unit whose backward has run, and the units in memory after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RanNode {
    /// Type of the node: `PostBackward`, `UnshardedParamNode`, ..
    pub node: &'static str,
    /// The unit's path; empty for a module that only encloses units.
    pub unit: String,
    /// Depth of the node in the graph.
    pub depth: usize,
    /// Position of the unit's pass in forward; `None` if the pass trains no parameter.
    pub place: Option<u64>,
    /// The units that hold unsharded weights, in order of entry.
    pub weights: Vec<String>,
    /// The units that hold unsharded gradients, in order of entry.
    pub gradients: Vec<String>,
}

thread_local! {
    /// Trace of the backward that the thread records.
    static TRACE: RefCell<Option<Trace>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Trace {
    passes: Vec<Weak<UnitPass>>,
    ran: Vec<RanNode>,
}

/// Runs `program`, a forward and its backward on this thread. Returns its result and the nodes of
/// units whose backward ran, in order. Local: nothing additional is sent.
pub fn trace_backward<T>(program: impl FnOnce() -> T) -> (T, Vec<RanNode>) {
    TRACE.replace(Some(Trace::default()));
    let result = program();
    (
        result,
        TRACE.take().map_or_else(Vec::new, |trace| trace.ran),
    )
}

/// Records that a pass was created.
pub(super) fn entered(pass: &Arc<UnitPass>) {
    TRACE.with_borrow_mut(|trace| {
        if let Some(trace) = trace {
            trace.passes.push(Arc::downgrade(pass));
        }
    });
}

/// Records that a node of `pass` has run.
pub(super) fn ran(node: &'static str, pass: Option<&Arc<UnitPass>>, depth: usize) {
    TRACE.with_borrow_mut(|trace| {
        let Some(trace) = trace else { return };
        let path = |pass: &Arc<UnitPass>| pass.unsharded.unit().label().to_string();
        let alive = |holds: fn(&UnitPass) -> bool| {
            let passes = trace.passes.iter().filter_map(Weak::upgrade);
            passes
                .filter(|pass| holds(pass))
                .map(|pass| path(&pass))
                .collect()
        };
        trace.ran.push(RanNode {
            node,
            unit: pass.map(path).unwrap_or_default(),
            depth,
            place: pass.and_then(|pass| pass.number()),
            weights: alive(|pass| pass.unsharded.has_weights()),
            gradients: alive(|pass| pass.grads.lock().is_any()),
        });
    });
}
