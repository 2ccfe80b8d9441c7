//! [`check_not_replaced`]: whether all parameters of a distributed model still are.
//!
//! A parameter that is assigned anew, or made of the old one (`param.map(..)`, `param.set_require_grad(..)`), has lost
//! its [`DistributedParameter`](super::DistributedParameter): it is not gathered, nobody reduces its gradient, and
//! ranks drift apart. Where the others were when they were distributed tells which module that call was for:
//!
//! ```text
//!   when distributed   blocks.0.weight       blocks.0.weight      blocks.0.weight      weight
//!   here               blocks.0.weight       0.weight             net.blocks.0.weight  blocks.0.weight
//!   the call was for   this module           one around it        `net`                `blocks.0`
//! ```
//!
//! All parameters in that module were distributed then, but for those ignored. Of what lies outside nothing is known,
//! nor of a module of which nothing is distributed any more.

use burn::module::Module;
use itertools::Itertools;

use super::ParamError;
use super::model_scan::{ModelScan, ScannedParam};
use super::visit::Walk;
use crate::pattern::PathPattern;

/// Checks that of the modules that were distributed, as far as `module` shows them, no parameter has been replaced.
///
/// Local. It costs nothing where every tensor of `module` is distributed, and next to nothing where the same was
/// found before.
///
/// # Errors
/// [`ParamError::Replaced`].
pub(crate) fn check_not_replaced<M: Module>(module: &M, walk: &Walk) -> Result<(), ParamError> {
    let Some(first) = walk.distributed.first() else { return Ok(()) };
    let key = [first.depth, walk.distributed.len(), walk.others];
    if walk.others == 0 || first.param.unit.has_passed_check(key) {
        return Ok(());
    }
    ModelScan::of(module).check_not_replaced()?;
    first.param.unit.note_passed_check(key);
    Ok(())
}

impl ModelScan {
    /// Checks that no parameter has been replaced since those around it were distributed.
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

/// A call that distributed a module, seen from another.
struct DistributeCall<'a> {
    /// Path of its module in this one.
    around: &'a [String],
    /// Path of this module in its one.
    inside: &'a str,
    ignored: &'a [PathPattern],
}

impl<'a> DistributeCall<'a> {
    /// The one that distributed a parameter; `None` if it has been moved.
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

    /// The path that a parameter which is not distributed should have been distributed under.
    fn lost(&self, path: &[String]) -> Option<String> {
        let path = path.strip_prefix(self.around)?;
        let path = format!("{}{}", self.inside, path.join("."));
        (!self.ignored.iter().any(|pattern| pattern.matches(&path))).then_some(path)
    }
}
