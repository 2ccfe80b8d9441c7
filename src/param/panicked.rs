//! Panics and warnings that name a unit.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::backend::autodiff::NodeId;
use log::{LevelFilter, log_enabled, max_level};
use smallvec::SmallVec;

use super::ParamError;
use super::recompute::context;
use super::shards::LocalShards;
use super::unit::Unit;
use super::unit_stack;
use crate::Error;
use crate::burn_compat::{consumed_node, is_about_dtypes};
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
                        full_name(unit),
                        precision_note(unit, text, inside)
                    )
                })
            });
            resume_unwind(payload)
        }
    }
}

/// Maximum number of recorded passes. The first of two backwards is of the same step, so the units
/// of a step suffice.
const REMEMBERED: usize = 1024;

/// The most recent passes of a thread whose graphs are gone.
///
/// burn consumes a graph's nodes as backward runs them, and drops all nodes that depend on them. A
/// later backward panics at the first missing node, before any of its own nodes has run: no
/// gradient is wrong, and no rank waits. The panic contains only the node's number. Numbers ascend
/// in the order in which forward makes nodes. So a unit's nodes have numbers between one that is
/// drawn when the unit is opened and one that is drawn when it is closed:
///
/// ```text
///   trunk           left            loss  right           loss
///   opened..closed  opened..closed        opened..closed   └── missing: it depends on `right`, which was dropped
///   consumed        consumed              dropped              because its input, a node of `trunk`, was consumed
/// ```
#[derive(Debug, Default)]
pub(super) struct Through(VecDeque<Gone>);

/// One forward through a unit.
#[derive(Debug)]
struct Gone {
    nodes: Nodes,
    unit: Arc<str>,
    /// True if a backward consumed the graph; false if it was dropped without one.
    consumed: bool,
}

/// Numbers of the nodes of one forward through a unit. Nodes that other threads make during that
/// time have numbers in the same range.
#[derive(Debug, Clone, Default)]
pub(super) struct Nodes {
    opened: u64,
    closed: u64,
    /// Nodes of the tracked inputs.
    inputs: SmallVec<[u64; 2]>,
}

impl Nodes {
    pub(super) fn opened() -> Self {
        Self {
            opened: NodeId::new().value,
            closed: u64::MAX,
            ..Self::default()
        }
    }

    /// Returns the number drawn when the unit was opened. Units opened later have higher ones.
    pub(super) fn opened_at(&self) -> u64 {
        self.opened
    }

    pub(super) fn input(&mut self, node: NodeId) {
        self.inputs.push(node.value);
    }

    pub(super) fn close(&mut self) {
        self.closed = NodeId::new().value;
    }
}

impl Through {
    /// Records that the graph of a pass through `unit` is gone: `consumed` by a backward, or
    /// dropped.
    pub(super) fn add(&mut self, nodes: Nodes, unit: Arc<str>, consumed: bool) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(Gone {
            nodes,
            unit,
            consumed,
        });
    }

    /// Returns the error that explains a panic of burn with this `text`, if the text names a node
    /// that depends on a consumed unit.
    pub(super) fn explain(&self, text: &str) -> Option<Error> {
        let node = consumed_node(text)?;
        let unit = self
            .around(node)
            .or_else(|| self.forgotten_before(node))
            .or_else(|| {
                let before = self
                    .0
                    .iter()
                    .filter(|gone| gone.consumed && gone.nodes.opened < node);
                before.max_by_key(|gone| gone.nodes.opened)
            })?;
        Some(
            ParamError::SecondBackward {
                unit: unit.unit.to_string(),
            }
            .into(),
        )
    }

    /// Returns the innermost consumed pass that contains the node.
    fn around(&self, node: u64) -> Option<&Gone> {
        let has =
            |gone: &&Gone| gone.consumed && (gone.nodes.opened..gone.nodes.closed).contains(&node);
        self.0
            .iter()
            .filter(has)
            .max_by_key(|gone| gone.nodes.opened)
    }

    /// Returns the consumed pass whose backward caused the last pass before the node to be dropped.
    fn forgotten_before(&self, node: u64) -> Option<&Gone> {
        let forgotten = self
            .0
            .iter()
            .filter(|gone| !gone.consumed && gone.nodes.opened < node);
        let on = |gone: &Gone| {
            gone.nodes
                .inputs
                .iter()
                .find_map(|&input| self.around(input))
        };
        forgotten
            .filter_map(|gone| Some((gone.nodes.opened, on(gone)?)))
            .max_by_key(|(opened, _)| *opened)
            .map(|(_, on)| on)
    }
}

