//! [`ShardingContext`]: the order and the lengths in which the dimensions of an operator's tensors are cut.

use std::iter;
use std::sync::Arc;

use burn::tensor::Shape;
use itertools::Itertools;
use smallvec::SmallVec;

use super::rule::Strategy;
use crate::placement::{Layout, Placement, Placements};

/// Mesh dimensions, ascending.
pub(super) type Dims = SmallVec<[usize; 3]>;

/// The lengths of ragged cuts, each with its mesh dimension.
pub(super) type Lengths = SmallVec<[(usize, Arc<[usize]>); 1]>;

/// The lengths in which cuts may be made: none, so that all are into chunks, and those that each
/// operand comes with.
pub(super) fn uneven_sizes<'a>(operands: impl Iterator<Item = &'a Layout>) -> Vec<Lengths> {
    let of = |layout: &Layout| -> Lengths {
        layout.uneven_mesh_dims().map(|(mesh_dim, lengths)| (mesh_dim, lengths.clone())).collect()
    };
    iter::once(Lengths::new()).chain(operands.map(of)).unique().collect()
}

/// How the cuts of all inputs and outputs are made.
#[derive(Clone, Copy)]
pub(super) struct ShardingContext<'a> {
    pub(super) mesh_shape: &'a [usize],
    /// The order of the mesh dimensions.
    pub(super) mesh_order: &'a [usize],
    pub(super) lengths: &'a Lengths,
}

impl ShardingContext<'_> {
    /// The layout with these placements, of which those on the mesh dimensions `uneven` have their
    /// lengths.
    pub(super) fn layout(&self, placements: &[Placement], uneven: &[usize]) -> Option<Layout> {
        let layout = Layout::in_order(self.mesh_shape, placements, self.mesh_order).ok()?;
        let mut lengths = self
            .lengths
            .iter()
            .filter(|(mesh_dim, _)| uneven.contains(mesh_dim) && placements[*mesh_dim].shard_dim().is_some());
        lengths
            .try_fold(layout, |layout, (mesh_dim, lengths)| layout.with_uneven_sizes(*mesh_dim, lengths.clone()).ok())
    }

    /// [`layout`](Self::layout) of an output of `shape`: by rows that are [in
    /// proportion](Strategy::in_proportion), the lengths are those that the first input has.
    pub(super) fn output(
        &self,
        placements: &[Placement],
        uneven: &[usize],
        rows: &[&Strategy],
        (inputs, shape): (&[&Shape], &Shape),
    ) -> Option<Layout> {
        let layout = self.layout(placements, uneven)?;
        let mut scaled = uneven.iter().filter(|&&mesh_dim| rows[mesh_dim].in_proportion);
        scaled.try_fold(layout, |layout, &mesh_dim| {
            let dim = placements[mesh_dim].shard_dim()?;
            let lengths = layout.uneven_sizes(mesh_dim)?;
            let is_alone = layout.shard_order(dim).len() == 1;
            let lengths = if is_alone { in_proportion(lengths, inputs[0][dim], shape[dim]) } else { lengths.clone() };
            layout.with_uneven_sizes(mesh_dim, lengths).ok()
        })
    }

    /// The mesh dimensions on which these rows leave the lengths as they are: whatever they cut there,
    /// input or output, is as long as the lengths add up to, and no piece has to divide anything.
    pub(super) fn kept(&self, rows: &[&Strategy], inputs: &[&Shape], outputs: &[Shape]) -> Dims {
        let mut kept = Dims::new();
        let fits = |placements: Placements, shape: &Shape, kept: &[usize]| {
            self.layout(&placements, kept).is_none_or(|layout| layout.check_shape(shape).is_ok())
        };
        let output_fits = |placements: Placements, shape: &Shape, kept: &[usize]| {
            self.output(&placements, kept, rows, (inputs, shape)).is_none_or(|layout| layout.check_shape(shape).is_ok())
        };
        // Outermost first: a cut outside another leaves the pieces that this one cuts.
        for &mesh_dim in self.mesh_order {
            if rows[mesh_dim].divides.is_some() || !self.lengths.iter().any(|(uneven, _)| *uneven == mesh_dim) {
                continue;
            }
            kept.push(mesh_dim);
            let input = |at| rows.iter().map(|row| row.inputs[at]).collect();
            let output = |at| rows.iter().map(|row| row.outputs[at]).collect();
            let all = inputs.iter().enumerate().all(|(at, shape)| fits(input(at), shape, &kept))
                && outputs.iter().enumerate().all(|(at, shape)| output_fits(output(at), shape, &kept));
            if !all {
                kept.pop();
            }
        }
        kept
    }
}

