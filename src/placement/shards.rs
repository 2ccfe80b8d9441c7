//! Shards of a tensor of a given shape: the intervals that ranks hold, and their lengths.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::{Layout, Placement, PlacementError, ShardSizes};

impl Layout {
    /// Checks that a tensor of shape `global` can have this layout.
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`ShardSizeSum`](PlacementError::ShardSizeSum) for uneven
    /// sizes that do not add up to the length that they split, on any rank.
    pub fn check_shape(&self, global: &[usize]) -> Result<(), PlacementError> {
        self.check(global.len())?;
        if self.is_uneven() {
            self.orders()
                .try_for_each(|(dim, _)| self.parts(dim, global[dim]).map(drop))?;
        }
        Ok(())
    }

    /// Returns the shape of the shard at `coordinate`.
    ///
    /// # Panics
    /// As [`local_slices`](Self::local_slices).
    pub fn local_shape(&self, global: &[usize], coordinate: &[usize]) -> Vec<usize> {
        self.local_slices(global, coordinate)
            .iter()
            .map(ExactSizeIterator::len)
            .collect()
    }

    /// Returns the interval of each tensor dimension that the rank at `coordinate` holds.
    ///
    /// An empty chunk is an empty interval at the end of the interval that was split. An empty
    /// shard among uneven sizes starts where the next one starts.
    ///
    /// # Panics
    /// If a tensor of shape `global` [cannot](Self::check_shape) have this layout, or if
    /// `coordinate` is outside the mesh.
    pub fn local_slices(&self, global: &[usize], coordinate: &[usize]) -> Vec<Range<usize>> {
        let mut slices: Vec<_> = global.iter().map(|&len| 0..len).collect();
        for (dim, sharding_dims) in self.orders() {
            let slice = slices
                .get_mut(dim)
                .unwrap_or_else(|| self.misfit(dim, global));
            *slice = self.nested(dim, slice.len(), sharding_dims, coordinate);
        }
        slices
    }

    /// Returns, for each tensor dimension, the smallest local length on any rank; 0 if a rank has
    /// no elements of it. With nested shards, that rank need not be the last one:
    ///
    /// ```text
    /// mesh (2, 3), [S(0), S(0)], a dim of 7:   | 0 1 | 2 3 | | 4 | 5 | 6 |
    /// ```
    ///
    /// # Panics
    /// If a tensor of shape `global` [cannot](Self::check_shape) have this layout.
    pub fn min_local_shape(&self, global: &[usize]) -> Vec<usize> {
        let mut shortest = global.to_vec();
        for (dim, _) in self.orders() {
            let len = *global.get(dim).unwrap_or_else(|| self.misfit(dim, global));
            shortest[dim] = self
                .parts(dim, len)
                .unwrap_or_else(|error| panic!("{error}"))[0];
        }
        shortest
    }

    /// Returns the distinct lengths that ranks hold of dimension `dim`, which has length `len`,
    /// ascending.
    fn parts(&self, dim: usize, len: usize) -> Result<SmallVec<[usize; 4]>, PlacementError> {
        let mut blocks: SmallVec<[usize; 4]> = smallvec![len];
        // The interval with the shortest shard is known only after the innermost mesh dimension.
        for &mesh_dim in self.shard_order(dim) {
            let mut parts = SmallVec::new();
            for &block in &blocks {
                parts.extend(
                    self.shard_sizes_of(dim, mesh_dim, block)?
                        .distinct(self.mesh_shape()[mesh_dim]),
                );
            }
            parts.sort_unstable();
            parts.dedup();
            blocks = parts;
        }
        Ok(blocks)
    }

    /// Returns the shard sizes into which `mesh_dim` splits an interval of dimension `dim` of
    /// length `len`.
    fn shard_sizes_of(
        &self,
        dim: usize,
        mesh_dim: usize,
        len: usize,
    ) -> Result<ShardSizes, PlacementError> {
        match self.uneven_sizes(mesh_dim) {
            None => Ok(ShardSizes::Chunked(len)),
            Some(lengths) if lengths.iter().sum::<usize>() == len => {
                Ok(ShardSizes::Uneven(lengths.clone()))
            }
            Some(lengths) => Err(PlacementError::ShardSizeSum {
                mesh_dim,
                dim,
                lengths: lengths.to_vec(),
                len,
            }),
        }
    }

    /// Returns the offset of the shard at `coordinate` in each tensor dimension, as PyTorch reports
    /// it: for an empty interval, it is the length of the dimension.
    ///
    /// # Panics
    /// As [`local_slices`](Self::local_slices).
    pub fn global_offset(&self, global: &[usize], coordinate: &[usize]) -> Vec<usize> {
        let slices = self.local_slices(global, coordinate).into_iter();
        slices
            .zip(global)
            .map(|(slice, &len)| if slice.is_empty() { len } else { slice.start })
            .collect()
    }

    /// Returns the shard sizes into which `mesh_dim` splits its interval, for the rank at
    /// `coordinate`. The interval is the one that the outer mesh dimensions leave. The result is
    /// the same on all ranks that differ only along `mesh_dim`.
    ///
    /// # Panics
    /// If `mesh_dim` does not shard, and as [`local_slices`](Self::local_slices).
    pub fn shard_sizes(
        &self,
        global: &[usize],
        coordinate: &[usize],
        mesh_dim: usize,
    ) -> ShardSizes {
        let Placement::Shard(dim) = self.placements()[mesh_dim] else {
            panic!("mesh dimension {mesh_dim} of {self} does not shard");
        };
        let outer = self
            .shard_order(dim)
            .iter()
            .take_while(|&&sharding_dim| sharding_dim != mesh_dim);
        let len = *global.get(dim).unwrap_or_else(|| self.misfit(dim, global));
        let block = self.nested(dim, len, outer, coordinate);
        self.shard_sizes_of(dim, mesh_dim, block.len())
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the shard sizes into which `mesh_dims` together split their interval, for the rank
    /// at `coordinate`. They must be consecutive in the shard order of one tensor dimension,
    /// outermost first. In the numbering of the ranks, the last of `mesh_dims` changes fastest.
    ///
    /// ```text
    /// mesh (2, 3), [S(0), S(0)], a dim of 7:   both together 2 + 2 + 0 + 1 + 1 + 1
    /// ```
    ///
    /// # Panics
    /// As [`shard_sizes`](Self::shard_sizes), and if `mesh_dims` is empty.
    pub(crate) fn shard_sizes_over(
        &self,
        global: &[usize],
        coordinate: &[usize],
        mesh_dims: &[usize],
    ) -> ShardSizes {
        let block = self.shard_sizes(global, coordinate, mesh_dims[0]);
        let Placement::Shard(dim) = self.placements()[mesh_dims[0]] else {
            unreachable!("it was found to shard")
        };
        if mesh_dims.len() == 1 {
            return block;
        }
        let lengths = mesh_dims
            .iter()
            .fold(vec![block.total()], |lengths, &mesh_dim| {
                let ranks = self.mesh_shape()[mesh_dim];
                let parts = |len: usize| {
                    let sharding_dim = self
                        .shard_sizes_of(dim, mesh_dim, len)
                        .unwrap_or_else(|error| panic!("{error}"));
                    (0..ranks).map(move |rank| sharding_dim.range(ranks, rank).len())
                };
                lengths.into_iter().flat_map(parts).collect()
            });
        ShardSizes::Uneven(lengths.into())
    }

    /// Returns the interval of dimension `dim`, of length `len`, that remains after `sharding_dims`
    /// have split it, outermost first.
    fn nested<'a>(
        &self,
        dim: usize,
        len: usize,
        sharding_dims: impl IntoIterator<Item = &'a usize>,
        coordinate: &[usize],
    ) -> Range<usize> {
        sharding_dims.into_iter().fold(0..len, |block, &mesh_dim| {
            let sharding_dim = self
                .shard_sizes_of(dim, mesh_dim, block.len())
                .unwrap_or_else(|error| panic!("{error}"));
            let part = sharding_dim.range(self.mesh_shape()[mesh_dim], coordinate[mesh_dim]);
            block.start + part.start..block.start + part.end
        })
    }

    fn misfit(&self, dim: usize, global: &[usize]) -> ! {
        panic!("{self} shards dim {dim}, which a tensor of shape {global:?} lacks")
    }
}
