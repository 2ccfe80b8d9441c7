//! Mixed precision, against the unsharded model cast by hand.

pub mod reference;
mod io_casts;
mod parity;
mod policies;
mod reductions;
mod grad_scaler;
mod params;