/// A length of `to`, cut where `lengths` cut one of `from`, in proportion.
fn in_proportion(lengths: &[usize], from: usize, to: usize) -> Arc<[usize]> {
    let ends = lengths.iter().scan(0, |end, len| {
        *end += len;
        Some((*end * to + from / 2).checked_div(from).unwrap_or(0))
    });
    iter::once(0).chain(ends).tuple_windows().map(|(start, end)| end - start).collect()
}

#[cfg(test)]
mod tests {
    use super::super::placements::{R, S, SUM};
    use super::super::strategy;
    use super::*;

    fn kept(rows: [Strategy; 2], inputs: &[[usize; 2]], output: [usize; 2]) -> Vec<usize> {
        // On mesh (2, 3): 4 rows as 1 + 3, 6 columns as 6 + 0 + 0.
        let lengths = Lengths::from_iter([(0, Arc::from([1, 3])), (1, Arc::from([6, 0, 0]))]);
        let cutting = ShardingContext { mesh_shape: &[2, 3], mesh_order: &[0, 1], lengths: &lengths };
        let inputs: Vec<Shape> = inputs.iter().map(|&shape| Shape::from(shape)).collect();
        let inputs: Vec<&Shape> = inputs.iter().collect();
        cutting.kept(&[&rows[0], &rows[1]], &inputs, &[Shape::from(output)]).to_vec()
    }

    #[test]
    fn sizes_stay_where_all_sharded_dimensions_are_as_long() {
        let unary = |dim: usize| strategy([S(dim)], [S(dim)]);
        assert_eq!(kept([unary(0), unary(1)], &[[4, 6]], [4, 6]), [0, 1]);
        // An input or an output of other lengths.
        assert_eq!(kept([unary(0), unary(1)], &[[4, 6]], [4, 12]), [0]);
        assert_eq!(kept([unary(0), unary(1)], &[[8, 6]], [4, 6]), [1]);
        // What is not cut may be as long as it likes.
        let product = [strategy([S(0), R], [S(0)]), strategy([S(1), S(0)], [SUM])];
        assert_eq!(kept(product, &[[4, 6], [6, 9]], [4, 9]), [0, 1]);
        // Pieces that have to divide something are chunks.
        assert_eq!(kept([unary(0).if_divides(4), unary(1)], &[[4, 6]], [4, 6]), [1]);
        // The second cut would need pieces of 6, the first leaves 1 and 3.
        assert_eq!(kept([unary(0), unary(0)], &[[4, 6]], [4, 6]), [0]);
    }

    #[test]
    fn lengths_in_proportion_add_up_and_go_back_to_what_they_were() {
        let scaled = |lengths: &[usize], to: usize| in_proportion(lengths, lengths.iter().sum(), to).to_vec();
        assert_eq!(scaled(&[3, 0, 2], 5), [3, 0, 2]);
        assert_eq!(scaled(&[6, 0, 4], 5), [3, 0, 2]);
        assert_eq!(scaled(&[3, 0, 2], 10), [6, 0, 4]);
        assert_eq!(scaled(&[1, 3, 9], 7), [1, 1, 5]);
        assert_eq!(scaled(&[3, 0, 2], 0), [0, 0, 0]);
    }

    #[test]
    fn only_sharded_dimensions_are_uneven() {
        let lengths = Lengths::from_iter([(0, Arc::from([1, 3]))]);
        let cutting = ShardingContext { mesh_shape: &[2], mesh_order: &[0], lengths: &lengths };
        let layout = |placement, uneven: &[usize]| cutting.layout(&[placement], uneven).unwrap().to_string();
        assert_eq!(layout(S(0), &[0]), "[S(0); mesh dim 0 cuts 1 + 3]");
        assert_eq!(layout(S(0), &[]), "[S(0)]");
        assert_eq!(layout(R, &[0]), "[R]");
    }
}
