//! Assignment of matrices to owners and rounds.

/// Owners of a round's matrices: pairs of a matrix index and a rank.
pub(super) type RoundOwners = Vec<(usize, usize)>;

/// Distributes matrices of these shapes over `ranks` ranks.
///
/// The most expensive matrix is assigned first, each to the rank with the least work in the round,
/// as long as no rank owns more elements than the largest matrix has. Matrices that do not fit are
/// assigned in the next round. `count` matrices of one size take `count.div_ceil(ranks)` rounds.
///
/// ```text
/// 3 ranks, square matrices:   40  40  20  20  20  20        round 0   40 │ 40 │ 20 20 20 20
/// ```
pub(super) fn rounds(shapes: &[[usize; 2]], ranks: usize) -> Vec<RoundOwners> {
    let elements = |matrix: &usize| shapes[*matrix][0] * shapes[*matrix][1];
    let mut waiting: Vec<usize> = (0..shapes.len()).collect();
    // The stable sort keeps matrices of equal cost in the same order on every rank.
    waiting.sort_by_key(|&matrix| std::cmp::Reverse(cost(shapes[matrix])));
    let room = waiting.iter().map(elements).max().unwrap_or(0);
    let mut rounds = Vec::new();
    while !waiting.is_empty() {
        let mut round = RoundOwners::new();
        let mut busy = vec![0; ranks];
        let mut held = vec![0; ranks];
        waiting.retain(|matrix| {
            let fits = (0..ranks).filter(|&rank| held[rank] + elements(matrix) <= room);
            let Some(owner) = fits.min_by_key(|&rank| busy[rank]) else {
                return true;
            };
            busy[owner] += cost(shapes[*matrix]);
            held[owner] += elements(matrix);
            round.push((*matrix, owner));
            false
        });
        rounds.push(round);
    }
    rounds
}

/// Returns the number of multiplications of one Newton-Schulz step: `X Xᵀ`, its square, and the
/// product with `X`.
fn cost([rows, columns]: [usize; 2]) -> u128 {
    let short = rows.min(columns) as u128;
    let long = rows.max(columns) as u128;
    short * short * (2 * long + short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_matrix_has_one_owner_and_no_rank_more_than_the_largest() {
        for ranks in 1..=5 {
            for count in 0..=9 {
                let shapes: Vec<_> = (0..count)
                    .map(|at| [1 + (at * 7) % 5, 2 + (at * 3) % 4])
                    .collect();
                let largest = shapes
                    .iter()
                    .map(|[rows, columns]| rows * columns)
                    .max()
                    .unwrap_or(0);
                let mut owned = vec![0; count];
                for round in rounds(&shapes, ranks) {
                    let mut held = vec![0; ranks];
                    for (matrix, owner) in round {
                        owned[matrix] += 1;
                        held[owner] += shapes[matrix][0] * shapes[matrix][1];
                    }
                    assert!(
                        held.iter().all(|&held| held <= largest),
                        "{held:?} of {largest}"
                    );
                }
                assert_eq!(owned, vec![1; count]);
            }
        }
    }

    #[test]
    fn matrices_of_one_size_go_one_to_a_rank() {
        for (count, ranks) in [(8, 4), (7, 3), (1, 4), (6, 1)] {
            assert_eq!(
                rounds(&vec![[4, 6]; count], ranks).len(),
                count.div_ceil(ranks),
                "{count} on {ranks}"
            );
        }
    }

    /// Checks the example in the documentation of `rounds`.
    #[test]
    fn small_matrices_share_a_rank() {
        let shapes = [40, 40, 20, 20, 20, 20].map(|side| [side, side]);
        assert_eq!(
            rounds(&shapes, 3),
            [[(0, 0), (1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]]
        );
    }
}
