//! [`ShardSummaries`]: operators along a dimension that is cut, without the whole of it.
//!
//! Every rank brings its part down to a few *slots*, the slots of all parts are gathered in their order along
//! the dimension, and with those it finishes its own part:
//!
//! | | the slots of a part | what becomes of all slots | operators |
//! |---|---|---|---|
//! | [`scan`](ShardSummaries::scan) | its total | what comes before a part is carried into it | cumulative ones |
//! | [`pick`](ShardSummaries::pick) | what it finds, and where | it finds among them, the same on all ranks | extrema and where they are, the `k` largest |
//! | [`exponentials`](ShardSummaries::exponentials) | its maximum, and its sum of exponentials | those of the whole | softmaxes |
//!
//! ```text
//! cumsum of  1 2 3 | 4 5 | 6          totals  6 | 9 | 6
//! carried in     0 |   6 | 15                       all gathered by all
//! results    1 3 6 | 10 15 | 21
//! ```
//!
//! That is one collective, however many mesh dimensions cut the dimension, as gathering it is, of as many
//! elements as there are parts, times the slots of one. Every rank does the same number of steps, whatever the
//! length of its part, and none is empty: a rule that does not say otherwise gathers such first.

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

/// The parts of one input along a dimension that is cut.
pub(super) struct ShardSummaries<'a> {
    spec: &'a Arc<DTensorSpec>,
    dim: usize,
    /// The operator.
    name: &'static str,
    /// The line that called it.
    at: &'static Location<'static>,
}

impl<'a> ShardSummaries<'a> {
    /// Of the first input of `op`, called `at` that line; `None` if it has `dim` whole.
    pub(super) fn of(op: &'a Operator, dim: usize, at: &'static Location<'static>) -> Option<Self> {
        let spec = op.input_spec(0);
        let parts = Self { spec, dim, name: op.name(), at };
        (parts.count() > 1).then_some(parts)
    }

    /// How many there are.
    fn count(&self) -> usize {
        self.sharding_dims().iter().map(|&mesh_dim| self.spec.mesh().shape()[mesh_dim]).product()
    }

    /// Which one is this rank's, in their order along the dimension.
    fn index(&self) -> usize {
        let (sizes, coordinate) = (self.spec.mesh().shape(), self.spec.coordinate());
        self.sharding_dims().iter().fold(0, |index, &mesh_dim| index * sizes[mesh_dim] + coordinate[mesh_dim])
    }

    /// The mesh dimensions that cut it, outermost first.
    fn sharding_dims(&self) -> &[usize] {
        self.spec.layout().shard_order(self.dim)
    }

    /// `scan` of this rank's part, after what the parts before it come to: of each that is the last element
    /// of its own scan, and before the first comes what `start` makes of the first element, which must not
    /// matter to the scan.
    ///
    /// # Collective
    /// Every rank of the mesh; in backward the sums of the totals' gradients are scattered.
    pub(super) fn scan<const D: usize, K: Kind + kind::Basic>(
        &self,
        x: Tensor<D, K>,
        start: impl Fn(&Tensor<D, K>) -> Tensor<D, K>,
        scan: impl Fn(Tensor<D, K>) -> Tensor<D, K>,
    ) -> Result<Tensor<D, K>> {
        let (dim, dtype) = (self.dim, x.dtype());
        let (x, len) = (in_single(x), self.spec.local_range(dim).len());
        let total = scan(x.clone()).narrow(dim, len - 1, 1);
        let start = start(&x.clone().narrow(dim, 0, 1));
        let before = scan(Tensor::cat(vec![start, self.gather(total)?], dim)).narrow(dim, self.index(), 1);
        let scanned = scan(Tensor::cat(vec![before, x], dim)).narrow(dim, 1, len);
        Ok(cast(scanned, dtype))
    }

