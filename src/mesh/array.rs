//! Arithmetic and checks for the array of ranks, without communication.

use std::collections::HashSet;
use std::hash::Hash;

use smallvec::SmallVec;

use super::MeshError;

/// Checks the ranks, shape and names of a mesh.
///
/// # Errors
/// A [`MeshError`] for names, shape or ranks that do not fit each other or the world.
pub(super) fn validate(
    world_size: usize,
    ranks: &[usize],
    shape: &[usize],
    names: &[String],
) -> Result<(), MeshError> {
    let needed = rank_count(shape);
    if shape.is_empty() || needed == 0 {
        return Err(MeshError::EmptyShape {
            shape: shape.to_vec(),
        });
    }
    if names.len() != shape.len() {
        return Err(MeshError::NameCount {
            names: names.to_vec(),
            shape: shape.to_vec(),
        });
    }
    if let Some(mesh_dim) = names.iter().position(String::is_empty) {
        return Err(MeshError::EmptyName { mesh_dim });
    }
    if let Some(name) = first_repeated(names) {
        return Err(MeshError::DuplicateName {
            name: name.clone(),
            names: names.to_vec(),
        });
    }
    if ranks.len() != needed {
        return Err(MeshError::RankCount {
            given: ranks.len(),
            needed,
            shape: shape.to_vec(),
        });
    }
    if let Some(&rank) = ranks.iter().find(|rank| **rank >= world_size) {
        return Err(MeshError::RankOutOfRange { rank, world_size });
    }
    match first_repeated(ranks) {
        Some(&rank) => Err(MeshError::DuplicateRank { rank }),
        None => Ok(()),
    }
}

/// Returns the number of ranks in a mesh of this shape, or `usize::MAX` if there are more.
pub(super) fn rank_count(shape: &[usize]) -> usize {
    shape
        .iter()
        .fold(1, |count: usize, &size| count.saturating_mul(size))
}

pub(super) fn first_repeated<T: Eq + Hash>(items: &[T]) -> Option<&T> {
    let mut seen = HashSet::new();
    items.iter().find(|item| !seen.insert(*item))
}

/// Returns the coordinate of a row-major position.
pub(super) fn unravel(position: usize, shape: &[usize]) -> SmallVec<[usize; 3]> {
    let mut rest = position;
    let mut coordinate: SmallVec<[usize; 3]> = shape.into();
    for index in coordinate.iter_mut().rev() {
        (rest, *index) = (rest / *index, rest % *index);
    }
    coordinate
}

/// Returns the ranks that differ from `coordinate` only along the dimensions `free`, of which the
/// last varies fastest.
pub(super) fn along(
    ranks: &[usize],
    shape: &[usize],
    coordinate: &[usize],
    free: &[usize],
) -> Vec<usize> {
    let sizes: SmallVec<[usize; 3]> = free.iter().map(|&dim| shape[dim]).collect();
    let rank = |position| {
        let mut at: SmallVec<[usize; 3]> = coordinate.into();
        free.iter()
            .zip(unravel(position, &sizes))
            .for_each(|(&dim, index)| at[dim] = index);
        ranks[at
            .iter()
            .zip(shape)
            .fold(0, |position, (index, size)| position * size + index)]
    };
    (0..sizes.iter().product()).map(rank).collect()
}
