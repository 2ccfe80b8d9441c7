//! [`Broken`]: the naive backend on hosts of which one changes a bit of what it receives.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::{Device, TensorData};
use burn_dtensor::Error;
use burn_dtensor::comm::backend::{
    Backend, CallContext, Completed, Failure, GroupBackend, GroupMember, PostResult,
    ReceivedTensors, Request,
};
use burn_dtensor::comm::{CollectivePlan, CommError, Op, ReduceOp, TensorMeta};

use super::{Naive, host};

/// Ranks with inboxes, one of which is on a broken host.
#[derive(Debug)]
pub struct Broken {
    backend: Arc<Naive>,
    fault: Fault,
}

/// An error in one bit of the first tensor that a rank receives from a collective.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    pub rank: usize,
    pub op: Op,
    /// Label of the call.
    pub label: &'static str,
    /// Index among the calls with this operation and label on one channel: 1, 2, ..
    pub number: u64,
}

impl Broken {
    pub fn new(ranks: usize, fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            backend: Naive::new(ranks),
            fault,
        })
    }
}

/// Returns the same numbers, except for one bit of the first.
pub fn flipped(mut data: TensorData, bit: u32) -> TensorData {
    let first = &mut data.as_mut_slice::<f32>().expect("parameters are f32")[0];
    *first = f32::from_bits(first.to_bits() ^ (1 << bit));
    data
}

impl Backend for Broken {
    fn size(&self) -> usize {
        self.backend.size()
    }

    fn local_ranks(&self) -> Vec<usize> {
        self.backend.local_ranks()
    }

    fn launch(&self) -> u64 {
        self.backend.launch()
    }

    fn channel(self: Arc<Self>, member: GroupMember, name: &'static str) -> Arc<dyn GroupBackend> {
        let fault = (member.rank() == self.fault.rank).then_some(self.fault);
        Arc::new(BrokenChannel {
            channel: self.backend.clone().channel(member, name),
            fault,
            calls: AtomicU64::new(0),
        })
    }

    fn fail(&self, failure: Failure) -> CommError {
        self.backend.fail(failure)
    }

    fn failure(&self) -> Option<Failure> {
        self.backend.failure()
    }

    fn rank_exited(
        &self,
        rank: usize,
        error: Option<Error>,
        at: Option<&'static Location<'static>>,
    ) {
        self.backend.rank_exited(rank, error, at);
    }

    fn activity(&self, rank: usize) -> String {
        self.backend.activity(rank)
    }

    fn is_finished(&self) -> bool {
        self.backend.is_finished()
    }
}

/// The handle of a rank on one group.
#[derive(Debug)]
struct BrokenChannel {
    channel: Arc<dyn GroupBackend>,
    fault: Option<Fault>,
    /// Number of calls with the operation and label of the fault.
    calls: AtomicU64,
}

/// A request whose first tensor is changed.
struct Flipped(Box<dyn Request<Vec<DispatchTensor>>>, Device);

impl BrokenChannel {
    fn through(
        &self,
        post: CallContext,
        call: impl FnOnce(CallContext) -> PostResult<Vec<DispatchTensor>>,
    ) -> PostResult<Vec<DispatchTensor>> {
        let signature = &post.signature;
        let is_it = |fault: &Fault| (signature.op, &*signature.label) == (fault.op, fault.label);
        let fault = self
            .fault
            .filter(is_it)
            .filter(|fault| self.calls.fetch_add(1, Ordering::SeqCst) + 1 == fault.number);
        let pending = call(post)?;
        Ok(match fault {
            Some(_) => Box::new(Flipped(pending, self.member().device.clone())),
            None => pending,
        })
    }
}

impl GroupBackend for BrokenChannel {
    fn member(&self) -> &GroupMember {
        self.channel.member()
    }

    fn all_gather(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        parts: Vec<DispatchTensor>,
    ) -> PostResult<Vec<DispatchTensor>> {
        self.through(post, |post| self.channel.all_gather(post, plan, parts))
    }

    fn reduce_scatter(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        self.through(post, |post| {
            self.channel.reduce_scatter(post, plan, full_tensors, op)
        })
    }

    fn all_reduce(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        self.through(post, |post| self.channel.all_reduce(post, tensors, op))
    }

    fn all_to_all(
        &self,
        post: CallContext,
        parts: Vec<Vec<DispatchTensor>>,
        metas: Vec<Vec<TensorMeta>>,
    ) -> PostResult<Vec<Vec<DispatchTensor>>> {
        self.channel.all_to_all(post, parts, metas)
    }

    fn broadcast(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        metas: Vec<TensorMeta>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        self.channel.broadcast(post, tensors, metas, root)
    }

    fn barrier(&self, post: CallContext) -> PostResult<()> {
        self.channel.barrier(post)
    }

    fn send(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        to: usize,
        tag: u32,
    ) -> PostResult<()> {
        self.channel.send(post, tensors, to, tag)
    }

    fn receive(
        &self,
        post: CallContext,
        from: Option<usize>,
        tag: u32,
        metas: Option<Vec<TensorMeta>>,
    ) -> PostResult<ReceivedTensors> {
        self.channel.receive(post, from, tag, metas)
    }
}

impl Request<Vec<DispatchTensor>> for Flipped {
    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    fn wait(
        self: Box<Self>,
        deadline: Duration,
    ) -> Result<Completed<Vec<DispatchTensor>>, CommError> {
        let Self(pending, device) = *self;
        let mut waited = pending.wait(deadline)?;
        let first = waited.value.remove(0);
        waited
            .value
            .insert(0, host::write(flipped(host::read(first), 0), &device));
        Ok(waited)
    }
}
