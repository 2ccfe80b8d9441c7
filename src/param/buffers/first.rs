//! [`own_buffers`]: gives each rank a private copy of the first rank's buffers.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::Module;

use super::buffer_owner::{BufferOwner, homes};
use super::unshare::unshared;
use super::values::{meta, read, write};
use crate::Result;
use crate::comm::{Call, Communicator};
use crate::param::unit::Unit;

/// Returns a model that has just been distributed, with buffers that no clone of it shares. Buffers that belong to
/// a parameter of `units` have the values of the group's first rank.
///
/// `label` names the call.
///
/// # Collective
/// On every rank of the group. A model without buffers needs no communication.
///
/// # Errors
/// [`ParamError::ParamNotVisited`](crate::param::ParamError::ParamNotVisited) if `map` of a module does not visit
/// the same parameters as its `visit`, and [`Error::Comm`](crate::Error::Comm) if ranks have different buffers or
/// another rank fails.
pub(crate) fn own_buffers<M: Module>(
    model: M,
    units: &[Arc<Unit>],
    group: &Communicator,
    label: &'static str,
) -> Result<M> {
    let units: HashSet<_> = units.iter().map(Arc::as_ptr).collect();
    let of_units = |home: &BufferOwner| units.contains(&Arc::as_ptr(&home.param.unit));
    let model = unshared(model)?;
    let paths: Vec<_> = homes(&model).into_iter().filter(of_units).map(|home| home.path).collect();
    if paths.is_empty() {
        return Ok(model);
    }
    let first = group.group().rank() == 0;
    let values = read(&model, &paths, first);
    let metas = values.iter().map(meta).collect();
    let call = Call::new(format!("{label}, buffers"));
    let values = group.broadcast(call, first.then_some(values), metas, 0).wait()?;
    Ok(write(model, paths, values))
}
