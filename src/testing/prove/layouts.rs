//! Which layouts of the inputs are tried. Pure.

use itertools::Itertools;

use super::values::{ValueKind, gcd};
use crate::placement::{Layout, PartialOp, Placement};

/// Every layout that an input of `ndim` dimensions may come in: all placements that can be
/// combined and, where two mesh dimensions cut one tensor dimension, both orders of the cuts.
pub(super) fn layouts(mesh_shape: &[usize], ndim: usize, values: &ValueKind) -> Vec<Layout> {
    let partials = PartialOp::ALL.into_iter().filter(|&op| values.takes(op)).map(Placement::Partial);
    let one: Vec<_> =
        std::iter::once(Placement::Replicate).chain((0..ndim).map(Placement::Shard)).chain(partials).collect();
    let mut all = Vec::new();
    for placements in mesh_shape.iter().map(|_| one.iter().copied()).multi_cartesian_product() {
        // Reductions that do not commute are no layout.
        let Ok(layout) = Layout::new(mesh_shape, &placements) else { continue };
        let reversed: Vec<usize> = (0..mesh_shape.len()).rev().collect();
        let turned = Layout::in_order(mesh_shape, &placements, &reversed).expect("the placements form a layout");
        let differs = turned != layout;
        all.push(layout);
        if differs {
            all.push(turned);
        }
    }
    all
}

/// Layouts of a tensor of this shape with ragged cuts, and those that they meet: Replicate, chunks and
/// partial sums. Of every tensor dimension the outermost cut is ragged, in two ways: all ranks have
/// something if there is enough, most of it the last one; and the first has nothing.
///
/// ```text
/// a dim of 5 over 3 ranks:   | 0 | 1 | 2 3 4 |    | | 0 | 1 2 3 4 |
/// ```
pub(super) fn uneven(mesh_shape: &[usize], shape: &[usize], values: &ValueKind) -> Vec<Layout> {
    let sum = Placement::Partial(PartialOp::Sum);
    let shards = (0..shape.len()).map(Placement::Shard);
    let one: Vec<_> = std::iter::once(Placement::Replicate)
        .chain(shards)
        .chain(values.takes(PartialOp::Sum).then_some(sum))
        .collect();
    let mut all = Vec::new();
    for placements in mesh_shape.iter().map(|_| one.iter().copied()).multi_cartesian_product() {
        let layout = Layout::new(mesh_shape, &placements).expect("sums commute");
        for nothing in [0, 1] {
            let outermost = layout
                .orders()
                .map(|(dim, shardings)| (shardings[0], lengths(shape[dim], mesh_shape[shardings[0]], nothing)));
            let uneven =
                outermost.collect::<Vec<_>>().into_iter().fold(layout.clone(), |layout, (mesh_dim, lengths)| {
                    layout.with_uneven_sizes(mesh_dim, lengths).expect("a cut has as many lengths as ranks")
                });
            all.push(uneven);
        }
        all.push(layout);
    }
    all.into_iter().unique().collect()
}

/// `nothing` for so many ranks, then one element each while there are any, the rest for the last.
fn lengths(len: usize, ranks: usize, nothing: usize) -> Vec<usize> {
    let ones = (0..ranks - 1).map(|rank| usize::from(rank >= nothing && rank - nothing < len));
    let mut lengths: Vec<usize> = ones.collect();
    lengths.push(len - lengths.iter().sum::<usize>());
    lengths
}

/// At most `cap` combinations of one layout per input, as numbers in mixed radix: the digits are
/// places in `inputs`, the first input's the lowest.
///
/// Up to half of them are of layouts without partial placements, which is where most rules have
/// their rows; the rest are spread over all.
pub(super) fn combinations(inputs: &[Vec<Layout>], cap: usize) -> Vec<usize> {
    let total: usize = inputs.iter().map(Vec::len).product();
    if total <= cap {
        return (0..total).collect();
    }
    let plain = inputs.iter().map(|layouts| (0..layouts.len()).filter(|&at| !layouts[at].has_partial()));
    let plain: Vec<Vec<usize>> = plain.map(Iterator::collect).collect();
    let number = |at: usize| {
        let (mut rest, mut radix, mut number) = (at, 1, 0);
        for (plain, layouts) in plain.iter().zip(inputs) {
            number += plain[rest % plain.len()] * radix;
            (rest, radix) = (rest / plain.len(), radix * layouts.len());
        }
        number
    };
    let some = spread(plain.iter().map(Vec::len).product(), cap / 2).map(number).take(cap / 2);
    some.chain(spread(total, cap)).unique().take(cap).collect()
}

