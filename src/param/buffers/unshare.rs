//! [`unshared`]: returns a model whose buffers no clone shares.

use burn::module::Module;

use crate::Result;
use crate::burn_compat;
use crate::param::ParamError;
use crate::param::model_scan::ModelScan;
use crate::param::states::copying;

/// Returns the model with private buffers. Everything else is unchanged, including lazy parameters, except that plain
/// tensors in fields are no longer on an autodiff device.
///
/// # Errors
/// [`ParamError::ParamNotVisited`] for a parameter that the model's `map` does not visit as its `visit` does.
pub(crate) fn unshared<M: Module>(model: M) -> Result<M> {
    if !ModelScan::of(&model).has_running() {
        return Ok(model);
    }
    copying(|| burn_compat::renewed(model)).map_err(|param| ParamError::ParamNotVisited { param }.into())
}

/// Returns the model in validation, with private buffers. Lazy parameters are replaced by empty tensors, so nothing
/// is initialized.
///
/// Updates of statistics that a thread has postponed are applied now, in `model` too.
pub(in crate::param) fn settled<M: Module>(model: &M) -> M {
    copying(|| burn_compat::settled(model))
}
