//! [`ShardSummaries`]: operators along a sharded dimension that exchange summaries instead of gathering the
//! dimension.
//!
//! Every rank reduces its shard to a summary of a few elements. The summaries of all shards are
//! gathered in their order along the dimension, and each rank uses them to finish its own shard:
//!
//! | | summary of a shard | use of all summaries | operators |
//! |---|---|---|---|
//! | [`scan`](ShardSummaries::scan) | its total | the totals of the shards before it are carried in | cumulative ones |
//! | [`pick`](ShardSummaries::pick) | the elements it finds, with their positions | every rank finds the same result among them | extrema and their positions, the `k` largest |
//! | [`exponentials`](ShardSummaries::exponentials) | its maximum and its sum of exponentials | both for the full dimension | softmaxes |
//!
//! ```text
//! cumsum of  1 2 3 | 4 5 | 6          totals  6 | 9 | 6
//! carried in     0 |   6 | 15                       all gathered by all
//! results    1 3 6 | 10 15 | 21
//! ```
//!
//! Like a gather of the dimension, this takes one collective, however many mesh dimensions shard
//! it; its size is the number of shards times the size of a summary. Every rank records the same
//! number of autodiff nodes, whatever the length of its shard. No shard is empty, because a rule
//! without support for empty shards gathers such a dimension first.

use std::panic::Location;
use std::sync::{Arc, Weak};

use burn::tensor::{Int, Slice, Tensor, kind};

use super::Operator;
use super::lookup::{moved, outside};
use crate::Result;
use crate::comm::{Call, Phase, ShardedTensor};
use crate::dtensor::local::{associate, cast, in_single};
use crate::dtensor::redistribute_plan::RedistributePlan;
use crate::dtensor::{DTensorSpec, Kind};
use crate::placement::{Layout, Placement, ShardSizes};
use crate::watch::{self, CallSite, LayoutChange};

/// The shards of one input along a sharded dimension.
pub(super) struct ShardSummaries<'a> {
    spec: &'a Arc<DTensorSpec>,
    dim: usize,
    /// Name of the operator.
    name: &'static str,
    /// Location of the call of the operator.
    at: &'static Location<'static>,
}

impl<'a> ShardSummaries<'a> {
    /// Makes the summaries for `dim` of the first input of `op`, called at location `at`. Returns
    /// `None` if `dim` is not sharded.
    pub(super) fn of(op: &'a Operator, dim: usize, at: &'static Location<'static>) -> Option<Self> {
        let spec = op.input_spec(0);
        let parts = Self {
            spec,
            dim,
            name: op.name(),
            at,
        };
        (parts.count() > 1).then_some(parts)
    }

    /// Returns the number of shards.
    fn count(&self) -> usize {
        self.sharding_dims()
            .iter()
            .map(|&mesh_dim| self.spec.mesh().shape()[mesh_dim])
            .product()
    }

    /// Returns the index of this rank's shard in the order along the dimension.
    fn index(&self) -> usize {
        let sizes = self.spec.mesh().shape();
        let coordinate = self.spec.coordinate();
        self.sharding_dims().iter().fold(0, |index, &mesh_dim| {
            index * sizes[mesh_dim] + coordinate[mesh_dim]
        })
    }

    /// Returns the mesh dimensions that shard it, outermost first.
    fn sharding_dims(&self) -> &[usize] {
        self.spec.layout().shard_order(self.dim)
    }

    /// Returns `scan` of this rank's shard, continued from the shards before it. The total of a
    /// shard is the last element of its scan. `start` makes the value before the first shard from
    /// the first element; the scan must not depend on it.
    ///
    /// # Collective
    /// Every rank of the mesh. Backward reduce-scatters the gradients of the totals.
    pub(super) fn scan<const D: usize, K: Kind + kind::Basic>(
        &self,
        x: Tensor<D, K>,
        start: impl Fn(&Tensor<D, K>) -> Tensor<D, K>,
        scan: impl Fn(Tensor<D, K>) -> Tensor<D, K>,
    ) -> Result<Tensor<D, K>> {
        let dim = self.dim;
        let dtype = x.dtype();
        let x = in_single(x);
        let len = self.spec.local_range(dim).len();
        let total = scan(x.clone()).narrow(dim, len - 1, 1);
        let start = start(&x.clone().narrow(dim, 0, 1));
        let before =
            scan(Tensor::cat(vec![start, self.gather(total)?], dim)).narrow(dim, self.index(), 1);
        let scanned = scan(Tensor::cat(vec![before, x], dim)).narrow(dim, 1, len);
        Ok(cast(scanned, dtype))
    }

    /// Returns the `count` elements that `pick` finds in the full dimension, and their positions.
    /// `pick` must find the same elements among the results of the shards as in the full dimension.
    /// If a shard has fewer than `count` elements, or if it sends less, the dimension is gathered
    /// instead.
    ///
    /// The result is the same on all ranks. The gradient goes to the rank that holds the element.
    ///
    /// # Collective
    /// Every rank of the mesh, in forward.
    pub(super) fn pick<const D: usize, K: Kind + kind::Basic>(
        &self,
        x: Tensor<D, K>,
        count: usize,
        pick: impl Fn(Tensor<D, K>) -> (Tensor<D, K>, Tensor<D, Int>),
    ) -> Result<(Tensor<D, K>, Tensor<D, Int>)> {
        let dim = self.dim;
        let layout = self.spec.layout();
        let shape = self.spec.shape();
        let value = x.dtype().size();
        let place = size_of::<i64>();
        if count > layout.min_local_shape(shape)[dim]
            || count * self.count() * (value + place) > shape[dim] * value
        {
            return Ok(pick(self.gathered(x, self.spec, &[])?));
        }
        let (found, places) = pick(x);
        let places = places.add_scalar(self.spec.local_range(dim).start as i64);
        let (values, places) = self.exchange(&found, places)?;
        let (values, at) = pick(values);
        let own = self.index() * count..(self.index() + 1) * count;
        let elsewhere = outside(&at, &own);
        let here = moved(at.clone(), &elsewhere, own.start, 0);
        Ok((
            found.gather(dim, here).mask_where(elsewhere, values),
            places.gather(dim, at),
        ))
    }

