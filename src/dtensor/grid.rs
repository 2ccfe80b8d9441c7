//! [`Grid`]: the cells into which a layout divides a tensor, along two of its dimensions, for drawings.

use std::ops::Range;

use itertools::Itertools;

use super::DTensorSpec;

/// Two dimensions of a tensor, divided at every index at which a shard begins, with the ranks that hold each cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Tensor dimensions of the rows and of the columns. A tensor of one dimension is drawn as a single row.
    pub dims: [Option<usize>; 2],
    pub rows: Vec<Range<usize>>,
    pub columns: Vec<Range<usize>>,
    /// Ranks that hold each cell, indexed by row and column.
    pub cells: Vec<Vec<Vec<usize>>>,
    /// Ranks whose local tensor is empty.
    pub empty: Vec<usize>,
}

impl Grid {
    /// Returns the grid of the sharded dimensions, completed to two with the first of the others. Returns `None` if
    /// more than two dimensions are sharded.
    pub fn of(spec: &DTensorSpec) -> Option<Self> {
        let sizes = spec.layout().orders().map(|(dim, _)| dim);
        let mut dims: Vec<usize> = sizes.chain(0..spec.shape().num_dims()).unique().collect();
        if spec.layout().orders().count() > 2 {
            return None;
        }
        dims.truncate(2);
        dims.sort_unstable();
        let dims = match dims[..] {
            [column] => [None, Some(column)],
            [row, column] => [Some(row), Some(column)],
            _ => [None, None],
        };
        let mesh = spec.mesh();
        let coordinates = mesh.shape().iter().map(|&size| 0..size).multi_cartesian_product();
        let parts = mesh.ranks().iter().zip(coordinates).map(|(&rank, coordinate)| {
            let slices = spec.layout().local_slices(spec.shape(), &coordinate);
            let is_empty = slices.iter().any(Range::is_empty);
            (rank, is_empty, dims.map(|dim| dim.map_or(0..1, |dim| slices[dim].clone())))
        });
        let (empty, held): (Vec<_>, Vec<_>) = parts.partition(|(_, is_empty, _)| *is_empty);
        let intervals = |at: usize| -> Vec<Range<usize>> {
            let end = dims[at].map_or(1, |dim| spec.shape()[dim]);
            let starts = held.iter().map(|(.., slices)| slices[at].start).chain([end]);
            starts.sorted().dedup().tuple_windows().map(|(start, end)| start..end).collect()
        };
        let (rows, columns) = (intervals(0), intervals(1));
        let cell = |row: &Range<usize>, column: &Range<usize>| {
            let covers =
                |slices: &[Range<usize>; 2]| slices[0].contains(&row.start) && slices[1].contains(&column.start);
            held.iter().filter(|(.., slices)| covers(slices)).map(|(rank, ..)| *rank).collect()
        };
        let cells = rows.iter().map(|row| columns.iter().map(|column| cell(row, column)).collect()).collect();
        Some(Self { dims, rows, columns, cells, empty: empty.into_iter().map(|(rank, ..)| rank).collect() })
    }
}
