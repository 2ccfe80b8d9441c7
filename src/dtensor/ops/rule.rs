//! [`ShardingRule`] and [`Strategy`]: the placements along one mesh dimension under which an
//! operator can run locally.

use std::fmt::{self, Debug};
use std::hash::Hash;

use burn::tensor::{DType, Shape};
use itertools::Itertools;
use smallvec::SmallVec;

use super::placements::{AVG, SUM};
use crate::Result;
use crate::placement::Placement;

/// A row of a rule's table. If the inputs have these placements along a mesh dimension, every rank
/// computes its local outputs without communication, by applying the operator to its local tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Strategy {
    pub(super) inputs: SmallVec<[Placement; 4]>,
    pub(super) outputs: SmallVec<[Placement; 2]>,
    pub(super) divides: Option<usize>,
    pub(super) floats: bool,
    /// Number of elements by which each shard of the first input is summarized for the other ranks;
    /// see [`ShardSummaries`](super::shard_summaries::ShardSummaries).
    pub(super) slots: usize,
    /// Inputs that may be converted to partial sums.
    partial_inputs: SmallVec<[usize; 1]>,
    /// True if uneven shard sizes of the inputs carry over to the outputs in proportion.
    pub(super) in_proportion: bool,
}

/// Makes the strategy `inputs -> outputs`.
pub fn strategy(
    inputs: impl IntoIterator<Item = Placement>,
    outputs: impl IntoIterator<Item = Placement>,
) -> Strategy {
    Strategy {
        inputs: inputs.into_iter().collect(),
        outputs: outputs.into_iter().collect(),
        divides: None,
        floats: false,
        slots: 0,
        partial_inputs: SmallVec::new(),
        in_proportion: false,
    }
}

impl Strategy {
    /// Allows the strategy only if the number of shards divides `len`, where the shards of the
    /// first output's dimension are counted over all mesh dimensions that shard it. No shard
    /// boundary is then inside one of `len` units, such as attention heads.
    #[must_use]
    pub fn if_divides(mut self, len: usize) -> Self {
        self.divides = Some(len);
        self
    }

    /// Allows converting these inputs to `P(sum)` where the strategy requires that: the first rank
    /// contributes the replicated value, or every rank its shard, and zeros elsewhere. This costs
    /// no communication in forward or backward. Without it, a strategy that requires a partial
    /// input applies only if the input is already partial.
    #[must_use]
    pub fn with_partial_inputs(mut self, inputs: &[usize]) -> Self {
        self.partial_inputs = inputs.into();
        self
    }

    /// Carries uneven shard sizes over to an output dimension of another length: each rank holds
    /// the same proportion of it. For operators that fetch the input elements they need by
    /// themselves.
    #[must_use]
    pub(super) fn in_proportion(mut self) -> Self {
        self.in_proportion = true;
        self
    }

    /// Allows partial inputs of floats only, because integers are rounded or wrap around, which
    /// does not preserve order.
    #[must_use]
    pub fn if_floats(mut self) -> Self {
        self.floats = true;
        self
    }

    /// Declares that the local operator sends the other ranks of the mesh dimension this many
    /// elements of its shard of the first input, for each index of the other dimensions.
    #[must_use]
    pub(super) fn with_slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Returns true if input `at` may be converted to the partial sum that the strategy requires.
    pub(super) fn makes_partial(&self, at: usize) -> bool {
        self.partial_inputs.contains(&at) && self.inputs[at] == SUM
    }

    /// Returns true if the strategy holds for inputs of these element types.
    pub(super) fn takes(&self, dtypes: &[DType]) -> bool {
        // An average of integers is rounded, so averaging after the operator would give another
        // number.
        let exact = |(placement, dtype): (&Placement, &DType)| match placement {
            Placement::Partial(_) if self.floats || *placement == AVG => dtype.is_float(),
            _ => true,
        };
        self.inputs.iter().zip(dtypes).all(exact)
    }
}

/// Writes the strategy as in `S(0), R -> S(0)`.
impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} -> {}",
            self.inputs.iter().format(", "),
            self.outputs.iter().format(", ")
        )
    }
}

/// Sharding rule of an operator: the combinations of placements that it supports. Most rules are an
/// [`EinsumRule`](super::EinsumRule), which implements this trait; an operator whose dimensions
/// cannot be described by letters lists its strategies.
///
/// A rule is a small value that contains the operator's static arguments. These are also its key in
/// the cache of decisions. The all-`Replicate` strategy is always allowed and never listed.
pub trait ShardingRule: Debug + Clone + Eq + Hash + 'static {
    /// Returns the name of the operator, for messages.
    fn name(&self) -> &'static str;

    /// Returns the global shapes of the outputs. Local: it computes the same on all ranks.
    ///
    /// # Errors
    /// [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if the inputs do not fit
    /// each other or the arguments.
    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>>;

    /// Returns the strategies for inputs and outputs of these global shapes. Among strategies of
    /// equal cost, the first is chosen.
    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy>;

    /// Returns true if the local operator supports tensors without elements: it does not fail on
    /// one, and records as many autodiff nodes as for any other. If it returns false, an input of
    /// which a rank would have no elements is gathered first, because a rank that skips a node gets
    /// out of step with the others in backward.
    fn supports_empty_shards(&self) -> bool {
        false
    }

    /// Returns true if the local operator supports shards of input `input` that are empty along
    /// `dim`. For operators that support some empty shards but not all.
    fn supports_empty_shards_along(&self, _input: usize, _dim: usize) -> bool {
        self.supports_empty_shards()
    }
}
