//! Operators on DTensors: burn's names and signatures, and for each family the rule that says
//! what happens to placements.

mod args;
mod arithmetic;
mod attention;
mod cat;
mod choose;
mod conv;
mod cross;
mod dropout;
mod einsum;
mod embedding;
mod empty;
mod expand;
mod flip;
mod gather;
mod linear;
mod lookup;
pub mod loss;
mod mask_select;
mod matmul;
pub mod module;
mod one_hot;
mod pad;
mod permute;
mod placements;
pub mod pointwise;
mod policy;
mod pool;
pub mod random;
mod resolved;
mod rows;
mod rule;
mod run;
mod select;
mod slice;
mod split;
mod triangle;
mod unary;
mod update;
mod view;

pub use einsum::EinsumOperand;
pub use policy::RedistributePolicy;
pub use resolved::{Resolved, resolve};
pub use rule::{Rule, Strategy, strategy};
pub use run::{binary, ternary, unary, variadic};
