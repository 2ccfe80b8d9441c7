//! Distributed parameters: stored as this rank's shard, read as the whole, moved unit by unit.
//!
//! What [`fully_shard`](crate::fsdp::fully_shard) and [`parallelize`](crate::parallel::parallelize) make of a parameter is
//! one thing, a [`DistributedParameter`]: they differ in over which ranks it is cut. Units of parameters
//! are gathered and reduced here, whoever made them.
//!
//! | to find | look in |
//! |---|---|
//! | every parameter of a model; what it becomes | `inventory`, `attach` |
//! | over which ranks it is cut, and cut again | `combine`, `recut` |
//! | the parameter, its views and its gradient | `distributed`, `view`, `read`, `varying`, `grad` |
//! | what moves together, over which groups | `unit`, `shards`, `reduce` |
//! | one forward through a unit, and its backward | `enter`, `open`, `scope`, `pass` |
//! | what backward does, and in which order | `graph`, the page; `order`, `progress` |
//! | whose the gathered memory is | `buffer` |
//! | the ordinary model again | `full` |
//! | where a layer's activations go | `style` |

mod attach;
mod buffer;
mod combine;
mod distributed;
mod enter;
mod error;
mod full;
mod grad;
mod graph;
mod inventory;
mod io;
mod open;
mod order;
mod pass;
mod progress;
mod read;
mod recut;
mod reduce;
mod reshard;
mod scope;
mod shards;
mod style;
#[cfg(feature = "testing")]
pub(crate) mod trace;
mod unit;
mod unshard;
mod varying;
mod view;
mod visit;

pub(crate) use attach::{Attachment, attach};
pub(crate) use combine::{combine, data_spec};
pub use distributed::DistributedParameter;
pub(crate) use distributed::make_units;
pub use enter::unit;
pub use error::ParamError;
pub use full::{full_model, full_model_on};
pub use grad::Grads;
pub(crate) use inventory::{Found, Inventory};
pub use io::UnitTensors;
pub(crate) use recut::{Recut, recut};
pub use reshard::ReshardAfterForward;
pub use style::Style;
pub(crate) use unit::{AGAIN, DataParallel, REDUCE, TensorParallel, Unit, UnitParam};
pub use unshard::{UnshardHandle, reshard, unshard};
pub use view::ParamExt;
pub(crate) use view::path;
pub(crate) use visit::{Visited, distributed_parameters, distributed_parameters_with_paths};
