//! Text of a panic, the error that caused it, and the part of the program in which it occurred.

use std::any::Any;
use std::cell::{Cell, RefCell};

use super::rank_context::is_rank;
use crate::Error;
use crate::error::record_remedy;

/// Function that returns the error which a panic's text stands for, if it recognizes the text.
type Explain = fn(&str) -> Option<Error>;

thread_local! {
    static EXPLAIN: Cell<Option<Explain>> = const { Cell::new(None) };
    /// Text of the last panic whose place was noted, and the place.
    static NOTED: RefCell<Option<(String, String)>> = const { RefCell::new(None) };
    /// Innermost pass whose backward a panic has interrupted: the number at which it was opened,
    /// and its place.
    static INTERRUPTED: RefCell<Option<(u64, String)>> = const { RefCell::new(None) };
}

/// Registers `explain` for the calling thread: it is called with the text of each panic that ends
/// the thread's program.
pub(crate) fn explain_panics_by(explain: Explain) {
    EXPLAIN.set(Some(explain));
}

/// Returns the error that caused a panic with this payload: the error with which the thread
/// unwinds, or the error which the text stands for.
pub(crate) fn error_behind(payload: &(dyn Any + Send)) -> Option<Error> {
    let unwinding = payload.downcast_ref::<Error>().cloned();
    unwinding.or_else(|| EXPLAIN.get()?(panic_text(payload)))
}

/// Notes the part of the program in which the calling thread panicked. `place` returns it for the
/// panic's text. If several parts are nested, each notes the panic as it unwinds through them, and
/// the innermost is kept. The report of the launch contains the note; on a thread that runs no
/// rank's program, it is logged.
pub(crate) fn note_panic(payload: &(dyn Any + Send), place: impl FnOnce(&str) -> Option<String>) {
    if payload.is::<Error>() {
        return;
    }
    let text = panic_text(payload);
    NOTED.with_borrow_mut(|noted| {
        if noted.as_ref().is_some_and(|(known, _)| known == text) {
            return;
        }
        *noted = place(text).map(|place| (text.into(), place));
        if let Some((_, place)) = noted.as_ref().filter(|_| !is_rank()) {
            log::error!("{text} ({place})");
        }
    });
}

/// Notes that a panic of the calling thread has interrupted the backward of a pass, at `place`.
/// `opened` increases from pass to pass. Of several, those opened last are inside the others or, as
/// backward runs in the opposite order, ran first; the innermost one is kept.
pub(crate) fn note_interrupted(opened: u64, place: impl FnOnce() -> String) {
    INTERRUPTED.with_borrow_mut(|interrupted| {
        if interrupted
            .as_ref()
            .is_none_or(|(other, _)| *other < opened)
        {
            *interrupted = Some((opened, place()));
        }
    });
}

/// Drops the notes of a panic that the program has caught.
pub(crate) fn forget_panic() {
    NOTED.take();
    INTERRUPTED.take();
}

/// Returns the text of a panic that ended the thread's program, with the place in which it
/// occurred, or the remedy, if they are known.
pub(super) fn panic_report(payload: &(dyn Any + Send)) -> String {
    let text = panic_text(payload);
    let noted = NOTED
        .take()
        .filter(|(known, _)| known == text)
        .map(|(_, place)| place);
    let place = noted.or_else(|| INTERRUPTED.take().map(|(_, place)| place));
    let remedy = || record_remedy(text).filter(|remedy| !text.contains(remedy));
    match place.or_else(|| remedy().map(Into::into)) {
        Some(place) => format!("{text} ({place})"),
        None => text.into(),
    }
}

/// Returns the text of a panic.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("(no message)")
}
