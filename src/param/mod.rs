//! Distributed parameters, and the units in which they are gathered and reduced.
//!
//! [`fully_shard`](crate::fsdp::fully_shard) and [`parallelize`](crate::parallel::parallelize) both
//! turn a parameter into a [`DistributedParameter`]; they differ only in the ranks over which it is
//! sharded. This module stores the shards, runs the collectives of the units, and connects both to
//! burn's autodiff graph.
//!
//! ```text
//!   model   Param<Tensor>: base = this rank's shard, value = the full parameter
//!              │ reparameterization
//!   DistributedParameter ──> Unit: the parameters that one all-gather and one reduce-scatter move
//!                              │ ├── UnitComm: name, options, collectives
//!                              │ │     └── UnitSpec: parameters, groups; fixed by `fully_shard`
//!                              │ └── AccumulatedGrads, UnshardedCopies, ..: what forward and backward change
//!                              │ one forward and its backward
//!                            UnitPass ──> UnshardedParams: memory of the gathered parameters; CollectedGrads
//!                              │
//!            forward         unit() ── ForwardScope: all-gather, reads, reshard
//!            backward        graph nodes ── BackwardScheduler: all-gather, GradReducer: reduce-scatter, all-reduce
//! ```
//!
//! Files use those further down only: `Unit` owns state whose files know `UnitComm` or `UnitSpec`, and
//! not `Unit`. `cargo run -p tree -- uses param` prints which file uses which.
//!
//! # Invariants
//! 1. The base of a distributed parameter is this rank's shard. Optimizers, records and visitors
//!    see only the base.
//! 2. All ranks enter the units of a model in the same order. The order of all collectives, also of
//!    those in backward, follows from the order of forward, never from the depth of a rank's
//!    autodiff graph.
//! 3. The all-gathers of forward, the all-gathers of backward and the reductions each have their
//!    own sequence, so that none of them waits for another.
//! 4. A gradient reduction is waited for before the next one is issued, so at most the gradients of
//!    the units in reduction and in computation are unsharded at once.
//! 5. **Nothing local decides a collective.** Whether a rank posts a collective, and in which
//!    order, follows from what the program did: entries of units, backwards, steps, calls such as
//!    `reshard`. These are the same on all ranks. It never reads what `Drop`, burn's graph, a cache
//!    or a clock changes, such as the number of passes that exist. What decides is in
//!    `storage::copies` and `counts`. A pass that burn has dropped on one rank still takes part in
//!    the collectives of the others. In debug builds each all-gather carries a description of what
//!    decided it ([`Call::decision`](crate::comm::Call::decision)), so that ranks that decide by
//!    different inputs fail there.
//! 6. A `UnitPass` holds plain tensors only. The graph's nodes own it, so a tensor of the
//!    graph inside it would be a reference cycle.
//!
//! The order of the graph's nodes in backward has rules of its own, in `backward.md`: the module
//! page of `backward_nodes`.
//!
//! # Contents
//!
//! | topic | modules |
//! |---|---|
//! | parameters of a model; their replacement by shards, also of lazy ones | `model_scan`, `visit`; `attach` |
//! | meshes, specs; their comparison over ranks | `data_mesh`; `spec_check` |
//! | the parameter, its LoRA adapter, its views and gradients, its reads | `distributed`, `read`, `varying` |
//! | states that distinguish clones of a parameter; shards and their marker in records | `states`; `shards` |
//! | units: what is fixed; name, options and collectives; state; counts | `unit_spec`; `unit_comm`, `unit_name`, `options`; `unit`; `counts` |
//! | user-defined collectives and hooks | `custom`, `gradient_hook` |
//! | unsharded parameters of a pass; their state, copies, memory | `unsharded`; `storage`: `unshard_state`, `copies`, `slot` |
//! | all-gathers in flight; in advance, and resharding | `pending_all_gather`; `prefetch` |
//! | one forward of a unit | `forward`, `unit_stack`, `scope`, `begin_pass` |
//! | its backward: autodiff nodes, passes; the checks of debug builds; forwards without a backward | `backward_nodes`, `unit_pass`; `progress`; `sweep` |
//! | gradients: collected, accumulated, reduced in order, in buckets; told from zeros for none | `reduction`: `gradients`, `stages`, `order`, `bucket`, `buckets`, `flags`, `padding` |
//! | a step without gradients that wait in a unit; steps in backward | `missed_step`; `steps` |
//! | scheduler of a thread | `thread` |
//! | activation checkpointing; the leaves that a block copies | `recompute`; `copied_leaves` |
//! | CPU offload; what else of a model moves to the device | `offload`; `other_params` |
//! | comparison of values that must be identical on several ranks | `replica_check`, `replica_digests` |
//! | events of units, and what they return; panics and warnings that name a unit | `events`; `panicked`, `finished_graphs`, `warning` |
//! | conversion to an ordinary model; tensors by path | `full`; `stored` |
//! | module buffers such as running statistics | `buffers` |

