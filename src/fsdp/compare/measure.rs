//! Differences between two runs, relative to the magnitude of their values.
//!
//! ```text
//!   root mean square of the difference  /  (that of the reference  +  4 √ε · that of values nearby)   ≤  √ε
//! ```
//!
//! ε is the machine epsilon of the coarsest dtype that takes part. Values nearby are the output
//! before, or the largest gradient of the unit: a sum that nearly cancels is rounded like its
//! terms.

use std::collections::BTreeMap;
use std::iter;

use serde::{Deserialize, Serialize};

use super::ranks::{ComparedParam, Ranks};
use super::report::{Cause, Comparison, Finding};
use super::run::Run;
use crate::param::HostTensor;

/// Sums of squares over the elements of a tensor.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Squares {
    difference: f64,
    reference: f64,
    count: usize,
}

impl Squares {
    fn of(values: impl IntoIterator<Item = f64>, reference: impl IntoIterator<Item = f64>) -> Self {
        values
            .into_iter()
            .zip(reference)
            .fold(Self::default(), |sum, (value, reference)| {
                let difference = match value - reference {
                    // Infinite in the same direction, or both not a number: no difference.
                    _ if value == reference || value.is_nan() && reference.is_nan() => 0.0,
                    difference if difference.is_nan() => f64::INFINITY,
                    difference => difference * difference,
                };
                let reference = if reference.is_finite() {
                    reference * reference
                } else {
                    0.0
                };
                sum.plus(&Self {
                    difference,
                    reference,
                    count: 1,
                })
            })
    }

    fn plus(&self, other: &Self) -> Self {
        Self {
            difference: self.difference + other.difference,
            reference: self.reference + other.reference,
            count: self.count + other.count,
        }
    }

    /// Returns the magnitude of the reference.
    fn magnitude(&self) -> f64 {
        (self.reference / self.count.max(1) as f64).sqrt()
    }

    /// Returns the difference, relative to the magnitude of the reference, and of values `nearby`.
    fn relative(&self, nearby: f64, epsilon: f64) -> f64 {
        if self.difference == 0.0 {
            return 0.0;
        }
        (self.difference / self.count as f64).sqrt()
            / (self.magnitude() + 4.0 * epsilon.sqrt() * nearby)
    }
}

fn largest(numbers: impl IntoIterator<Item = f64>) -> f64 {
    numbers.into_iter().fold(0.0, f64::max)
}

/// Difference between the runs of one rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Number that is equal on ranks that differ only in their rows.
    slice: usize,
    outputs: Vec<MeasuredOutput>,
    /// Gradients, in the order of [`Ranks::params`]. Empty without a backward.
    params: Vec<Squares>,
}

