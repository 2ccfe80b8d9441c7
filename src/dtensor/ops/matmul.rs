//! Matrix products.
//!
//! | | `a` | `b` | `a @ b` |
//! |---|---|---|---|
//! | batch | `S(batch)`, broadcast `R` | `S(batch)`, broadcast `R` | `S(batch)` |
//! | rows | `S(rows)` | `R` | `S(rows)` |
//! | columns | `R` | `S(columns)` | `S(columns)` |
//! | contraction | `S(columns)` | `S(rows)` | `P(sum)` |
//! | linear | `P(sum)`, `P(avg)` | `R` | the same |
//! | linear | `R` | `P(sum)`, `P(avg)` | the same |

use burn::tensor::{Shape, kind};

use super::args::misfit;
use super::placements::{AVG, R, S, SUM};
use super::pointwise::broadcast;
use super::{Rule, Strategy, binary, product, strategy};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Matmul;

impl Rule for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let [a, b] = inputs else { unreachable!("a product has two factors") };
        let n = a.num_dims();
        if n < 2 || a[n - 1] != b[n - 2] {
            let why = "the columns of the first must be as many as the rows of the second";
            return Err(misfit(self.name(), inputs, why));
        }
        // The batch dimensions broadcast; the matrices' own do not.
        let (mut left, mut right) = (a.clone(), b.clone());
        (left[n - 1], right[n - 2]) = (b[n - 1], a[n - 2]);
        Ok(vec![broadcast(self.name(), &[left, right])?])
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let [a, b] = inputs else { unreachable!("a product has two factors") };
        let (rows, columns) = (a.num_dims() - 2, a.num_dims() - 1);
        let batch = (0..rows).map(|dim| {
            let cut = |input: &Shape| if input[dim] == outputs[0][dim] { S(dim) } else { R };
            strategy([cut(a), cut(b)], [S(dim)])
        });
        let mut table = vec![
            strategy([S(rows), R], [S(rows)]),
            strategy([R, S(columns)], [S(columns)]),
            strategy([S(columns), S(rows)], [SUM]),
            strategy([SUM, R], [SUM]),
            strategy([R, SUM], [SUM]),
            strategy([AVG, R], [AVG]),
            strategy([R, AVG], [AVG]),
        ];
        table.extend(batch);
        table
    }
}

impl<const D: usize, K: Kind + kind::Numeric> DTensor<D, K> {
    /// The matrix product of the last two dimensions, as burn's
    /// [`matmul`](burn::tensor::Tensor::matmul): `[.., m, k] @ [.., k, n] -> [.., m, n]`.
    #[must_use]
    pub fn matmul(self, other: Self) -> Self {
        binary(&Matmul, self, other, product::matmul)
    }
}
