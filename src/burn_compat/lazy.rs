//! [`undrawn`]: the shape of a parameter that is not initialized, without its values.
//!
//! # What it relies on
//! * `Param::lazy_shape` is the shape of the parameter's record. Where a record has another shape
//!   than the parameter, as for a `Linear` with column layout, the mapping that is applied to a
//!   loaded record produces the final shape.
//! * `Param::transform_for_load` applies that mapping, and does not draw the values.
//!
//! # The issue to file
//! *The final shape of an uninitialized parameter.* `Param::lazy_shape` reports the shape before
//! `load_mapper`. A method that reports the shape that `val()` will have would make the placeholder
//! unnecessary.

use burn::module::{Param, Parameter};
use burn::tensor::Tensor;

use crate::dtensor::Kind;

/// Returns a parameter with the final shape, device and id of a lazy `param`, but without its
/// values. The placeholder takes no memory.
pub(crate) fn undrawn<const D: usize, K: Kind>(param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
where
    Tensor<D, K>: Parameter,
{
    let shape = param.lazy_shape();
    let device = param.lazy_device();
    let id = param.id;
    let zeros = match shape.num_elements() {
        0 => Tensor::zeros(shape, &device),
        _ => Tensor::<D, K>::zeros([1; D], &device).expand(shape),
    };
    param.transform_for_load(zeros, id)
}

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use burn::nn::{LinearConfig, LinearLayout};
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn the_final_shape_is_known_without_drawing_the_values() {
        for layout in [LinearLayout::Row, LinearLayout::Col] {
            let linear = LinearConfig::new(2, 3)
                .with_layout(layout)
                .init(&Device::flex());
            let weight = linear.weight.clone();
            let placeholder = undrawn(weight.clone());
            assert!(!weight.is_initialized());
            assert_eq!(placeholder.base().dims(), linear.weight.val().dims());
            assert_eq!(
                (placeholder.id, placeholder.base().dims()),
                (linear.weight.id, [2, 3])
            );
        }
    }
}
