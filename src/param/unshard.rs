//! [`unshard`] and [`reshard`]: gathering a unit ahead of its forward.

use std::sync::Arc;

use burn::module::Module;

use super::enter::unit_of;
use super::unit::Unit;
use crate::Result;

/// A unit being gathered ahead of its forward; see [`unshard`].
#[must_use = "the all-gather is waited for by `wait`, or by the unit's forward"]
#[derive(Debug)]
pub struct UnshardHandle(Arc<Unit>);

impl UnshardHandle {
    /// Waits until the parameters are gathered. The unit's forward waits by itself.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn wait(self) -> Result<()> {
        Ok(self.0.wait_unsharded()?)
    }
}

/// Starts gathering the parameters of the unit `module`, for its next forward to use.
///
/// Not recursive: inner units stay as they are. An optimizer step in between makes the gathered
/// values stale; the forward notices and gathers again. Until then, or until [`reshard`], what was
/// gathered stays in memory, stale or not.
///
/// # Collective
/// Every rank of the unit's mesh must call it.
///
/// # Errors
/// [`ParamError`](super::ParamError) if `module` is no unit, or a parameter of it was replaced. A failing collective
/// shows in [`wait`](UnshardHandle::wait), or in the unit's forward.
pub fn unshard<M: Module>(module: &M) -> Result<UnshardHandle> {
    let (unit, shards) = unit_of(module)?;
    unit.unshard(shards);
    Ok(UnshardHandle(unit))
}

/// Drops what [`unshard`] gathered for the unit `module`, if no forward has used it.
///
/// Local: no communication.
///
/// # Errors
/// [`ParamError`](super::ParamError) if `module` is no unit, or a parameter of it was replaced.
pub fn reshard<M: Module>(module: &M) -> Result<()> {
    let (unit, _) = unit_of(module)?;
    unit.reshard();
    Ok(())
}
