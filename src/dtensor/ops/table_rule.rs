//! [`TableRule`]: a rule written out as its rows.

use std::hash::{Hash, Hasher};

use burn::tensor::Shape;

use super::{ShardingRule, Strategy};
use crate::Result;

/// A [`ShardingRule`] given as a plain table: PyTorch's `register_sharding`. For an operator whose dimensions
/// [letters](super::EinsumRule) cannot name, and which takes no arguments beside its tensors; with arguments, of which a
/// decision may depend, implement [`ShardingRule`].
///
/// A row says which placements of the inputs, along one mesh dimension, give which of the outputs when every rank
/// computes alone. The all-`Replicate` row is always allowed and need not be listed.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_dtensor::dtensor::DTensor;
/// use burn_dtensor::dtensor::ops::{TableRule, apply, strategy};
/// use burn_dtensor::placement::Placement::Shard;
///
/// /// `[a, b, c] -> [b, a, c]`, which keeps whatever shards it.
/// const TURN: TableRule = TableRule::new(
///     "turn",
///     |inputs| Ok(vec![[inputs[0][1], inputs[0][0], inputs[0][2]].into()]),
///     |_, _| [(0, 1), (1, 0), (2, 2)].map(|(from, to)| strategy([Shard(from)], [Shard(to)])).into(),
/// );
///
/// fn turn(x: DTensor<3>) -> DTensor<3> {
///     apply(&TURN, x, |x: Tensor<3>, _| x.swap_dims(0, 1))
/// }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct TableRule {
    name: &'static str,
    shapes: fn(&[Shape]) -> Result<Vec<Shape>>,
    rows: fn(&[Shape], &[Shape]) -> Vec<Strategy>,
}

impl TableRule {
    /// The table of the operator `name`: global shapes of the outputs for those of the inputs, and the
    /// [rows](super::strategy()) for inputs and outputs of given shapes.
    pub const fn new(
        name: &'static str,
        shapes: fn(&[Shape]) -> Result<Vec<Shape>>,
        rows: fn(&[Shape], &[Shape]) -> Vec<Strategy>,
    ) -> Self {
        Self { name, shapes, rows }
    }

    /// What tells tables apart: those of one name whose functions are the same code are one.
    fn key(&self) -> (&'static str, usize, usize) {
        (self.name, self.shapes as usize, self.rows as usize)
    }
}

impl PartialEq for TableRule {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for TableRule {}

impl Hash for TableRule {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl ShardingRule for TableRule {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        (self.shapes)(inputs)
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        (self.rows)(inputs, outputs)
    }
}
