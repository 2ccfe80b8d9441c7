//! [`agree`]: one outcome of a step that several ranks take, on all of them.
//!
//! A rank that fails alone must not leave the others in a later collective. So after a step that may
//! fail on one rank, all ranks agree on its outcome, and either all continue or all have the error.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Call, Communicator};
use crate::{Error, Result};

/// Returns the outcomes of all ranks, in the order of the group; if one rank failed, the error of
/// the first that did.
///
/// # Collective
/// Every rank of `comm` must call it, also after a failure of its own.
pub(crate) fn agree<T, E>(comm: &Communicator, label: &str, own: Result<T, E>) -> Result<Vec<T>>
where
    T: Serialize + DeserializeOwned,
    E: Serialize + DeserializeOwned + Into<Error>,
{
    let outcomes = comm.all_gather_object(Call::new(label), &own)?;
    outcomes
        .into_iter()
        .map(|outcome| outcome.map_err(Into::into))
        .collect()
}

/// Runs `step` on group rank 0 and returns its outcome on all ranks.
///
/// # Collective
/// Every rank of `comm` must call it.
pub(crate) fn agree_on_first<T, E>(
    comm: &Communicator,
    label: &str,
    step: impl FnOnce() -> Result<T, E>,
) -> Result<T>
where
    T: Serialize + DeserializeOwned,
    E: Serialize + DeserializeOwned + Into<Error>,
{
    let own = (comm.group().rank() == 0).then(step);
    let outcome = comm.broadcast_object(Call::new(label), own.as_ref(), 0)?;
    outcome.map_err(Into::into)
}

/// Returns this rank's result if all ranks succeeded; otherwise, on every rank, the error of the
/// first that failed. The results are not exchanged. `typed` returns an error that other ranks get
/// as it is; of other errors they get the text.
///
/// # Collective
/// Every rank of `comm` must call it, also after a failure of its own.
pub(crate) fn agree_on_success<T, E>(
    comm: &Communicator,
    label: &str,
    own: Result<T>,
    typed: fn(&Error) -> Option<E>,
) -> Result<T>
where
    E: Serialize + DeserializeOwned + Into<Error>,
{
    if !comm.any(Call::new(label), own.is_err())? {
        return own;
    }
    let failed = own
        .as_ref()
        .err()
        .map(|error| typed(error).ok_or_else(|| error.to_string()));
    let failures = comm.all_gather_object(Call::new(label), &failed)?;
    let first = failures.into_iter().flatten().next();
    match (own, first.expect("one rank has failed")) {
        (_, Ok(error)) => Err(error.into()),
        (Err(error), _) => Err(error),
        (Ok(_), Err(text)) => Err(Error::other(text)),
    }
}
