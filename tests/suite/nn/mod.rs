//! burn-nn's layers over DTensors, against burn's own forward on one rank.

mod composition;
mod counts;
mod layers;
mod llama;
mod misuse;

use burn::module::Module;

/// A layer as a field of a model, for plans to name.
#[derive(Module, Debug)]
struct Only<L> {
    layer: L,
}
