//! Which layouts of the inputs are tried. Pure.

use itertools::Itertools;

use super::values::{Values, gcd};
use crate::placement::{Layout, PartialOp, Placement};

/// Every layout that an input of `ndim` dimensions may come in: all placements that can be
/// combined and, where two mesh dimensions cut one tensor dimension, both orders of the cuts.
pub(super) fn layouts(mesh_shape: &[usize], ndim: usize, values: &Values) -> Vec<Layout> {
    let ops = [PartialOp::Sum, PartialOp::Avg, PartialOp::Min, PartialOp::Max];
    let partials = ops.into_iter().filter(|&op| values.takes(op)).map(Placement::Partial);
    let one: Vec<_> =
        std::iter::once(Placement::Replicate).chain((0..ndim).map(Placement::Shard)).chain(partials).collect();
    let mut all = Vec::new();
    for placements in mesh_shape.iter().map(|_| one.iter().copied()).multi_cartesian_product() {
        // Reductions that do not commute are no layout.
        let Ok(layout) = Layout::new(mesh_shape, &placements) else { continue };
        let reversed: Vec<usize> = (0..mesh_shape.len()).rev().collect();
        let turned = Layout::in_turn(mesh_shape, &placements, &reversed).expect("the placements form a layout");
        let differs = turned != layout;
        all.push(layout);
        if differs {
            all.push(turned);
        }
    }
    all
}

/// At most `cap` of the numbers below `total`, spread evenly.
pub(super) fn selection(total: usize, cap: usize) -> impl Iterator<Item = usize> {
    // Multiples of a number near the golden section of `total` fill it evenly, whatever the period
    // that one is interested in.
    let golden = if total > cap { (total as f64 * 0.618_034) as usize } else { 1 };
    let step = (golden.max(1)..).find(|&step| gcd(step, total) == 1).unwrap_or(1);
    (0..total.min(cap)).map(move |at| at * step % total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_all_that_exist() {
        let values = Values::Float(0.0..1.0);
        assert_eq!(layouts(&[3], 2, &values).len(), 7);
        assert_eq!(layouts(&[3], 2, &Values::Int(4)).len(), 6);
        assert_eq!(layouts(&[3], 2, &Values::Bool).len(), 3);
        // 7 x 7, without the ten pairs of reductions that do not commute, and two more orders.
        assert_eq!(layouts(&[2, 2], 2, &values).len(), 49 - 10 + 2);
    }

    #[test]
    fn a_selection_repeats_nothing_and_meets_every_layout_of_every_input() {
        assert_eq!(selection(5, 10).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        let (layouts, cap) = (41, 200);
        let picked: Vec<_> = selection(layouts * layouts, cap).collect();
        assert_eq!(picked.iter().unique().count(), cap);
        assert_eq!(picked.iter().map(|at| at / layouts).unique().count(), layouts);
        assert_eq!(picked.iter().map(|at| at % layouts).unique().count(), layouts);
    }
}
