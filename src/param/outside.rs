//! Parameters that are read outside their unit. They are gathered and reduced one by one, which is correct but slow.

use std::sync::atomic::Ordering;

use super::ParamError;
use super::unit::Unit;
use super::warning::warn;
use crate::Error;

impl Unit {
    /// Called before the parameter at `index` is read outside its unit. Logs a warning when a second parameter of the
    /// unit is read so, once per unit and only on the first rank of the mesh.
    ///
    /// # Panics
    /// Unwinds with [`ParamError::ReadOutsideUnit`] if implicit unshard is disabled for the unit.
    pub(super) fn read_outside(&self, index: usize) {
        let Some(data) = &self.data else { return };
        if !data.implicit_unshard {
            let (param, unit) = (self.params[index].path.to_string(), self.label().to_string());
            Error::from(ParamError::ReadOutsideUnit { param, unit }).unwind();
        }
        let first = *self.first_outside.get_or_init(|| index);
        // Reading one parameter costs no more than gathering the unit would.
        if first == index || self.warned.swap(true, Ordering::Relaxed) || data.shard.group().size() == 1 {
            return;
        }
        let first = &self.params[first];
        if first.spec.coordinate().iter().all(|&index| index == 0) {
            warn(&format!(
                "parameters of unit `{}` are read outside of it, first `{}`, so each is gathered and reduced \
                 separately. Write `unit(&model, input, |model, input| model.forward(input))` around the forward of \
                 the model, or of the unit's module",
                self.label(),
                first.path
            ));
        }
    }
}