    /// The `count` elements that `pick` finds in the whole, and where: it must find among what it found in the
    /// parts what it finds in the whole. That is gathered where a part has fewer, or it is less.
    ///
    /// The same on all ranks; the gradient goes to the rank that holds what was found.
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
        let (layout, shape) = (self.spec.layout(), self.spec.shape());
        let (value, place) = (x.dtype().size(), size_of::<i64>());
        if count > layout.min_local_shape(shape)[dim] || count * self.count() * (value + place) > shape[dim] * value {
            return Ok(pick(self.gathered(x, self.spec, &[])?));
        }
        let (found, places) = pick(x);
        let places = places.add_scalar(self.spec.local_range(dim).start as i64);
        let (values, places) = self.exchange(&found, places)?;
        let (values, at) = pick(values);
        let own = self.index() * count..(self.index() + 1) * count;
        let elsewhere = outside(&at, &own);
        let here = moved(at.clone(), &elsewhere, own.start, 0);
        Ok((found.gather(dim, here).mask_where(elsewhere, values), places.gather(dim, at)))
    }

    /// `x` less its maximum over all parts, the maximum, and the sum of the exponentials of that: in single
    /// precision at least. A maximum of minus infinity counts as 0.
    ///
    /// # Collective
    /// Every rank of the mesh; in backward the sums of the slots' gradients are scattered.
    pub(super) fn exponentials<const D: usize>(&self, x: Tensor<D>) -> Result<[Tensor<D>; 3]> {
        let (dim, x) = (self.dim, in_single(x));
        let finite = |max: Tensor<D>| max.clone().mask_fill(max.equal_scalar(f32::NEG_INFINITY), 0);
        let own = untracked(&x).max_dim(dim);
        let sum = (x.clone() - finite(own.clone())).exp().sum_dim(dim);
        let slots = self.gather(Tensor::cat(vec![own, sum], dim))?;
        let every_other = |from: isize| slots.clone().slice_dim(dim, Slice::new(from, None, 2));
        let (maxima, sums) = (every_other(0).detach(), every_other(1));
        let max = finite(maxima.clone().max_dim(dim));
        let sum = (sums * (maxima - max.clone()).exp()).sum_dim(dim);
        Ok([x - max.clone(), max, sum])
    }

    /// The slots of all parts, of which every rank makes something else.
    fn gather<const D: usize, K: Kind>(&self, slots: Tensor<D, K>) -> Result<Tensor<D, K>> {
        let spec = self.spec;
        let mut shape = spec.shape().clone();
        shape[self.dim] = self.count() * slots.dims()[self.dim];
        let layout = spec.layout().clone().in_chunks(self.dim);
        let sizes = DTensorSpec::decided(spec.mesh(), layout, shape, slots.dtype()).with_terms(spec.terms().cloned());
        self.gathered(slots, &sizes.shared(), self.sharding_dims())
    }

    /// `local`, laid out as `from`, with the dimension whole, to vary over the mesh dimensions `varying`.
    fn gathered<const D: usize, K: Kind>(
        &self,
        local: Tensor<D, K>,
        from: &Arc<DTensorSpec>,
        varying: &[usize],
    ) -> Result<Tensor<D, K>> {
        let route = RedistributePlan::between(from.layout(), &self.unsharded(from.layout())?)?;
        route.start(local, from, varying, None, CallSite::called(self.name, self.at))?.finish(Weak::new())
    }

    /// `layout` with the dimension whole.
    fn unsharded(&self, layout: &Layout) -> Result<Layout> {
        let full = |mesh_dim, own| if self.sharding_dims().contains(&mesh_dim) { Placement::Replicate } else { own };
        Ok(layout.replaced(full)?)
    }

    /// The slots of all parts and where they are, outside the graph: both in one collective.
    fn exchange<const D: usize, K: Kind>(
        &self,
        slots: &Tensor<D, K>,
        places: Tensor<D, Int>,
    ) -> Result<(Tensor<D, K>, Tensor<D, Int>)> {
        let strategies = (slots.gradient_checkpointing_strategy(), places.gradient_checkpointing_strategy());
        let len = self.count() * slots.dims()[self.dim];
        let chunk = |tensor| ShardedTensor { tensor, dim: self.dim, sizes: ShardSizes::Chunked(len) };
        let chunks = vec![chunk(slots.clone().inner().into_dispatch()), chunk(places.inner().into_dispatch())];
        let comm = self.spec.mesh().communicator_over(self.sharding_dims())?;
        let call = Call::new(format!("parts of {} {}", self.name, self.spec.layout())).with_phase(Phase::Forward);
        let (from, to) = (self.spec.layout(), self.unsharded(self.spec.layout())?);
        let _changing = watch::changing(|| LayoutChange {
            origin: CallSite::called(self.name, self.at),
            from: from.clone(),
            to,
            summed: Vec::new(),
            shape: self.spec.shape().to_vec(),
            phase: Phase::Forward,
        });
        let full_tensors = comm.all_gather(self.spec.call_as(call, self.spec.dtype()), chunks).wait()?;
        let [slots, places] =
            <[_; 2]>::try_from(full_tensors).expect("a collective returns as many tensors as it takes");
        Ok((
            associate(Tensor::from_dispatch(slots), strategies.0),
            associate(Tensor::from_dispatch(places), strategies.1),
        ))
    }
}

/// `x` outside the graph.
pub(super) fn untracked<const D: usize, K: Kind>(x: &Tensor<D, K>) -> Tensor<D, K> {
    associate(x.clone().inner(), x.gradient_checkpointing_strategy())
}
