//! [`Matrix`]: a small matrix of integers, for the [simulation](super::simulation).

use itertools::Itertools;

use super::PartialOp;

/// A matrix of exact values; the inputs are chosen such that averages are integers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Matrix {
    pub(super) shape: [usize; 2],
    values: Vec<i128>,
}

impl Matrix {
    pub(super) fn from_fn(shape: [usize; 2], value: impl Fn([usize; 2]) -> i128) -> Self {
        let at = (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |column| [row, column]));
        Self {
            shape,
            values: at.map(value).collect(),
        }
    }

    fn get(&self, at: [usize; 2]) -> i128 {
        self.values[at[0] * self.shape[1] + at[1]]
    }

    /// Returns the elements with these indices along `dim`.
    pub(super) fn pick(&self, dim: usize, indices: &[usize]) -> Self {
        let mut shape = self.shape;
        shape[dim] = indices.len();
        Self::from_fn(shape, |mut at| {
            at[dim] = indices[at[dim]];
            self.get(at)
        })
    }

    pub(super) fn concat(dim: usize, parts: &[Self]) -> Self {
        let owners = parts
            .iter()
            .enumerate()
            .flat_map(|(part, m)| (0..m.shape[dim]).map(move |i| (part, i)))
            .collect_vec();
        let mut shape = parts[0].shape;
        assert!(
            parts
                .iter()
                .all(|part| part.shape[1 - dim] == shape[1 - dim]),
            "uneven {parts:?}"
        );
        shape[dim] = owners.len();
        Self::from_fn(shape, |mut at| {
            let (part, index) = owners[at[dim]];
            at[dim] = index;
            parts[part].get(at)
        })
    }

    pub(super) fn reduce(op: PartialOp, parts: &[Self]) -> Self {
        assert!(
            parts.iter().all(|part| part.shape == parts[0].shape),
            "unequal {parts:?}"
        );
        Self::from_fn(parts[0].shape, |at| {
            let values = parts.iter().map(|part| part.get(at));
            match op {
                PartialOp::Sum => values.sum(),
                PartialOp::Avg => {
                    let sum: i128 = values.sum();
                    assert_eq!(
                        sum % parts.len() as i128,
                        0,
                        "the inputs are too small for exact averages"
                    );
                    sum / parts.len() as i128
                }
                PartialOp::Min => values.min().unwrap(),
                PartialOp::Max => values.max().unwrap(),
                PartialOp::Product => values.product(),
            }
        })
    }

    pub(super) fn zeros_like(&self) -> Self {
        Self::from_fn(self.shape, |_| 0)
    }
}
