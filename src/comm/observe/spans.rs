//! Creation of a [`tracing`] span for each collective, for profilers.

use std::fmt;

use tracing::field::Empty;
use tracing::{Span, debug_span};

use super::{CallEvent, Posting};
use crate::comm::TensorMeta;
use crate::comm::backend::{CallSignature, tensor_text};

/// Consumes an event: creates the span when the call is posted, and adds the result of the wait to
/// it.
pub(super) fn observe(span: &mut Span, event: &CallEvent<'_>) {
    match *event {
        CallEvent::Posted(posting) => *span = posted(posting),
        CallEvent::Completed {
            waiting,
            local_work,
            last,
        } => {
            span.record("waiting_ns", waiting.as_nanos() as u64);
            span.record("moving_ns", local_work.as_nanos() as u64);
            if let Some(last) = last {
                span.record("last", last);
            }
        }
        _ => {}
    }
}

/// Returns the span of a call, or a disabled span if there is no subscriber.
///
/// Fields are evaluated and formatted only if there is a subscriber: the macro checks first.
fn posted(
    &Posting {
        group,
        seq,
        signature,
        phase,
        bytes,
        ..
    }: &Posting<'_>,
) -> Span {
    debug_span!(
        target: "burn_dtensor::comm",
        "collective",
        operation = signature.op.name(),
        label = &*signature.label,
        %phase,
        bytes,
        tensors = %Tensors(signature),
        group = group.size(),
        ranks = ?group.ranks(),
        rank = group.ranks()[group.rank()],
        seq,
        waiting_ns = Empty,
        moving_ns = Empty,
        last = Empty,
    )
}

/// Displays the shapes and dtypes of a call's tensors.
struct Tensors<'a>(&'a CallSignature);

impl fmt::Display for Tensors<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(CallSignature { tensors, pairs, .. }) = self;
        let given = pairs.iter().flat_map(|pairs| pairs.sent.iter().cloned());
        let metas = tensors.iter().map(|tensor| {
            Some(TensorMeta {
                shape: tensor.shape.clone(),
                dtype: tensor.dtype,
            })
        });
        for (index, meta) in metas.chain(given).enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{}", tensor_text(&meta))?;
        }
        Ok(())
    }
}
