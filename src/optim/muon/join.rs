//! Assembles a matrix from its shards.

use std::ops::Range;

use burn::tensor::Tensor;
use itertools::Itertools;

/// Assembles a matrix from all its shards, each given with its range of rows and its range of
/// columns.
pub(super) fn joined(parts: impl Iterator<Item = (Vec<Range<usize>>, Tensor<1>)>) -> Tensor<2> {
    let shaped = parts.map(|(region, part)| {
        let [rows, columns] = region.try_into().expect("a matrix has two dimensions");
        (
            rows.start,
            columns.start,
            shaped(part, [rows.len(), columns.len()]),
        )
    });
    let parts = shaped.filter(|(.., part)| part.shape().num_elements() > 0);
    let parts = parts.sorted_by_key(|&(row, column, _)| (row, column));
    let bands = parts.chunk_by(|&(row, ..)| row);
    let bands = bands
        .into_iter()
        .map(|(_, parts)| one(parts.map(|(.., part)| part).collect(), 1))
        .collect();
    one(bands, 0)
}

/// Reshapes a flat shard.
pub(super) fn shaped(part: Tensor<1>, shape: [usize; 2]) -> Tensor<2> {
    // burn's `reshape` interprets 0 as "keep this dimension".
    if shape.contains(&0) {
        Tensor::zeros(shape, (&part.device(), part.dtype()))
    } else {
        part.reshape(shape)
    }
}

/// Concatenates tensors along `dim`. A single tensor is returned without a copy.
fn one(mut tensors: Vec<Tensor<2>>, dim: usize) -> Tensor<2> {
    match tensors.len() {
        1 => tensors.remove(0),
        _ => Tensor::cat(tensors, dim),
    }
}
