//! Operators on DTensors: burn's names and signatures, and for each family the rule that says
//! what happens to placements.
//!
//! A rule says, in einsum's [letters](EinsumRule), what the dimensions of inputs and outputs are. Of the matrix
//! product it is `..mk, ..kn -> ..mn`, and from that follows a table for *one* mesh dimension. A row of it
//! says: with the inputs placed like this, every rank computes its part of the output alone, with burn's own
//! operator on local tensors (`S(d)` shards tensor dimension `d`, `R` replicates, `P` is partial):
//!
//! | axis | `a` | `b` | `a @ b` |
//! |---|---|---|---|
//! | `m` | `S(0)` | `R` | `S(0)` |
//! | `n` | `R` | `S(1)` | `S(1)` |
//! | `k` | `S(1)` | `S(0)` | `P(sum)` |
//!
//! The rest follows, for every operator alike:
//!
//! 1. **Any mesh.** A rank's part of an operator is that operator on parts, so each mesh dimension
//!    takes a row of its own.
//! 2. **Any placements.** Where the inputs come otherwise, the [cheapest rows](#how-layouts-are-chosen) are
//!    found and the inputs redistributed to them, in forward; [`RedistributePolicy::Deny`] makes that an
//!    error that says what to write.
//! 3. **Gradients.** A replicated input of a row whose other columns differ between ranks is
//!    [varied](crate::dtensor::DTensor::vary): its gradient is a term of a sum on every rank, and
//!    backward adds them up. Clones of one tensor share that, and whatever brings it elsewhere.
//! 4. **No cost when repeated.** A decision is cached by rule and specs.
//!
//! # How layouts are chosen
//!
//! Inputs that fit a row stay. Else the rows count that take the fewest collectives in forward, of these the
//! ones that send the least in forward, then the fewest collectives in backward, and the least sent in it. That
//! is so whatever the lengths, and whether or not a gradient is taken: a program's layouts are the same for every
//! batch that is cut alike and longer than 1, in training and in inference. What that costs is sometimes sent in
//! backward: a large weight that no plan has placed is sliced for nothing, and its gradient gathered.
//! [`explain`] shows it. A program says otherwise by placing its tensors or, under a [`CostModel`], lets the
//! time of both decide, of tensors as long as they are.
//!
//! # Collective
//!
//! Every rank of the mesh calls an operator, in the same order. It communicates where it
//! redistributes an input, and in backward where an input was moved or varies; else it is local, but
//! for those that tell others a few elements of their [parts](crate::dtensor::DTensor::cumsum), and say so.
//!
//! # Panics
//!
//! An operator unwinds with a typed [`Error`](crate::Error), on every rank alike: inputs or
//! arguments that do not fit ([`Operands`](crate::dtensor::DTensorError::Operands)), inputs on
//! different meshes, a redistribution that the policy denies, a collective that fails.
//! [`launch`](crate::comm::launch) returns it.
//!
//! # Plain tensors
//!
//! A plain tensor is no operand of a DTensor: what it is on other ranks, only the program knows. Beside one it
//! does not compile, and the compiler says what to write:
//!
//! ```compile_fail,E0277
//! # use burn::tensor::Tensor;
//! # use burn_dtensor::dtensor::DTensor;
//! fn add(x: DTensor<2>, plain: Tensor<2>) -> DTensor<2> {
//!     x + plain
//! }
//! ```
//!
//! ```
//! # use burn::tensor::Tensor;
//! # use burn_dtensor::{Result, dtensor::DTensor, placement::Placement};
//! fn add(x: DTensor<2>, plain: Tensor<2>) -> Result<DTensor<2>> {
//!     // The same on every rank.
//!     let everywhere = vec![Placement::Replicate; x.mesh().ndim()];
//!     let plain = DTensor::distribute_replicated(plain, x.mesh(), &everywhere)?;
//!     Ok(x + plain)
//! }
//! ```
//!
//! # Finding a rule
//!
//! Each family has a file in this folder; its rules are the [`EinsumRule`] on top.
//!
//! | file | operators |
//! |---|---|
//! | `arithmetic`, `unary` | `+ - * / %`, powers, exponentials, trigonometry, rounding, clamping |
//! | `compare`, `logic`, `mask`, `cast`, `like` | comparisons, Boolean and bitwise logic, masked values, kinds and dtypes |
//! | `activation` | activations and softmaxes |
//! | `matmul`, `linear`, `einsum`, `cross` | products |
//! | `reduce`, `order` | sums to covariances; along a dimension: cumulative sums, extrema, top k, sorting, medians |
//! | `view`, `permute`, `expand`, `windows` | shapes |
//! | `attention`, `conv`, `deform_conv`, `pool`, `interpolate`, `unfold`, `norm`, `batch_norm`, `embedding`, `dropout` | what layers are made of, in [`module`] |
//! | `slice`, `split`, `cat`, `flip`, `pad`, `triangle` | pieces put apart and together |
//! | `gather`, `gather_nd`, `select`, `one_hot`, `nonzero` | by index, and to indices |
//! | `linalg`, `signal`, `grid` | norms and decompositions; Fourier transforms; coordinates |
//! | `loss`, `ctc` | cross-entropy, also of class-sharded logits; losses of sequences |
//! | `random`, `categorical` | values and seeds that do not depend on the mesh, and draws |
//! | `read` | single numbers, for the program |
//! | [`replicated`] | any other, on whole tensors |
//!
//! How a call runs: [`apply`] has its inputs decided on ([`Operator::resolve`], from a cache), brings each to
//! where the decision wants it ([`Operator::input`]), runs burn's operator, and gives the result its spec
//! ([`Operator::output`]). `choose` is the search behind a decision, and `weigh` its costs; how a tensor gets
//! from one layout to another is [`plan`](crate::placement::plan)'s.
//!
//! # Adding an operator
//!
//! An elementwise operator is one line: its name, and how it goes through [partial](partial_rules) inputs.
//!
//! ```
//! use burn_dtensor::dtensor::DTensor;
//! use burn_dtensor::dtensor::ops::{EinsumRule, apply, partial_rules::NO_PARTIAL};
//!
//! /// `x * sigmoid(1.702 x)`.
//! fn quick_gelu<const D: usize>(x: DTensor<D>) -> DTensor<D> {
//!     apply(&EinsumRule::pointwise("quick_gelu", NO_PARTIAL), x, |x, _| x.clone() * burn::tensor::activation::sigmoid(x * 1.702))
//! }
//! ```
//!
//! Any other is its letters, with as many results as they say. All rows must hold for uneven parts too;
//! parts without elements are gathered first, unless the rule [takes them](ShardingRule::supports_empty_shards). A
//! ragged cut stays under a row if all that the row cuts is as long as its lengths add up to, and no
//! shard has to divide anything.
//!
//! ```
//! use burn::tensor::Tensor;
//! use burn_dtensor::dtensor::DTensor;
//! use burn_dtensor::dtensor::ops::{EinsumRule, apply};
//! use burn_dtensor::placement::{PartialOp, Placement::{Partial, Shard}};
//!
//! /// The sum of the elements of each row, and that of their squares: `[rows, columns] -> [rows, 1]`.
//! const MOMENTS: EinsumRule = EinsumRule::new("moments", "rc -> r1, r1");
//!
//! fn moments(x: DTensor<2>) -> (DTensor<2>, DTensor<2>) {
//!     apply(&MOMENTS, x, |x: Tensor<2>, _| (x.clone().sum_dim(1), x.square().sum_dim(1)))
//! }
//!
//! # use burn_dtensor::prelude::*;
//! # launch(Launch::threads(2), |world| {
//! let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//! let x = DTensor::<2>::ones([3, 4], &mesh, &[Shard(1)], world.device())?;
//! let (_, squares) = moments(x);
//! assert_eq!(squares.placements(), [Partial(PartialOp::Sum)]); // nothing was sent
//! assert_eq!(squares.full_tensor()?.into_data(), Tensor::<2>::full([3, 1], 4.0, world.device()).into_data());
//! # Ok::<_, burn_dtensor::Error>(())
//! # })?;
//! # Ok::<_, burn_dtensor::comm::LaunchError>(())
//! ```
//!
//! The few operators whose dimensions letters cannot name (views, permutations, expansion, grouped
//! channels) write their tables out, as a [`TableRule`] or by implementing [`ShardingRule`]. A computation that is
//! written once, at one place, needs none: a [`LocalMap`] says there what it takes and makes.
//!
//! A row never communicates: what needs its neighbours is made of redistributions. But of a dimension that it needs
//! whole, a row may ask the other ranks for a few elements of each part (`parts`), and says how many; and windows
//! over a dimension that is cut get what they lack in an exchange of their own, forward and backward (`halo`).
//!
//! The local operator must record as many nodes of the autodiff graph for parts of any length, or
//! ranks fall out of step in backward. Burn's own do, but for `matmul`, `linear` and `einsum`, which
//! do something else for a length of 1; the prover compares the depths of all ranks' results.
//!
//! Then prove it: `cargo run --example prove_rule` shows how, and tries every placement on every
//! mesh against the operator on whole tensors, forward and backward.
//!
//! Inside this crate a method with burn's name is a line in one of the macros of `methods` (`mapped!`,
//! `zipped!`, `along!`, `reductions!`), and its proof a `case!` in `tests/suite/rules`, without which the
//! suite fails.

