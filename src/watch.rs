//! What a rank communicates, noted while it does: what asked for it, and in which module.
//!
//! Nothing is noted, and nothing is made to be noted, but inside of [`watch`]. The [`debug`](crate::debug)
//! room shows what was.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::sync::Arc;

use crate::comm::{LedgerEntry, Phase, listen};
use crate::placement::Layout;

/// What asked for a change of layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallSite {
    /// The operator that needed an input elsewhere, or the method that was called, such as `redistribute`.
    pub operator: &'static str,
    /// The line of the program that called it.
    pub at: &'static Location<'static>,
    /// The path of the module whose forward called it, where a layer of [`nn`](crate::nn) or a
    /// [unit](fn@crate::fsdp::unit) did.
    pub module: Option<Arc<str>>,
}

/// A tensor that changed its layout, or whose gradient did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutChange {
    /// What asked for it; of a gradient, in forward.
    pub origin: CallSite,
    /// The layout before.
    pub from: Layout,
    /// The layout after.
    pub to: Layout,
    /// Names of the mesh dimensions over whose ranks a gradient was summed, because they computed
    /// different things with one value.
    pub summed: Vec<String>,
    /// Global shape.
    pub shape: Vec<usize>,
    /// The pass.
    pub phase: Phase,
}

/// A collective that was issued.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub entry: LedgerEntry,
    /// The module whose forward issued it.
    pub module: Option<Arc<str>>,
    /// The change of layout that it is a step of.
    pub change: Option<Arc<LayoutChange>>,
}

/// What was noted, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    pub changes: Vec<Arc<LayoutChange>>,
    pub collectives: Vec<Seen>,
}

thread_local! {
    static WATCHES: Cell<usize> = const { Cell::new(0) };
    static LOG: RefCell<Log> = RefCell::default();
    /// Modules whose forwards run, innermost last, and the lines that called them.
    static MODULES: RefCell<Vec<(Arc<str>, &'static Location<'static>)>> = const { RefCell::new(Vec::new()) };
    static CHANGE: RefCell<Option<Arc<LayoutChange>>> = const { RefCell::new(None) };
}

/// Runs `body`, and notes what the calling thread communicates meanwhile.
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

/// A watch; one inside another sees what the other does.
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

fn note(entry: &LedgerEntry) {
    let change = CHANGE.with_borrow(Clone::clone);
    let module = change.as_ref().map_or_else(module, |change| change.origin.module.clone());
    LOG.with_borrow_mut(|log| log.collectives.push(Seen { entry: entry.clone(), module, change }));
}

fn module() -> Option<Arc<str>> {
    MODULES.with_borrow(|modules| modules.last().map(|(path, _)| path.clone()))
}

impl CallSite {
    /// The caller, as far as a watch will want to know it.
    #[track_caller]
    pub(crate) fn new(operator: &'static str) -> Self {
        Self::called(operator, Location::caller())
    }

    /// The same, of a caller that is known already.
    pub(crate) fn called(operator: &'static str, at: &'static Location<'static>) -> Self {
        if !is_on() {
            return Self { operator, at, module: None };
        }
        // A line of this crate's says nothing to the program's author: that of the layer's call does.
        let own = file!().trim_end_matches("watch.rs");
        let called = MODULES.with_borrow(|modules| modules.last().map(|(_, at)| *at));
        let at = called.filter(|_| at.file().starts_with(own)).unwrap_or(at);
        Self { operator, at, module: module() }
    }
}

/// Until it is dropped, what is communicated are steps of `change`.
pub(crate) fn changing(change: impl FnOnce() -> LayoutChange) -> Option<Changing> {
    is_on().then(|| {
        let change = Arc::new(change());
        LOG.with_borrow_mut(|log| log.changes.push(change.clone()));
        Changing(CHANGE.replace(Some(change)))
    })
}

/// A change of layout that is being made; inside is the one around it.
#[must_use]
pub(crate) struct Changing(Option<Arc<LayoutChange>>);

impl Drop for Changing {
    fn drop(&mut self) {
        CHANGE.set(self.0.take());
    }
}

/// Until it is dropped, the forward of the module at the path that `module` says runs, if it has one.
#[track_caller]
pub(crate) fn entered(module: impl FnOnce() -> Option<Arc<str>>) -> Option<ModuleGuard> {
    let path = if is_on() { module()? } else { return None };
    let at = Location::caller();
    MODULES.with_borrow_mut(|modules| modules.push((path, at)));
    Some(ModuleGuard)
}

/// A module whose forward runs.
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
        assert!(changing(change).is_none(), "nobody watches");
        let (_, log) = watch(|| changing(change).is_some());
        assert_eq!(log.changes.len(), 1);
        assert!(LOG.with_borrow(|log| log.changes.is_empty()) && !is_on());
    }
}
