//! [`ShardingContext`]: the order of the mesh dimensions and the shard sizes with which an operator's tensors are
//! sharded.

use std::iter;
use std::sync::Arc;

use burn::tensor::Shape;
use itertools::Itertools;
use smallvec::SmallVec;

use super::rule::Strategy;
use crate::placement::{Layout, Placement, Placements};

/// Mesh dimensions, in ascending order.
pub(super) type Dims = SmallVec<[usize; 3]>;

/// Explicit (uneven) shard sizes, each with its mesh dimension.
pub(super) type Lengths = SmallVec<[(usize, Arc<[usize]>); 1]>;

/// Returns the sets of shard sizes to try: none, so that all shards are chunks, and those of each
/// operand.
pub(super) fn uneven_sizes<'a>(operands: impl Iterator<Item = &'a Layout>) -> Vec<Lengths> {
    let of = |layout: &Layout| -> Lengths {
        layout
            .uneven_mesh_dims()
            .map(|(mesh_dim, lengths)| (mesh_dim, lengths.clone()))
            .collect()
    };
    iter::once(Lengths::new())
        .chain(operands.map(of))
        .unique()
        .collect()
}

/// Mesh order and shard sizes for all inputs and outputs of an operator.
#[derive(Clone, Copy)]
pub(super) struct ShardingContext<'a> {
    pub(super) mesh_shape: &'a [usize],
    /// Mesh dimensions from the outermost to the innermost.
    pub(super) mesh_order: &'a [usize],
    pub(super) lengths: &'a Lengths,
}

impl ShardingContext<'_> {
    /// Returns the layout with these placements. The mesh dimensions in `uneven` use their explicit
    /// shard sizes.
    pub(super) fn layout(&self, placements: &[Placement], uneven: &[usize]) -> Option<Layout> {
        let layout = Layout::in_order(self.mesh_shape, placements, self.mesh_order).ok()?;
        let mut lengths = self.lengths.iter().filter(|(mesh_dim, _)| {
            uneven.contains(mesh_dim) && placements[*mesh_dim].shard_dim().is_some()
        });
        lengths.try_fold(layout, |layout, (mesh_dim, lengths)| {
            layout.with_uneven_sizes(*mesh_dim, lengths.clone()).ok()
        })
    }

    /// Returns the [`layout`](Self::layout) of an output of `shape`. For strategies that are [in
    /// proportion](Strategy::in_proportion), the shard sizes of the first input are scaled to the
    /// output.
    pub(super) fn output(
        &self,
        placements: &[Placement],
        uneven: &[usize],
        rows: &[&Strategy],
        (inputs, shape): (&[&Shape], &Shape),
    ) -> Option<Layout> {
        let layout = self.layout(placements, uneven)?;
        let mut scaled = uneven
            .iter()
            .filter(|&&mesh_dim| rows[mesh_dim].in_proportion);
        scaled.try_fold(layout, |layout, &mesh_dim| {
            let dim = placements[mesh_dim].shard_dim()?;
            let lengths = layout.uneven_sizes(mesh_dim)?;
            let is_alone = layout.shard_order(dim).len() == 1;
            let lengths = if is_alone {
                in_proportion(lengths, inputs[0][dim], shape[dim])
            } else {
                lengths.clone()
            };
            layout.with_uneven_sizes(mesh_dim, lengths).ok()
        })
    }

    /// Returns the mesh dimensions on which these strategies can keep the explicit shard sizes:
    /// every dimension sharded there, of inputs and outputs, is as long as the sizes add up to, and
    /// no strategy requires divisibility.
    pub(super) fn kept(&self, rows: &[&Strategy], inputs: &[&Shape], outputs: &[Shape]) -> Dims {
        let mut kept = Dims::new();
        let fits = |placements: Placements, shape: &Shape, kept: &[usize]| {
            self.layout(&placements, kept)
                .is_none_or(|layout| layout.check_shape(shape).is_ok())
        };
        let output_fits = |placements: Placements, shape: &Shape, kept: &[usize]| {
            self.output(&placements, kept, rows, (inputs, shape))
                .is_none_or(|layout| layout.check_shape(shape).is_ok())
        };
        // Outermost first: an inner mesh dimension divides the shards of an outer one.
        for &mesh_dim in self.mesh_order {
            if rows[mesh_dim].divides.is_some()
                || !self.lengths.iter().any(|(uneven, _)| *uneven == mesh_dim)
            {
                continue;
            }
            kept.push(mesh_dim);
            let input = |at| rows.iter().map(|row| row.inputs[at]).collect();
            let output = |at| rows.iter().map(|row| row.outputs[at]).collect();
            let all = inputs
                .iter()
                .enumerate()
                .all(|(at, shape)| fits(input(at), shape, &kept))
                && outputs
                    .iter()
                    .enumerate()
                    .all(|(at, shape)| output_fits(output(at), shape, &kept));
            if !all {
                kept.pop();
            }
        }
        kept
    }
}

