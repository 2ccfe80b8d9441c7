//! Which ranks survive a failure, and the worlds in which they continue ([`World::shrink`](super::World::shrink)).
//!
//! ```text
//! world of 4 ranks          rank 2 is lost           the survivors
//! 0 1 2 3   --failure-->    0 1 . 3   --shrink-->    0 1 2           a new backend, with ranks 0, 1 and 3
//! ```
//!
//! | file | content |
//! |---|---|
//! | `agreement` | agreement of processes on the survivors; pure state |
//! | `survivors` | the agreement as ranks wait for it |
//!
//! The worlds of which a rank was a member are in `comm::rank_worlds`.
//! Collectives know nothing of it: a shrunk world is an ordinary world with a backend of its own. A backend holds a
//! [`Membership`], to which it passes the ends of ranks, the losses of processes and the messages of other processes.

mod agreement;
mod survivors;

pub(in crate::comm) use agreement::MembershipMessage;
pub(in crate::comm) use survivors::{Membership, MembershipPeers};
