//! Distributed parameters: stored as this rank's shard, read as the whole, moved unit by unit.
//!
//! What [`fully_shard`](crate::fsdp::fully_shard) and [`parallelize`](crate::parallel::parallelize) make of a parameter
//! is one thing, a [`DistributedParameter`]: they differ in over which ranks it is cut. Units of parameters
//! are gathered and reduced here, whoever made them.
//!
//! | to find | look in |
//! |---|---|
//! | every parameter of a model; what it becomes; who draws its values | `inventory`, `attach_shards`; `lazy` |
//! | weights with LoRA | `adapter` |
//! | whether they all still are; where they are | `replaced`, `device` |
//! | over which ranks it is cut, and cut again | `data_mesh`, `combine`, `apply_tp_after_fsdp` |
//! | the parameter, its views and its gradient | `distributed`, `view`, `read`, `varying`, `grad` |
//! | what moves together, over which groups | `unit`, `unit_path`, `shards`, `exchange`, `terms` |
//! | what becomes of whole gradients | `trained`, `reduce`, `pass`; `waiting`, where they are not reduced yet |
//! | in which element types | `precision` |
//! | shards in host memory; what is beside them then | `offload`; `other_params` |
//! | what is gathered before it is needed | `gathering`, `unshard`, `prefetch` |
//! | what units do, for all to see | `events` |
//! | what the program has units do, or does in their place | `fsdp_module`, `runtime_options`; `custom` |
//! | blocks that keep no activations | `recompute` |
//! | what is compared between ranks that hold it alike | `verify` |
//! | one forward through a unit, and its backward | `enter`, `open`, `scope`, `pass` |
//! | a parameter read outside its unit | `read`, `outside` |
//! | what backward does, and in which order; that it has been there | `graph`, the page; `order`, `progress`; `through` |
//! | what forwards hold that no backward comes to | `sweep` |
//! | whose the gathered memory is; several passes' | `buffer`; `buffer/shared` |
//! | the ordinary model again; all parameters in a table | `full`; `describe` |
//! | what records say of a shard | `part` |
//! | what is beside the parameters: running statistics | `running` |
//! | where a layer's activations go, and a module's | `style`, `prepare`, `prepared` |

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
mod partial_grad_groups;
mod pending_all_gather;
mod plan_cache;
mod precision;
mod prefetch;
mod prepare;
mod prepared;
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
mod style;
mod sweep;
mod through;
mod tp_after_fsdp;
#[cfg(feature = "testing")]
pub(crate) mod trace;
mod trained;
mod unit;
mod unit_name;
mod unit_pass;
mod unit_stack;
mod unshard;
mod varying;
mod verify;
mod view;
mod visit;

pub(crate) use adapter::take_burns;
pub(crate) use attach::{ShardAssignment, attach_shards};
pub(crate) use buffers::own_buffers;
pub use buffers::{BufferSync, sync_buffers};
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
pub use full::{full_model, full_model_on};
pub use grad::Grads;
pub use io::{FloatMapFn, TensorTree};
pub(crate) use lazy::{in_turn, is_any_lazy};
pub(crate) use model_scan::{ModelScan, ScannedParam};
pub(crate) use offload::CpuOffload;
pub use offload::OffloadPolicy;
pub(crate) use other_params::move_other_params;
pub(crate) use partial_grad_groups::REDUCE;
pub(crate) use precision::Precision;
pub use prepare::PrepareModuleInputOutput;
pub(crate) use prepare::{IoLayout, ModuleIoLayouts};
pub(crate) use prepared::{Prepared, prepared_of};
pub use recompute::checkpoint_activations;
pub(crate) use replaced::check_not_replaced;
pub(crate) use replica_check::ReplicaCheck;
pub use reshard::ReshardAfterForward;
pub(crate) use style::LayerStyles;
pub use style::{LayerParam, Style};
pub(crate) use tp_after_fsdp::{TpAfterFsdp, apply_tp_after_fsdp};
pub(crate) use unit::{AGAIN, DataParallelGroups, ModelNumbers, TpPlacement, Unit, UnitParam};
pub(crate) use unit_name::UnitName;
pub use unshard::{UnshardHandle, reshard, unshard};
pub use view::ParamExt;
pub(crate) use view::{layer_styles, module_path, path};
pub(crate) use visit::{Visited, walk, walk_with_paths};
