//! The layout of a model as an HTML page of drawings.

use std::collections::BTreeMap;
use std::fmt::Write;

use itertools::Itertools;

use super::parameter::{HeldParameter, Holders};
use crate::dtensor::{DTensorSpec, Grid};

/// Length in pixels of the longest side of a drawing.
const SIDE: f64 = 240.0;

const HEAD: &str = "<!doctype html>
<meta charset=\"utf-8\">
<title>Layout of a model</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222 }
section { display: inline-block; vertical-align: top; margin: 0 2em 2em 0; max-width: 26em }
h2 { font: bold 15px ui-monospace, monospace; margin: 0 }
p { margin: 0 0 .5em; color: #555 }
text { font: 11px ui-monospace, monospace; text-anchor: middle; dominant-baseline: central }
table { border-collapse: collapse; margin-bottom: 2em } td { padding: 0 1em 0 0 }
</style>
";

/// Returns the page as HTML.
pub(super) fn page(parameters: &[HeldParameter]) -> String {
    let mut text = String::from(HEAD);
    let _ = writeln!(text, "<h1>Layout of a model</h1>\n<table>");
    let held = held(parameters);
    let most = held.values().max().copied().unwrap_or(0).max(1);
    for (rank, count) in &held {
        let width = SIDE * *count as f64 / most as f64;
        let _ = writeln!(
            text,
            "<tr><td>rank {rank}<td><svg width=\"{SIDE}\" height=\"12\"><rect width=\"{width:.1}\" height=\"12\" \
             fill=\"{}\"/></svg><td>{count} elements",
            color(*rank, held.len())
        );
    }
    let _ = writeln!(text, "</table>");
    for HeldParameter { path, place } in parameters {
        let _ = writeln!(text, "<section>\n<h2>{}</h2>", escaped(path));
        match place {
            Holders::Distributed { spec, unit } => {
                let _ = writeln!(
                    text,
                    "<p>{}<br>unit {}</p>",
                    escaped(&spec.to_string()),
                    escaped(unit)
                );
                text += &drawing(spec, held.len());
            }
            Holders::Own { shape } => {
                let _ = writeln!(text, "<p>{shape:?}, separate on every rank</p>");
            }
        }
        let _ = writeln!(text, "</section>");
    }
    text
}

/// Returns the number of elements of distributed parameters that each rank holds.
fn held(parameters: &[HeldParameter]) -> BTreeMap<usize, usize> {
    let mut held = BTreeMap::new();
    for HeldParameter { place, .. } in parameters {
        let Holders::Distributed { spec, .. } = place else {
            continue;
        };
        let mesh = spec.mesh();
        let coordinates = mesh
            .shape()
            .iter()
            .map(|&size| 0..size)
            .multi_cartesian_product();
        for (&rank, coordinate) in mesh.ranks().iter().zip(coordinates) {
            *held.entry(rank).or_default() += spec.local_shape_at(&coordinate).num_elements();
        }
    }
    held
}

/// Draws the cells to scale, each divided into one band per rank that holds it.
fn drawing(spec: &DTensorSpec, ranks: usize) -> String {
    let Some(grid) =
        Grid::of(spec).filter(|grid| !grid.rows.is_empty() && !grid.columns.is_empty())
    else {
        return String::new();
    };
    let len = |dim: Option<usize>| dim.map_or(1, |dim| spec.shape()[dim]) as f64;
    let rows = len(grid.dims[0]);
    let columns = len(grid.dims[1]);
    // Limits the ratio of the sides, so that a long tensor is not drawn as a line.
    let side = |own: f64| (SIDE * own / rows.max(columns)).max(SIDE / 8.0);
    let height = side(rows);
    let width = side(columns);
    let mut text = format!(
        "<svg width=\"{:.0}\" height=\"{:.0}\" stroke=\"#fff\">\n",
        width, height
    );
    let cells = grid
        .rows
        .iter()
        .cartesian_product(&grid.columns)
        .zip(grid.cells.iter().flatten());
    for ((row, column), holders) in cells {
        let top = height * row.start as f64 / rows;
        let bottom = height * row.end as f64 / rows;
        let left = width * column.start as f64 / columns;
        let right = width * column.end as f64 / columns;
        let band = (right - left) / holders.len().max(1) as f64;
        for (at, &rank) in holders.iter().enumerate() {
            let _ = writeln!(
                text,
                "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{band:.1}\" height=\"{:.1}\" fill=\"{}\"><title>rank {rank}: rows \
                 {row:?}, columns {column:?}</title></rect>",
                left + band * at as f64,
                bottom - top,
                color(rank, ranks)
            );
        }
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" stroke=\"none\">{}</text>",
            (left + right) / 2.0,
            (top + bottom) / 2.0,
            holders.iter().join(" ")
        );
    }
    let _ = writeln!(text, "</svg>");
    if !grid.empty.is_empty() {
        let _ = writeln!(text, "<p>empty on {}</p>", grid.empty.iter().join(", "));
    }
    text
}

/// Returns the color of `rank`. The colors of `ranks` ranks are spaced evenly.
fn color(rank: usize, ranks: usize) -> String {
    format!(
        "hsl({:.0} 65% 70%)",
        360.0 * (rank % ranks.max(1)) as f64 / ranks.max(1) as f64
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