mod attach;
mod backward_nodes;
mod begin_pass;
mod buffers;
mod copied_leaves;
mod counts;
mod custom;
mod data_mesh;
mod distributed;
mod error;
mod events;
mod finished_graphs;
mod forward;
mod full;
mod gradient_hook;
mod missed_step;
mod model_scan;
mod offload;
mod options;
mod other_params;
mod panicked;
mod pending_all_gather;
mod prefetch;
mod progress;
mod read;
mod recompute;
mod reduction;
mod replica_check;
mod replica_digests;
mod scope;
mod shard_codec;
mod shards;
mod spec_check;
mod states;
mod steps;
mod storage;
mod stored;
mod sweep;
mod thread;
#[cfg(feature = "testing")]
pub(crate) mod trace;
mod unit;
mod unit_comm;
mod unit_name;
mod unit_pass;
mod unit_spec;
mod unit_stack;
mod unsharded;
mod varying;
mod visit;
mod warning;

pub(crate) use attach::{ShardAssignment, attach_drawn, attach_shards};
pub use buffers::sync_buffers;
pub(crate) use buffers::{own_buffers, unshared};
pub(crate) use custom::AllReduceHook;
pub use custom::{ReducedGradients, UnitCollectives};
pub(crate) use data_mesh::FsdpMeshInfo;
pub(crate) use data_mesh::{combine, data_spec};
pub use distributed::DistributedParameter;
pub(crate) use distributed::{copying, make_units};
pub use error::ParamError;
pub use events::{Event, EventKind, ShardedState, TrainingState, record_events};
pub(crate) use events::{HostTensor, Probe, probe};
pub use forward::unit;
pub(crate) use forward::{ModuleUnits, units_of};
#[cfg(feature = "store")]
pub(crate) use full::full_model_if;
pub use full::{full_model, full_model_on};
pub use gradient_hook::{GradientBucket, GradientHook};
pub(crate) use missed_step::check_reduced;
pub(crate) use model_scan::{Layer, ModelScan, ScannedParam, check_patterns};
pub(crate) use offload::CpuOffload;
pub use offload::OffloadPolicy;
pub use options::{BufferSync, ReshardAfterForward};
pub(crate) use options::{Precision, RuntimeOptions};
pub(crate) use other_params::move_other_params;
pub(crate) use prefetch::unshard_unit;
pub use read::{Grads, ParamExt};
pub(crate) use read::{module_path, path, placed};
pub use recompute::checkpoint_activations;
pub(crate) use reduction::buckets::Buckets;
pub(crate) use reduction::partial_groups::REDUCE;
pub(crate) use replica_check::ReplicaCheck;
pub(crate) use scope::{give_up_backward, is_backward_gathered};
pub use shard_codec::{EncodedShard, ShardCodec};
pub(crate) use spec_check::check_specs;
pub(crate) use steps::{LeftGradients, awaited_leaves, backward_with_steps};
pub(crate) use stored::{
    NewValue, StoredTensor, release_shards, replace_tensors, stored_like, stored_tensors,
};
pub(crate) use unit::Unit;
pub(crate) use unit_name::UnitName;
pub(crate) use unit_spec::{
    BACKWARD_GATHER, DataParallelGroups, ModelNumbers, TpPlacement, UnitParam,
};
pub(crate) use visit::check_not_replaced;
pub(crate) use visit::{UnitShard, Visited, walk, walk_with_paths};
pub(crate) use warning::warn;
