//! Operators that read beyond a rank's shard: windows over a sharded spatial dimension.
//!
//! If the input `[batch, channels, height]` of a convolution is placed as `S(2)`, every rank
//! computes the output rows of its shard. It lacks some input rows that these are computed from:
//! its halo. An [`Exchange`](exchange::Exchange) fetches exactly these rows from the ranks that
//! hold them, and returns their gradients in backward. burn's operator runs between the two. For
//! example, 8 rows over 2 ranks, with windows of 3:
//!
//! ```text
//! rank 0   has 0 1 2 3    reads _ 0 1 2 3 4    makes 0 1 2 3
//! rank 1   has 4 5 6 7    reads 3 4 5 6 7 _    makes 4 5 6 7
//! ```
//!
//! Padding is written into the rows that a rank reads, and nowhere else, so that every rank runs
//! the same operators, whether its shard is at the border, in the middle, or empty.
//!
//! # Sharding of the output
//!
//! The output is sharded along the same mesh dimensions in the same order. If the input is split
//! into chunks, so is the output, whatever its length. Tensors of equal length, such as those on
//! both sides of a U-Net, can then be combined without redistribution. Chunks of the output may
//! start at other rows than those of the input; input rows that another rank holds for this reason
//! are part of the halo. Uneven shard sizes are scaled in proportion to the length of the output,
//! and stay the same if the length does.
//!
//! # Rules
//!
//! The strategies of a rule never communicate, except those of a halo. [`Spatial`] adds the
//! strategy `S(d), R, .. -> S(d)` for every spatial dimension. The other inputs are replicated, and
//! their gradients are partial sums. [`RedistributePolicy::Deny`](super::RedistributePolicy::Deny)
//! permits the exchange, because no input is redistributed. The exception is an input with uneven
//! shards inside another sharding of the same dimension, whose output has another length.
//!
//! The exchange is planned at every call, for every rank of the group. This takes microseconds,
//! less than the computation of the windows.

mod crop;
mod exchange;
mod plan;

use std::iter::repeat_n;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use burn::tensor::{Shape, Tensor};
use itertools::Itertools;
use smallvec::SmallVec;

use super::placements::{R, S};
use super::{Operator, ShardingRule, Strategy, strategy};
use crate::Result;
use crate::comm::Call;
use crate::error::OrUnwind;
use crop::crop;
use exchange::Exchange;
use plan::{HaloBlock, HaloPlan, HaloRange};

/// The first spatial dimension, after batch and channels.
pub(super) const SPATIAL: usize = 2;

/// A rule that also allows sharding the spatial dimensions (those from the third on) of the first
/// input and the output.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Spatial<T>(pub(super) T);

impl<T: ShardingRule> ShardingRule for Spatial<T> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        self.0.outputs(inputs)
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let mut rows = self.0.strategies(inputs, outputs);
        rows.extend((SPATIAL..inputs[0].num_dims()).map(|dim| {
            let others = repeat_n(R, inputs.len() - 1);
            strategy([S(dim)].into_iter().chain(others), [S(dim)]).in_proportion()
        }));
        rows
    }

    fn supports_empty_shards(&self) -> bool {
        self.0.supports_empty_shards()
    }

    fn supports_empty_shards_along(&self, input: usize, dim: usize) -> bool {
        (input == 0 && dim >= SPATIAL) || self.0.supports_empty_shards_along(input, dim)
    }
}

/// Elements that are read and made for an interval of the output, along one dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reach {
    /// Input interval from which it is computed. May extend beyond the input, into the padding.
    pub(super) input: Range<isize>,
    /// Elements of the input in that interval, from the first to the last that is read.
    pub(super) needs: Range<usize>,
    /// Output interval that the local operator makes of the input: the requested one, or more.
    pub(super) made: Range<isize>,
}

/// Halo of this rank, for an operator whose spatial dimensions are sharded.
#[derive(Debug)]
pub(super) struct Halo {
    exchange: Arc<Exchange>,
    own: HaloRank,
    /// True if any rank makes more than it keeps.
    is_cropped: bool,
}

/// Intervals of one rank of the group along the sharded dimensions, in ascending order.
#[derive(Debug)]
struct HaloRank {
    part: HaloRange,
    /// Interval of the output that the rank holds; one element if that is empty.
    output: HaloBlock,
    /// Size of the output of the local operator, followed by the interval of it that the rank
    /// keeps.
    made: HaloBlock,
    kept: HaloBlock,
}

