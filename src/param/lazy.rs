//! Lazy parameters: those whose values burn draws when they are first read.
//!
//! Where a model is distributed, only the first rank of the mesh reads them, and draws the next one when every rank has
//! its part of the one before. So no rank ever holds more than one that is whole, and the others hold parts:
//!
//! ```text
//!   first rank    draw a │ send │ drop a │ draw b │ send ...
//!   the others           │ take │  part  │        │ take ...
//! ```
//!
//! Slices of one mesh have a first rank each. They draw one after another, the first slice first: burn's random state may
//! be one for all of them, and what each gets would else be a matter of time. A run on one device draws what the first does.
//! Along dimensions of a mesh that a parameter is not cut over, ranks copy the parts of those that are first there.

use burn::module::{Param, Parameter};
use burn::tensor::Tensor;

use crate::Result;
use crate::comm::{self, Call};
use crate::dtensor::Kind;
use crate::mesh::DeviceMesh;

/// The parameter as it will be, but for its values, of which it takes no memory.
///
/// Of a lazy one burn tells the shape that its record has, which a `Linear` in column layout transposes: what counts is
/// what is made of that where it is loaded.
pub(super) fn undrawn<const D: usize, K: Kind>(param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
where
    Tensor<D, K>: Parameter,
{
    let (shape, device, id) = (param.lazy_shape(), param.lazy_device(), param.id);
    let zeros = match shape.num_elements() {
        0 => Tensor::zeros(shape, &device),
        _ => Tensor::<D, K>::zeros([1; D], &device).expand(shape),
    };
    param.transform_for_load(zeros, id)
}

/// Whether one of the ranks that draw with this one has lazy parameters, as `own` says of this one.
///
/// # Collective
/// Every rank of the mesh that `mesh` was sliced from; none of a mesh of one rank.
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

/// Runs `body`, which draws lazy parameters, on one slice after another of the mesh that this one was sliced from.
///
/// # Collective
/// As [`is_any_lazy`].
///
/// # Errors
/// Those of `body`, and a failure of another rank.
pub(crate) fn in_turn<T>(mesh: &DeviceMesh, label: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let root = mesh.root();
    let slices = root.size() / mesh.size();
    if slices == 1 {
        return body();
    }
    let all = mesh.world().group(root.ranks())?;
    comm::in_turn(&all, label, mesh.slice_index() % slices, slices, body)
}
