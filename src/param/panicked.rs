//! Panics inside units: the report of the launch names the unit.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::recompute::context;
use super::unit::Unit;
use super::unit_stack::{self, InnermostUnit};
use crate::burn_compat::is_about_dtypes;
use crate::comm::{forget_panic, note_panic};

/// Runs `forward`, the forward of the module entered last. If it panics, notes the innermost open unit. The payload
/// is not changed.
pub(super) fn noting_panics<O>(forward: impl FnOnce() -> O) -> O {
    forget_panic();
    match catch_unwind(AssertUnwindSafe(forward)) {
        Ok(output) => output,
        Err(payload) => {
            note_panic(&*payload, |text| {
                let InnermostUnit { unit, may_be_over, inside } = unit_stack::innermost_unit()?;
                let phase = if context::anchor().is_some() { "recomputation" } else { "forward" };
                let place = if may_be_over { "in or after" } else { "in" };
                Some(format!("{place} the {phase} of {}{}", unit.full_name(), unit.precision_note(text, &inside)))
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
    /// whose `text` is about element types. `inside` are units inside this one, whose outputs it may have computed with.
    pub(super) fn precision_note(&self, text: &str, inside: &[Arc<Self>]) -> String {
        let weights = || self.params.iter().find_map(|param| param.compute);
        let Some(dtype) = self.precision().inputs.or_else(weights) else { return String::new() };
        let note = format!(", which computes in {}", dtype.name());
        if !is_about_dtypes(text) {
            return note;
        }
        let returns_other =
            |unit: &Arc<Self>| Some((unit.label(), unit.precision().outputs.filter(|&out| out != dtype)?));
        let inner = inside.iter().find_map(returns_other).map(|(label, out)| {
            format!(
                ". Unit `{label}` inside it returns {}: set `with_output_dtype` for the outermost unit only, and a policy \
                 without it for the others (`with_mixed_precision_for`)",
                out.name()
            )
        });
        let constants = ". Tensors of one operation must have the same dtype: inside the unit, create constants in the \
                         dtype of its input (`x.dtype()`), or create them before and pass them in its input, which is \
                         cast";
        note + inner.as_deref().unwrap_or(constants)
    }
}
