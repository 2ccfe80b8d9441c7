//! Agreement of all ranks on the outcome of a step.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::CheckpointError;
use crate::Result;
use crate::comm::{Call, Communicator};

/// Returns the outcomes of all ranks, in the order of the group; if one rank failed, the error of
/// the first that did.
///
/// # Collective
/// Every rank of `comm` must call it, also after a failure of its own.
pub(super) fn agree<T>(
    comm: &Communicator,
    label: &str,
    own: Result<T, CheckpointError>,
) -> Result<Vec<T>>
where
    T: Serialize + DeserializeOwned,
{
    let outcomes = comm.all_gather_object(Call::new(label), &own)?;
    Ok(outcomes
        .into_iter()
        .collect::<Result<_, CheckpointError>>()?)
}

/// Runs `step` on group rank 0 and returns its outcome on all ranks.
///
/// # Collective
/// Every rank of `comm` must call it.
pub(super) fn on_first_rank<T>(
    comm: &Communicator,
    label: &str,
    step: impl FnOnce() -> Result<T, CheckpointError>,
) -> Result<T>
where
    T: Serialize + DeserializeOwned,
{
    let own = (comm.group().rank() == 0).then(step);
    Ok(comm.broadcast_object(Call::new(label), own.as_ref(), 0)??)
}

/// Returns this rank's result if all ranks succeeded; otherwise, on every rank, the error of the
/// first that failed.
///
/// # Collective
/// Every rank of `comm` must call it, also after a failure of its own.
pub(super) fn agreed<T>(comm: &Communicator, label: &str, own: Result<T>) -> Result<T> {
    if !comm.any(Call::new(label), own.is_err())? {
        return own;
    }
    let failed = match &own {
        Ok(_) => None,
        Err(crate::Error::Checkpoint(error)) => Some(Ok(error.clone())),
        Err(error) => Some(Err(error.to_string())),
    };
    let outcomes = comm.all_gather_object(Call::new(label), &failed)?;
    match (
        own,
        outcomes
            .into_iter()
            .flatten()
            .next()
            .expect("one rank has failed"),
    ) {
        (_, Ok(error)) => Err(error.into()),
        (Err(error), _) => Err(error),
        (Ok(_), Err(text)) => Err(crate::Error::other(text)),
    }
}
