//! Operators on DTensors: burn's names and signatures, and for each family the rule that says
//! what happens to placements.

mod args;
mod arithmetic;
mod attention;
mod choose;
mod conv;
mod einsum;
mod empty;
mod expand;
mod linear;
pub mod loss;
mod matmul;
pub mod module;
mod permute;
mod placements;
pub mod pointwise;
mod policy;
mod pool;
mod resolved;
mod rows;
mod rule;
mod run;
mod unary;
mod view;

pub use einsum::EinsumOperand;
pub use policy::RedistributePolicy;
pub use resolved::{Resolved, resolve};
pub use rule::{Rule, Strategy, strategy};
pub use run::{binary, ternary, unary, variadic};
