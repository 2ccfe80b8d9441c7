//! What a panic says, and the error behind it.

use std::any::Any;
use std::cell::Cell;

use crate::Error;

/// The error that a panic's text is known to mean.
type Explain = fn(&str) -> Option<Error>;

thread_local! {
    static EXPLAIN: Cell<Option<Explain>> = const { Cell::new(None) };
}

/// Has `explain` see the text of each panic that the calling thread's program ends with.
pub(crate) fn explain_panics_by(explain: Explain) {
    EXPLAIN.set(Some(explain));
}

/// The error behind a panic with this payload: that which the thread unwinds with, or which the text is known to mean.
pub(crate) fn error_behind(payload: &(dyn Any + Send)) -> Option<Error> {
    let unwinding = payload.downcast_ref::<Error>().cloned();
    unwinding.or_else(|| EXPLAIN.get()?(panic_text(payload)))
}

/// What a panic says.
pub(super) fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("(no message)")
}
