//! [`TableRule`]: a rule given as a list of strategies.

use std::hash::{Hash, Hasher};

use burn::tensor::Shape;

use super::{ShardingRule, Strategy};
use crate::Result;

/// A [`ShardingRule`] given as a plain table, like PyTorch's `register_sharding`. It is for an
/// operator without arguments other than its tensors whose dimensions cannot be described by
/// [letters](super::EinsumRule). If the strategies depend on arguments, implement [`ShardingRule`].
///
/// A strategy lists placements of the inputs along one mesh dimension, and the placements of the
/// outputs that result if every rank computes locally. The all-`Replicate` strategy is always
/// allowed and need not be listed.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_dtensor::dtensor::DTensor;
/// use burn_dtensor::dtensor::ops::{TableRule, apply, strategy};
/// use burn_dtensor::placement::Placement::Shard;
///
/// /// Swaps the first two dimensions: `[a, b, c] -> [b, a, c]`. Every sharding is kept.
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
    /// Makes the table of the operator `name`. `shapes` computes the global shapes of the outputs
    /// from those of the inputs, and `rows` the [strategies](super::strategy()) for inputs and
    /// outputs of given shapes.
    pub const fn new(
        name: &'static str,
        shapes: fn(&[Shape]) -> Result<Vec<Shape>>,
        rows: fn(&[Shape], &[Shape]) -> Vec<Strategy>,
    ) -> Self {
        Self { name, shapes, rows }
    }

    /// Returns the identity of the table. Two tables with the same name and the same functions are
    /// equal.
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
