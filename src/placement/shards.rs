//! What ranks hold of a tensor of a certain shape: intervals, and their lengths.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::{Layout, Placement, PlacementError, ShardSizes};

impl Layout {
    /// Checks that a tensor of shape `global` can lie this way.
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`ShardSizeSum`](PlacementError::ShardSizeSum) for a ragged cut whose
    /// lengths do not add up to what it cuts, on any rank.
    pub fn check_shape(&self, global: &[usize]) -> Result<(), PlacementError> {
        self.check(global.len())?;
        if self.is_uneven() {
            self.orders().try_for_each(|(dim, _)| self.parts(dim, global[dim]).map(drop))?;
        }
        Ok(())
    }

    /// The shape of the shard at `coordinate`.
    ///
    /// # Panics
    /// As [`local_slices`](Self::local_slices).
    pub fn local_shape(&self, global: &[usize], coordinate: &[usize]) -> Vec<usize> {
        self.local_slices(global, coordinate).iter().map(ExactSizeIterator::len).collect()
    }

    /// The interval of each tensor dimension that the rank at `coordinate` holds.
    ///
    /// An empty chunk is an empty interval at the end of the piece it was cut from; an empty part of
    /// a ragged cut lies where the next one begins.
    ///
    /// # Panics
    /// If a tensor of shape `global` [cannot](Self::check_shape) lie this way, or `coordinate` is outside
    /// the mesh.
    pub fn local_slices(&self, global: &[usize], coordinate: &[usize]) -> Vec<Range<usize>> {
        let mut slices: Vec<_> = global.iter().map(|&len| 0..len).collect();
        for (dim, sharding_dims) in self.orders() {
            let slice = slices.get_mut(dim).unwrap_or_else(|| self.misfit(dim, global));
            *slice = self.nested(dim, slice.len(), sharding_dims, coordinate);
        }
        slices
    }

    /// Of each tensor dimension the length of the shortest part that any rank has: 0 where one has
    /// nothing of it. Under nested cuts that need not be the last rank:
    ///
    /// ```text
    /// mesh (2, 3), [S(0), S(0)], a dim of 7:   | 0 1 | 2 3 | | 4 | 5 | 6 |
    /// ```
    ///
    /// # Panics
    /// If a tensor of shape `global` [cannot](Self::check_shape) lie this way.
    pub fn min_local_shape(&self, global: &[usize]) -> Vec<usize> {
        let mut shortest = global.to_vec();
        for (dim, _) in self.orders() {
            let len = *global.get(dim).unwrap_or_else(|| self.misfit(dim, global));
            shortest[dim] = self.parts(dim, len).unwrap_or_else(|error| panic!("{error}"))[0];
        }
        shortest
    }

    /// The lengths of the parts that ranks have of dimension `dim`, `len` long: each once, ascending.
    fn parts(&self, dim: usize, len: usize) -> Result<SmallVec<[usize; 4]>, PlacementError> {
        let mut blocks: SmallVec<[usize; 4]> = smallvec![len];
        // Which piece leaves the shortest part is only known after the last cut.
        for &mesh_dim in self.shard_order(dim) {
            let mut parts = SmallVec::new();
            for &block in &blocks {
                parts.extend(self.shard_sizes_of(dim, mesh_dim, block)?.distinct(self.mesh_shape()[mesh_dim]));
            }
            parts.sort_unstable();
            parts.dedup();
            blocks = parts;
        }
        Ok(blocks)
    }

    /// How `mesh_dim` cuts a piece of dimension `dim`, `len` long.
    fn shard_sizes_of(&self, dim: usize, mesh_dim: usize, len: usize) -> Result<ShardSizes, PlacementError> {
        match self.uneven_sizes(mesh_dim) {
            None => Ok(ShardSizes::Chunked(len)),
            Some(lengths) if lengths.iter().sum::<usize>() == len => Ok(ShardSizes::Uneven(lengths.clone())),
            Some(lengths) => Err(PlacementError::ShardSizeSum { mesh_dim, dim, lengths: lengths.to_vec(), len }),
        }
    }

    /// Where the shard at `coordinate` begins in each tensor dimension, as PyTorch reports it: for
    /// an interval that is empty, the length of the dimension.
    ///
    /// # Panics
    /// As [`local_slices`](Self::local_slices).
    pub fn global_offset(&self, global: &[usize], coordinate: &[usize]) -> Vec<usize> {
        let slices = self.local_slices(global, coordinate).into_iter();
        slices.zip(global).map(|(slice, &len)| if slice.is_empty() { len } else { slice.start }).collect()
    }

    /// How mesh dimension `mesh_dim` cuts its piece, for the rank at `coordinate`: the interval left
    /// by the cuts before it. The same for all ranks that differ only along `mesh_dim`.
    ///
    /// # Panics
    /// If `mesh_dim` shards nothing, and as [`local_slices`](Self::local_slices).
    pub fn shard_sizes(&self, global: &[usize], coordinate: &[usize], mesh_dim: usize) -> ShardSizes {
        let Placement::Shard(dim) = self.placements()[mesh_dim] else {
            panic!("mesh dim {mesh_dim} of {self} cuts nothing");
        };
        let outer = self.shard_order(dim).iter().take_while(|&&sharding_dim| sharding_dim != mesh_dim);
        let len = *global.get(dim).unwrap_or_else(|| self.misfit(dim, global));
        let block = self.nested(dim, len, outer, coordinate);
        self.shard_sizes_of(dim, mesh_dim, block.len()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// How `mesh_dims` together cut their piece, for the rank at `coordinate`: cuts of one tensor dimension that
    /// follow each other, outermost first. Of the ranks along them, the last of `mesh_dims` changes fastest.
    ///
    /// ```text
    /// mesh (2, 3), [S(0), S(0)], a dim of 7:   both cut 2 + 2 + 0 + 1 + 1 + 1
    /// ```
    ///
    /// # Panics
    /// As [`shard_sizes`](Self::shard_sizes), and without any `mesh_dims`.
    pub(crate) fn shard_sizes_over(&self, global: &[usize], coordinate: &[usize], mesh_dims: &[usize]) -> ShardSizes {
        let block = self.shard_sizes(global, coordinate, mesh_dims[0]);
        let Placement::Shard(dim) = self.placements()[mesh_dims[0]] else { unreachable!("it cuts something") };
        if mesh_dims.len() == 1 {
            return block;
        }
        let lengths = mesh_dims.iter().fold(vec![block.total()], |lengths, &mesh_dim| {
            let ranks = self.mesh_shape()[mesh_dim];
            let parts = |len: usize| {
                let sharding_dim = self.shard_sizes_of(dim, mesh_dim, len).unwrap_or_else(|error| panic!("{error}"));
                (0..ranks).map(move |rank| sharding_dim.range(ranks, rank).len())
            };
            lengths.into_iter().flat_map(parts).collect()
        });
        ShardSizes::Uneven(lengths.into())
    }

    /// The interval left of dimension `dim`, `len` long, by `cuts`, outermost first.
    fn nested<'a>(
        &self,
        dim: usize,
        len: usize,
        sharding_dims: impl IntoIterator<Item = &'a usize>,
        coordinate: &[usize],
    ) -> Range<usize> {
        sharding_dims.into_iter().fold(0..len, |block, &mesh_dim| {
            let sharding_dim =
                self.shard_sizes_of(dim, mesh_dim, block.len()).unwrap_or_else(|error| panic!("{error}"));
            let part = sharding_dim.range(self.mesh_shape()[mesh_dim], coordinate[mesh_dim]);
            block.start + part.start..block.start + part.end
        })
    }

    fn misfit(&self, dim: usize, global: &[usize]) -> ! {
        panic!("{self} shards dim {dim}, which a tensor of shape {global:?} lacks")
    }
}
