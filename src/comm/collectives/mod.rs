//! The collectives of [`Communicator`](super::Communicator). Each method checks its arguments, creates the
//! signature on which the ranks must agree, and posts an operation to the backend.

mod lists;
mod messages;
mod objects;
mod planned;
mod rooted;
mod rows;
mod shards;
mod sparse;
