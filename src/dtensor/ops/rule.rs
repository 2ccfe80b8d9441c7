//! [`ShardingRule`] and [`Strategy`]: what an operator may do along one mesh dimension.

use std::fmt::{self, Debug};
use std::hash::Hash;

use burn::tensor::{DType, Shape};
use itertools::Itertools;
use smallvec::SmallVec;

use super::placements::{AVG, SUM};
use crate::Result;
use crate::placement::Placement;

/// One row of a rule's table: with its inputs placed like this along a mesh dimension, every rank
/// computes its part of the outputs alone, with the operator itself on local tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strategy {
    pub(super) inputs: SmallVec<[Placement; 4]>,
    pub(super) outputs: SmallVec<[Placement; 2]>,
    pub(super) divides: Option<usize>,
    pub(super) floats: bool,
    /// What every part of the first input comes down to, for the other ranks; see
    /// [`Parts`](super::shard_summaries::ShardSummaries).
    pub(super) slots: usize,
    /// Inputs that become terms of a sum over ranks.
    terms: SmallVec<[usize; 1]>,
    /// Whether outputs are cut in proportion to the inputs, where those are ragged.
    pub(super) in_proportion: bool,
}

/// The row `inputs -> outputs`.
pub fn strategy(inputs: impl IntoIterator<Item = Placement>, outputs: impl IntoIterator<Item = Placement>) -> Strategy {
    Strategy {
        inputs: inputs.into_iter().collect(),
        outputs: outputs.into_iter().collect(),
        divides: None,
        floats: false,
        slots: 0,
        terms: SmallVec::new(),
        in_proportion: false,
    }
}

impl Strategy {
    /// Allows the row only where the number of pieces, over all mesh dimensions that cut the same
    /// dimension of the first output, divides `len`: local results are then whole rows of `len`.
    #[must_use]
    pub fn if_divides(mut self, len: usize) -> Self {
        self.divides = Some(len);
        self
    }

    /// Makes these inputs, where the row wants them as `P(sum)`, terms of a sum: the first rank's value, or
    /// every rank's own shard, and zeros. That costs nothing, in forward or in backward. Without it a row
    /// that wants a partial input is for one that comes so.
    #[must_use]
    pub fn with_terms(mut self, inputs: &[usize]) -> Self {
        self.terms = inputs.into();
        self
    }

    /// Takes ragged cuts to an output of another length: each rank has as much of that in proportion. For a row
    /// whose operator gets what its part is computed from by itself.
    #[must_use]
    pub(super) fn in_proportion(mut self) -> Self {
        self.in_proportion = true;
        self
    }

    /// Allows the row for partial inputs of floats only: integers are rounded, or wrap around,
    /// which keeps no order.
    #[must_use]
    pub fn if_floats(mut self) -> Self {
        self.floats = true;
        self
    }

    /// The local operator tells the other ranks along the mesh dimension this many elements of its part of
    /// the first input, for each that there is of the other dimensions.
    #[must_use]
    pub(super) fn with_slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Whether input `at` may be made into what the row wants of it, partial though that is.
    pub(super) fn makes_term(&self, at: usize) -> bool {
        self.terms.contains(&at) && self.inputs[at] == SUM
    }

    /// Whether the row holds for inputs of these element types.
    pub(super) fn takes(&self, dtypes: &[DType]) -> bool {
        // Of integers an average is rounded, and only after the operator would be another number.
        let exact = |(placement, dtype): (&Placement, &DType)| match placement {
            Placement::Partial(_) if self.floats || *placement == AVG => dtype.is_float(),
            _ => true,
        };
        self.inputs.iter().zip(dtypes).all(exact)
    }
}

/// `S(0), R -> S(0)`.
impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", self.inputs.iter().format(", "), self.outputs.iter().format(", "))
    }
}

/// Describes which placements an operator supports: mostly an [`EinsumRule`](super::EinsumRule), which is one; an operator
/// whose dimensions letters cannot name writes its table out.
///
/// A rule is a small value: the operator's static arguments, which are also its key in the cache
/// of decisions. The all-`Replicate` row is always allowed and never listed.
pub trait ShardingRule: Debug + Clone + Eq + Hash + 'static {
    /// The operator, for messages.
    fn name(&self) -> &'static str;

    /// Global shapes of the outputs.
    ///
    /// # Errors
    /// [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if the inputs do not fit
    /// each other or the arguments.
    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>>;

    /// The rows of the table, for inputs and outputs of these global shapes. Of two rows that cost
    /// the same the first is taken.
    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy>;

    /// Whether the local operator goes by itself with parts without elements: it neither fails on
    /// one, nor records fewer nodes in the graph than on any other. A rank that skips a node falls
    /// out of step with the others in backward, so where this is false an input that would leave a
    /// rank without elements is gathered first.
    fn supports_empty_shards(&self) -> bool {
        false
    }

    /// The same of parts of input `input` that are empty along `dim`, and perhaps of no others.
    fn takes_empty_parts_along(&self, _input: usize, _dim: usize) -> bool {
        self.supports_empty_shards()
    }
}
