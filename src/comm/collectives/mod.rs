//! The methods of [`Communicator`](super::Communicator): each checks its arguments, says what ranks must agree on, and
//! asks the engine for one of its operations.

mod lists;
mod messages;
mod objects;
mod planned;
mod rooted;
mod rows;
mod shards;
mod sparse;