#[derive(Debug, Serialize, Deserialize)]
enum MeasuredOutput {
    Values {
        unit: Option<String>,
        tensors: Vec<MeasuredTensor>,
    },
    Order {
        sharded: Option<String>,
        full: Option<String>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
enum MeasuredTensor {
    /// This rank's rows.
    Rows(Squares),
    /// Values of a tensor without rows, which are averaged over the ranks.
    Average { sharded: Vec<f64>, full: Vec<f64> },
    Shape {
        sharded: Vec<usize>,
        full: Vec<usize>,
    },
}

impl Measured {
    /// Compares the run of the sharded model with the reference, that of the full one.
    pub(super) fn of(own: &Run, reference: &Run, ranks: &Ranks) -> Self {
        let mut outputs = Vec::new();
        for (sharded, full) in own.outputs.iter().zip(&reference.outputs) {
            if sharded.unit != full.unit || sharded.tensors.len() != full.tensors.len() {
                outputs.push(MeasuredOutput::Order {
                    sharded: sharded.name(),
                    full: full.name(),
                });
                break;
            }
            let tensors = sharded.tensors.iter().zip(&full.tensors);
            let tensors = tensors
                .map(|(sharded, full)| MeasuredTensor::of(sharded, full, ranks))
                .collect();
            outputs.push(MeasuredOutput::Values {
                unit: sharded.name(),
                tensors,
            });
        }
        let params = own.grads.as_ref().zip(reference.grads.as_ref()).map_or(
            Vec::new(),
            |(own, reference)| {
                // A gradient that is zero everywhere may be missing.
                let squares = |ComparedParam { path, .. }: &ComparedParam| match (
                    own.get(path),
                    reference.get(path),
                ) {
                    (Some(own), Some(reference)) => Squares::of(own.values(), reference.values()),
                    (Some(own), None) => Squares::of(own.values(), iter::repeat(0.0)),
                    (None, Some(reference)) => Squares::of(iter::repeat(0.0), reference.values()),
                    (None, None) => Squares::default(),
                };
                ranks.params.iter().map(squares).collect()
            },
        );
        Self {
            slice: ranks.slice(),
            outputs,
            params,
        }
    }
}

impl MeasuredTensor {
    fn of(sharded: &HostTensor, full: &HostTensor, ranks: &Ranks) -> Self {
        if sharded.shape == full.shape && ranks.count() == 1 {
            return Self::Rows(Squares::of(sharded.values(), full.values()));
        }
        if sharded.shape == full.shape {
            return Self::Average {
                sharded: sharded.values(),
                full: full.values(),
            };
        }
        match rows(sharded, full, ranks.count(), ranks.position()) {
            Some(rows) => Self::Rows(Squares::of(sharded.values(), rows)),
            None => Self::Shape {
                sharded: sharded.shape.clone(),
                full: full.shape.clone(),
            },
        }
    }
}

/// Returns those rows of `full` that are at `position` of `count` equal parts, in the shape of
/// `sharded`; `None` unless the shapes differ by the factor `count` in one dimension only.
fn rows(
    sharded: &HostTensor,
    full: &HostTensor,
    count: usize,
    position: usize,
) -> Option<Vec<f64>> {
    let dims = || sharded.shape.iter().zip(&full.shape);
    let dim = dims().position(|(sharded, full)| sharded != full)?;
    if sharded.shape.len() != full.shape.len()
        || !dims().enumerate().all(|(at, (sharded, full))| {
            *full == if at == dim { sharded * count } else { *sharded }
        })
    {
        return None;
    }
    let block: usize = sharded.shape[dim..].iter().product();
    let values = full.values();
    let blocks = values
        .chunks_exact(block.max(1))
        .skip(position)
        .step_by(count);
    Some(blocks.flatten().copied().collect())
}

/// Returns true if both runs returned the same values at this place.
pub(super) fn agrees_at(values: &Run, reference: &Run, at: usize, epsilon: f64) -> bool {
    let (Some(output), Some(expected)) = (values.outputs.get(at), reference.outputs.get(at)) else {
        return false;
    };
    let squares = |(value, reference): (&HostTensor, &HostTensor)| {
        Squares::of(value.values(), reference.values())
    };
    let nearby = at.checked_sub(1).map_or(0.0, |before| {
        let tensors = &reference.outputs[before].tensors;
        largest(
            tensors
                .iter()
                .map(|tensor| squares((tensor, tensor)).magnitude()),
        )
    });
    let tensors = || output.tensors.iter().zip(&expected.tensors);
    output.unit == expected.unit
        && output.tensors.len() == expected.tensors.len()
        && tensors().all(|(value, reference)| value.shape == reference.shape)
        && tensors().all(|pair| squares(pair).relative(nearby, epsilon) <= epsilon.sqrt())
}

/// Returns the place of the first output in which two runs on the same rows differ.
pub(super) fn first_difference(values: &Run, reference: &Run, epsilon: f64) -> Option<usize> {
    let count = values.outputs.len().max(reference.outputs.len());
    (0..count).find(|&at| !agrees_at(values, reference, at, epsilon))
}

/// Differences between the runs of all ranks.
pub(super) struct Verdict {
    /// The result, in which the cause of a differing output is not known yet.
    pub(super) comparison: Comparison,
    /// Place of the first output that differs.
    pub(super) first: Option<usize>,
}

impl Verdict {
    /// Decides by the differences of all ranks, which `measured` yields in one order on every rank.
    pub(super) fn of(measured: &[Measured], ranks: &Ranks) -> Self {
        let (epsilon, tolerance) = (ranks.epsilon, ranks.epsilon.sqrt());
        let mut first = None;
        let mut findings = Vec::new();
        let mut all = Vec::new();
        let mut units = Vec::new();
        let mut nearby = 0.0;
        let count = measured
            .iter()
            .map(|of_rank| of_rank.outputs.len())
            .max()
            .unwrap_or(0);
        for at in 0..count {
            let (unit, tensors) = match joined(measured, at) {
                Ok(joined) => joined,
                Err(difference) => {
                    findings.push(difference);
                    break;
                }
            };
            let relative = largest(
                tensors
                    .iter()
                    .map(|tensor| tensor.relative(nearby, epsilon)),
            );
            nearby = largest(tensors.iter().map(Squares::magnitude));
            all.push(relative);
            units.extend(unit.clone());
            if relative > tolerance {
                first = Some(at);
                findings.push(Finding::Output {
                    unit,
                    relative,
                    cause: Cause::Shards,
                });
                break;
            }
        }
        let mut parameters = 0;
        let params: Vec<_> = (0..measured[0].params.len())
            .map(|at| {
                measured.iter().fold(Squares::default(), |sum, of_rank| {
                    sum.plus(&of_rank.params[at])
                })
            })
            .collect();
        for (param, squares) in ranks
            .params
            .iter()
            .zip(&params)
            .filter(|(_, squares)| squares.count > 0)
        {
            let of_unit = ranks
                .params
                .iter()
                .zip(&params)
                .filter(|(other, _)| other.unit == param.unit);
            let nearby = largest(of_unit.map(|(_, squares)| squares.magnitude()));
            let relative = squares.relative(nearby, epsilon);
            parameters += 1;
            all.push(relative);
            if relative > tolerance {
                findings.push(Finding::Gradient {
                    param: param.path.clone(),
                    relative,
                });
            }
        }
        units.sort_unstable();
        units.dedup();
        let comparison = Comparison {
            units: units.len(),
            parameters,
            largest: largest(all),
            tolerance,
            findings,
        };
        Self { comparison, first }
    }

    /// Returns the result. `cause` is that of the first output that differs.
    pub(super) fn caused_by(mut self, found: Cause) -> Comparison {
        for difference in &mut self.comparison.findings {
            if let Finding::Output { cause, .. } = difference {
                *cause = found;
            }
        }
        self.comparison
    }
}

/// Returns the output at this place over all ranks: its unit, and its tensors.
///
/// # Errors
/// The difference, if units or shapes differ.
fn joined(measured: &[Measured], at: usize) -> Result<(Option<String>, Vec<Squares>), Finding> {
    let mut joined: Option<(Option<String>, Vec<Squares>)> = None;
    let mut averages = TensorMeans::default();
    for of_rank in measured {
        let (unit, tensors) = match of_rank.outputs.get(at) {
            Some(MeasuredOutput::Values { unit, tensors }) => (unit, tensors),
            Some(MeasuredOutput::Order { sharded, full }) => {
                return Err(Finding::Order {
                    sharded: sharded.clone(),
                    full: full.clone(),
                });
            }
            // The rank has run fewer units, and differs at an earlier place.
            None => continue,
        };
        let (known, sums) =
            joined.get_or_insert_with(|| (unit.clone(), vec![Squares::default(); tensors.len()]));
        if known != unit {
            return Err(Finding::Order {
                sharded: unit.clone(),
                full: known.clone(),
            });
        }
        for (k, (sum, tensor)) in sums.iter_mut().zip(tensors).enumerate() {
            match tensor {
                MeasuredTensor::Rows(squares) => *sum = sum.plus(squares),
                MeasuredTensor::Average { sharded, full } => {
                    averages.add((of_rank.slice, k), sharded, full)
                }
                MeasuredTensor::Shape { sharded, full } => {
                    let unit = unit.clone();
                    let sharded = sharded.clone();
                    let full = full.clone();
                    return Err(Finding::Shape {
                        unit,
                        sharded,
                        full,
                    });
                }
            }
        }
    }
    let (unit, mut sums) = joined.unwrap_or_default();
    for ((_, k), average) in averages.0 {
        let means = average.sum.iter().map(|sum| sum / average.ranks as f64);
        sums[k] = sums[k].plus(&Squares::of(means, average.reference.iter().copied()));
    }
    Ok((unit, sums))
}

/// Tensors without rows, by the slice of the ranks and by their place among a unit's tensors.
#[derive(Default)]
struct TensorMeans(BTreeMap<(usize, usize), TensorMean>);

struct TensorMean {
    sum: Vec<f64>,
    ranks: usize,
    /// Values of the full model, of the first rank.
    reference: Vec<f64>,
}

impl TensorMeans {
    fn add(&mut self, key: (usize, usize), sharded: &[f64], full: &[f64]) {
        let average = self.0.entry(key).or_insert_with(|| TensorMean {
            sum: vec![0.0; sharded.len()],
            ranks: 0,
            reference: full.to_vec(),
        });
        average
            .sum
            .iter_mut()
            .zip(sharded)
            .for_each(|(sum, value)| *sum += value);
        average.ranks += 1;
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor, TensorData};

    use super::*;

    #[test]
    fn differences_are_relative_to_magnitudes() {
        let relative = |values: [f64; 2], reference: [f64; 2], nearby| {
            Squares::of(values, reference).relative(nearby, 1e-6)
        };
        assert_eq!(relative([3.0, 4.0], [3.0, 4.0], 0.0), 0.0);
        assert!(
            (relative([3.0, 5.0], [3.0, 4.0], 0.0) - 0.2).abs() < 1e-12,
            "1 of the root of 9 + 16"
        );
        assert_eq!(relative([1e-9, 0.0], [0.0, 0.0], 0.0), f64::INFINITY);
        // Of values that cancel, the terms count.
        assert!(relative([1e-9, 0.0], [0.0, 0.0], 1.0) < 1e-3);
        for (value, reference, same) in [
            (f64::NAN, f64::NAN, true),
            (f64::INFINITY, f64::INFINITY, true),
            (f64::INFINITY, f64::NEG_INFINITY, false),
            (f64::NAN, 1.0, false),
            (1.0, f64::NAN, false),
            (1.0, f64::INFINITY, false),
        ] {
            let expected = if same { 0.0 } else { f64::INFINITY };
            assert_eq!(
                relative([value, 1.0], [reference, 1.0], 1.0),
                expected,
                "{value} for {reference}"
            );
        }
    }

    #[test]
    fn rows_of_a_rank_are_along_the_dimension_that_grows() {
        let device = Device::flex();
        let of = |shape: &[usize]| {
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|value| value as f32)
                .collect();
            let data = TensorData::new(values, shape.to_vec());
            match shape.len() {
                1 => HostTensor::of(Tensor::<1>::from_data(data, &device).into_dispatch()),
                _ => HostTensor::of(Tensor::<2>::from_data(data, &device).into_dispatch()),
            }
        };
        let rows = |sharded: &[usize], full: &[usize], position| {
            rows(&of(sharded), &of(full), 3, position)
        };
        assert_eq!(rows(&[2], &[6], 1), Some(vec![2.0, 3.0]));
        assert_eq!(rows(&[1, 2], &[3, 2], 2), Some(vec![4.0, 5.0]));
        assert_eq!(rows(&[2, 1], &[2, 3], 1), Some(vec![1.0, 4.0]));
        for (sharded, full) in [
            (&[2][..], &[4][..]),
            (&[2], &[2, 3]),
            (&[1, 1], &[3, 3]),
            (&[2, 2], &[2, 2]),
        ] {
            assert_eq!(rows(sharded, full, 0), None, "{sharded:?} of {full:?}");
        }
    }
}
