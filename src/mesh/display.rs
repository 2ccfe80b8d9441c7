//! Formatting of a mesh as one line, and as a grid.

use std::fmt;

use itertools::Itertools;

use super::DeviceMesh;

/// Formats the mesh as `DeviceMesh(replicate=2, shard=2; ranks 0..4)`. With `{:#}`, a grid of ranks
/// follows.
impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceMesh(")?;
        for (at, (name, size)) in self.names().iter().zip(self.shape()).enumerate() {
            write!(f, "{}{name}={size}", if at == 0 { "" } else { ", " })?;
        }
        let first = self.ranks()[0];
        let ranks = self.ranks();
        if ranks.iter().copied().eq(first..first + ranks.len()) {
            write!(f, "; ranks {:?})", first..first + ranks.len())?;
        } else {
            write!(f, "; ranks {ranks:?})")?;
        }
        if f.alternate() { grid(self, f) } else { Ok(()) }
    }
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Writes one block of rows and columns for each position in the dimensions before the last two.
fn grid(mesh: &DeviceMesh, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let (&columns, outer) = mesh.shape().split_last().expect("a mesh has a dimension");
    let (heading, names) = mesh.names().split_last().expect("a dimension has a name");
    let coordinates: Vec<Vec<usize>> = match outer {
        [] => vec![Vec::new()],
        _ => outer
            .iter()
            .map(|&size| 0..size)
            .multi_cartesian_product()
            .collect(),
    };
    let label = |coordinate: &[usize]| {
        coordinate.last().map_or_else(String::new, |row| {
            format!("{} {row} ", names[outer.len() - 1])
        })
    };
    let margin = coordinates
        .iter()
        .map(|coordinate| label(coordinate).len())
        .max()
        .unwrap_or(0);
    let width = mesh
        .ranks()
        .iter()
        .chain([&(columns - 1)])
        .map(|cell| cell.to_string().len())
        .max()
        .unwrap_or(0);
    let under = heading.len();
    let line = |label: &str, heading: &str, cells: &mut dyn Iterator<Item = usize>| {
        format!(
            "{label:margin$}{heading:under$}  {}",
            cells.map(|cell| format!("{cell:>width$}")).join("  ")
        )
    };
    for (row, (coordinate, ranks)) in coordinates
        .iter()
        .zip(mesh.ranks().chunks(columns))
        .enumerate()
    {
        if row % outer.last().unwrap_or(&1) == 0 {
            let block = names
                .iter()
                .zip(coordinate)
                .rev()
                .skip(1)
                .map(|(name, index)| format!("{name} {index}"));
            let block = block.collect::<Vec<_>>().into_iter().rev().join(", ");
            write!(
                f,
                "\n\n{}",
                if block.is_empty() {
                    block
                } else {
                    block + "\n"
                }
            )?;
            write!(f, "{}", line("", heading, &mut (0..columns)))?;
        }
        write!(
            f,
            "\n{}",
            line(&label(coordinate), "", &mut ranks.iter().copied())
        )?;
    }
    Ok(())
}
