//! [`Update`]: rules for updates of indexed elements (scatter, select_assign) with partial inputs and replicated
//! indices.
//!
//! | | `x` | values | output |
//! |---|---|---|---|
//! | assign | `P(op)` | `P(op)` | `P(op)` |
//! | assign, except sum and product | `P(op)`, `R` | `R`, `P(op)` | `P(op)` |
//! | add | `P(sum)` | `P(sum)` | `P(sum)` |
//! | add | `P(avg)`, `R` | `P(avg)`, `R` | `P(avg)` |
//! | mul | `P(sum)`, `P(avg)` | `R` | as `x` |
//! | mul | `P(product)` | `P(product)` | `P(product)` |
//! | max | `P(max)`, `R` | `P(max)`, `R` | `P(max)` |
//! | min | as max, mirrored | | |
//!
//! Extrema are reduced before additions, and minima before maxima and vice versa. Otherwise,
//! partial values that become equal would share the gradient of one of them.

use burn::tensor::{IndexingUpdateOp, Shape};

use super::einsum_rule::EinsumRuleAt;
use super::partial_rules::{PartialRules, PlacementList};
use super::placements::{AVG, MAX, MIN, PRODUCT, R, S, SUM};
use super::{ShardingRule, Strategy, strategy};
use crate::Result;

const ASSIGN: &[PlacementList] = &[
    (&[SUM, R, SUM], SUM),
    (&[AVG, R, AVG], AVG),
    (&[MAX, R, MAX], MAX),
    (&[MIN, R, MIN], MIN),
    (&[PRODUCT, R, PRODUCT], PRODUCT),
    (&[AVG, R, R], AVG),
    (&[R, R, AVG], AVG),
    (&[MAX, R, R], MAX),
    (&[R, R, MAX], MAX),
    (&[MIN, R, R], MIN),
    (&[R, R, MIN], MIN),
];
const ADD: &[PlacementList] = &[
    (&[SUM, R, SUM], SUM),
    (&[AVG, R, AVG], AVG),
    (&[AVG, R, R], AVG),
    (&[R, R, AVG], AVG),
];
const MUL: &[PlacementList] = &[
    (&[SUM, R, R], SUM),
    (&[AVG, R, R], AVG),
    (&[PRODUCT, R, PRODUCT], PRODUCT),
];
const MAXIMUM: &[PlacementList] = &[
    (&[MAX, R, MAX], MAX),
    (&[MAX, R, R], MAX),
    (&[R, R, MAX], MAX),
];
const MINIMUM: &[PlacementList] = &[
    (&[MIN, R, MIN], MIN),
    (&[MIN, R, R], MIN),
    (&[R, R, MIN], MIN),
];

/// Returns the partial inputs that an update accepts. The inputs are a tensor, indices, and values.
pub(super) fn through(update: IndexingUpdateOp) -> PartialRules {
    match update {
        IndexingUpdateOp::Assign => PartialRules::new(ASSIGN),
        IndexingUpdateOp::Add => PartialRules::new(ADD),
        IndexingUpdateOp::Mul => PartialRules::new(MUL),
        IndexingUpdateOp::Max => PartialRules::new(MAXIMUM),
        IndexingUpdateOp::Min => PartialRules::new(MINIMUM),
    }
}

/// Rule of an update of a tensor at indices by values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Update {
    pub(super) axes: EinsumRuleAt,
    pub(super) update: IndexingUpdateOp,
    /// Dimension of the tensor, and that of the indices.
    pub(super) dims: [usize; 2],
}

impl ShardingRule for Update {
    fn name(&self) -> &'static str {
        self.axes.name()
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        self.axes.outputs(inputs)
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let [dim, index] = self.dims;
        let mut rows = self.axes.strategies(inputs, outputs);
        if self.update == IndexingUpdateOp::Add {
            rows.push(strategy([SUM, S(index), S(dim)], [SUM]));
        }
        rows.extend(through(self.update).rows(3, 1));
        rows
    }
}
