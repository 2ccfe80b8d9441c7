//! Layouts of inputs that the prover tries. Pure functions.

use itertools::Itertools;

use super::values::{ValueKind, gcd};
use crate::placement::{Layout, PartialOp, Placement};

/// Returns every layout of an input with `ndim` dimensions: all placements that can be combined. If
/// two mesh dimensions shard one tensor dimension, both orders are included.
pub(super) fn layouts(mesh_shape: &[usize], ndim: usize, values: &ValueKind) -> Vec<Layout> {
    let partials = PartialOp::ALL
        .into_iter()
        .filter(|&op| values.takes(op))
        .map(Placement::Partial);
    let one: Vec<_> = std::iter::once(Placement::Replicate)
        .chain((0..ndim).map(Placement::Shard))
        .chain(partials)
        .collect();
    let mut all = Vec::new();
    for placements in mesh_shape
        .iter()
        .map(|_| one.iter().copied())
        .multi_cartesian_product()
    {
        // Reductions that do not commute cannot be combined in one layout.
        let Ok(layout) = Layout::new(mesh_shape, &placements) else {
            continue;
        };
        let reversed: Vec<usize> = (0..mesh_shape.len()).rev().collect();
        let turned = Layout::in_order(mesh_shape, &placements, &reversed)
            .expect("the placements form a layout");
        let differs = turned != layout;
        all.push(layout);
        if differs {
            all.push(turned);
        }
    }
    all
}

/// Returns layouts of a tensor of this shape with uneven shard sizes, together with the placements
/// that occur next to them: Replicate, chunks and partial sums. For every tensor dimension the
/// outermost sharding is uneven, in two ways. In the first, each rank has one element as long as
/// elements remain, and the last rank has the rest. In the second, the first rank is empty as well.
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
    for placements in mesh_shape
        .iter()
        .map(|_| one.iter().copied())
        .multi_cartesian_product()
    {
        let layout = Layout::new(mesh_shape, &placements).expect("sums commute");
        for nothing in [0, 1] {
            let outermost = layout.orders().map(|(dim, shardings)| {
                (
                    shardings[0],
                    lengths(shape[dim], mesh_shape[shardings[0]], nothing),
                )
            });
            let uneven = outermost.collect::<Vec<_>>().into_iter().fold(
                layout.clone(),
                |layout, (mesh_dim, lengths)| {
                    layout
                        .with_uneven_sizes(mesh_dim, lengths)
                        .expect("there are as many shard sizes as ranks")
                },
            );
            all.push(uneven);
        }
        all.push(layout);
    }
    all.into_iter().unique().collect()
}

/// Returns uneven shard sizes: 0 for the first `nothing` ranks, then 1 each as long as elements
/// remain, and the rest for the last rank.
fn lengths(len: usize, ranks: usize, nothing: usize) -> Vec<usize> {
    let ones = (0..ranks - 1).map(|rank| usize::from(rank >= nothing && rank - nothing < len));
    let mut lengths: Vec<usize> = ones.collect();
    lengths.push(len - lengths.iter().sum::<usize>());
    lengths
}

/// Returns at most `cap` combinations of one layout per input, as mixed-radix numbers. The digits
/// are indices into `inputs`, with the first input as the lowest digit.
///
/// Up to half of them contain only layouts without partial placements, because most rules have
/// their rows there. The others are spread over all combinations.
pub(super) fn combinations(inputs: &[Vec<Layout>], cap: usize) -> Vec<usize> {
    let total: usize = inputs.iter().map(Vec::len).product();
    if total <= cap {
        return (0..total).collect();
    }
    let plain = inputs
        .iter()
        .map(|layouts| (0..layouts.len()).filter(|&at| !layouts[at].has_partial()));
    let plain: Vec<Vec<usize>> = plain.map(Iterator::collect).collect();
    let number = |at: usize| {
        let mut rest = at;
        let mut radix = 1;
        let mut number = 0;
        for (plain, layouts) in plain.iter().zip(inputs) {
            number += plain[rest % plain.len()] * radix;
            (rest, radix) = (rest / plain.len(), radix * layouts.len());
        }
        number
    };
    let some = spread(plain.iter().map(Vec::len).product(), cap / 2)
        .map(number)
        .take(cap / 2);
    some.chain(spread(total, cap)).unique().take(cap).collect()
}

/// Returns all numbers below `total` in an order in which the first `count` are spread evenly.
fn spread(total: usize, count: usize) -> impl Iterator<Item = usize> {
    // Multiples of a number near the golden section of `total` fill it evenly, for any period. Of
    // 16 such numbers, the one is chosen whose multiples are furthest apart.
    let golden = ((total as f64 * 0.618_034) as usize).max(1);
    let apart = |step: usize| {
        (1..count.min(total))
            .map(|times| (times * step % total).min(total - times * step % total))
            .min()
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
        // 8 x 8 pairs, minus the 18 of reductions that do not commute, plus two more orders.
        assert_eq!(layouts(&[2, 2], 2, &values).len(), 64 - 18 + 2);
    }

    #[test]
    fn uneven_layouts_deal_out_the_shape() {
        let texts = |mesh: &[usize], shape: &[usize], values| {
            let layouts = uneven(mesh, shape, &values);
            layouts
                .iter()
                .for_each(|layout| layout.check_shape(shape).unwrap());
            layouts.iter().map(ToString::to_string).collect_vec()
        };
        let [none, some] = [
            "[S(0); mesh dim 0 sizes 0 + 1 + 4]",
            "[S(0); mesh dim 0 sizes 1 + 1 + 3]",
        ];
        assert_eq!(
            texts(&[3], &[5], ValueKind::Bool),
            ["[R]", some, none, "[S(0)]"]
        );
        let [none, some] = [
            "[S(0); mesh dim 0 sizes 0 + 1 + 0]",
            "[S(0); mesh dim 0 sizes 1 + 0 + 0]",
        ];
        assert_eq!(
            texts(&[3], &[1], ValueKind::Int(0..4)),
            ["[R]", some, none, "[S(0)]", "[P(sum)]"]
        );
        // R, S(0), S(1) or P on each mesh dimension. If both shard one dimension, only one of them
        // is uneven.
        let two = texts(&[2, 2], &[3, 4], ValueKind::Int(0..4));
        assert!(
            two.contains(&"[S(0), S(0); mesh dim 0 sizes 1 + 2]".into()),
            "{two:?}"
        );
        assert!(
            two.contains(&"[S(1), S(0); mesh dim 0 sizes 0 + 4; mesh dim 1 sizes 0 + 3]".into()),
            "{two:?}"
        );
        assert_eq!(two.len(), 16 + 2 * 12);
    }

    #[test]
    fn combinations_repeat_nothing_and_meet_every_layout_of_every_input() {
        let one = layouts(&[2, 2], 2, &ValueKind::Float(0.0..1.0));
        assert_eq!(
            combinations(&[one[..5].to_vec(), one[..3].to_vec()], 20),
            Vec::from_iter(0..15)
        );
        let picked = combinations(&[one.clone(), one.clone()], 240);
        assert_eq!(picked.iter().unique().count(), 240);
        for digit in [|at: &usize| at % 48, |at: &usize| at / 48] {
            assert_eq!(picked.iter().map(digit).unique().count(), one.len());
        }
        let plain = |at: &&usize| !one[**at % 48].has_partial() && !one[**at / 48].has_partial();
        assert_eq!(picked[..120].iter().filter(plain).count(), 120);
        assert_eq!(
            one.iter().filter(|layout| !layout.has_partial()).count(),
            11
        );
    }
}
