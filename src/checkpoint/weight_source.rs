//! [`WeightSource`]: the stored values that a parameter gets.

use std::fmt;
use std::ops::Range;

use burn::tensor::Shape;

use super::region::Region;

/// The place of a parameter's values in files of another framework.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSource {
    key: String,
    rows: Option<Range<usize>>,
    is_transposed: bool,
}

impl WeightSource {
    /// Returns the tensor named `key`.
    pub fn new(key: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            rows: None,
            is_transposed: false,
        }
    }

    /// Takes only these indices of the stored tensor's first dimension, for instance the queries of
    /// a weight in which queries, keys and values are fused.
    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        Self {
            rows: Some(rows),
            ..self
        }
    }

    /// Transposes the stored matrix, after [`rows`](Self::rows).
    #[must_use]
    pub fn transposed(self) -> Self {
        Self {
            is_transposed: true,
            ..self
        }
    }

    pub(super) fn key(&self) -> &str {
        &self.key
    }

    pub(super) fn is_transposed(&self) -> bool {
        self.is_transposed
    }

    /// Returns the shape of the values for a stored tensor of shape `stored`; `None` if it does not
    /// have the rows, or is not the matrix that is to be transposed.
    pub(super) fn shape(&self, stored: &Shape) -> Option<Shape> {
        let mut shape = stored.to_vec();
        if let Some(rows) = &self.rows {
            let first = shape
                .first_mut()
                .filter(|len| rows.start <= rows.end && rows.end <= **len)?;
            *first = rows.len();
        }
        if self.is_transposed {
            if shape.len() != 2 {
                return None;
            }
            shape.reverse();
        }
        Some(shape.into())
    }

    /// Returns the stored region of a region of the values.
    pub(super) fn region(&self, of_values: Region) -> Region {
        let mut region = if self.is_transposed {
            of_values.transposed()
        } else {
            of_values
        };
        if let Some(rows) = &self.rows {
            region.offsets[0] += rows.start;
        }
        region
    }
}

impl fmt::Display for WeightSource {
    /// Writes what is taken of the tensor, after its shape, such as `, rows 0..4, to be
    /// transposed`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(rows) = &self.rows {
            write!(f, ", rows {rows:?}")?;
        }
        f.write_str(if self.is_transposed {
            ", to be transposed"
        } else {
            ""
        })
    }
}
