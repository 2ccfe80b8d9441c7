//! Panics and warnings that name a unit.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;

use super::ParamError;
use super::recompute::context;
use super::unit::Unit;
use super::unit_stack;
use super::warning::warn;
use crate::Error;
use crate::comm::{forget_panic, note_panic};

/// Runs `forward`, the forward of the module entered last. If it panics, notes the innermost open
/// unit. The payload is not changed.
pub(super) fn noting_panics<O>(forward: impl FnOnce() -> O) -> O {
    forget_panic();
    match catch_unwind(AssertUnwindSafe(forward)) {
        Ok(output) => output,
        Err(payload) => {
            note_panic(&*payload, |text| {
                let phase = if context::anchor().is_some() {
                    "recomputation"
                } else {
                    "forward"
                };
                unit_stack::with_innermost_unit(|unit, may_be_over, inside| {
                    let place = if may_be_over { "in or after" } else { "in" };
                    format!(
                        "{place} the {phase} of {}{}",
                        unit.comm.full_name(),
                        unit.precision_note(text, inside)
                    )
                })
            });
            resume_unwind(payload)
        }
    }
}

/// Called before the parameter at `index` is read outside its unit. Logs a warning when a second
/// parameter of the unit is read so, once per unit and only on the first rank of the mesh.
///
/// # Panics
/// Unwinds with [`ParamError::ReadOutsideUnit`] if implicit unshard is disabled for the unit.
pub(super) fn note_read_outside(unit: &Unit, index: usize) {
    let Some(data) = &unit.spec().data else {
        return;
    };
    if !data.implicit_unshard {
        let param = unit.spec().params[index].path.to_string();
        let unit = unit.label().to_string();
        Error::from(ParamError::ReadOutsideUnit { param, unit }).unwind();
    }
    let first = *unit.first_outside.get_or_init(|| index);
    // Reading one parameter costs no more than gathering the unit would, and a unit that is reduced
    // in buckets is not gathered.
    if first == index
        || data.buckets.is_some()
        || unit.warned.swap(true, Ordering::Relaxed)
        || data.shard.group().size() == 1
    {
        return;
    }
    let first = &unit.spec().params[first];
    if first.spec.coordinate().iter().all(|&index| index == 0) {
        warn(&format!(
            "parameters of unit `{}` are read outside of it, first `{}`, so each is gathered and reduced \
             separately. Write `unit(&model, input, |model, input| model.forward(input))` around the forward of \
             the model, or of the unit's module",
            unit.label(),
            first.path
        ));
    }
}
