//! Records the communication of a rank: each collective and each change of a tensor's layout, with
//! the operator, program line and module that caused it.
//!
//! Nothing is recorded outside [`watch`], and outside it no data for a record is computed. The
//! [`debug`](crate::debug) module displays the records.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::sync::Arc;

use crate::comm::{CallEvent, CallInfo, Phase, listen};
use crate::placement::Layout;

/// Origin of a change of layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallSite {
    /// The operator that required another layout of its input, or the method that was called, such
    /// as `redistribute`.
    pub operator: &'static str,
    /// The program line that called it.
    pub at: &'static Location<'static>,
    /// Path of the module whose forward made the call, if a layer of [`nn`](crate::nn) or a
    /// [unit](fn@crate::fsdp::unit) made it.
    pub module: Option<Arc<str>>,
}

/// A change of the layout of a tensor, or of a tensor's gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutChange {
    /// Origin of the change. The origin of a gradient's change is the call in forward.
    pub origin: CallSite,
    /// The layout before.
    pub from: Layout,
    /// The layout after.
    pub to: Layout,
    /// Names of the mesh dimensions over which a gradient was summed, because the ranks along them
    /// computed different results from the same value.
    pub summed: Vec<String>,
    /// Global shape of the tensor.
    pub shape: Vec<usize>,
    /// The pass in which the layout changed.
    pub phase: Phase,
}

/// A collective that was issued while a watch was active.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub call: CallInfo,
    /// Path of the module whose forward issued it.
    pub module: Option<Arc<str>>,
    /// The change of layout for which it was issued.
    pub change: Option<Arc<LayoutChange>>,
}

/// Records of a watch, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    pub changes: Vec<Arc<LayoutChange>>,
    pub collectives: Vec<Seen>,
}

thread_local! {
    static WATCHES: Cell<usize> = const { Cell::new(0) };
    static LOG: RefCell<Log> = RefCell::default();
    /// Modules whose forwards are running, innermost last, and the lines that called them.
    static MODULES: RefCell<Vec<(Arc<str>, &'static Location<'static>)>> = const { RefCell::new(Vec::new()) };
    static CHANGE: RefCell<Option<Arc<LayoutChange>>> = const { RefCell::new(None) };
}

/// Runs `body` and returns its value, together with a record of what the calling thread
/// communicated in it.
pub(crate) fn watch<T>(body: impl FnOnce() -> T) -> (T, Log) {
    let (changes, collectives) = LOG.with_borrow(|log| (log.changes.len(), log.collectives.len()));
    let begun = Begun::new();
    let value = body();
    let log = LOG.with_borrow(|log| Log {
        changes: log.changes[changes..].to_vec(),
        collectives: log.collectives[collectives..].to_vec(),
    });
    drop(begun);
    (value, log)
}

/// An active watch. A watch inside another records into the same log, so the outer one sees its
/// records too.
struct Begun;

impl Begun {
    fn new() -> Self {
        WATCHES.set(WATCHES.get() + 1);
        listen(Some(note));
        Self
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        WATCHES.set(WATCHES.get() - 1);
        if !is_on() {
            listen(None);
            LOG.take();
        }
    }
}

fn is_on() -> bool {
    WATCHES.get() > 0
}

fn note(call: &CallInfo, event: &CallEvent<'_>) {
    if !matches!(event, CallEvent::Counted) {
        return;
    }
    let change = CHANGE.with_borrow(Clone::clone);
    let module = change
        .as_ref()
        .map_or_else(module, |change| change.origin.module.clone());
    LOG.with_borrow_mut(|log| {
        log.collectives.push(Seen {
            call: call.clone(),
            module,
            change,
        })
    });
}

fn module() -> Option<Arc<str>> {
    MODULES.with_borrow(|modules| modules.last().map(|(path, _)| path.clone()))
}

impl CallSite {
    /// Returns the origin of a call: the caller's line, adapted as in [`called`](Self::called).
    #[track_caller]
    pub(crate) fn new(operator: &'static str) -> Self {
        Self::called(operator, Location::caller())
    }

    /// Like [`new`](Self::new), for a caller that is already known. While a watch is active, a line
    /// inside this crate is replaced by the line that called the running layer, and the path of
    /// that layer's module is added.
    pub(crate) fn called(operator: &'static str, at: &'static Location<'static>) -> Self {
        if !is_on() {
            return Self {
                operator,
                at,
                module: None,
            };
        }
        // A line of this crate means nothing to the author of the program; the line that called the
        // layer does.
        let own = file!().trim_end_matches("watch.rs");
        let called = MODULES.with_borrow(|modules| modules.last().map(|(_, at)| *at));
        let at = called.filter(|_| at.file().starts_with(own)).unwrap_or(at);
        Self {
            operator,
            at,
            module: module(),
        }
    }
}

/// Records a change of layout while a watch is active. Until the guard is dropped, collectives are
/// attributed to it.
pub(crate) fn changing(change: impl FnOnce() -> LayoutChange) -> Option<Changing> {
    is_on().then(|| {
        let change = Arc::new(change());
        LOG.with_borrow_mut(|log| log.changes.push(change.clone()));
        Changing(CHANGE.replace(Some(change)))
    })
}

/// Guard of a change of layout in progress. It contains the enclosing change, which is restored on
/// drop.
#[must_use]
pub(crate) struct Changing(Option<Arc<LayoutChange>>);

impl Drop for Changing {
    fn drop(&mut self) {
        CHANGE.set(self.0.take());
    }
}

/// Records that the forward of the module at the path `module` returns is running, until the guard
/// is dropped. Returns `None` if no watch is active or the module has no path.
#[track_caller]
pub(crate) fn entered(module: impl FnOnce() -> Option<Arc<str>>) -> Option<ModuleGuard> {
    let path = if is_on() { module()? } else { return None };
    let at = Location::caller();
    MODULES.with_borrow_mut(|modules| modules.push((path, at)));
    Some(ModuleGuard)
}

/// Guard of a module whose forward is running.
#[must_use]
pub(crate) struct ModuleGuard;

impl Drop for ModuleGuard {
    fn drop(&mut self) {
        MODULES.with_borrow_mut(|modules| modules.pop());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_kept_no_longer_than_it_is_watched() {
        let change = || LayoutChange {
            origin: CallSite::new("test"),
            from: Layout::replicate(&[2]).unwrap(),
            to: Layout::replicate(&[2]).unwrap(),
            summed: Vec::new(),
            shape: vec![4],
            phase: Phase::Forward,
        };
        assert!(changing(change).is_none(), "no watch is active");
        let (_, log) = watch(|| changing(change).is_some());
        assert_eq!(log.changes.len(), 1);
        assert!(LOG.with_borrow(|log| log.changes.is_empty()) && !is_on());
    }
}
