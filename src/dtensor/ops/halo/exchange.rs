//! [`Exchange`]: an autodiff node that fetches the elements each rank reads from the other ranks' shards. In
//! backward it returns their gradients to the ranks that hold the elements.
//!
//! ```text
//!                forward                                backward
//! rank 0   a b c|           ->  _ a b c d     da  db  dc + dc' |
//! rank 1        |d e f|     ->      c d e f g          dd + dd' ..
//! ```

use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Shape, Slice, Tensor};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::plan::{HaloBlock, HaloPlan};
use crate::Result;
use crate::autodiff::{self, BackwardStep, GraphOp};
use crate::comm::{Call, Communicator, Phase, TensorMeta};
use crate::dtensor::DTensorSpec;
use crate::dtensor::local::{associate, is_tracked, zeros};
use crate::error::OrUnwind;
use crate::watch::{self, CallSite, LayoutChange};

/// Exchange of blocks along the dimensions `dims` between the ranks of `comm`.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) plan: HaloPlan,
    pub(super) dims: SmallVec<[usize; 2]>,
    pub(super) comm: Communicator,
    pub(super) call: Call,
    /// Spec of the tensor.
    pub(super) spec: Arc<DTensorSpec>,
    /// Name of the operator.
    pub(super) name: &'static str,
}

impl Exchange {
    /// Returns the elements that this rank reads, with `fill` for padding. `at` is the location of
    /// the operator's call.
    ///
    /// # Collective
    /// If any elements move between ranks: every rank of `comm`, in forward and in backward.
    pub(super) fn walk<const D: usize>(
        self: &Arc<Self>,
        local: Tensor<D>,
        fill: f64,
        at: &'static Location<'static>,
    ) -> Result<Tensor<D>> {
        if self.plan.is_identity {
            return Ok(local);
        }
        let strategy = local.gradient_checkpointing_strategy();
        let origin = CallSite::called(self.name, at);
        let changing = self.changing(&origin, Phase::Forward);
        let read = self.read(local.clone().inner(), fill)?;
        drop(changing);
        if !is_tracked(&local) {
            return Ok(associate(read, strategy));
        }
        let place = self.plan.moves.then(|| self.comm.next_forward_index());
        let op = HaloNode::<D> {
            output: Mutex::new(Some(read.into_dispatch())),
            part: local.shape(),
            place,
            exchange: self.clone(),
            origin,
        };
        Ok(Tensor::from_dispatch(autodiff::unary(
            local.into_dispatch(),
            Arc::new(op),
        )))
    }

    /// Attributes communication to the operator's call as long as the result lives.
    fn changing(&self, origin: &CallSite, phase: Phase) -> Option<watch::Changing> {
        let layout = self.spec.layout();
        let change = || LayoutChange {
            origin: origin.clone(),
            from: layout.clone(),
            to: layout.clone(),
            summed: Vec::new(),
            shape: self.spec.shape().to_vec(),
            phase,
        };
        self.plan.moves.then(|| watch::changing(change)).flatten()
    }

    fn read<const D: usize>(&self, local: Tensor<D>, fill: f64) -> Result<Tensor<D>> {
        let HaloPlan {
            gives, takes, lens, ..
        } = &self.plan;
        let mut shape = local.shape();
        self.dims
            .iter()
            .zip(lens)
            .for_each(|(&dim, &len)| shape[dim] = len);
        let mut read = Tensor::<D>::full(shape, fill, (&local.device(), local.dtype()));
        let own = self.comm.group().rank();
        if let (Some(from), Some(to)) = (&gives[own], &takes[own]) {
            read = read.slice_assign(
                self.slices::<D>(to),
                local.clone().slice(self.slices::<D>(from)),
            );
        }
        let call = self.call.clone().with_phase(Phase::Forward);
        for (peer, values) in self.swap(call, &local, gives, takes)? {
            let to = takes[peer]
                .as_ref()
                .expect("a received block is in the plan");
            read = read.slice_assign(self.slices::<D>(to), values);
        }
        Ok(read)
    }

    /// Returns the gradient of this rank's shard, of shape `part`, from the gradient of the
    /// elements that it read.
    fn pull<const D: usize>(
        &self,
        grad: Tensor<D>,
        part: Shape,
        place: Option<u64>,
    ) -> Result<Tensor<D>> {
        let HaloPlan { gives, takes, .. } = &self.plan;
        let own = self.comm.group().rank();
        let mut sum = zeros(part, &grad);
        if let (Some(from), Some(to)) = (&gives[own], &takes[own]) {
            sum = sum.slice_assign(
                self.slices::<D>(from),
                grad.clone().slice(self.slices::<D>(to)),
            );
        }
        let call = Call {
            forward_index: place,
            ..self.call.clone().with_phase(Phase::Backward)
        };
        for (peer, values) in self.swap(call, &grad, takes, gives)? {
            let slices =
                self.slices::<D>(gives[peer].as_ref().expect("a sent block is in the plan"));
            let values = sum.clone().slice(slices) + values;
            sum = sum.slice_assign(slices, values);
        }
        Ok(sum)
    }

    /// Sends each other rank a block of `local`, and returns the blocks received, in the order of
    /// the ranks.
    fn swap<const D: usize>(
        &self,
        call: Call,
        local: &Tensor<D>,
        gives: &[Option<HaloBlock>],
        takes: &[Option<HaloBlock>],
    ) -> Result<Vec<(usize, Tensor<D>)>> {
        if !self.plan.moves {
            return Ok(Vec::new());
        }
        let own = self.comm.group().rank();
        let other =
            |(rank, block): (usize, &Option<HaloBlock>)| block.clone().filter(|_| rank != own);
        let given = gives.iter().enumerate().map(other).map(|block| {
            let block = local.clone().slice(self.slices::<D>(&block?));
            Some(block.into_dispatch())
        });
        let taken = takes.iter().enumerate().map(other).map(|block| {
            let mut shape = local.shape();
            self.dims
                .iter()
                .zip(&block?)
                .for_each(|(&dim, range)| shape[dim] = range.len());
            Some(TensorMeta {
                shape,
                dtype: local.dtype(),
            })
        });
        let work = self
            .comm
            .all_to_all_list(call, given.collect(), taken.collect());
        let parts = work.wait()?.into_iter().enumerate();
        Ok(parts
            .filter_map(|(rank, part)| Some((rank, Tensor::from_dispatch(part?))))
            .collect())
    }

    fn slices<const D: usize>(&self, block: &HaloBlock) -> [Slice; D] {
        let mut slices = [Slice::full(); D];
        self.dims
            .iter()
            .zip(block)
            .for_each(|(&dim, range): (_, &Range<usize>)| slices[dim] = range.clone().into());
        slices
    }
}

/// Autodiff node of an exchange.
#[derive(Debug)]
struct HaloNode<const D: usize> {
    /// Computed before the node is recorded, so that a failing collective is an error and not a
    /// panic.
    output: Mutex<Option<DispatchTensor>>,
    /// Shape of this rank's shard.
    part: Shape,
    /// Assigned in forward: see [`Call::forward_index`].
    place: Option<u64>,
    exchange: Arc<Exchange>,
    origin: CallSite,
}

impl<const D: usize> GraphOp for HaloNode<D> {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.output
            .lock()
            .take()
            .expect("a node of the graph is recorded once")
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grad = Tensor::<D>::from_dispatch(step.take());
        let _changing = self.exchange.changing(&self.origin, Phase::Backward);
        let grad = self
            .exchange
            .pull(grad, self.part.clone(), self.place)
            .or_unwind();
        step.give(0, || grad.into_dispatch());
    }
}
