//! [`check_not_replaced`]: checks that all parameters of a distributed model are still distributed.
//!
//! A parameter that the program assigns, or makes from the old one (`param.map(..)`, `param.set_require_grad(..)`),
//! has lost its [`DistributedParameter`](super::DistributedParameter). It is not gathered, its gradient is not
//! reduced, and the ranks drift apart. The other parameters show for which module the distributing call was made,
//! because each knows its path in that module:
//!
//! ```text
//!   when distributed   blocks.0.weight       blocks.0.weight      blocks.0.weight      weight
//!   now                blocks.0.weight       0.weight             net.blocks.0.weight  blocks.0.weight
//!   the call was for   this module           one around it        `net`                `blocks.0`
//! ```
//!
//! All parameters in that module were distributed then, except those ignored. Nothing is known of parameters
//! outside it, nor of a module in which no parameter is distributed any more.

use burn::module::Module;
use itertools::Itertools;

use super::ParamError;
use super::model_scan::{ModelScan, ScannedParam};
use super::visit::Walk;
use crate::pattern::PathPattern;

/// Checks that no parameter inside `module` has been replaced since it was distributed.
///
/// Local. The check costs nothing if every tensor of `module` is distributed, and almost nothing if the module, or a
/// clone of it, passed before.
///
/// # Errors
/// [`ParamError::Replaced`].
pub(crate) fn check_not_replaced<M: Module>(module: &M, walk: &Walk) -> Result<(), ParamError> {
    let Some(first) = walk.distributed.first() else { return Ok(()) };
    let key = [first.depth, first.param.index, walk.distributed.len(), walk.others];
    if walk.others == 0 || first.param.unit.has_passed_check(key) {
        return Ok(());
    }
    ModelScan::of(module).check_not_replaced()?;
    first.param.unit.note_passed_check(key);
    Ok(())
}

impl ModelScan {
    /// Checks that no parameter has been replaced since the others of its module were distributed.
    ///
    /// # Errors
    /// [`ParamError::Replaced`].
    pub(crate) fn check_not_replaced(&self) -> Result<(), ParamError> {
        let calls = self.params.iter().filter_map(DistributeCall::of);
        let calls = calls.unique_by(|call| (call.around, call.inside, call.ignored.as_ptr())).collect_vec();
        let own = self.params.iter().filter(|found| found.distributed.is_none()).map(|found| &found.path);
        let lost = own.chain(self.foreign.iter().map(|(path, _)| path));
        let mut lost = lost.flat_map(|path| calls.iter().filter_map(|call| call.lost(path)));
        lost.next().map_or(Ok(()), |param| Err(ParamError::Replaced { param }))
    }
}

/// A call that distributed a module, seen from the module that is checked.
struct DistributeCall<'a> {
    /// Path of the call's module in the checked module.
    around: &'a [String],
    /// Path of the checked module in the call's module.
    inside: &'a str,
    ignored: &'a [PathPattern],
}

impl<'a> DistributeCall<'a> {
    /// Returns the call that distributed a parameter, or `None` if the parameter was moved to another path since.
    fn of(found: &'a ScannedParam) -> Option<Self> {
        let param = found.distributed.as_ref()?;
        let before = param.info().path.split('.').filter(|part| !part.is_empty()).collect_vec();
        let ignored = param.unit.ignored();
        let common = before.len().min(found.path.len());
        let (around, end) = found.path.split_at(found.path.len() - common);
        if !end.iter().eq(&before[before.len() - common..]) {
            return None;
        }
        let inside = param.info().path.len() - end.join(".").len();
        Some(Self { around, inside: &param.info().path[..inside], ignored })
    }

    /// Returns the path under which this call should have distributed a parameter that is not distributed. Returns
    /// `None` if the parameter is outside the call's module or was ignored.
    fn lost(&self, path: &[String]) -> Option<String> {
        let path = path.strip_prefix(self.around)?;
        let path = format!("{}{}", self.inside, path.join("."));
        (!self.ignored.iter().any(|pattern| pattern.matches(&path))).then_some(path)
    }
}