/// All numbers below `total`, the first `count` of them spread evenly.
fn spread(total: usize, count: usize) -> impl Iterator<Item = usize> {
    // Multiples of a number near the golden section of `total` fill it evenly, whatever the period
    // that one looks at; of those numbers, the one that keeps the multiples furthest apart.
    let golden = ((total as f64 * 0.618_034) as usize).max(1);
    let apart = |step: usize| {
        let distance = |times: usize| (times * step % total).min(total - times * step % total);
        (1..count.min(total)).map(distance).min()
    };
    let near = (golden..).filter(|&step| gcd(step, total) == 1).take(16);
    let step = near.max_by_key(|&step| apart(step)).unwrap_or(1);
    (0..total).map(move |at| at * step % total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_all_that_exist() {
        let values = ValueKind::Float(0.0..1.0);
        assert_eq!(layouts(&[3], 2, &values).len(), 8);
        assert_eq!(layouts(&[3], 2, &ValueKind::Int(0..4)).len(), 7);
        assert_eq!(layouts(&[3], 2, &ValueKind::Bool).len(), 3);
        // 8 x 8, without the 18 pairs of reductions that do not commute, and two more orders.
        assert_eq!(layouts(&[2, 2], 2, &values).len(), 64 - 18 + 2);
    }

    #[test]
    fn uneven_layouts_deal_out_the_shape() {
        let texts = |mesh: &[usize], shape: &[usize], values| {
            let layouts = uneven(mesh, shape, &values);
            layouts.iter().for_each(|layout| layout.check_shape(shape).unwrap());
            layouts.iter().map(ToString::to_string).collect_vec()
        };
        let [none, some] = ["[S(0); mesh dim 0 cuts 0 + 1 + 4]", "[S(0); mesh dim 0 cuts 1 + 1 + 3]"];
        assert_eq!(texts(&[3], &[5], ValueKind::Bool), ["[R]", some, none, "[S(0)]"]);
        let [none, some] = ["[S(0); mesh dim 0 cuts 0 + 1 + 0]", "[S(0); mesh dim 0 cuts 1 + 0 + 0]"];
        assert_eq!(texts(&[3], &[1], ValueKind::Int(0..4)), ["[R]", some, none, "[S(0)]", "[P(sum)]"]);
        // R, S(0), S(1), P on either; cuts of one dimension by both have one that is ragged.
        let two = texts(&[2, 2], &[3, 4], ValueKind::Int(0..4));
        assert!(two.contains(&"[S(0), S(0); mesh dim 0 cuts 1 + 2]".into()), "{two:?}");
        assert!(two.contains(&"[S(1), S(0); mesh dim 0 cuts 0 + 4; mesh dim 1 cuts 0 + 3]".into()), "{two:?}");
        assert_eq!(two.len(), 16 + 2 * 12);
    }

    #[test]
    fn combinations_repeat_nothing_and_meet_every_layout_of_every_input() {
        let one = layouts(&[2, 2], 2, &ValueKind::Float(0.0..1.0));
        assert_eq!(combinations(&[one[..5].to_vec(), one[..3].to_vec()], 20), Vec::from_iter(0..15));
        let picked = combinations(&[one.clone(), one.clone()], 240);
        assert_eq!(picked.iter().unique().count(), 240);
        for digit in [|at: &usize| at % 48, |at: &usize| at / 48] {
            assert_eq!(picked.iter().map(digit).unique().count(), one.len());
        }
        let plain = |at: &&usize| !one[**at % 48].has_partial() && !one[**at / 48].has_partial();
        assert_eq!(picked[..120].iter().filter(plain).count(), 120);
        assert_eq!(one.iter().filter(|layout| !layout.has_partial()).count(), 11);
    }
}