/// Returns sizes that add up to `to`, in proportion to `lengths`, which add up to `from`.
fn in_proportion(lengths: &[usize], from: usize, to: usize) -> Arc<[usize]> {
    let ends = lengths.iter().scan(0, |end, len| {
        *end += len;
        Some((*end * to + from / 2).checked_div(from).unwrap_or(0))
    });
    iter::once(0)
        .chain(ends)
        .tuple_windows()
        .map(|(start, end)| end - start)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::placements::{R, S, SUM};
    use super::super::strategy;
    use super::*;

    fn kept(rows: [Strategy; 2], inputs: &[[usize; 2]], output: [usize; 2]) -> Vec<usize> {
        // On mesh (2, 3): 4 rows as 1 + 3, 6 columns as 6 + 0 + 0.
        let lengths = Lengths::from_iter([(0, Arc::from([1, 3])), (1, Arc::from([6, 0, 0]))]);
        let cutting = ShardingContext {
            mesh_shape: &[2, 3],
            mesh_order: &[0, 1],
            lengths: &lengths,
        };
        let inputs: Vec<Shape> = inputs.iter().map(|&shape| Shape::from(shape)).collect();
        let inputs: Vec<&Shape> = inputs.iter().collect();
        cutting
            .kept(&[&rows[0], &rows[1]], &inputs, &[Shape::from(output)])
            .to_vec()
    }

    #[test]
    fn sizes_stay_where_all_sharded_dimensions_are_as_long() {
        let unary = |dim: usize| strategy([S(dim)], [S(dim)]);
        assert_eq!(kept([unary(0), unary(1)], &[[4, 6]], [4, 6]), [0, 1]);
        // An input or an output has another length.
        assert_eq!(kept([unary(0), unary(1)], &[[4, 6]], [4, 12]), [0]);
        assert_eq!(kept([unary(0), unary(1)], &[[8, 6]], [4, 6]), [1]);
        // A dimension that is not sharded may have any length.
        let product = [strategy([S(0), R], [S(0)]), strategy([S(1), S(0)], [SUM])];
        assert_eq!(kept(product, &[[4, 6], [6, 9]], [4, 9]), [0, 1]);
        // A strategy that requires divisibility uses chunks.
        assert_eq!(
            kept([unary(0).if_divides(4), unary(1)], &[[4, 6]], [4, 6]),
            [1]
        );
        // The second sharding would need shards of 6, but the first leaves 1 and 3.
        assert_eq!(kept([unary(0), unary(0)], &[[4, 6]], [4, 6]), [0]);
    }

    #[test]
    fn lengths_in_proportion_add_up_and_go_back_to_what_they_were() {
        let scaled = |lengths: &[usize], to: usize| {
            in_proportion(lengths, lengths.iter().sum(), to).to_vec()
        };
        assert_eq!(scaled(&[3, 0, 2], 5), [3, 0, 2]);
        assert_eq!(scaled(&[6, 0, 4], 5), [3, 0, 2]);
        assert_eq!(scaled(&[3, 0, 2], 10), [6, 0, 4]);
        assert_eq!(scaled(&[1, 3, 9], 7), [1, 1, 5]);
        assert_eq!(scaled(&[3, 0, 2], 0), [0, 0, 0]);
    }

    #[test]
    fn only_sharded_dimensions_are_uneven() {
        let lengths = Lengths::from_iter([(0, Arc::from([1, 3]))]);
        let cutting = ShardingContext {
            mesh_shape: &[2],
            mesh_order: &[0],
            lengths: &lengths,
        };
        let layout =
            |placement, uneven: &[usize]| cutting.layout(&[placement], uneven).unwrap().to_string();
        assert_eq!(layout(S(0), &[0]), "[S(0); mesh dim 0 sizes 1 + 3]");
        assert_eq!(layout(S(0), &[]), "[S(0)]");
        assert_eq!(layout(R, &[0]), "[R]");
    }
}
