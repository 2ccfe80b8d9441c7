//! Parameters read outside their unit: gathered and reduced one by one, which is right, and slow.

use std::sync::atomic::Ordering;

use log::{LevelFilter, log_enabled, max_level};

use super::ParamError;
use super::unit::Unit;
use crate::Error;

impl Unit {
    /// The parameter at `index` is about to be read by itself. Warns of the second that is, once a unit and on
    /// one rank of the mesh.
    ///
    /// # Panics
    /// Unwinds with [`ParamError::ReadOutsideUnit`] if the unit is strict.
    pub(super) fn read_outside(&self, index: usize) {
        let Some(data) = &self.data else { return };
        if !data.implicit_unshard {
            let (param, unit) = (self.params[index].path.to_string(), self.label().to_string());
            Error::from(ParamError::ReadOutsideUnit { param, unit }).unwind();
        }
        let first = *self.first_outside.get_or_init(|| index);
        // One costs no more than the unit would.
        if first == index || self.warned.swap(true, Ordering::Relaxed) || data.shard.group().size() == 1 {
            return;
        }
        let first = &self.params[first];
        if first.spec.coordinate().iter().all(|&index| index == 0) {
            warn(&format!(
                "parameters of unit `{}` are read outside of it, first `{}`: each is gathered and reduced by itself. \
                 Write `unit(&model, input, |model, input| model.forward(input))` around the forward of the model, or \
                 of the unit's module",
                self.label(),
                first.path
            ));
        }
    }
}

/// To the program's logger, or, as it has none, to its standard error: who is not told, waits.
fn warn(text: &str) {
    if log_enabled!(log::Level::Warn) {
        log::warn!("{text}");
    } else if max_level() == LevelFilter::Off {
        eprintln!("warning: {text}");
    }
}
