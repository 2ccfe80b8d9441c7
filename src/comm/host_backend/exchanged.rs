//! [`ExchangedRequest`]: a collective whose tensors the ranks exchange by their data plane.
//!
//! ```text
//! rank            posts; the plane keeps its tensors --- computes --- waits: takes what the others sent
//! any thread               all have posted: starts the exchange
//! ```
//!
//! The exchange is started on every rank, also on one that drops its request, since the others
//! cannot complete theirs without it. All exchanges are started in one
//! [order](super::exchange_order).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::Device;

use super::HostBackend;
use super::request::{Finish, HostRequest};
use crate::comm::backend::{Backend, Completed, Failure, Request};
use crate::comm::control::match_table::OpHandle;
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::plane::{DataPlane, DataPlaneError, PlaneResult, TakeExchanged};
use crate::comm::{CollectiveId, CommError};

/// Builds a result with the plane of the call.
type FinishExchanged<T> = Box<dyn FnOnce(&dyn DataPlane, &CollectiveInputs) -> T + Send>;

/// A collective that this rank has posted, until it has the result.
pub(super) struct ExchangedRequest<T> {
    pub started: HostRequest<PlaneResult<TakeExchanged>>,
    pub call: ExchangedCall,
    pub device: Device,
    pub finish: FinishExchanged<T>,
}

/// A call whose tensors are exchanged. Gives the result up when dropped.
pub(super) struct ExchangedCall {
    pub backend: Arc<HostBackend>,
    pub plane: Arc<dyn DataPlane>,
    /// Global rank that posted the call.
    pub rank: usize,
    pub op: OpHandle,
    pub id: CollectiveId,
    /// True if the exchange is started only when some rank needs the result, and this one has not
    /// waited for it.
    pub may_decline: bool,
    /// Set when the rank has the result of an exchange of the group, in which all its ranks have
    /// connected.
    pub is_connected: Arc<AtomicBool>,
}

impl Drop for ExchangedCall {
    fn drop(&mut self) {
        if self.may_decline {
            self.backend.decline_exchange(self.op);
        }
    }
}

impl<T> ExchangedRequest<T> {
    /// Returns the function that starts an exchange, once all ranks have agreed on it. If that
    /// fails, the world fails, because no rank may wait for this one.
    pub fn start(
        rank: usize,
        plane: Arc<dyn DataPlane>,
        backend: Arc<HostBackend>,
    ) -> Finish<PlaneResult<TakeExchanged>> {
        Box::new(move |inputs| backend.start_part(rank, &*plane, inputs))
    }
}

impl<T: Send + 'static> Request<T> for ExchangedRequest<T> {
    /// Returns true once all ranks have agreed: results that are usable in stream order need no more.
    fn is_complete(&self) -> bool {
        self.started.is_complete()
    }

    fn start(&mut self) {
        if self.call.may_decline {
            self.call.backend.want_exchange(self.call.op);
        }
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        let Self {
            started,
            mut call,
            device,
            finish,
        } = *self;
        call.may_decline = false;
        let ExchangedCall {
            backend,
            plane,
            rank,
            op,
            id,
            is_connected,
            ..
        } = &call;
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        backend.await_exchange(*rank, *op, id, deadline)?;
        is_connected.store(true, Ordering::Release);
        let started = Box::new(started).wait(left())?;
        let all = started
            .value
            .and_then(|take| take(left()))
            .map_err(|error| backend.exchange_error(*rank, &**plane, &error, Some(id.clone())))?;
        let inputs = CollectiveInputs {
            is_distributed: true,
            ..backend.inputs(&all, *op, &device)
        };
        let finished = Completed::timed(|| finish(&**plane, &inputs));
        Ok(Completed {
            local_work: started.local_work + finished.local_work,
            last: started.last,
            transfer: started.transfer,
            ..finished
        })
    }
}

impl HostBackend {
    /// Starts the part of `rank` in an exchange. If that fails, the world fails.
    pub(super) fn start_part(
        &self,
        rank: usize,
        plane: &dyn DataPlane,
        inputs: &CollectiveInputs<'_>,
    ) -> PlaneResult<TakeExchanged> {
        plane.start(inputs).inspect_err(|error| {
            self.rendezvous.find(failure(rank, plane.name(), error));
        })
    }

    /// Fails the world because of an exchange of `rank` in call `id`. Returns the error of the first
    /// failure, from which that of the plane may follow.
    pub(super) fn exchange_error(
        &self,
        rank: usize,
        plane: &dyn DataPlane,
        error: &DataPlaneError,
        id: Option<CollectiveId>,
    ) -> CommError {
        let error = self.fail(failure(rank, plane.name(), error));
        self.failure().map_or(error, |failure| failure.error(id))
    }
}

pub(super) fn failure(rank: usize, plane: &str, error: &DataPlaneError) -> Failure {
    Failure::Collective(CommError::DataPlane {
        rank,
        plane: plane.into(),
        problem: error.problem.clone(),
    })
}
