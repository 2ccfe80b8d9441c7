//! [`in_turn`]: one rank after another.

use super::{CommError, Communicator};

/// Runs `body` when those with lower turns are through; there are `turns` of them, and ranks with the same
/// run together.
///
/// # Collective
/// Every rank of the group, with the same label and number of turns. `body` must not wait for ranks that
/// have another turn.
///
/// # Errors
/// Those of `body`, for which the others do not wait in vain, and a failure of another rank.
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
    // Where it failed too: the others wait for their turns.
    match (result, wait(turns - turn)) {
        (Ok(_), Err(error)) => Err(error.into()),
        (result, _) => result,
    }
}
