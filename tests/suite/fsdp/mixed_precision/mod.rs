//! Mixed precision, against the unsharded model cast by hand.

mod grad_scaler;
mod io_casts;
mod params;
mod parity;
mod policies;
mod reductions;
pub mod reference;
