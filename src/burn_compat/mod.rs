//! Everything that relies on what burn does but does not promise, one file for each dependence.
//!
//! Each file says what it relies on, has a test that fails when burn changes it, and ends with the
//! issue that would make the file unnecessary, as it would be filed with burn.
//!
//! | file | relies on |
//! |---|---|
//! | `visitor` | names of fields and of the types that declare them; the order in which a parameter and its reparameterization are visited |
//! | `layers` | the place from which burn's derived code calls a visitor |
//! | `lazy` | the shape of a parameter that is not initialized |
//! | `lora` | the paths of an adapter's factors, and the value of an adapted parameter |
//! | `running_state` | `valid` gives a copy of a model new running statistics; these keep no reparameterization |
//! | `panics` | texts of panics |
//! | `empty_batch` | a product with a matrix of no rows has no rows; with a batch of no matrices, burn reads foreign memory |
//! | `graph_depth` | backward runs the deepest node first |
//! | `graph_edges` | the debug text of a backward's checkpointer lists the nodes and their parents |
//! | `internals` | the bottom layer, with a file and a test each: numbers of graph nodes, containers of gradients, memory behind a handle |
//!
//! The nodes of the autodiff graph are recorded in [`autodiff`](crate::autodiff), by burn's
//! documented extension interface.

mod empty_batch;
mod graph_depth;
mod graph_edges;
pub(crate) mod internals;
mod layers;
mod lazy;
mod lora;
mod panics;
mod running_state;
mod visitor;

pub(crate) use empty_batch::is_unsafe;
pub(crate) use graph_depth::LAYER_DEPTH;
pub(crate) use graph_edges::{GraphEdges, edges_of};
pub(crate) use layers::BurnLayer;
pub(crate) use lazy::undrawn;
pub(crate) use lora::{ADAPTER, Adapters, put_adapters, take_adapters};
pub(crate) use panics::{consumed_node, is_about_dtypes};
pub(crate) use running_state::{MARK, marked, renewed, settled};
pub(crate) use visitor::{
    Container, ModulePath, REPARAMETERIZATION, TensorMapper, TensorVisitor, map_tensors,
    visit_tensors,
};
