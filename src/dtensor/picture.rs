//! [`picture`]: which rank holds what, drawn.

use std::fmt::Write;
use std::ops::Range;

use itertools::Itertools;

use super::DTensorSpec;

/// Draws a tensor of one or two dimensions, with the ranks that hold each part. Local.
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
/// Ranks that share a cell hold copies of it, or terms of it where the heading says `P`. Ranks
/// with nothing are listed below. A tensor of other dimensions gets the heading alone.
pub fn picture(spec: &DTensorSpec) -> String {
    let mut text = format!("{spec}\n");
    let global: Vec<usize> = match spec.shape().as_ref() as &[usize] {
        [columns] => vec![1, *columns],
        [rows, columns] => vec![*rows, *columns],
        _ => return text,
    };
    let mesh = spec.mesh();
    let coordinates = mesh.shape().iter().map(|&size| 0..size).multi_cartesian_product();
    let parts = mesh.ranks().iter().zip(coordinates).map(|(&rank, coordinate)| {
        let mut slices = spec.layout().local_slices(spec.shape(), &coordinate);
        if slices.len() == 1 {
            slices.insert(0, 0..1);
        }
        (rank, slices)
    });
    let (held, empty): (Vec<_>, Vec<_>) = parts.partition(|(_, slices)| slices.iter().all(|slice| !slice.is_empty()));
    let intervals = |dim: usize| -> Vec<Range<usize>> {
        let starts = held.iter().map(|(_, slices)| slices[dim].start).chain([global[dim]]);
        starts.sorted().dedup().tuple_windows().map(|(start, end)| start..end).collect()
    };
    let (rows, columns) = (intervals(0), intervals(1));
    let cell = |row: &Range<usize>, column: &Range<usize>| {
        let covers = |slices: &[Range<usize>]| slices[0].contains(&row.start) && slices[1].contains(&column.start);
        held.iter().filter(|(_, slices)| covers(slices)).map(|(rank, _)| rank).join(" ")
    };
    let cells: Vec<Vec<String>> =
        rows.iter().map(|row| columns.iter().map(|column| cell(row, column)).collect()).collect();
    let labels: Vec<String> = rows.iter().map(|row| format!("{row:?}")).collect();
    let margin = labels.iter().map(String::len).max().unwrap_or(0);
    let width = |at: usize| {
        let cells = cells.iter().map(|row| row[at].len());
        cells.chain([format!("{:?}", columns[at]).len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let rule = format!("{:margin$} +{}", "", widths.iter().map(|width| format!("{:-<1$}+", "", width + 2)).join(""));
    let line = |label: &str, separator: &str, cells: &[String]| {
        let cells = cells.iter().zip(&widths).map(|(cell, &width)| format!(" {cell:width$} {separator}"));
        let line = format!("{label:>margin$} {separator}{}", cells.collect::<String>());
        line.trim_end().to_string()
    };
    let heads: Vec<String> = columns.iter().map(|column| format!("{column:?}")).collect();
    let _ = writeln!(text, "\n{}\n{rule}", line("", " ", &heads));
    for (label, cells) in labels.iter().zip(&cells) {
        let _ = writeln!(text, "{}\n{rule}", line(label, "|", cells));
    }
    if !empty.is_empty() {
        let _ = writeln!(text, "empty: {}", empty.iter().map(|(rank, _)| rank).join(" "));
    }
    text
}