    /// Returns `x - max`, the maximum `max` over all shards, and the sum of `exp(x - max)`, in
    /// single precision or better. A maximum of minus infinity counts as 0.
    ///
    /// # Collective
    /// Every rank of the mesh. Backward reduce-scatters the gradients of the summaries.
    pub(super) fn exponentials<const D: usize>(&self, x: Tensor<D>) -> Result<[Tensor<D>; 3]> {
        let dim = self.dim;
        let x = in_single(x);
        let finite = |max: Tensor<D>| {
            max.clone()
                .mask_fill(max.equal_scalar(f32::NEG_INFINITY), 0)
        };
        let own = untracked(&x).max_dim(dim);
        let sum = (x.clone() - finite(own.clone())).exp().sum_dim(dim);
        let slots = self.gather(Tensor::cat(vec![own, sum], dim))?;
        let every_other = |from: isize| slots.clone().slice_dim(dim, Slice::new(from, None, 2));
        let maxima = every_other(0).detach();
        let sums = every_other(1);
        let max = finite(maxima.clone().max_dim(dim));
        let sum = (sums * (maxima - max.clone()).exp()).sum_dim(dim);
        Ok([x - max.clone(), max, sum])
    }

    /// Gathers the summaries of all shards. Every rank then uses them in different computations.
    fn gather<const D: usize, K: Kind>(&self, slots: Tensor<D, K>) -> Result<Tensor<D, K>> {
        let spec = self.spec;
        let mut shape = spec.shape().clone();
        shape[self.dim] = self.count() * slots.dims()[self.dim];
        let layout = spec.layout().clone().in_chunks(self.dim);
        let sizes = DTensorSpec::decided(spec.mesh(), layout, shape, slots.dtype())
            .with_terms(spec.terms().cloned());
        self.gathered(slots, &sizes.shared(), self.sharding_dims())
    }

    /// Gathers the dimension of `local`, which has the layout of `from`. The result varies over the
    /// mesh dimensions `varying`.
    fn gathered<const D: usize, K: Kind>(
        &self,
        local: Tensor<D, K>,
        from: &Arc<DTensorSpec>,
        varying: &[usize],
    ) -> Result<Tensor<D, K>> {
        let plan = RedistributePlan::between(from.layout(), &self.unsharded(from.layout())?)?;
        plan.start(
            local,
            from,
            varying,
            None,
            CallSite::called(self.name, self.at),
        )?
        .finish(Weak::new())
    }

    /// Returns `layout` without the sharding of the dimension.
    fn unsharded(&self, layout: &Layout) -> Result<Layout> {
        Ok(layout.replaced(|mesh_dim, own| {
            if self.sharding_dims().contains(&mesh_dim) {
                Placement::Replicate
            } else {
                own
            }
        })?)
    }

    /// Gathers the summaries of all shards and their positions outside the graph, both in one
    /// collective.
    fn exchange<const D: usize, K: Kind>(
        &self,
        slots: &Tensor<D, K>,
        places: Tensor<D, Int>,
    ) -> Result<(Tensor<D, K>, Tensor<D, Int>)> {
        let strategies = (
            slots.gradient_checkpointing_strategy(),
            places.gradient_checkpointing_strategy(),
        );
        let len = self.count() * slots.dims()[self.dim];
        let chunk = |tensor| ShardedTensor {
            tensor,
            dim: self.dim,
            sizes: ShardSizes::Chunked(len),
        };
        let chunks = vec![
            chunk(slots.clone().inner().into_dispatch()),
            chunk(places.inner().into_dispatch()),
        ];
        let comm = self.spec.mesh().communicator_over(self.sharding_dims())?;
        let call = Call::new(format!("parts of {} {}", self.name, self.spec.layout()))
            .with_phase(Phase::Forward);
        let from = self.spec.layout();
        let to = self.unsharded(self.spec.layout())?;
        let _changing = watch::changing(|| LayoutChange {
            origin: CallSite::called(self.name, self.at),
            from: from.clone(),
            to,
            summed: Vec::new(),
            shape: self.spec.shape().to_vec(),
            phase: Phase::Forward,
        });
        let full_tensors = comm
            .all_gather(self.spec.call_as(call, self.spec.dtype()), chunks)
            .wait()?;
        let [slots, places] = <[_; 2]>::try_from(full_tensors)
            .expect("a collective returns as many tensors as it takes");
        Ok((
            associate(Tensor::from_dispatch(slots), strategies.0),
            associate(Tensor::from_dispatch(places), strategies.1),
        ))
    }
}

/// Returns `x` outside the graph.
pub(super) fn untracked<const D: usize, K: Kind>(x: &Tensor<D, K>) -> Tensor<D, K> {
    associate(x.clone().inner(), x.gradient_checkpointing_strategy())
}
