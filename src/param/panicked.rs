//! Panics inside units: the report of the launch names the unit.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::recompute::context;
use super::unit::Unit;
use super::unit_stack;
use crate::comm::{forget_panic, note_panic};

/// Runs `forward`, the forward of the module entered last. If it panics, notes the innermost open unit. The payload
/// is not changed.
pub(super) fn noting_panics<O>(forward: impl FnOnce() -> O) -> O {
    forget_panic();
    match catch_unwind(AssertUnwindSafe(forward)) {
        Ok(output) => output,
        Err(payload) => {
            note_panic(&*payload, |text| {
                let (unit, may_be_over) = unit_stack::innermost_unit()?;
                let phase = if context::anchor().is_some() { "recomputation" } else { "forward" };
                let place = if may_be_over { "in or after" } else { "in" };
                Some(format!("{place} the {phase} of {}{}", unit.full_name(), unit.precision_note(text)))
            });
            resume_unwind(payload)
        }
    }
}

impl Unit {
    /// Returns the unit's label and model for messages, such as ``unit `blocks.0` of Net, sharded at src/main.rs:17``.
    pub(super) fn full_name(&self) -> String {
        let model = self.model_root().map(|model| format!(" of {model}")).unwrap_or_default();
        format!("unit `{}`{model}", self.label())
    }

    /// Returns a clause about the element type that the unit's policy sets, if it sets one, with the remedy for a panic
    /// whose `text` is about element types.
    pub(super) fn precision_note(&self, text: &str) -> String {
        let weights = || self.params.iter().find_map(|param| param.compute);
        let Some(dtype) = self.precision().inputs.or_else(weights) else { return String::new() };
        let remedy = match text.to_lowercase().contains("dtype") {
            true => {
                ". Tensors of one operation must have the same dtype: inside the unit, create constants in the dtype \
                 of its input (`x.dtype()`), or create them before and pass them in its input, which is cast"
            }
            false => "",
        };
        format!(", which computes in {}{remedy}", dtype.name())
    }
}