/// Logs a warning, or prints it to the standard error if the program has no logger, because what it
/// is about would otherwise go unnoticed.
pub(crate) fn warn(text: &str) {
    if log_enabled!(log::Level::Warn) {
        log::warn!("{text}");
    } else if max_level() == LevelFilter::Off {
        eprintln!("warning: {text}");
    }
}

/// Returns the unit's label and model for messages, such as ``unit `blocks.0` of Net, sharded at
/// src/main.rs:17``.
pub(super) fn full_name(unit: &Unit) -> String {
    let model = unit
        .model_root()
        .map(|model| format!(" of {model}"))
        .unwrap_or_default();
    format!("unit `{}`{model}", unit.label())
}

/// Returns a clause about the element type that the unit's policy sets, if it sets one, with the
/// remedy for a panic whose `text` is about element types. `inside` are units inside this one,
/// whose outputs it may have computed with.
pub(super) fn precision_note(
    unit: &Unit,
    text: &str,
    inside: &[(Arc<Unit>, LocalShards)],
) -> String {
    let weights = || unit.params.iter().find_map(|param| param.compute);
    let Some(dtype) = unit.precision().inputs.or_else(weights) else {
        return String::new();
    };
    let note = format!(", which computes in {}", dtype.name());
    if !is_about_dtypes(text) {
        return note;
    }
    let returns_other = |(unit, _): &(Arc<Unit>, _)| {
        Some((
            unit.label(),
            unit.precision().outputs.filter(|&out| out != dtype)?,
        ))
    };
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

/// Called before the parameter at `index` is read outside its unit. Logs a warning when a second
/// parameter of the unit is read so, once per unit and only on the first rank of the mesh.
///
/// # Panics
/// Unwinds with [`ParamError::ReadOutsideUnit`] if implicit unshard is disabled for the unit.
pub(super) fn note_read_outside(unit: &Unit, index: usize) {
    let Some(data) = &unit.data else { return };
    if !data.implicit_unshard {
        let (param, unit) = (
            unit.params[index].path.to_string(),
            unit.label().to_string(),
        );
        Error::from(ParamError::ReadOutsideUnit { param, unit }).unwind();
    }
    let first = *unit.first_outside.get_or_init(|| index);
    // Reading one parameter costs no more than gathering the unit would.
    if first == index || unit.warned.swap(true, Ordering::Relaxed) || data.shard.group().size() == 1
    {
        return;
    }
    let first = &unit.params[first];
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

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(opened: u64, closed: u64, inputs: &[u64]) -> Nodes {
        Nodes {
            opened,
            closed,
            inputs: inputs.into(),
        }
    }

    fn named(through: &Through, node: u64) -> Option<String> {
        let text = format!(
            "Cannot run backward: graph tape has already been consumed at NodeId({node}). Burn .."
        );
        match through.explain(&text)? {
            Error::Param(ParamError::SecondBackward { unit }) => Some(unit),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn the_innermost_unit_around_a_node_is_named_or_else_the_last_before_it() {
        let mut through = Through::default();
        through.add(gone(20, 30, &[]), "inner".into(), true);
        through.add(gone(10, 40, &[]), "outer".into(), true);
        assert_eq!(named(&through, 25).as_deref(), Some("inner"));
        assert_eq!(
            [30, 35].map(|node| named(&through, node)),
            [Some("outer".into()), Some("outer".into())]
        );
        assert_eq!(named(&through, 50).as_deref(), Some("inner"));
        assert_eq!(named(&through, 9), None);
        assert!(through.explain("index out of bounds").is_none());
    }

    #[test]
    fn a_forgotten_unit_leads_to_the_one_that_was_consumed() {
        let mut through = Through::default();
        through.add(gone(30, 40, &[29]), "left".into(), true);
        through.add(gone(10, 20, &[]), "trunk".into(), true);
        assert_eq!(named(&through, 70).as_deref(), Some("left"));
        through.add(gone(50, 60, &[19]), "right".into(), false);
        assert_eq!(named(&through, 70).as_deref(), Some("trunk"));
        // A pass that was only dropped, as after a validation.
        through.add(gone(61, 62, &[5]), "other".into(), false);
        assert_eq!(named(&through, 70).as_deref(), Some("trunk"));
    }

    #[test]
    fn what_was_left_long_ago_is_forgotten() {
        let mut through = Through::default();
        for at in 0..=REMEMBERED as u64 {
            through.add(gone(2 * at, 2 * at + 1, &[]), at.to_string().into(), true);
        }
        assert_eq!(through.0.len(), REMEMBERED);
        assert_eq!(
            [0, 2].map(|node| named(&through, node)),
            [None, Some("1".into())]
        );
    }
}
