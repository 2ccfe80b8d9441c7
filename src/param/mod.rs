//! Distributed parameters, and the units in which they are gathered and reduced.
//!
//! [`fully_shard`](crate::fsdp::fully_shard) and [`parallelize`](crate::parallel::parallelize) both turn a parameter
//! into a [`DistributedParameter`]; they differ only in the ranks over which it is sharded. This module stores the
//! shards, runs the collectives of the units, and connects both to burn's autodiff graph.
//!
//! ```text
//!   model   Param<Tensor>: base = this rank's shard, value = the full parameter
//!              │ reparameterization
//!   DistributedParameter ──> Unit: the parameters that one all-gather and one reduce-scatter move
//!                              │ one forward and its backward
//!                            UnitPass ──> UnshardedParams: memory of the gathered parameters and gradients
//!                              │
//!            forward         unit() ── ForwardScope: all-gather, reads, reshard
//!            backward        graph nodes ── BackwardScheduler: all-gather, GradReducer: reduce-scatter, all-reduce
//! ```
//!
//! # Invariants
//! 1. The base of a distributed parameter is this rank's shard. Optimizers, records and visitors see only the base.
//! 2. All ranks enter the units of a model in the same order. The order of all collectives, also of those in
//!    backward, follows from the order of forward, never from the depth of a rank's autodiff graph.
//! 3. The all-gathers of forward, the all-gathers of backward and the reductions each have their own sequence, so
//!    that none of them waits for another.
//! 4. A gradient reduction is waited for before the next one is issued, so at most the gradients of the units in
//!    reduction and in computation are unsharded at once.
//! 5. A `UnitPass` holds plain tensors only. The graph's nodes own it, so a tensor of the
//!    graph inside it would be a reference cycle.
//!
//! The order of the graph's nodes in backward has rules of its own, in `backward.md`: the module page of
//! `backward_nodes`.
//!
//! # Contents
//!
//! | topic | modules |
//! |---|---|
//! | parameters of a model; replacement by shards; lazy parameters | `model_scan`, `visit`; `attach`; `lazy` |
//! | LoRA adapters of distributed parameters | `adapter` |
//! | checks that a model is still distributed, and on the right device | `replaced`; `device` |
//! | meshes and specs | `data_mesh`, `combine` |
//! | the parameter, its views and its gradient | `distributed`, `view`, `read`, `varying`, `grad` |
//! | states that distinguish clones of a parameter | `states` |
//! | units and their shards | `unit`, `unit_name`, `shards`, `partial_grad_groups` |
//! | collectives of units | `gather`, `exchange`, `plan_cache` |
//! | gradients and their reduction; accumulated gradients | `trained`, `reduce`, `unit_pass`; `accumulated_grads` |
//! | mixed precision | `precision` |
//! | CPU offload of shards; the rest of such a model | `offload`; `other_params` |
//! | all-gathers in advance, and resharding | `pending_all_gather`, `unshard`, `prefetch`; `reshard` |
//! | events of units; what units return, and panics in them | `events`; `probe` |
//! | options at run time; user-defined collectives and hooks | `fsdp_module`, `runtime_options`; `custom` |
//! | activation checkpointing | `recompute` |
//! | comparison of values that must be identical on several ranks | `verify`, `replica_check` |
//! | one forward of a unit, and its backward; inputs and outputs | `enter`, `unit_stack`, `scope`, `unit_pass`; `io` |
//! | parameters read outside their unit; warnings | `read`, `outside`; `warning` |
//! | panics inside units | `panicked` |
//! | autodiff nodes, order of backward | `backward_nodes`, `reduction_order` |
//! | checks of backward, and errors of a second one | `progress`, `trace`; `through` |
//! | memory held by forwards without a backward | `sweep` |
//! | unsharded parameters: their state, copies, memory | `storage`: `unshard_state`, `copies`, `slot` |
//! | conversion to an ordinary model; table of all parameters | `full`; `describe` |
//! | the marker of a shard in records | `shard_marker` |
//! | the tensors of a model by path: reading and replacing them | `stored` |
//! | module buffers such as running statistics | `buffers` |

mod accumulated_grads;
mod adapter;
mod attach;
mod backward_nodes;
mod buffers;
mod combine;
mod custom;
mod data_mesh;
mod describe;
mod device;
mod distributed;
mod enter;
mod error;
mod events;
mod exchange;
mod fsdp_module;
mod full;
mod gather;
mod grad;
mod io;
mod lazy;
mod model_scan;
mod offload;
mod other_params;
mod outside;
mod panicked;
mod partial_grad_groups;
mod pending_all_gather;
mod plan_cache;
mod precision;
mod prefetch;
mod probe;
mod progress;
mod read;
mod recompute;
mod reduce;
mod reduction_order;
mod replaced;
mod replica_check;
mod reshard;
mod runtime_options;
mod scope;
mod shard_marker;
mod shards;
mod states;
mod storage;
mod stored;
mod sweep;
mod through;
#[cfg(feature = "testing")]
pub(crate) mod trace;
mod trained;
mod unit;
mod unit_name;
mod unit_pass;
mod unit_stack;
mod unreduced;
mod unshard;
mod varying;
mod verify;
mod view;
mod visit;
mod warning;

pub(crate) use attach::{ShardAssignment, attach_shards};
pub use buffers::{BufferSync, sync_buffers};
pub(crate) use buffers::{own_buffers, unshared};
pub(crate) use combine::{combine, data_spec};
pub use custom::{ReducedGradients, UnitCollectives};
pub(crate) use data_mesh::FsdpMeshInfo;
pub use describe::{Description, describe};
pub use distributed::DistributedParameter;
pub(crate) use distributed::make_units;
pub use enter::unit;
pub use error::ParamError;
pub use events::{Event, EventKind, ShardedState, TrainingState, record_events};
pub use fsdp_module::{FsdpModule, NoSync, Prefetch};
#[cfg(feature = "store")]
pub(crate) use full::full_model_if;
pub use full::{full_model, full_model_on};
pub use grad::Grads;
pub use io::{TensorMapFn, TensorTree};
pub(crate) use lazy::{in_turn, is_any_lazy};
pub(crate) use model_scan::{Layer, ModelScan, ScannedParam};
pub(crate) use offload::CpuOffload;
pub use offload::OffloadPolicy;
pub(crate) use other_params::move_other_params;
pub(crate) use partial_grad_groups::REDUCE;
pub(crate) use precision::Precision;
pub(crate) use probe::{HostTensor, Probe, probe};
pub use recompute::checkpoint_activations;
pub(crate) use replaced::check_not_replaced;
pub(crate) use replica_check::ReplicaCheck;
pub use reshard::ReshardAfterForward;
pub(crate) use shards::plain;
pub(crate) use stored::{NewValue, StoredTensor, release_shards, replace_tensors, stored_tensors};
pub(crate) use unit::{AGAIN, DataParallelGroups, ModelNumbers, TpPlacement, Unit, UnitParam};
pub(crate) use unit_name::UnitName;
pub(crate) use unreduced::check_reduced;
pub use unshard::{UnshardHandle, reshard, unshard};
pub use view::ParamExt;
pub(crate) use view::{module_path, path, placed};
pub(crate) use visit::{Visited, walk, walk_with_paths};
pub(crate) use warning::warn;
