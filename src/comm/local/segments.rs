//! [`Segment`]: the elements of its tensors that an all-reduce moves at once.
//!
//! The received shards, their sums and the received sums are each as large as the tensors. If the tensors are
//! large, none of these is still in the caches when it is needed next. Large tensors are therefore reduced in
//! segments, one after another.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Shape;

use super::contribution;
use crate::comm::backend::{ShardSignature, TensorSignature};
use crate::placement::ShardSizes;

/// Ranges of elements of some rows, which are one-dimensional tensors.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Segment(Vec<(usize, Range<usize>)>);

impl Segment {
    /// Returns a segment of all elements of `rows`.
    pub fn of_all(rows: &[DispatchTensor]) -> Self {
        Self(rows.iter().map(|row| 0..row.shape().num_elements()).enumerate().collect())
    }

    /// Returns the elements of `rows` in order, in segments of at most `most` bytes.
    pub fn several(rows: &[DispatchTensor], most: usize) -> Vec<Self> {
        Self::split(rows.iter().map(|row| (row.dtype().size(), row.shape().num_elements())), most)
    }

    /// Splits rows, each given as (bytes per element, number of elements).
    fn split(rows: impl IntoIterator<Item = (usize, usize)>, most: usize) -> Vec<Self> {
        let (mut all, mut room) = (vec![Self(Vec::new())], most);
        for (index, (size, len)) in rows.into_iter().enumerate() {
            let mut start = 0;
            while start < len {
                if room < size {
                    all.push(Self(Vec::new()));
                    room = most;
                }
                let end = len.min(start + room / size);
                all.last_mut().expect("`all` has a first segment").0.push((index, start..end));
                room -= (end - start) * size;
                start = end;
            }
        }
        all
    }

    /// Returns the ranges of the segment, each given as (row index, range).
    pub fn ranges(&self) -> &[(usize, Range<usize>)] {
        &self.0
    }

    /// Returns the elements of the segment in `rows`, without a copy if possible.
    pub fn segments_of(&self, rows: &[DispatchTensor]) -> Vec<DispatchTensor> {
        let sizes = |(index, range): &(usize, Range<usize>)| match &rows[*index] {
            row if row.shape()[..] == [range.len()] => row.clone(),
            row => contribution::part(row, 0, range.clone()),
        };
        self.0.iter().map(sizes).collect()
    }

    /// Returns the dimension and shard sizes by which the ranks shard each range.
    pub fn shardings(&self) -> Vec<(usize, ShardSizes)> {
        self.0.iter().map(|(_, range)| (0, ShardSizes::Chunked(range.len()))).collect()
    }

    /// Returns the signature that the ranks agree on.
    pub fn prints(&self, rows: &[DispatchTensor]) -> Arc<[TensorSignature]> {
        let print = |((index, range), (dim, sizes)): (&(usize, Range<usize>), (usize, ShardSizes))| TensorSignature {
            shape: Shape::from([range.len()]),
            dtype: rows[*index].dtype(),
            sharding: Some(ShardSignature::new(dim, &sizes)),
            to: None,
        };
        self.0.iter().zip(self.shardings()).map(print).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_have_all_elements_in_order_and_no_more_bytes_than_they_may() {
        for most in [8, 9, 24, 100] {
            let rows = [(4, 5), (1, 0), (8, 3), (2, 1), (1, 17)];
            let segments = Segment::split(rows, most);
            let elements = |segment: &Segment| -> Vec<_> {
                segment.ranges().iter().flat_map(|(row, range)| range.clone().map(|at| (*row, at))).collect()
            };
            let bytes = |segment: &Segment| elements(segment).iter().map(|(row, _)| rows[*row].0).sum::<usize>();
            assert!(segments.iter().all(|segment| (1..=most).contains(&bytes(segment))), "{most}: {segments:?}");
            let all = rows.iter().enumerate().flat_map(|(row, (_, len))| (0..*len).map(move |at| (row, at)));
            assert!(segments.iter().flat_map(elements).eq(all), "{most}: {segments:?}");
        }
    }

    #[test]
    fn nothing_is_one_segment() {
        assert_eq!(Segment::split([(4, 0)], 8), [Segment(Vec::new())]);
    }
}
