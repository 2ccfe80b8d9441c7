//! Lazy parameters: parameters whose values burn draws when they are first read.
//!
//! When a model is distributed, only the first rank of the mesh reads them. It draws the next parameter after every
//! rank has received its shard of the previous one. So no rank ever holds more than one full parameter, and the other
//! ranks hold only shards:
//!
//! ```text
//!   first rank    draw a │ send    │ drop a │ draw b │ send ...
//!   other ranks          │ receive │ shard  │        │ receive ...
//! ```
//!
//! Each slice of a mesh has a first rank. The slices draw one after the other, in the order of their indices. burn's
//! random state may be shared by all of them, so concurrent draws would give values that depend on timing. A run on
//! one device draws the values that the first slice draws. Along mesh dimensions that do not shard a parameter, the
//! ranks receive copies of the shards of the ranks with index 0.

use crate::Result;
use crate::comm::{self, Call};
use crate::mesh::DeviceMesh;

/// Returns true if any rank of the mesh that `mesh` was sliced from has lazy parameters. `own` is the contribution of
/// this rank.
///
/// # Collective
/// Every rank of the mesh that `mesh` was sliced from. Local if that mesh has one rank.
///
/// # Errors
/// A failure of another rank.
pub(crate) fn is_any_lazy(mesh: &DeviceMesh, label: &str, own: bool) -> Result<bool> {
    let root = mesh.root();
    if root.size() == 1 {
        return Ok(own);
    }
    Ok(mesh.world().group(root.ranks())?.any(Call::new(format!("{label}, lazy parameters")), own)?)
}

/// Runs `body`, which draws lazy parameters, on one slice after the other of the mesh that `mesh` was sliced from.
///
/// # Collective
/// Every rank of the mesh that `mesh` was sliced from.
///
/// # Errors
/// Errors of `body`, and a failure of another rank.
pub(crate) fn in_turn<T>(mesh: &DeviceMesh, label: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let root = mesh.root();
    let slices = root.size() / mesh.size();
    if slices == 1 {
        return body();
    }
    let all = mesh.world().group(root.ranks())?;
    comm::in_turn(&all, label, mesh.slice_index() % slices, slices, body)
}
