//! [`ExchangedRequest`]: a collective whose tensors the ranks exchange by their data plane.
//!
//! ```text
//! rank                posts; the plane stages its tensors --- computes --- waits: takes what the others sent
//! completion thread            all have posted: starts the exchange
//! ```
//!
//! The exchange is started on every rank, also on one that drops its request, since the others
//! cannot complete theirs without it. The completion thread starts the exchanges in the order in
//! which this process finds them agreed, unless the rank waits first.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;

use super::HostBackend;
use super::request::{Finish, HostRequest};
use crate::comm::CommError;
use crate::comm::backend::{Backend, Completed, Failure, Request};
use crate::comm::control::match_table::OpHandle;
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::plane::{DataPlane, DataPlaneError, PlaneResult, TakeExchanged};

/// Builds a result with the plane of the call.
type FinishExchanged<T> = Box<dyn FnOnce(&dyn DataPlane, &CollectiveInputs) -> T + Send>;

/// A collective that this rank has posted, until it has the result.
pub(super) struct ExchangedRequest<T> {
    pub started: HostRequest<PlaneResult<TakeExchanged>>,
    pub backend: Arc<HostBackend>,
    pub plane: Arc<dyn DataPlane>,
    /// Global rank that posted the call.
    pub rank: usize,
    pub op: OpHandle,
    pub device: Device,
    pub finish: FinishExchanged<T>,
}

impl<T> ExchangedRequest<T> {
    /// Returns the function that starts an exchange, once all ranks have agreed on it. If that
    /// fails, the world fails, because no rank may wait for this one.
    pub fn start(
        rank: usize,
        plane: Arc<dyn DataPlane>,
        backend: Arc<HostBackend>,
    ) -> Finish<PlaneResult<TakeExchanged>> {
        Box::new(move |inputs| {
            plane.start(inputs).inspect_err(|error| {
                backend.rendezvous.find(failure(rank, &*plane, error));
            })
        })
    }
}

impl<T: Send + 'static> Request<T> for ExchangedRequest<T> {
    fn is_complete(&self) -> bool {
        self.started.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        let Self {
            started,
            backend,
            plane,
            rank,
            op,
            device,
            finish,
        } = *self;
        let started = Box::new(started).wait(deadline)?;
        let finished = Completed::timed(|| {
            let all = started.value?()?;
            let inputs = CollectiveInputs {
                is_distributed: true,
                ..backend.inputs(&all, op, &device)
            };
            Ok(finish(&*plane, &inputs))
        });
        match finished.value {
            Ok(value) => Ok(Completed {
                value,
                local_work: finished.local_work,
                last: started.last,
                transfer: None,
            }),
            Err(error) => Err(backend.fail(failure(rank, &*plane, &error))),
        }
    }
}

fn failure(rank: usize, plane: &dyn DataPlane, error: &DataPlaneError) -> Failure {
    Failure::Collective(CommError::DataPlane {
        rank,
        plane: plane.name().into(),
        problem: error.problem.clone(),
    })
}
