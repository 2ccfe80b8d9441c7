//! Which rows of a dataset a rank trains on.

mod loader;
mod sampler;
