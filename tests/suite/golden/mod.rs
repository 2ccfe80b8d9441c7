//! Values computed by PyTorch. Each file's `note` states its conventions.
//!
//! Every assertion holds for any file of the same kind: what a test expects is read from the file
//! or derived from its cases, never a number of this repository's files.

mod brute;
mod events;
mod layout;
mod ops;
mod plan;
mod redistribute;
mod training;

use std::path::PathBuf;

use burn_dtensor::placement::{Layout, PlacementError, StridedPlacement};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A golden file.
#[derive(Deserialize)]
struct Golden<Case> {
    cases: Vec<Case>,
}

/// The folder of the golden files: `BURN_DTENSOR_GOLDEN`, else `tests/golden`.
fn folder() -> PathBuf {
    let own = || concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden").into();
    std::env::var_os("BURN_DTENSOR_GOLDEN").map_or_else(own, PathBuf::from)
}

/// One file.
fn read<T: DeserializeOwned>(file: &str) -> T {
    let path = folder().join(file);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The cases of one file.
fn cases<Case: DeserializeOwned>(file: &str) -> Vec<Case> {
    let Golden { cases } = read(file);
    assert!(!cases.is_empty(), "{file} has no cases");
    cases
}

/// Every coordinate of a mesh, by rank.
fn coordinates(mesh: &[usize]) -> Vec<Vec<usize>> {
    mesh.iter().fold(vec![vec![]], |prefixes, &size| {
        let extended = prefixes
            .iter()
            .flat_map(|prefix| (0..size).map(move |index| [&prefix[..], &[index]].concat()));
        extended.collect()
    })
}

/// The layout of placements written as text, strided shards included.
fn layout(mesh: &[usize], placements: &[String]) -> Result<Layout, PlacementError> {
    let placements = placements
        .iter()
        .map(|text| text.parse())
        .collect::<Result<Vec<StridedPlacement>, _>>()?;
    Layout::from_strided(mesh, &placements)
}

/// The rectangular part of an array: its shape and row-major values.
fn part<T: Copy>(
    (shape, values): &(Vec<usize>, Vec<T>),
    slices: &[std::ops::Range<usize>],
) -> (Vec<usize>, Vec<T>) {
    let lens: Vec<usize> = slices.iter().map(|slice| slice.len()).collect();
    let pick = |mut local: usize| {
        let (mut global, mut stride) = (0, 1);
        for (dim, slice) in slices.iter().enumerate().rev() {
            global += (slice.start + local % slice.len()) * stride;
            local /= slice.len();
            stride *= shape[dim];
        }
        values[global]
    };
    let len = lens.iter().product();
    (lens, (0..len).map(pick).collect())
}
