//! Operators that read beyond a rank's part: windows over a spatial dimension that is cut.
//!
//! Under the placement `S(2)` of a convolution's input `[batch, channels, height]` every rank makes the rows of
//! the output that are its own, and lacks some of the input's that these are computed from: its halo. An
//! [`Exchange`](exchange::Exchange) brings it exactly those, from whichever ranks have them, and in backward
//! brings their gradients back; between the two runs burn's operator. 8 rows over 2 ranks, windows of 3:
//!
//! ```text
//! rank 0   has 0 1 2 3    reads _ 0 1 2 3 4    makes 0 1 2 3
//! rank 1   has 4 5 6 7    reads 3 4 5 6 7 _    makes 4 5 6 7
//! ```
//!
//! Padding is written into what the rank reads, and only there, so that every rank runs the same operators,
//! whether its part lies at the border, in the middle, or is empty.
//!
//! # How the output is cut
//!
//! Along the same mesh dimensions, in the same order: into chunks, if the input is, whatever the lengths. So
//! tensors of one length meet as they are, such as those that a U-Net makes narrower and wider again with those
//! that it kept; rows that chunks of another length shift to a neighbour are part of the halo. A ragged cut
//! stays ragged, in proportion, and of the same length it stays as it is.
//!
//! # Rules
//!
//! A row of a rule's table never communicates; that of a halo is the exception, and names what it cuts like any
//! other: [`Spatial`] adds `S(d), R, .. -> S(d)` for every spatial dimension. What else an operator is given is
//! the same on all ranks, and its gradient a term of a sum.
//! [`RedistributePolicy::Deny`](super::RedistributePolicy::Deny) has no objection: no input is redistributed, but for
//! one whose ragged cut lies inside another cut of the same dimension and whose output has another length.
//!
//! What is exchanged is worked out at every call, for every rank of the group: in microseconds, where a window
//! computes for longer.

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

/// The first spatial dimension: before it are batch and channels.
pub(super) const SPATIAL: usize = 2;

/// A rule whose spatial dimensions, those from the third on, may be cut: in the first input and the output.
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

    fn takes_empty_parts_along(&self, input: usize, dim: usize) -> bool {
        (input == 0 && dim >= SPATIAL) || self.0.takes_empty_parts_along(input, dim)
    }
}

/// Of an interval of the output, along one dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reach {
    /// What of the input it is computed from. May reach beyond it, where there is only padding.
    pub(super) input: Range<isize>,
    /// Those elements of the input: from the first to the last that is read.
    pub(super) needs: Range<usize>,
    /// What of the output the local operator makes of that: the interval, or more.
    pub(super) made: Range<isize>,
}

/// What this rank reads and makes, of an operator whose spatial dimensions are cut.
#[derive(Debug)]
pub(super) struct Halo {
    exchange: Arc<Exchange>,
    own: HaloRank,
    /// Whether any rank makes more than it keeps.
    is_cropped: bool,
}

/// What one rank of the group does; all of the cut dimensions, ascending.
#[derive(Debug)]
struct HaloRank {
    part: HaloRange,
    /// Its interval of the output; where that is empty, one element.
    output: HaloBlock,
    /// How much the local operator makes, and what of that it keeps.
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
        let output: HaloBlock =
            dims.iter().map(|&dim| makes[dim].start..makes[dim].end.max(makes[dim].start + 1)).collect();
        let reaches: SmallVec<[Reach; 2]> =
            dims.iter().zip(&output).map(|(&dim, output)| reach(dim - SPATIAL, output.clone())).collect();
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
    /// That of the first input of `operator`, called `name`, if any of its spatial dimensions is cut. `reach` is
    /// asked of spatial dimensions, counted from 0, and of intervals of at least one element.
    #[track_caller]
    pub(super) fn of(
        name: &'static str,
        operator: &Operator,
        reach: impl Fn(usize, Range<usize>) -> Reach,
    ) -> Option<Self> {
        let input = operator.input_spec(0);
        let (layout, ranks) = (input.layout(), input.mesh().shape());
        let sharding_dims = |dim: usize| layout.shard_order(dim).iter().copied().filter(|&sizes| ranks[sizes] > 1);
        let dims: SmallVec<[usize; 2]> =
            (SPATIAL..input.shape().num_dims()).filter(|&dim| sharding_dims(dim).next().is_some()).collect();
        if dims.is_empty() {
            return None;
        }
        let sharding_dims: SmallVec<[usize; 3]> = dims.iter().flat_map(|&dim| sharding_dims(dim)).sorted().collect();
        let comm = input.mesh().communicator_over(&sharding_dims).or_unwind();
        let member = |at: Vec<usize>| {
            let mut coordinate: SmallVec<[usize; 3]> = input.coordinate().into();
            sharding_dims.iter().zip(at).for_each(|(&sizes, at)| coordinate[sizes] = at);
            let has = layout.local_slices(input.shape(), &coordinate);
            HaloRank::new(&dims, &has, &operator.output_slices(0, &coordinate), &reach)
        };
        // In the order of the group.
        let mut members: Vec<HaloRank> =
            sharding_dims.iter().map(|&sizes| 0..ranks[sizes]).multi_cartesian_product().map(member).collect();
        let is_cropped = members.iter().any(|member| member.kept != member.made);
        let parts: Vec<&HaloRange> = members.iter().map(|member| &member.part).collect();
        let plan = HaloPlan::new(&parts, comm.group().rank());
        let call = input.call_as(Call::new(format!("halo of {name} {layout}")), input.dtype());
        let own = members.swap_remove(comm.group().rank());
        let exchange = Exchange { plan, dims, comm, call, spec: input.clone(), name };
        Some(Self { exchange: Arc::new(exchange), own, is_cropped })
    }

    /// The cut dimensions, ascending, each with the interval of the output that the local operator is to make.
    pub(super) fn outputs(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        self.exchange.dims.iter().copied().zip(&self.own.output)
    }

    /// Runs `local` on what this rank reads: its part of `x` without what it does not need, with its halo, and
    /// with `fill` for padding; for the operator called `at` that line.
    ///
    /// # Collective
    /// If a rank has a halo: every rank along the cut dimensions, in forward and in backward.
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
        self.exchange.dims.iter().zip(self.own.kept).for_each(|(&dim, kept)| ranges[dim] = kept);
        crop(made, ranges)
    }
}
