//! Mixed precision, against the unsharded model cast by hand.

pub mod by_hand;
mod edges;
mod parity;
mod policies;
mod reductions;
mod scaler;
mod weights;