impl HaloRank {
    fn new(
        dims: &[usize],
        has: &[Range<usize>],
        makes: &[Range<usize>],
        reach: impl Fn(usize, Range<usize>) -> Reach,
    ) -> Self {
        let is_idle = makes.iter().any(Range::is_empty);
        let output: HaloBlock = dims
            .iter()
            .map(|&dim| makes[dim].start..makes[dim].end.max(makes[dim].start + 1))
            .collect();
        let reaches: SmallVec<[Reach; 2]> = dims
            .iter()
            .zip(&output)
            .map(|(&dim, output)| reach(dim - SPATIAL, output.clone()))
            .collect();
        let inside = |(&dim, reach): (&usize, &Reach)| {
            let start = (makes[dim].start as isize - reach.made.start) as usize;
            start..start + makes[dim].len()
        };
        let needs: HaloBlock = reaches.iter().map(|reach| reach.needs.clone()).collect();
        Self {
            kept: dims.iter().zip(&reaches).map(inside).collect(),
            made: reaches.iter().map(|reach| 0..reach.made.len()).collect(),
            part: HaloRange {
                has: dims.iter().map(|&dim| has[dim].clone()).collect(),
                reads: reaches.into_iter().map(|reach| reach.input).collect(),
                needs: Some(needs).filter(|needs| !is_idle && !needs.iter().any(Range::is_empty)),
            },
            output,
        }
    }
}

impl Halo {
    /// Returns the halo of the first input of `operator`, called `name`, if any of its spatial
    /// dimensions is sharded. `reach` is called with spatial dimensions counted from 0, and with
    /// intervals of at least one element.
    #[track_caller]
    pub(super) fn of(
        name: &'static str,
        operator: &Operator,
        reach: impl Fn(usize, Range<usize>) -> Reach,
    ) -> Option<Self> {
        let input = operator.input_spec(0);
        let layout = input.layout();
        let ranks = input.mesh().shape();
        let sharding_dims = |dim: usize| {
            layout
                .shard_order(dim)
                .iter()
                .copied()
                .filter(|&sizes| ranks[sizes] > 1)
        };
        let dims: SmallVec<[usize; 2]> = (SPATIAL..input.shape().num_dims())
            .filter(|&dim| sharding_dims(dim).next().is_some())
            .collect();
        if dims.is_empty() {
            return None;
        }
        let sharding_dims: SmallVec<[usize; 3]> = dims
            .iter()
            .flat_map(|&dim| sharding_dims(dim))
            .sorted()
            .collect();
        let comm = input.mesh().communicator_over(&sharding_dims).or_unwind();
        let member = |at: Vec<usize>| {
            let mut coordinate: SmallVec<[usize; 3]> = input.coordinate().into();
            sharding_dims
                .iter()
                .zip(at)
                .for_each(|(&sizes, at)| coordinate[sizes] = at);
            let has = layout.local_slices(input.shape(), &coordinate);
            HaloRank::new(&dims, &has, &operator.output_slices(0, &coordinate), &reach)
        };
        // In the order of the ranks in the group.
        let mut members: Vec<HaloRank> = sharding_dims
            .iter()
            .map(|&sizes| 0..ranks[sizes])
            .multi_cartesian_product()
            .map(member)
            .collect();
        let is_cropped = members.iter().any(|member| member.kept != member.made);
        let parts: Vec<&HaloRange> = members.iter().map(|member| &member.part).collect();
        let plan = HaloPlan::new(&parts, comm.group().rank());
        let call = input.call_as(Call::new(format!("halo of {name} {layout}")), input.dtype());
        let own = members.swap_remove(comm.group().rank());
        let exchange = Exchange {
            plan,
            dims,
            comm,
            call,
            spec: input.clone(),
            name,
        };
        Some(Self {
            exchange: Arc::new(exchange),
            own,
            is_cropped,
        })
    }

    /// Returns the sharded dimensions, in ascending order, each with the output interval that the
    /// local operator is to make.
    pub(super) fn outputs(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        self.exchange.dims.iter().copied().zip(&self.own.output)
    }

    /// Runs `local` on the elements that this rank reads: those of its shard of `x` that it needs,
    /// its halo, and `fill` for padding. `at` is the location of the operator's call.
    ///
    /// # Collective
    /// If a rank has a halo: every rank along the mesh dimensions that shard spatial dimensions, in
    /// forward and in backward.
    #[track_caller]
    pub(super) fn run<const D: usize>(
        self,
        x: Tensor<D>,
        fill: f64,
        at: &'static Location<'static>,
        local: impl FnOnce(Tensor<D>, &Self) -> Tensor<D>,
    ) -> Tensor<D> {
        let read = self.exchange.walk(x, fill, at).or_unwind();
        let made = local(read, &self);
        if !self.is_cropped {
            return made;
        }
        let mut ranges: [Range<usize>; D] = made.dims().map(|len| 0..len);
        self.exchange
            .dims
            .iter()
            .zip(self.own.kept)
            .for_each(|(&dim, kept)| ranges[dim] = kept);
        crop(made, ranges)
    }
}
