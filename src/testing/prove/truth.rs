//! Expected results from the unsharded operator, and the comparison with them.

use burn::tensor::{Device, Tensor, TensorData};

use super::case::{Case, CaseInput, PlainInput};
use super::output::FullOutput;
use super::values::weight;
use crate::Result;

/// Results of the unsharded operator of one case.
pub(super) struct Truth {
    /// Values of every input.
    pub(super) inputs: Vec<Vec<f64>>,
    pub(super) outputs: Vec<FullOutput>,
    /// Gradient of the [`loss`] with respect to every input that has one.
    pub(super) gradients: Vec<Option<Vec<f64>>>,
}

impl Truth {
    pub(super) fn of(case: &Case, device: &Device) -> Result<Self> {
        let values = |(at, input): (usize, &CaseInput)| {
            input.values.full_values(at, input.shape.iter().product())
        };
        let inputs: Vec<_> = case.inputs.iter().enumerate().map(values).collect();
        let leaf = |(input, values): (&CaseInput, &Vec<f64>)| {
            PlainInput(input.leaf(values, &input.shape, device))
        };
        let leaves: Vec<_> = case.inputs.iter().zip(&inputs).map(leaf).collect();
        let mut outputs = (case.plain)(&leaves)?;
        let grads = loss(&outputs).map(|loss| loss.backward());
        let gradients = case
            .inputs
            .iter()
            .zip(&leaves)
            .map(|(input, leaf)| Some(input.gradient(&leaf.0, grads.as_ref()?)?.1))
            .collect();
        outputs.iter_mut().for_each(|output| output.tracked = None);
        Ok(Self {
            inputs,
            outputs,
            gradients,
        })
    }
}

/// Returns the weighted sum of the elements of all tracked outputs. Every element has a different
/// weight.
pub(super) fn loss(outputs: &[FullOutput]) -> Option<Tensor<1>> {
    let term = |(at, output): (usize, &FullOutput)| {
        let tracked = output.tracked.clone()?;
        let weights: Vec<f32> = (0..output.values.len())
            .map(|element| weight(at, element) as f32)
            .collect();
        let weights = TensorData::new(weights, [output.values.len()]);
        Some(
            (tracked.clone() * Tensor::from_data(weights, (&tracked.device(), tracked.dtype())))
                .sum(),
        )
    };
    outputs
        .iter()
        .enumerate()
        .filter_map(term)
        .reduce(|sum, term| sum + term)
}

/// Returns index and distance of the element of `found` that is furthest from `expected`, if the
/// distance is more than `tolerance` times the size of the expected element.
pub(super) fn furthest(found: &[f64], expected: &[f64], tolerance: f64) -> Option<(usize, f64)> {
    let distance = |(found, expected): (&f64, &f64)| {
        if found == expected || (found.is_nan() && expected.is_nan()) {
            return 0.0;
        }
        let distance = (found - expected).abs();
        if distance.is_nan() {
            f64::INFINITY
        } else {
            distance
        }
    };
    // If the expected element is infinite, so is the limit. An infinite distance is therefore
    // checked separately.
    found
        .iter()
        .zip(expected)
        .map(distance)
        .enumerate()
        .filter(|&(at, distance)| {
            distance.is_infinite() || distance > tolerance * expected[at].abs().max(1.0)
        })
        .max_by(|a, b| a.1.total_cmp(&b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_infinity_is_near_to_an_infinity() {
        let infinity = f64::INFINITY;
        for found in [3.0, -infinity, f64::NAN, f64::MAX] {
            assert_eq!(
                furthest(&[found], &[infinity], 0.1),
                Some((0, infinity)),
                "{found}"
            );
            assert_eq!(
                furthest(&[infinity], &[found], 0.1),
                Some((0, infinity)),
                "{found}"
            );
        }
        assert_eq!(
            furthest(&[infinity, f64::NAN, 5.0], &[infinity, f64::NAN, 5.1], 0.1),
            None
        );
    }
}
