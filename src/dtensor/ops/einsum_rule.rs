//! [`EinsumRule`]: a sharding rule written as an einsum equation.

use std::hash::{Hash, Hasher};
use std::ptr;

use burn::tensor::Shape;
use smallvec::SmallVec;

use super::args::operand_error;
use super::partial_rules::{NO_PARTIAL, PartialRules};
use super::placements::SUM;
use super::subscripts::Subscripts;
use super::{ShardingRule, Strategy};
use crate::Result;
use crate::placement::{PartialOp, Placement};

/// Sharding rule of an operator, written with a letter for each dimension of its inputs and
/// outputs.
///
/// | text | dimension |
/// |---|---|
/// | a small letter | an axis that may be sharded: `S` in the inputs that have it, `R` in the others. The output is `S` too, or `P(sum)` if it lacks the axis |
/// | a capital | an axis that must not be sharded |
/// | `..` | all dimensions not covered by letters, each an axis, aligned from the right |
/// | `..d..` | `d` stands for the operator's dimensions, set with [`at`](Self::at); the dots are all others |
/// | `?` | after an axis: its length may be 1 here, and is then broadcast |
/// | `_`, `1` | not sharded, of any length; of length 1 |
/// | `operand*` | any number of such operands |
/// | `+ operand` | is added to the result of the others: if that is a partial sum, the operand is converted to one |
///
/// Inputs must agree on the length of an axis. The length of a capital that no input has is set
/// with [`lens`](Self::lens).
///
/// For example, the linear layer `..i, io + o* -> ..o` has these strategies:
///
/// ```
/// # use burn::tensor::Shape;
/// # use burn_dtensor::dtensor::ops::{EinsumRule, ShardingRule};
/// const LINEAR: EinsumRule = EinsumRule::new("linear", "..i, io + o* -> ..o").linear(&[0, 1]);
/// let inputs = [Shape::new([8, 6]), Shape::new([6, 4]), Shape::new([4])];
/// let outputs = LINEAR.outputs(&inputs)?;
/// assert_eq!(outputs, [Shape::new([8, 4])]);
/// let rows: Vec<_> = LINEAR.strategies(&inputs, &outputs).iter().map(ToString::to_string).collect();
/// assert_eq!(rows, [
///     "S(1), S(0), P(sum) -> P(sum)", // i: each rank sums over its shard
///     "R, S(1), S(0) -> S(1)", // o
///     "S(0), R, R -> S(0)", // ..
///     "P(sum), R, P(sum) -> P(sum)", // linear in the first input
///     "P(avg), R, R -> P(avg)",
///     "P(avg), R, P(avg) -> P(avg)",
///     "R, P(sum), P(sum) -> P(sum)", // and in the second
///     "R, P(avg), R -> P(avg)",
///     "R, P(avg), P(avg) -> P(avg)",
/// ]);
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct EinsumRule {
    name: &'static str,
    text: &'static str,
    linear: &'static [usize],
    partials: PartialRules,
    reduced: Placement,
    empty_parts: bool,
}

impl EinsumRule {
    /// Makes the rule of the operator `name` from its equation `text`. Partial inputs are reduced
    /// first.
    ///
    /// # Panics
    /// If `text` has no `->`; in a `const`, this is a compile error.
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        let bytes = text.as_bytes();
        let mut at = 1;
        while at < bytes.len() && !(bytes[at - 1] == b'-' && bytes[at] == b'>') {
            at += 1;
        }
        assert!(
            at < bytes.len(),
            "the text of a rule must have the form `inputs -> outputs`"
        );
        Self {
            name,
            text,
            linear: &[],
            partials: NO_PARTIAL,
            reduced: SUM,
            empty_parts: false,
        }
    }

    /// Makes the rule of the elementwise operator `name`, whose inputs broadcast.
    pub const fn pointwise(name: &'static str, partials: PartialRules) -> Self {
        // A constant, so that it is parsed only once: activations with parameters make their rule
        // at every call.
        const POINTWISE: EinsumRule = EinsumRule::new("", "..?* -> ..").with_empty_shards();
        Self {
            name,
            partials,
            ..POINTWISE
        }
    }

    /// Declares the operator linear in each of these inputs: their partial sums and averages pass
    /// through it.
    #[must_use]
    pub const fn linear(self, inputs: &'static [usize]) -> Self {
        Self {
            linear: inputs,
            ..self
        }
    }

    /// Sets the partial inputs that the operator accepts.
    #[must_use]
    pub const fn with_partial_rules(self, partials: PartialRules) -> Self {
        Self { partials, ..self }
    }

    /// Sets the reduction that combines the ranks' results if a sharded axis is missing in the
    /// output. Default: the sum.
    #[must_use]
    pub const fn reduced_by(self, op: PartialOp) -> Self {
        Self {
            reduced: Placement::Partial(op),
            ..self
        }
    }

    /// Declares that the local operator [supports empty
    /// shards](ShardingRule::supports_empty_shards).
    #[must_use]
    pub const fn with_empty_shards(self) -> Self {
        Self {
            empty_parts: true,
            ..self
        }
    }

    /// Returns the rule for the operator's dimensions `dims`, in any order: those that `d` stands
    /// for in the text `..d..`.
    ///
    /// # Panics
    /// If a dimension is 64 or more.
    #[must_use]
    pub fn at(&'static self, dims: impl IntoIterator<Item = usize>) -> EinsumRuleAt {
        let at = dims.into_iter().fold(0, |at, dim| {
            assert!(dim < 64, "dimension {dim} is not below 64");
            at | 1 << dim
        });
        EinsumRuleAt {
            axes: self,
            at,
            lens: SmallVec::new(),
            slots: 0,
        }
    }

    /// Returns the rule with the lengths `lens` of the axes that only the result has. At the
    /// operator's dimensions, lengths are in ascending order of these. If the result is `operand*`,
    /// there are as many results as lengths.
    #[must_use]
    pub fn lens(&'static self, lens: impl IntoIterator<Item = usize>) -> EinsumRuleAt {
        EinsumRuleAt {
            axes: self,
            at: 0,
            lens: lens.into_iter().collect(),
            slots: 0,
        }
    }

    fn subscripts(&self, at: &[usize], inputs: &[Shape], outputs: usize) -> Result<Subscripts> {
        Subscripts::new(self.text, at, inputs, outputs)
            .map_err(|why| operand_error(self.name, inputs, why))
    }

    fn outputs_at(&self, at: &[usize], lens: &[usize], inputs: &[Shape]) -> Result<Vec<Shape>> {
        let subscripts = self.subscripts(at, inputs, lens.len())?;
        subscripts
            .shapes(inputs, lens)
            .map_err(|why| operand_error(self.name, inputs, format!("in `{}`, {why}", self.text)))
    }

    fn strategies_at(
        &self,
        at: &[usize],
        inputs: &[Shape],
        outputs: usize,
        reduced: Placement,
    ) -> Vec<Strategy> {
        let Ok(subscripts) = self.subscripts(at, inputs, outputs) else {
            return Vec::new();
        };
        let rows = subscripts
            .rows(inputs, reduced)
            .chain(subscripts.linear(self.linear));
        rows.chain(self.partials.rows(inputs.len(), outputs))
            .collect()
    }
}

