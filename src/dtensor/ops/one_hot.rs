//! One-hot encodings.
//!
//! | indices | output |
//! |---|---|
//! | `S(d)` before the new dimension | `S(d)` |
//! | `S(d)` after | `S(d + 1)` |

use burn::tensor::{AsIndex, Shape, Tensor, kind};

use super::args::{dim_of, misfit};
use super::empty::is_empty;
use super::placements::S;
use super::{Rule, Strategy, strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct OneHot {
    axis: usize,
    classes: usize,
}

impl Rule for OneHot {
    fn name(&self) -> &'static str {
        "one_hot"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let mut output = inputs[0].to_vec();
        output.insert(self.axis, self.classes);
        Ok(vec![output.into()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let moved = |dim| if dim < self.axis { dim } else { dim + 1 };
        (0..inputs[0].num_dims()).map(|dim| strategy([S(dim)], [S(moved(dim))])).collect()
    }
}

fn encode<const D: usize, const D2: usize, K: Kind + kind::Ordered>(
    x: DTensor<D, K>,
    classes: usize,
    axis: usize,
    local: impl FnOnce(Tensor<D, K>) -> Tensor<D2, K>,
) -> DTensor<D2, K> {
    if D2 != D + 1 || classes < 2 {
        let why = format!("it has {} dimensions, {D2} are asked for, and at least 2 classes, not {classes}", D + 1);
        misfit("one_hot", &[x.shape()], why).unwind();
    }
    unary(&OneHot { axis, classes }, x, |x, op| {
        if is_empty(op, 0) {
            return Tensor::zeros(op.output_shape(0).clone(), (&x.device(), x.dtype()));
        }
        local(x)
    })
}

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    /// 1 at the class of each element along a new last dimension, as burn's
    /// [`one_hot`](Tensor::one_hot).
    #[must_use]
    pub fn one_hot<const D2: usize>(self, num_classes: usize) -> DTensor<D2, K> {
        encode(self, num_classes, D, |x| x.one_hot(num_classes))
    }

    /// `on_value` at the class of each element along a new dimension `axis`, `off_value` elsewhere,
    /// as burn's [`one_hot_fill`](Tensor::one_hot_fill).
    #[must_use]
    pub fn one_hot_fill<const D2: usize>(
        self,
        num_classes: usize,
        on_value: f32,
        off_value: f32,
        axis: impl AsIndex,
    ) -> DTensor<D2, K> {
        let axis = dim_of("one_hot_fill", axis, D + 1);
        encode(self, num_classes, axis, |x| x.one_hot_fill(num_classes, on_value, off_value, axis))
    }
}
