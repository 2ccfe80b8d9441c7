//! [`ObservedCall`]: a call of a rank, which emits its events.

use std::sync::Arc;
use std::time::Instant;

use tracing::Span;

use super::event::{self, CallEvent, CallInfo, Posting};
use super::flight::{RecordedCall, Sequence};
use super::{Ledger, spans};
use crate::comm::backend::{Completed, PostResult};
use crate::comm::{CommError, OpTiming, TransferTiming};

/// A call of a rank, from its posting until the rank has its result, or no longer needs it.
pub(in crate::comm) struct ObservedCall {
    ledger: Arc<Ledger>,
    pub info: CallInfo,
    /// True if the ledger counts the call only when the rank waits for its result.
    is_deferred: bool,
    is_in_flight: bool,
    record: RecordedCall,
    span: Span,
}

impl ObservedCall {
    /// Observes a call that the rank of `ledger` posts now.
    pub fn post(
        ledger: Arc<Ledger>,
        sequence: Arc<Sequence>,
        info: CallInfo,
        posting: &Posting<'_>,
        is_deferred: bool,
    ) -> Self {
        let posted = Instant::now();
        let span = Span::none();
        let record = RecordedCall {
            posted,
            sequence,
            index: 0,
        };
        let mut call = Self {
            ledger,
            info,
            is_deferred,
            is_in_flight: false,
            record,
            span,
        };
        call.emit(posted, CallEvent::Posted(posting));
        if !is_deferred {
            call.emit(posted, CallEvent::Counted);
        }
        call
    }

    /// Posts the call to the backend with `begin`.
    pub fn begin<T>(&mut self, begin: impl FnOnce() -> PostResult<T>) -> PostResult<T> {
        let pending = self.span.in_scope(begin);
        self.is_in_flight = pending.is_ok();
        self.emit(
            Instant::now(),
            if self.is_in_flight {
                CallEvent::Accepted
            } else {
                CallEvent::Refused
            },
        );
        pending
    }

    /// Waits with `wait` for the result.
    pub fn wait<T>(
        mut self,
        wait: impl FnOnce() -> Result<Completed<T>, CommError>,
    ) -> Result<(T, OpTiming), CommError> {
        let start = Instant::now();
        if self.is_deferred {
            self.emit(start, CallEvent::Counted);
        }
        self.emit(start, CallEvent::Waiting);
        let waited = self.span.in_scope(wait);
        let end = Instant::now();
        self.is_in_flight = false;
        let Completed {
            value,
            local_work,
            last,
            transfer,
        } = waited.inspect_err(|_| self.emit(end, CallEvent::Failed))?;
        let waiting = end
            .saturating_duration_since(start)
            .saturating_sub(local_work);
        self.emit(
            end,
            CallEvent::Completed {
                waiting,
                local_work,
                last,
            },
        );
        let posted = self.record.posted;
        let started = || end.checked_sub(local_work).unwrap_or(start);
        let transfer = transfer.unwrap_or_else(|| TransferTiming {
            send_started: Some(posted),
            started: started(),
            completed: end,
        });
        Ok((
            value,
            OpTiming {
                posted,
                transfer,
                requested: start,
            },
        ))
    }

    /// Passes an event to every consumer.
    fn emit(&mut self, at: Instant, event: CallEvent<'_>) {
        let Self {
            ledger,
            info,
            record,
            span,
            ..
        } = self;
        ledger.recorder().observe(record, info, at, &event);
        ledger.observe(info, &event);
        spans::observe(span, &event);
        event::tell(info, &event);
    }
}

impl Drop for ObservedCall {
    fn drop(&mut self) {
        if self.is_in_flight {
            self.emit(Instant::now(), CallEvent::Dropped);
        }
    }
}
