//! Creation of a [`tracing`] span for each collective, for profilers.

use std::fmt;
use std::time::Duration;

use tracing::field::Empty;
use tracing::{Span, debug_span};

use super::backend::{CallSignature, tensor_text};
use super::{Group, Phase, TensorMeta};

/// Returns the span of a collective that `rank` posts, or a disabled span if there is no subscriber.
///
/// Fields are evaluated and formatted only if there is a subscriber: the macro checks first.
pub(super) fn posted(rank: usize, group: &Group, seq: u64, print: &CallSignature, phase: Phase, bytes: u64) -> Span {
    debug_span!(
        target: "burn_dtensor::comm",
        "collective",
        operation = print.op.name(),
        label = &*print.label,
        %phase,
        bytes,
        tensors = %Tensors(print),
        group = group.size(),
        ranks = ?group.ranks(),
        rank,
        seq,
        waiting_ns = Empty,
        moving_ns = Empty,
        last = Empty,
    )
}

/// Records the duration of the wait in the span, and the rank that joined last.
pub(super) fn waited(span: &Span, waiting: Duration, moving: Duration, last: Option<usize>) {
    span.record("waiting_ns", waiting.as_nanos() as u64);
    span.record("moving_ns", moving.as_nanos() as u64);
    if let Some(last) = last {
        span.record("last", last);
    }
}

/// Displays the shapes and dtypes of a call's tensors.
struct Tensors<'a>(&'a CallSignature);

impl fmt::Display for Tensors<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(CallSignature { tensors, pairs, .. }) = self;
        let given = pairs.iter().flat_map(|pairs| pairs.given.iter().cloned());
        let metas = tensors.iter().map(|tensor| Some(TensorMeta { shape: tensor.shape.clone(), dtype: tensor.dtype }));
        for (index, meta) in metas.chain(given).enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{}", tensor_text(&meta))?;
        }
        Ok(())
    }
}
