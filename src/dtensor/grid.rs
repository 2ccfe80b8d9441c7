//! [`Grid`]: the cells that a layout cuts a tensor into, along two of its dimensions.

use std::ops::Range;

use itertools::Itertools;

use super::DTensorSpec;

/// Two dimensions of a tensor, cut wherever a part of it begins, and the ranks that hold each cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grid {
    /// The dimensions of rows and columns; a tensor of one dimension is a row.
    pub dims: [Option<usize>; 2],
    pub rows: Vec<Range<usize>>,
    pub columns: Vec<Range<usize>>,
    /// By row and column.
    pub cells: Vec<Vec<Vec<usize>>>,
    /// Ranks that hold nothing.
    pub empty: Vec<usize>,
}

impl Grid {
    /// Of the first two dimensions that are cut, or else the first ones; `None` where more than two are cut.
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
