//! Updates of indexed elements (scatter, select_assign) through pending reductions.
//!
//! | | `x` | values | output |
//! |---|---|---|---|
//! | assign | `P(op)` | `P(op)` | `P(op)` |
//! | assign, not of sum and product | `P(op)`, `R` | `R`, `P(op)` | `P(op)` |
//! | add | `P(sum)` | `P(sum)` | `P(sum)` |
//! | add | `P(avg)`, `R` | `P(avg)`, `R` | `P(avg)` |
//! | add, of floats | `P(max)`, `P(min)` | `R` | that of `x` |
//! | mul | `P(sum)`, `P(avg)` | `R` | that of `x` |
//! | mul | `P(product)` | `P(product)` | `P(product)` |
//! | max | `P(max)`, `R` | `P(max)`, `R` | `P(max)` |
//! | max | `P(min)` | `R` | `P(min)` |
//! | min | as max, mirrored | | |

use burn::tensor::IndexingUpdateOp;

use super::placements::{AVG, MAX, MIN, PRODUCT, R, SUM};
use super::{Strategy, strategy};
use crate::placement::Placement;

/// The tensor, the values, the result.
type Row = [Placement; 3];

const ASSIGN: &[Row] = &[
    [SUM, SUM, SUM],
    [AVG, AVG, AVG],
    [MAX, MAX, MAX],
    [MIN, MIN, MIN],
    [PRODUCT, PRODUCT, PRODUCT],
    [AVG, R, AVG],
    [R, AVG, AVG],
    [MAX, R, MAX],
    [R, MAX, MAX],
    [MIN, R, MIN],
    [R, MIN, MIN],
];
const ADD: &[Row] = &[[SUM, SUM, SUM], [AVG, AVG, AVG], [AVG, R, AVG], [R, AVG, AVG], [MAX, R, MAX], [MIN, R, MIN]];
const MUL: &[Row] = &[[SUM, R, SUM], [AVG, R, AVG], [PRODUCT, PRODUCT, PRODUCT]];
const MAXIMUM: &[Row] = &[[MAX, MAX, MAX], [MAX, R, MAX], [R, MAX, MAX], [MIN, R, MIN]];
const MINIMUM: &[Row] = &[[MIN, MIN, MIN], [MIN, R, MIN], [R, MIN, MIN], [MAX, R, MAX]];

/// The rows of an update with replicated indices.
pub(super) fn rows(update: IndexingUpdateOp) -> impl Iterator<Item = Strategy> {
    let table = match update {
        IndexingUpdateOp::Assign => ASSIGN,
        IndexingUpdateOp::Add => ADD,
        IndexingUpdateOp::Mul => MUL,
        IndexingUpdateOp::Max => MAXIMUM,
        IndexingUpdateOp::Min => MINIMUM,
    };
    // An order is kept by a sum only where it does not wrap around.
    let ordered = move |x| update == IndexingUpdateOp::Add && [MAX, MIN].contains(&x);
    table.iter().map(move |&[x, values, output]| {
        let row = strategy([x, R, values], [output]);
        if ordered(x) { row.if_floats() } else { row }
    })
}
