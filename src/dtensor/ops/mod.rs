//! Operators on DTensors: burn's names and signatures, and for each family the rule that says
//! what happens to placements.
//!
//! A rule is a table for *one* mesh dimension. A row of it says: with the inputs placed like this,
//! every rank computes its part of the output alone, with burn's own operator on local tensors. Of
//! `a @ b`, for example (`S(d)` shards tensor dimension `d`, `R` replicates, `P` is a pending
//! reduction):
//!
//! | `a` | `b` | `a @ b` |
//! |---|---|---|
//! | `S(0)` | `R` | `S(0)` |
//! | `R` | `S(1)` | `S(1)` |
//! | `S(1)` | `S(0)` | `P(sum)` |
//!
//! The rest follows, for every operator alike:
//!
//! 1. **Any mesh.** A rank's part of an operator is that operator on parts, so each mesh dimension
//!    takes a row of its own.
//! 2. **Any placements.** Where the inputs come otherwise, the cheapest rows are found (the fewest
//!    collectives, then what is sent, whatever the lengths: a program's layouts are the same for
//!    every batch that is cut alike and longer than 1) and the inputs redistributed to them, in forward;
//!    [`RedistributePolicy::Deny`] makes that an error that says what to write.
//! 3. **Gradients.** A replicated input of a row whose other columns differ between ranks is
//!    [varied](crate::dtensor::DTensor::vary): its gradient is a term of a sum on every rank, and
//!    backward adds them up. Clones of one tensor share that, and whatever brings it elsewhere.
//! 4. **No cost when repeated.** A decision is cached by rule and specs.
//!
//! # Collective
//!
//! Every rank of the mesh calls an operator, in the same order. It communicates where it
//! redistributes an input, and in backward where an input was moved or varies; else it is local.
//!
//! # Panics
//!
//! An operator unwinds with a typed [`Error`](crate::Error), on every rank alike: inputs or
//! arguments that do not fit ([`Operands`](crate::dtensor::DTensorError::Operands)), inputs on
//! different meshes, a redistribution that the policy denies, a collective that fails.
//! [`launch`](crate::comm::launch) returns it.
//!
//! # Finding a rule
//!
//! Each family has a file in this folder, with its table on top.
//!
//! | file | operators |
//! |---|---|
//! | `pointwise` | the rule of all that is elementwise, and how it meets pending reductions |
//! | `arithmetic`, `unary`, `clamp` | `+ - * / %`, powers, exponentials, trigonometry, rounding, clamping |
//! | `compare`, `logic`, `mask`, `cast`, `like` | comparisons, Boolean and bitwise logic, masked values, kinds and dtypes |
//! | `activation` | activations and softmaxes |
//! | `matmul`, `linear`, `einsum`, `cross` | products |
//! | `attention`, `conv`, `pool`, `norm`, `embedding`, `dropout` | what layers are made of, in [`module`] |
//! | `reduce`, `scan`, `order` | sums to medians, cumulative sums, sorting and top k |
//! | `view`, `permute`, `expand` | shapes |
//! | `slice`, `split`, `cat`, `flip`, `pad`, `triangle` | pieces put apart and together |
//! | `gather`, `select`, `one_hot`, `mask_select` | by index |
//! | `loss` | cross-entropy, also of class-sharded logits |
//! | `random` | values and seeds that do not depend on the mesh |
//!
//! # Adding an operator
//!
//! A pointwise operator is one line: its name and how it goes through pending reductions.
//!
//! ```
//! use burn_dtensor::dtensor::DTensor;
//! use burn_dtensor::dtensor::ops::pointwise::{NOTHING, Pointwise, map};
//!
//! /// `x * sigmoid(1.702 x)`.
//! fn quick_gelu<const D: usize>(x: DTensor<D>) -> DTensor<D> {
//!     map(Pointwise::new("quick_gelu", NOTHING), x, |x| x.clone() * burn::tensor::activation::sigmoid(x * 1.702))
//! }
//! ```
//!
//! Any other is a [`Rule`] and a call of [`unary`], [`binary`], [`ternary`] or [`variadic`]. All
//! rows must hold for uneven parts too; parts without elements are gathered first, unless the rule
//! [takes them](Rule::takes_empty_parts). The all-`Replicate` row need not be listed.
//!
//! The local operator must record as many nodes of the autodiff graph for parts of any length, or
//! ranks fall out of step in backward. Burn's own do, but for `matmul`, `linear` and `einsum`, which
//! do something else for a length of 1; the prover compares the depths of all ranks' results.
//!
//! ```
//! use burn::tensor::Shape;
//! use burn_dtensor::Result;
//! use burn_dtensor::dtensor::DTensor;
//! use burn_dtensor::dtensor::ops::{Rule, Strategy, strategy, unary};
//! use burn_dtensor::placement::{PartialOp, Placement::{Partial, Shard}};
//!
//! /// Sum of the squares of each row: `[rows, columns] -> [rows, 1]`.
//! #[derive(Debug, Clone, PartialEq, Eq, Hash)]
//! struct RowEnergy;
//!
//! impl Rule for RowEnergy {
//!     fn name(&self) -> &'static str {
//!         "row_energy"
//!     }
//!
//!     fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
//!         Ok(vec![Shape::new([inputs[0][0], 1])])
//!     }
//!
//!     fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
//!         vec![
//!             strategy([Shard(0)], [Shard(0)]),
//!             strategy([Shard(1)], [Partial(PartialOp::Sum)]),
//!         ]
//!     }
//! }
//!
//! fn row_energy(x: DTensor<2>) -> DTensor<2> {
//!     unary(&RowEnergy, x, |x, _| x.square().sum_dim(1))
//! }
//!
//! # use burn_dtensor::prelude::*;
//! # launch(Launch::threads(2), |world| {
//! let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//! let x = DTensor::<2>::ones([3, 4], &mesh, &[Shard(1)], world.device())?;
//! let energy = row_energy(x);
//! assert_eq!(energy.placements(), [Partial(PartialOp::Sum)]); // nothing was sent
//! assert_eq!(energy.full_tensor()?.into_data(), burn::tensor::Tensor::<2>::full([3, 1], 4.0, world.device()).into_data());
//! # Ok::<_, Error>(())
//! # })?;
//! # Ok::<_, burn_dtensor::comm::LaunchError>(())
//! ```
//!
//! Then prove it: `cargo run --example prove_rule` shows how, and tries every placement on every
//! mesh against the operator on whole tensors, forward and backward.

// Deciding and running.
mod choose;
mod policy;
mod resolved;
mod rule;
mod run;

// What rules share.
mod along;
mod args;
mod empty;
mod lookup;
mod placements;
mod product;
mod rows;
mod update;

// The families.
pub mod activation;
mod arithmetic;
mod attention;
mod batch_norm;
mod cast;
mod cat;
mod clamp;
mod compare;
mod conv;
mod cross;
mod dropout;
mod einsum;
mod embedding;
mod expand;
mod flip;
mod gather;
mod like;
pub mod linalg;
mod linear;
mod logic;
pub mod loss;
mod mask;
mod mask_select;
mod matmul;
pub mod module;
mod norm;
mod one_hot;
mod order;
mod pad;
mod permute;
pub mod pointwise;
mod pool;
pub mod random;
mod reduce;
mod scan;
mod select;
mod slice;
mod split;
mod triangle;
mod unary;
mod view;

pub use einsum::EinsumOperand;
pub use policy::RedistributePolicy;
pub use resolved::{Resolved, resolve};
pub use rule::{Rule, Strategy, strategy};
pub use run::{binary, ternary, unary, variadic};
