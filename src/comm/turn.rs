//! [`in_turn`]: runs code on the ranks one after another.

use super::{CommError, Communicator};

/// Runs `body` after all ranks with a lower `turn` have completed theirs. There are `turns` turns; ranks with the
/// same turn run at the same time.
///
/// # Collective
/// Called by every rank of the group, with the same label and number of turns. `body` must not wait for ranks with
/// another turn.
///
/// # Errors
/// The error of `body`, after which the other ranks still have their turns, or a failure of another rank.
pub(crate) fn in_turn<T, E: From<CommError>>(
    group: &Communicator,
    label: &'static str,
    turn: usize,
    turns: usize,
    body: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let wait = |turns: usize| (0..turns).try_for_each(|_| group.barrier(label.into()).wait());
    wait(turn)?;
    let result = body();
    // Runs the remaining barriers even if `body` failed, because the other ranks wait for their turns.
    match (result, wait(turns - turn)) {
        (Ok(_), Err(error)) => Err(error.into()),
        (result, _) => result,
    }
}
