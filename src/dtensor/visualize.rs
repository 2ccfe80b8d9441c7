//! [`visualize_sharding`]: a drawing of the ranks that hold each shard.

use std::fmt::Write;

use itertools::Itertools;

use super::DTensorSpec;
use super::grid::Grid;

/// Draws a tensor, with the ranks that hold each shard. Local.
///
/// ```text
/// [8, 16] f32 on DeviceMesh(dp=2, tp=2): [S(0), S(1)]
///
///        0..8   8..16
///      +------+-------+
/// 0..4 | 0    | 1     |
///      +------+-------+
/// 4..8 | 2    | 3     |
///      +------+-------+
/// ```
///
/// Ranks that share a cell hold replicas of it, or partial values if the heading shows `P`. Ranks
/// without elements are listed below the drawing. If the tensor has more than two dimensions, the
/// sharded ones are drawn; if more than two are sharded, only the heading is returned.
pub fn visualize_sharding(spec: &DTensorSpec) -> String {
    match Grid::of(spec) {
        Some(grid) if spec.shape().num_dims() > 0 => {
            format!("{spec}\n{}", draw_grid(&grid, spec.shape().num_dims()))
        }
        _ => format!("{spec}\n"),
    }
}

/// Draws the cells of a tensor of `ndim` dimensions.
pub(crate) fn draw_grid(grid: &Grid, ndim: usize) -> String {
    let cells: Vec<Vec<String>> = grid
        .cells
        .iter()
        .map(|row| row.iter().map(|ranks| ranks.iter().join(" ")).collect())
        .collect();
    let labels: Vec<String> = grid.rows.iter().map(|row| format!("{row:?}")).collect();
    let heads: Vec<String> = grid
        .columns
        .iter()
        .map(|column| format!("{column:?}"))
        .collect();
    let margin = labels.iter().map(String::len).max().unwrap_or(0);
    let width = |at: usize| {
        cells
            .iter()
            .map(|row| row[at].len())
            .chain([heads[at].len()])
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let rule = format!(
        "{:margin$} +{}",
        "",
        widths
            .iter()
            .map(|width| format!("{:-<1$}+", "", width + 2))
            .join("")
    );
    let line = |label: &str, separator: &str, cells: &[String]| {
        let cells = cells
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!(" {cell:width$} {separator}"));
        let line = format!("{label:>margin$} {separator}{}", cells.collect::<String>());
        line.trim_end().to_string()
    };
    let mut text = String::new();
    if let ([Some(row), Some(column)], 3..) = (grid.dims, ndim) {
        let _ = write!(text, "\ndim {row} down, dim {column} across");
    }
    let _ = writeln!(text, "\n{}\n{rule}", line("", " ", &heads));
    for (label, cells) in labels.iter().zip(&cells) {
        let _ = writeln!(text, "{}\n{rule}", line(label, "|", cells));
    }
    if !grid.empty.is_empty() {
        let _ = writeln!(text, "empty: {}", grid.empty.iter().join(" "));
    }
    text
}
