//! The collectives of [`Communicator`](super::Communicator). Each method checks its arguments,
//! creates the signature on which the ranks must agree, and posts an operation to the backend.

/// Evaluates to the value of a check. If the check has found a problem, the method returns a failed
/// work.
macro_rules! accepted {
    ($checked:expr, $comm:ident, $op:expr, $call:ident) => {
        match $checked {
            Ok(value) => value,
            Err(problem) => return $comm.refuse($op, &$call, problem),
        }
    };
}

mod lists;
mod messages;
mod objects;
mod planned;
mod rooted;
mod rows;
mod shards;
mod sparse;
