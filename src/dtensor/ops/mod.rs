//! Operators on DTensors, with burn's names and signatures.
//!
//! An operator takes and returns [`DTensor`](crate::dtensor::DTensor)s of global shapes, whatever
//! their placements. Most operators are methods, such as `x.matmul(w)`. The others are functions in
//! the modules below, such as [`activation::softmax`].
//!
//! ```
//! use burn_dtensor::comm::Op;
//! use burn_dtensor::placement::{PartialOp, Placement::{Partial, Shard}};
//! use burn_dtensor::prelude::*;
//!
//! launch(Launch::threads(2), |world| {
//!     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
//!     let x = DTensor::<2>::ones([4, 6], &mesh, &[Shard(1)], world.device())?;
//!     // Element by element: each rank computes its own columns.
//!     let y = (x * 2.0).exp();
//!     assert_eq!((y.dims(), y.local().dims()), ([4, 6], [4, 3]));
//!     // Over the sharded dimension: the result is partial, and nothing is sent.
//!     assert_eq!(y.clone().sum_dim(1).placements(), [Partial(PartialOp::Sum)]);
//!     assert_eq!(world.ledger().calls(Op::AllGather), 0);
//!     // A row of a softmax needs the sum of its exponentials: ranks gather two numbers for each row and shard.
//!     let p = activation::softmax(y, 1);
//!     assert_eq!(p.placements(), [Shard(1)]);
//!     assert_eq!(world.ledger().calls(Op::AllGather), 1);
//!     Ok(())
//! })?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! # How an operator runs
//! Every operator has a sharding rule. The rule and the placements of the inputs decide how the
//! ranks compute the operator together:
//!
//! ```text
//!  inputs (DTensor, Operand)
//!     |
//!     |  Operator::resolve      rule and specs -> layouts of inputs and outputs
//!     |    resolve_sharding       strategies that apply, from ShardingRule (EinsumRule, TableRule)
//!     |    select_strategy        the cheapest one for each mesh dimension
//!     |    strategy_cost            by counts, or by the times of a CostModel
//!     v
//!  Operator::input              redistributes an input if its layout differs
//!     v
//!  burn's operator              on the local tensors
//!     v
//!  Operator::output             the DTensor of the local result, with its spec
//! ```
//!
//! # Rules
//!
//! A rule describes the dimensions of inputs and outputs with einsum [letters](EinsumRule). The
//! matrix product has the rule `..?mk, ..?kn -> ..mn`, in which `?` marks axes that may be
//! broadcast. A table for *one* mesh dimension follows from it. Each row of the table is a
//! [`Strategy`]: if the inputs are placed like this, every rank computes its local output without
//! communication, with burn's own operator on local tensors. `S(d)` shards the tensor dimension
//! `d`, `R` replicates, and `P` is partial:
//!
//! | axis | `a` | `b` | `a @ b` |
//! |---|---|---|---|
//! | `m` | `S(0)` | `R` | `S(0)` |
//! | `n` | `R` | `S(1)` | `S(1)` |
//! | `k` | `S(1)` | `S(0)` | `P(sum)` |
//!
//! This is enough for every operator, because of four invariants:
//!
//! 1. **Any mesh.** The local computation of an operator is the operator itself, so each mesh
//!    dimension has its own strategy.
//! 2. **Any placements.** If the inputs are placed otherwise, the [cheapest
//!    strategies](#how-layouts-are-chosen) are selected and the inputs are redistributed in
//!    forward. Under [`RedistributePolicy::Deny`], this is an error that names the call to insert.
//! 3. **Gradients.** If an input is replicated in a strategy that has sharded or partial
//!    placements, it [varies](crate::dtensor::DTensor::vary): each rank computes a partial
//!    gradient, and backward sums them. Clones of one tensor share this sum, and every
//!    redistribution.
//! 4. **No repeated cost.** Decisions are cached by rule and specs.
//!
//! # How layouts are chosen
//!
//! Inputs that fit a strategy are not moved. Otherwise the strategy is chosen that has, in this
//! order:
//!
//! 1. the fewest collectives in forward,
//! 2. the least volume in forward,
//! 3. the fewest collectives in backward,
//! 4. the least volume in backward.
//!
//! The choice does not depend on lengths, nor on whether gradients are computed. So a program's
//! layouts are the same in training and in inference, for every batch of length greater than 1 with
//! the same sharding. The price is sometimes paid in backward: slicing a large weight that no plan
//! has placed costs nothing in forward, but its gradient is gathered. [`explain`] shows such cases.
//! To change the choice, place the tensors, or use a [`CostModel`]: then the total time of forward
//! and backward decides, computed from actual lengths.
//!
//! # Collective
//!
//! Every rank of the mesh must call the operators in the same order. Any operator communicates in
//! these two cases:
//!
//! | case | forward | backward |
//! |---|---|---|
//! | the placements of an input fit no strategy | the input is [redistributed](crate::dtensor#changes-of-layout) | its gradient is redistributed in reverse |
//! | an input is `Replicate`, and the strategy has sharded or partial placements | | one all-reduce of its gradient, shared by all clones of the input |
//!
//! An operator that consists of several others also redistributes its intermediate results.
//! Examples along a sharded dimension are `var`, `cov`, [`vector_norm`](linalg::vector_norm),
//! [`module::batch_norm_train`] and [`loss::cross_entropy`]: they reduce a mean, a sum or a maximum
//! before they use it.
//!
//! Some operators communicate along a sharded dimension although no input is redistributed:
//!
//! | operators | forward | backward |
//! |---|---|---|
//! | `cumsum`, `cumprod`, `cummax`, `cummin` | all-gather of one element of each shard | reduce-scatter |
//! | [`softmax`](activation::softmax), `log_softmax`, `softmin`, `quiet_softmax` | all-gather of two elements of each shard | reduce-scatter |
//! | `max_dim_with_indices`, `min_dim_with_indices`, `argmax`, `argmin`, `topk`, `topk_with_indices`, `argtopk` | all-gather of what each shard finds, or of the dimension if that is smaller | |
//! | `conv1d` to `conv3d`, `conv_transpose1d` to `conv_transpose3d`, `max_pool1d`, `max_pool2d`, `avg_pool1d`, `avg_pool2d`, and [`interpolate`](module::interpolate) by the modes `Nearest` and `Bilinear`, along a sharded length, height, width or depth | all-to-all of the elements at the borders of shards (halo) | all-to-all of their gradients |
//!
//! The numbers of elements are for each index of the other dimensions.
//!
//! Some results have no placement, or their shape depends on the values. `into_scalar`,
//! `all_close`, `argwhere`, `nonzero`, `mask_select` and [`replicated`] make their input or result
//! `Replicate` first, which communicates unless it is so already.
//!
//! In all other cases an operator is local, except that
//! [`Launch::with_replica_checks`](crate::comm::Launch::with_replica_checks) compares a plain
//! tensor of one element over the ranks. [`RedistributePolicy::Deny`] makes the redistribution of
//! an input an error. It permits the exchanges of the second table and the all-reduces of backward.
//!
//! # Panics
//!
//! An operator unwinds with a typed [`Error`](crate::Error) on every rank if inputs or arguments do
//! not fit ([`Operands`](crate::dtensor::DTensorError::Operands)), if inputs are on different
//! meshes, if the policy denies a redistribution, or if a collective fails.
//! [`launch`](crate::comm::launch) returns the error.
//!
//! # Plain tensors
//!
//! A plain tensor of one element combines with a DTensor like a number, and is taken as replicated.
//! Any other is an operand only as a DTensor, because only the program knows its values on other
//! ranks: `x + plain` unwinds with [`PlainTensor`](crate::dtensor::DTensorError::PlainTensor),
//! which names the conversion.
//!
//! ```
//! # use burn::tensor::Tensor;
//! # use burn_dtensor::dtensor::DTensor;
//! fn add(x: DTensor<2>, plain: Tensor<2>) -> DTensor<2> {
//!     let plain = DTensor::replicated_like(plain, &x); // identical on every rank
//!     x + plain
//! }
//! ```
//!
//! # Infinities and ties
//!
//! Two results may differ from the results on one device:
//!
//! - A partial sum passes through linear operators (`matmul`, `linear`, `einsum`, `*`, `/`,
//!   convolutions, `cross`) before it is reduced. A rank whose partial value is 0, such as one that
//!   does not hold the row that [`select`](crate::dtensor::DTensor::select) reads, multiplies the 0
//!   by the other factor. If that is an infinity or NaN, the sum is NaN, where one device may have
//!   an infinity. [Redistribute](crate::dtensor::DTensor::redistribute) the partial sum first.
//! - If several ranks hold the result of [`max`](crate::dtensor::DTensor::max), `min`, `max_abs` or
//!   their forms along dimensions, these ranks share its gradient evenly. On one device, the first
//!   of the equal elements has all of it. Each is a subgradient. The forms with indices, `topk`,
//!   sorting and `cummax` have the gradients of one device.
//!
//! # Finding a rule
//!
//! Each family has a file in this directory. Its rules are the [`EinsumRule`] constants at the top
//! of the file.
//!
//! | file | operators |
//! |---|---|
//! | `arithmetic`, `unary` | `+ - * / %`, powers, exponentials, trigonometry, rounding, clamping |
//! | `compare`, `logic`, `mask`, `cast`, `like` | comparisons, Boolean and bitwise logic, masked values, kinds and dtypes |
//! | `activation` | activations and softmaxes |
//! | `matmul`, `linear`, `einsum`, `cross` | products |
//! | `reduce`, `order` | sums to covariances; along a dimension: cumulative sums, extrema, top k, sorting, medians |
//! | `view`, `permute`, `expand`, `windows` | shapes |
//! | `attention`, `conv`, `deform_conv`, `pool`, `interpolate`, `unfold`, `norm`, `batch_norm`, `embedding`, `dropout` | components of layers, in [`module`] |
//! | `slice`, `split`, `cat`, `flip`, `pad`, `triangle` | splitting, joining, reordering and masking of elements |
//! | `gather`, `gather_nd`, `select`, `one_hot`, `nonzero` | selection and updates by index; conversion to indices |
//! | `linalg`, `signal`, `grid` | norms and decompositions; Fourier transforms; coordinates |
//! | `loss`, `ctc` | cross-entropy, also of class-sharded logits; losses of sequences |
//! | `random`, `categorical` | random values and seeds that do not depend on the mesh; samples of categories |
//! | `read` | single numbers, for the program |
//! | [`replicated`] | any other operator, on full tensors |
//!
//! A call of [`apply`] runs the steps of the picture above; decisions are cached.
//! [`plan`](crate::placement::plan) plans the steps from one layout to another.
//!
//! # Adding an operator
//!
//! An elementwise operator is one line: its name, and the [partial](partial_rules) inputs that it
//! accepts.
//!
//! ```
//! use burn_dtensor::dtensor::DTensor;
//! use burn_dtensor::dtensor::ops::{EinsumRule, apply, partial_rules::NO_PARTIAL};
//!
//! /// Returns `x * sigmoid(1.702 x)`.
//! fn quick_gelu<const D: usize>(x: DTensor<D>) -> DTensor<D> {
//!     apply(&EinsumRule::pointwise("quick_gelu", NO_PARTIAL), x, |x, _| x.clone() * burn::tensor::activation::sigmoid(x * 1.702))
//! }
//! ```
//!
//! Any other operator is described by its letters, with as many results as they state. All
//! strategies must be correct for uneven shards too. Inputs with empty shards are gathered first,
//! unless the rule [supports them](ShardingRule::supports_empty_shards). Uneven shard sizes are
//! kept if every dimension that the strategy shards has the length that they add up to, and the
//! strategy does not require divisibility.
//!
//! ```
//! use burn::tensor::Tensor;
//! use burn_dtensor::dtensor::DTensor;
//! use burn_dtensor::dtensor::ops::{EinsumRule, apply};
//! use burn_dtensor::placement::{PartialOp, Placement::{Partial, Shard}};
//!
//! /// The sum of the elements of each row, and the sum of their squares: `[rows, columns] -> [rows, 1]`.
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
//! A few operators have dimensions that letters cannot describe (views, permutations, expansion,
//! grouped channels). They list their strategies, in a [`TableRule`] or by implementing
//! [`ShardingRule`]. A computation that occurs at one place only needs no rule: a [`LocalMap`]
//! states the placements of its inputs and outputs there.
//!
//! A strategy does not communicate: an operator that needs elements of other ranks redistributes
//! its inputs. The second table of [Collective](#collective) has the two exceptions. Along a
//! dimension that it would otherwise gather, a strategy may exchange a few elements of each shard,
//! whose number it declares (`shard_summaries`). Windows over a sharded dimension fetch the
//! elements that they lack (`halo`).
//!
//! The local operator must record the same number of autodiff nodes for shards of any length.
//! Otherwise ranks run the collectives of backward in different orders. burn's own operators do,
//! except `matmul`, `linear` and `einsum`, which differ for a length of 1. The prover compares the
//! graph depths of all ranks' results.
//!
//! Then prove the rule: `cargo run --example prove_rule` shows how. It compares every placement on
//! every mesh with the operator on full tensors, forward and backward.
//!
//! In this crate, a method with burn's name is a line in one of the macros of `methods` (`mapped!`,
//! `zipped!`, `along!`, `reductions!`). Its proof is a `case!` in `tests/operators/rules`, and a
//! test fails without it.

// Resolving and running.
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

// Shared by rules.
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

// Families of operators.
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
