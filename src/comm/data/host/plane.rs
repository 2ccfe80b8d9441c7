//! [`HostPlane`]: ranks read each other's tensors in host memory, and share identical results.

use std::fmt;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};

use super::{
    CollectiveCache, GatherCopyPlan, Owner, ReduceOperands, ResultRetention, SharedResultCache,
    is_alone, primitive,
};
use crate::comm::backend::ranges::{Ranges, full};
use crate::comm::control::rendezvous::SpinPolicy;
use crate::comm::data::call::DataCall;
use crate::comm::data::contribution::Contribution;
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::plane::{DataPlane, gather_by_tensor};
use crate::comm::data::result_buffer::ResultBuffer;
use crate::comm::data::{PlaneContribution, has_kernel, reduce};
use crate::comm::{Capabilities, CollectivePlan, Op, ReduceOp};

/// The plane for tensors in host memory.
pub(in crate::comm::data) struct HostPlane {
    /// Cache of results that several local ranks share; `None` if every rank needs separate memory.
    shared: Option<SharedResultCache>,
}

/// Addition to a rank's tensors for other ranks that read them in host memory.
#[derive(Debug, Default)]
pub(in crate::comm) struct HostContribution {
    /// Plan of an all-gather.
    plan: Option<Arc<CollectivePlan>>,
    /// Result buffer that has the data, if it was received there instead of into tensors.
    pub result_buffer: Option<Arc<ResultBuffer>>,
    /// Cache of the collective; only that of the first member is used.
    cache: CollectiveCache,
}

impl HostContribution {
    /// Creates the addition for a rank of another process.
    pub fn received(result_buffer: Option<Arc<ResultBuffer>>) -> Self {
        Self {
            result_buffer,
            ..Self::default()
        }
    }
}

impl fmt::Debug for HostPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPlane")
            .field("shares", &self.shared.is_some())
            .finish()
    }
}

impl HostPlane {
    pub fn new(spin: SpinPolicy, separate_memory: bool, before: Option<&Self>) -> Self {
        let shared = (!separate_memory).then(|| {
            SharedResultCache::new(spin, before.and_then(|before| before.shared.as_ref()))
        });
        Self { shared }
    }

    /// Returns the owner of a result that is identical on all ranks, if several of them are local
    /// and may share it.
    fn owner<'a>(
        &'a self,
        inputs: &'a CollectiveInputs<'_>,
        keep: ResultRetention,
    ) -> Option<Owner<'a>> {
        let shared = self.shared.as_ref().filter(|_| inputs.has_local_peers())?;
        Some(
            first(inputs)?
                .cache
                .owner(shared, inputs.op, keep, &inputs.waited),
        )
    }
}

/// Returns what the first member adds, unless its tensors are on a device.
fn first<'a>(inputs: &CollectiveInputs<'a>) -> Option<&'a HostContribution> {
    match &inputs.all[0].plane {
        PlaneContribution::Host(host) => Some(host),
        #[cfg(any(feature = "cube", feature = "nccl", feature = "testing"))]
        _ => None,
    }
}

/// Returns tensor `index` of every rank, if all are Flex tensors and `op` has a kernel.
fn operands<'a>(
    inputs: &CollectiveInputs<'a>,
    index: usize,
    op: ReduceOp,
) -> Option<&'a ReduceOperands> {
    if !has_kernel(op) {
        return None;
    }
    let count = inputs.all[0].tensors.len();
    first(inputs)?.cache.terms((index, count), || {
        inputs.each(index).map(primitive).collect()
    })
}

impl DataPlane for HostPlane {
    fn name(&self) -> &'static str {
        "host"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn contribute(
        &self,
        call: &DataCall<'_>,
        tensors: Vec<DispatchTensor>,
        recipients: Vec<usize>,
    ) -> Contribution {
        let host = HostContribution {
            plan: call
                .plan
                .filter(|_| call.signature.op == Op::AllGather)
                .cloned(),
            ..HostContribution::default()
        };
        Contribution::new(tensors, PlaneContribution::Host(host)).with_recipients(recipients)
    }

    fn all_gather(
        &self,
        inputs: &CollectiveInputs<'_>,
        plan: &CollectivePlan,
    ) -> Vec<DispatchTensor> {
        if let Some(full_tensors) = inputs.received() {
            return full_tensors;
        }
        let shared = first(inputs).and_then(|first| {
            let copies = || GatherCopyPlan::new(plan, inputs.all.len());
            // One rank keeps it for all, because its size is proportional to the number of ranks.
            let copies = first.plan.as_deref().unwrap_or(plan).kept(copies);
            let shards = || {
                let all = inputs.all.iter();
                all.map(|contribution| contribution.tensors.iter().map(primitive).collect())
                    .collect()
            };
            let sources = first.cache.gathered(copies, shards)?;
            Some(copies.full_tensors(sources, self.owner(inputs, ResultRetention::Latest)))
        });
        shared.unwrap_or_else(|| gather_by_tensor(inputs, plan))
    }

    fn all_reduce(
        &self,
        inputs: &CollectiveInputs<'_>,
        index: usize,
        op: ReduceOp,
    ) -> DispatchTensor {
        match operands(inputs, index, op) {
            Some(operands) => operands.reduce_full(op, self.owner(inputs, ResultRetention::All)),
            None => {
                let shape = inputs.all[0].tensors[index].shape();
                self.reduce(inputs, index, &full(&shape[..]), op)
            }
        }
    }

    fn reduce(
        &self,
        inputs: &CollectiveInputs<'_>,
        index: usize,
        ranges: &Ranges,
        op: ReduceOp,
    ) -> DispatchTensor {
        if let Some(operands) = operands(inputs, index, op) {
            return operands.reduce(ranges, op);
        }
        let operands: Vec<_> = inputs.each(index).collect();
        reduce(&operands, ranges, op, &inputs.home(index))
    }

    fn may_share(&self, tensor: &DispatchTensor) -> bool {
        self.shared.is_some() && is_alone(tensor)
    }
}