// Deciding and running.
mod apply;
mod cost_model;
mod einsum_rule;
mod explain;
mod operand;
mod operator;
mod policy;
mod resolve_sharding;
mod rule;
mod select_strategy;
mod sharding_context;
mod strategy_cost;
mod subscripts;
mod table_rule;

// What rules share.
mod args;
mod empty;
mod halo;
mod local_map;
mod lookup;
mod methods;
pub mod partial_rules;
mod placements;
mod product;
mod shard_summaries;
mod update;
mod window;

// The families.
pub mod activation;
mod arithmetic;
mod attention;
mod batch_norm;
mod cast;
mod cat;
mod categorical;
mod compare;
mod conv;
mod cross;
mod ctc;
mod deform_conv;
mod dropout;
mod einsum;
mod embedding;
mod expand;
mod flip;
mod gather;
mod gather_nd;
pub mod grid;
mod interpolate;
mod like;
pub mod linalg;
mod linear;
mod logic;
pub mod loss;
mod mask;
mod matmul;
pub mod module;
mod nonzero;
mod norm;
mod one_hot;
mod order;
mod pad;
mod permute;
mod pool;
pub mod random;
mod read;
mod reduce;
mod replicated;
mod select;
pub mod signal;
mod slice;
mod split;
mod triangle;
mod unary;
mod unfold;
mod view;
mod windows;

pub use apply::{Inputs, Outputs, apply};
pub(crate) use args::operand_error;
pub use arithmetic::Scalar;
pub use cost_model::CostModel;
pub(crate) use dropout::check_probability;
pub use einsum::EinsumOperand;
pub use einsum_rule::{EinsumRule, EinsumRuleAt};
pub use explain::{Explanation, explain};
pub use local_map::LocalMap;
pub use operand::{Arg, Operand};
pub use operator::Operator;
pub use policy::RedistributePolicy;
pub use replicated::replicated;
pub use rule::{ShardingRule, Strategy, strategy};
pub use table_rule::TableRule;
