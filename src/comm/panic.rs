//! Text of a panic, and the error that caused it.

use std::any::Any;
use std::cell::Cell;

use crate::Error;

/// Function that returns the error which a panic's text stands for, if it recognizes the text.
type Explain = fn(&str) -> Option<Error>;

thread_local! {
    static EXPLAIN: Cell<Option<Explain>> = const { Cell::new(None) };
}

/// Registers `explain` for the calling thread: it is called with the text of each panic that ends the thread's
/// program.
pub(crate) fn explain_panics_by(explain: Explain) {
    EXPLAIN.set(Some(explain));
}

/// Returns the error that caused a panic with this payload: the error with which the thread unwinds, or the error
/// which the text stands for.
pub(crate) fn error_behind(payload: &(dyn Any + Send)) -> Option<Error> {
    let unwinding = payload.downcast_ref::<Error>().cloned();
    unwinding.or_else(|| EXPLAIN.get()?(panic_text(payload)))
}

/// Returns the text of a panic.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("(no message)")
}
