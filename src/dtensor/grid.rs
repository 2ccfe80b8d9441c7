//! [`Grid`]: the cells into which a layout divides a tensor, along two of its dimensions, for drawings.

use std::ops::Range;

use itertools::Itertools;

use super::DTensorSpec;

/// Two dimensions of a tensor, divided at every index at which a shard begins, with the ranks that
/// hold each cell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Tensor dimensions of the rows and of the columns. A tensor of one dimension is drawn as a
    /// single row.
    pub dims: [Option<usize>; 2],
    pub rows: Vec<Range<usize>>,
    pub columns: Vec<Range<usize>>,
    /// Ranks that hold each cell, indexed by row and column.
    pub cells: Vec<Vec<Vec<usize>>>,
    /// Ranks whose local tensor is empty.
    pub empty: Vec<usize>,
}

impl Grid {
    /// Returns the grid of the sharded dimensions, completed to two with the first of the others.
    /// Returns `None` if more than two dimensions are sharded.
    pub fn of(spec: &DTensorSpec) -> Option<Self> {
        let mesh = spec.mesh();
        let coordinates = mesh
            .shape()
            .iter()
            .map(|&size| 0..size)
            .multi_cartesian_product();
        let slices = |coordinate: Vec<usize>| spec.layout().local_slices(spec.shape(), &coordinate);
        let held = mesh
            .ranks()
            .iter()
            .zip(coordinates)
            .map(|(&rank, coordinate)| (rank, slices(coordinate)));
        Self::new(
            spec.shape(),
            spec.layout().orders().map(|(dim, _)| dim).collect(),
            held,
        )
    }

    /// Returns the grid of the dimensions `divided`, completed to two with the first of the others,
    /// for ranks and the slices that each holds. Returns `None` if more than two dimensions are
    /// divided.
    pub fn new(
        shape: &[usize],
        divided: Vec<usize>,
        held: impl IntoIterator<Item = (usize, Vec<Range<usize>>)>,
    ) -> Option<Self> {
        if divided.len() > 2 {
            return None;
        }
        let mut dims: Vec<usize> = divided.into_iter().chain(0..shape.len()).unique().collect();
        dims.truncate(2);
        dims.sort_unstable();
        let dims = match dims[..] {
            [column] => [None, Some(column)],
            [row, column] => [Some(row), Some(column)],
            _ => [None, None],
        };
        let parts = held.into_iter().map(|(rank, slices)| {
            let is_empty = slices.iter().any(Range::is_empty);
            (
                rank,
                is_empty,
                dims.map(|dim| dim.map_or(0..1, |dim| slices[dim].clone())),
            )
        });
        let (empty, held): (Vec<_>, Vec<_>) = parts.partition(|(_, is_empty, _)| *is_empty);
        let intervals = |at: usize| -> Vec<Range<usize>> {
            let end = dims[at].map_or(1, |dim| shape[dim]);
            let starts = held
                .iter()
                .map(|(.., slices)| slices[at].start)
                .chain([end]);
            starts
                .sorted()
                .dedup()
                .tuple_windows()
                .map(|(start, end)| start..end)
                .collect()
        };
        let rows = intervals(0);
        let columns = intervals(1);
        let cell = |row: &Range<usize>, column: &Range<usize>| {
            let covers = |slices: &[Range<usize>; 2]| {
                slices[0].contains(&row.start) && slices[1].contains(&column.start)
            };
            held.iter()
                .filter(|(.., slices)| covers(slices))
                .map(|(rank, ..)| *rank)
                .collect()
        };
        let cells = rows
            .iter()
            .map(|row| columns.iter().map(|column| cell(row, column)).collect())
            .collect();
        Some(Self {
            dims,
            rows,
            columns,
            cells,
            empty: empty.into_iter().map(|(rank, ..)| rank).collect(),
        })
    }
}