/// Compares the rules by address.
impl PartialEq for EinsumRule {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.name, other.name)
            && ptr::eq(self.text, other.text)
            && ptr::eq(self.linear, other.linear)
            && self.partials == other.partials
            && self.reduced == other.reduced
            && self.empty_parts == other.empty_parts
    }
}

impl Eq for EinsumRule {}

impl Hash for EinsumRule {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(self.name.as_ptr().addr());
        state.write_usize(self.text.as_ptr().addr());
    }
}

impl ShardingRule for EinsumRule {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        self.outputs_at(&[], &[], inputs)
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        self.strategies_at(&[], inputs, outputs.len(), self.reduced)
    }

    fn supports_empty_shards(&self) -> bool {
        self.empty_parts
    }
}

/// An [`EinsumRule`] with the dimensions that its operator works along, and with lengths of its
/// result.
#[derive(Debug, Clone)]
pub struct EinsumRuleAt {
    axes: &'static EinsumRule,
    /// One bit for each dimension.
    at: u64,
    lens: SmallVec<[usize; 2]>,
    slots: usize,
}

impl EinsumRuleAt {
    /// Sets the lengths of the next axes that only the result has.
    #[must_use]
    pub fn lens(mut self, lens: impl IntoIterator<Item = usize>) -> Self {
        self.lens.extend(lens);
        self
    }

    /// Declares that each rank sends all others this many elements of its shard along the
    /// operator's dimension, if that is sharded (see
    /// [`ShardSummaries`](super::shard_summaries::ShardSummaries)). Results without the dimension
    /// are then replicated. The number must follow from the lengths, because it is not compared.
    #[must_use]
    pub(super) fn with_slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    fn dims(&self) -> SmallVec<[usize; 4]> {
        (0..64).filter(|dim| self.at & 1 << dim != 0).collect()
    }
}

/// Compares the rules by address, and their arguments by value.
impl PartialEq for EinsumRuleAt {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.axes, other.axes) && self.at == other.at && self.lens == other.lens
    }
}

impl Eq for EinsumRuleAt {}

impl Hash for EinsumRuleAt {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(ptr::from_ref(self.axes).addr());
        state.write_u64(self.at);
        self.lens.iter().for_each(|&len| state.write_usize(len));
    }
}

impl ShardingRule for EinsumRuleAt {
    fn name(&self) -> &'static str {
        self.axes.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        self.axes.outputs_at(&self.dims(), &self.lens, inputs)
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let dims = self.dims();
        if self.slots == 0 {
            return self
                .axes
                .strategies_at(&dims, inputs, outputs.len(), self.axes.reduced);
        }
        let rows = self
            .axes
            .strategies_at(&dims, inputs, outputs.len(), Placement::Replicate);
        let sharding_dims = |row: &Strategy| {
            row.inputs[0]
                .shard_dim()
                .is_some_and(|dim| dims.contains(&dim))
        };
        rows.into_iter()
            .map(|row| {
                if sharding_dims(&row) {
                    row.with_slots(self.slots)
                } else {
                    row
                }
            })
            .collect()
    }

    fn supports_empty_shards(&self) -> bool {
        self.axes.empty_parts
    }
}
