//! [`NcclPlane`]: ranks exchange tensors between GPUs by NCCL.
//!
//! ```text
//! rank's stream       .. kernels ..  ready                                    waits for done, copies out
//! submitter                                 issues
//! NCCL's stream                              waits for ready, copies in, operation, done
//! ```
//!
//! A call is issued once all ranks have agreed on it, so that errors of the program are found before
//! the GPU waits for anything. The rank's thread never waits for the GPU: it takes the result when
//! the operation is enqueued, and events order the streams.
//!
//! | file | content | real implementation only |
//! |---|---|---|
//! | `api` | the calls that the plane makes, and their types | |
//! | `layout`, `ways` | where tensors are in staging memory, and which operation of NCCL moves them | |
//! | `staging` | memory that is registered with a communicator | |
//! | `rows` | kernels that pack and join the tensors of a call | |
//! | `submitter`, `gpu_world`, `jobs` | the thread of a GPU that makes the calls; the ranks of a world there; what they ask | |
//! | `gpu` | the calls on a GPU: cubecl's pointers and streams, CUDA's events, NCCL | all of it |
//! | `fake` | in tests: records the calls, and checks NCCL's rules | |
//!
//! `gpu` needs several GPUs to run. It has no decisions: each method is a few calls.

mod api;
#[cfg(feature = "testing")]
pub(crate) mod fake;
#[cfg(feature = "nccl")]
mod gpu;
mod gpu_world;
mod jobs;
mod layout;
mod rows;
mod staging;
mod submitter;
mod ways;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, TensorData};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::call::{DataCall, MessagePeer, RecipientData};
use super::contribution::Contribution;
use super::inputs::CollectiveInputs;
use super::plane::{
    DataPlane, DataPlaneError, OnFailure, PlaneResult, TakeExchanged, gather_by_tensor,
    reduce_by_tensor,
};
use super::{PlaneContribution, shard};
use crate::comm::{Capabilities, CollectivePlan, Group, Op, ReduceOp, TensorMeta, backend};
use crate::memory;
use crate::placement::ShardSizes;
use api::{Exported, Gpu, GpuAddress, GpuApi, GpuIdentity, NcclVersion, UniqueId, error};
#[cfg(feature = "nccl")]
pub(in crate::comm) use gpu::load;
use jobs::{ChannelKey, ConnectJob, Enqueued, ExchangeJob, GpuJob, Outcome};
use layout::{StagedCall, StagingLayout, StagingSource};
use rows::RowKernels;
use submitter::{GpuThreads, Submitter};

/// Name of the plane in errors.
const NAME: &str = "nccl";

/// First version of NCCL that allows two ranks on one GPU.
const SHARES_GPUS: NcclVersion = NcclVersion(2, 30, 0);

/// The plane of the ranks of one process.
#[derive(Debug)]
pub(in crate::comm) struct NcclPlane {
    api: Arc<dyn GpuApi>,
    threads: Arc<GpuThreads>,
    /// True if reductions are in the fixed tree: operands are gathered, and added by each rank.
    in_tree: bool,
    /// Channels of the ranks by their group and its name.
    channels: Mutex<HashMap<(Group, &'static str), ChannelKey>>,
    submitters: Mutex<HashMap<Gpu, Arc<Submitter>>>,
    failed: Mutex<Option<WorldFailure>>,
    is_aborted: AtomicBool,
}

/// Function that fails the world.
#[derive(Clone)]
struct WorldFailure(OnFailure);

impl std::fmt::Debug for WorldFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WorldFailure")
    }
}

/// Call that a rank posts, or its result.
#[derive(Debug)]
pub(in crate::comm) enum NcclContribution {
    Posted(Box<Posted>),
    /// Results of a reduction of NCCL.
    Reduced(Vec<DispatchTensor>),
}

/// A call that a rank is about to post.
#[derive(Debug)]
pub(in crate::comm) struct Posted {
    group: Group,
    name: &'static str,
    device: Device,
    gpu: Gpu,
    layout: Arc<StagingLayout>,
    /// Tensors that are copied in, and the offset of each.
    copied_in: Vec<(usize, usize)>,
    exported: Option<Exported>,
    /// True if each member receives only its own shards or tensors.
    is_addressed: bool,
    is_first: bool,
    kernels: RowKernels,
}

/// Introduction of a rank, which all others receive with the first call of a channel.
#[derive(Debug, Serialize, Deserialize)]
struct ConnectInfo {
    version: NcclVersion,
    gpu: GpuIdentity,
    /// Identity of the communicator, from member 0.
    id: Option<UniqueId>,
}

/// The loaded library, from which each launch gets a plane of its own.
#[cfg(feature = "nccl")]
#[derive(Debug, Clone)]
pub(in crate::comm) struct NcclLoader {
    api: Arc<dyn GpuApi>,
    threads: Arc<GpuThreads>,
    in_tree: bool,
}

#[cfg(feature = "nccl")]
impl NcclLoader {
    pub fn plane(&self) -> Arc<NcclPlane> {
        Arc::new(NcclPlane::new(
            self.api.clone(),
            self.threads.clone(),
            self.in_tree,
        ))
    }
}

impl NcclPlane {
    fn new(api: Arc<dyn GpuApi>, threads: Arc<GpuThreads>, in_tree: bool) -> Self {
        Self {
            api,
            threads,
            in_tree,
            channels: Mutex::default(),
            submitters: Mutex::default(),
            failed: Mutex::default(),
            is_aborted: AtomicBool::new(false),
        }
    }

    /// Returns the plane of a world that continues after a failure: it has new communicators.
    pub fn of_survivors(&self) -> Self {
        Self::new(self.api.clone(), self.threads.clone(), self.in_tree)
    }

    fn channel(&self, posted: &Posted) -> ChannelKey {
        let mut channels = self.channels.lock();
        let next = channels.len();
        let key = (posted.group.clone(), posted.name);
        *channels.entry(key).or_insert(next)
    }

    fn submitter(&self, gpu: Gpu) -> PlaneResult<Arc<Submitter>> {
        let mut submitters = self.submitters.lock();
        if self.is_aborted.load(Ordering::Acquire) {
            return error("the exchange was aborted");
        }
        if let Some(known) = submitters.get(&gpu) {
            return Ok(known.clone());
        }
        let Some(WorldFailure(failed)) = self.failed.lock().clone() else {
            return error("the plane belongs to no world");
        };
        let begun = Arc::new(self.threads.begin(&self.api, gpu, failed)?);
        submitters.insert(gpu, begun.clone());
        Ok(begun)
    }

    /// Prepares a call.
    fn post(
        &self,
        call: &DataCall<'_>,
        tensors: Vec<DispatchTensor>,
        recipients: Vec<usize>,
    ) -> PlaneResult<Contribution> {
        let group = call.member.group.clone();
        let rank = call.member.rank();
        let gpu = self.api.gpu(&call.member.device, rank)?;
        let is_addressed = !matches!(call.needed, RecipientData::Full);
        let all =
            Contribution::new(tensors, PlaneContribution::bytes(None)).with_recipients(recipients);
        let staged = StagedCall {
            signature: call.signature,
            ranks: group.size(),
            member: group.rank(),
            align: self.api.alignment(gpu),
            in_tree: self.in_tree,
            is_addressed,
            has_own: !matches!(call.needed, RecipientData::Addressed)
                || all.recipients.contains(&group.rank()),
        };
        let layout = match call.plan {
            Some(plan) => staged.planned_layout(plan)?,
            None => Arc::new(staged.layout()?),
        };
        let (kernels, rows) = RowKernels::pack(call, &layout, &all.tensors);
        let (sources, copied_in) = match rows {
            Some((flat, offset)) => (vec![flat], vec![(0, offset)]),
            None => sources(&layout, &all, call.needed, group.size()),
        };
        let exported = match layout.bytes {
            0 => None,
            _ => Some(self.api.export(gpu, rank, sources)?),
        };
        let introduction = match call.is_first_exchange {
            true => vec![self.introduction(gpu, group.rank())?],
            false => Vec::new(),
        };
        let posted = Posted {
            group,
            name: call.name,
            device: call.member.device.clone(),
            gpu,
            layout,
            copied_in,
            exported,
            is_addressed,
            is_first: call.is_first_exchange,
            kernels,
        };
        let addition = Arc::new(NcclContribution::Posted(Box::new(posted)));
        Ok(Contribution::new(
            introduction,
            PlaneContribution::Nccl(addition),
        ))
    }

    /// Prepares a message that the rank exchanges with `peer`.
    fn post_message(
        &self,
        call: &DataCall<'_>,
        tensors: Vec<DispatchTensor>,
        peer: MessagePeer,
    ) -> PlaneResult<Contribution> {
        let member = call.member;
        let gpu = self.api.gpu(&member.device, member.rank())?;
        let align = self.api.alignment(gpu);
        let layout = StagingLayout::of_message(call.signature.message_tensors(), peer, align);
        let all = Contribution::new(tensors, PlaneContribution::bytes(None));
        let (sources, copied_in) = sources(&layout, &all, call.needed, 1);
        let exported = match peer {
            MessagePeer::To(_) if layout.bytes > 0 => {
                Some(self.api.export(gpu, member.rank(), sources)?)
            }
            _ => None,
        };
        let posted = Posted {
            group: member.group.clone(),
            name: call.name,
            device: member.device.clone(),
            gpu,
            layout: Arc::new(layout),
            copied_in,
            exported,
            is_addressed: false,
            is_first: false,
            kernels: RowKernels::default(),
        };
        let addition = Arc::new(NcclContribution::Posted(Box::new(posted)));
        Ok(Contribution::new(
            Vec::new(),
            PlaneContribution::Nccl(addition),
        ))
    }

    /// Returns the introduction of a member, in host memory.
    fn introduction(&self, gpu: Gpu, member: usize) -> PlaneResult<DispatchTensor> {
        let introduction = ConnectInfo {
            version: self.api.version(),
            gpu: self.api.identity(gpu)?,
            id: (member == 0).then(|| self.api.unique_id()).transpose()?,
        };
        let bytes = postcard::to_stdvec(&introduction).expect("a vector takes every introduction");
        let shape = [bytes.len()];
        let data = TensorData::from_bytes_vec(bytes, shape, DType::U8);
        Ok(backend::from_data(data, &memory::host()))
    }

    /// Sends the job that connects the rank to the others of a channel.
    fn connect(
        &self,
        inputs: &CollectiveInputs<'_>,
        posted: &Posted,
        channel: ChannelKey,
    ) -> PlaneResult<()> {
        let introductions = inputs.all.iter().map(|contribution| {
            let Some(tensor) = contribution.tensors.first() else {
                return error("a rank could not prepare the call");
            };
            let bytes = backend::into_data(tensor.clone());
            postcard::from_bytes::<ConnectInfo>(bytes.as_bytes()).map_err(|_| DataPlaneError {
                problem: "a rank has sent an introduction that cannot be read".into(),
            })
        });
        let mut introductions = introductions.collect::<PlaneResult<Vec<_>>>()?;
        check_introductions(posted.group.ranks(), &introductions)?;
        let Some(id) = introductions[0].id.take() else {
            return error("the first rank of the group has sent no identity for a communicator");
        };
        let member = posted.group.rank();
        let job = GpuJob::Connect(ConnectJob {
            channel,
            rank: posted.group.ranks()[member],
            id,
            ranks: posted.group.size(),
            member,
        });
        self.submitter(posted.gpu)?.send(job);
        Ok(())
    }
}

/// Checks that the ranks have the same version of NCCL, and GPUs of their own. All ranks find the
/// same error.
fn check_introductions(ranks: &[usize], introductions: &[ConnectInfo]) -> PlaneResult<()> {
    let first = &introductions[0];
    for (rank, introduction) in ranks.iter().zip(introductions) {
        if introduction.version != first.version {
            return error(format!(
                "rank {} has NCCL {}, and rank {rank} has NCCL {}. Install the same version everywhere",
                ranks[0], first.version, introduction.version
            ));
        }
    }
    if first.version >= SHARES_GPUS {
        return Ok(());
    }
    for (index, introduction) in introductions.iter().enumerate() {
        let same = introductions[..index]
            .iter()
            .position(|other| other.gpu == introduction.gpu);
        if let Some(other) = same {
            return error(format!(
                "ranks {} and {} have the same GPU, {} of `{}`, which NCCL {} does not allow. Give each rank a GPU of \
                 its own, or install NCCL {SHARES_GPUS} and set NCCL_MULTI_RANK_GPU_ENABLE=1",
                ranks[other],
                ranks[index],
                introduction.gpu.bus,
                introduction.gpu.host,
                first.version,
            ));
        }
    }
    Ok(())
}

/// Returns the tensors that are copied in one by one, and for each copy the tensor and its offset.
fn sources(
    layout: &StagingLayout,
    all: &Contribution,
    needed: RecipientData<'_>,
    ranks: usize,
) -> (Vec<DispatchTensor>, Vec<(usize, usize)>) {
    let mut tensors = Vec::new();
    let mut known = HashMap::new();
    let tensor = |source: StagingSource| match (source, needed) {
        (StagingSource::For(member, index), RecipientData::Shards(shardings)) => {
            let (dim, sizes) = &shardings[index];
            shard(&all.tensors[index], *dim, sizes.range(ranks, member))
        }
        (StagingSource::For(member, index), _) => all.tensors_for(member)[index].clone(),
        (StagingSource::Full(index), _) => all.tensors[index].clone(),
    };
    let copies = layout.copied_in.iter().map(|(source, offset)| {
        let index = *known.entry(*source).or_insert_with(|| {
            tensors.push(tensor(*source));
            tensors.len() - 1
        });
        (index, *offset)
    });
    let copies = copies.collect();
    (tensors, copies)
}

/// Returns what this plane has added to the rank's own contribution.
fn own<'a>(inputs: &CollectiveInputs<'a>) -> Option<&'a NcclContribution> {
    match &inputs.own().plane {
        PlaneContribution::Nccl(contribution) => Some(contribution),
        #[allow(unreachable_patterns, reason = "there may be no other plane")]
        _ => None,
    }
}

/// Returns the results of a reduction of NCCL.
fn reduced<'a>(inputs: &CollectiveInputs<'a>) -> Option<&'a Vec<DispatchTensor>> {
    match own(inputs)? {
        NcclContribution::Reduced(tensors) => Some(tensors),
        NcclContribution::Posted(_) => None,
    }
}

impl DataPlane for NcclPlane {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fixed_tree: self.in_tree,
            stream_ordered: true,
            needs_remote_bytes: false,
        }
    }

    fn watch(&self, failed: OnFailure) {
        *self.failed.lock() = Some(WorldFailure(failed));
    }

    fn contribute(
        &self,
        call: &DataCall<'_>,
        tensors: Vec<DispatchTensor>,
        recipients: Vec<usize>,
    ) -> Contribution {
        let posted = match call.peer {
            Some(peer) => self.post_message(call, tensors, peer),
            None if call.signature.op == Op::Send => {
                return rows::message(call, tensors, recipients);
            }
            None => self.post(call, tensors, recipients),
        };
        posted.unwrap_or_else(|problem| {
            // The rank still posts the call, so that no other waits for it, and the world fails.
            let failed = self.failed.lock().clone();
            if let Some(WorldFailure(failed)) = failed {
                failed(call.member.rank(), NAME, problem);
            }
            Contribution::new(Vec::new(), PlaneContribution::bytes(None))
        })
    }

    fn start(&self, inputs: &CollectiveInputs<'_>) -> PlaneResult<TakeExchanged> {
        let Some(NcclContribution::Posted(posted)) = own(inputs) else {
            return error("the rank could not prepare the call");
        };
        let channel = self.channel(posted);
        if posted.is_first {
            self.connect(inputs, posted, channel)?;
        }
        let member = posted.group.rank();
        let rank = posted.group.ranks()[member];
        let outcome = match posted.layout.bytes {
            0 => None,
            _ => {
                let outcome = Arc::<Outcome>::default();
                let job = GpuJob::Exchange(ExchangeJob {
                    channel,
                    rank,
                    layout: posted.layout.clone(),
                    exported: posted.exported.clone(),
                    copied_in: posted.copied_in.clone(),
                    outcome: outcome.clone(),
                });
                self.submitter(posted.gpu)?.send(job);
                Some(outcome)
            }
        };
        let take = Take {
            api: self.api.clone(),
            gpu: posted.gpu,
            rank,
            device: posted.device.clone(),
            layout: posted.layout.clone(),
            is_addressed: posted.is_addressed,
            outcome,
            kernels: posted.kernels.clone(),
        };
        Ok(Box::new(move |time| take.received(time)))
    }

    fn abort(&self) {
        let submitters = self.submitters.lock();
        self.is_aborted.store(true, Ordering::Release);
        submitters.values().for_each(|submitter| submitter.abort());
    }

    fn all_gather(
        &self,
        inputs: &CollectiveInputs<'_>,
        plan: &CollectivePlan,
    ) -> Vec<DispatchTensor> {
        rows::joined(inputs).unwrap_or_else(|| gather_by_tensor(inputs, plan))
    }

    fn reduce_scatter(
        &self,
        inputs: &CollectiveInputs<'_>,
        shardings: &[(usize, ShardSizes)],
        op: ReduceOp,
    ) -> Vec<DispatchTensor> {
        reduced(inputs)
            .cloned()
            .unwrap_or_else(|| reduce_by_tensor(self, inputs, shardings, op))
    }

    fn all_reduce(
        &self,
        inputs: &CollectiveInputs<'_>,
        index: usize,
        op: ReduceOp,
    ) -> DispatchTensor {
        if let Some(tensors) = reduced(inputs) {
            return tensors[index].clone();
        }
        let shape = inputs.all[0].tensors[index].shape();
        self.reduce(inputs, index, &backend::ranges::full(&shape[..]), op)
    }
}

/// Takes the result of an exchange.
struct Take {
    api: Arc<dyn GpuApi>,
    gpu: Gpu,
    rank: usize,
    device: Device,
    layout: Arc<StagingLayout>,
    is_addressed: bool,
    outcome: Option<Arc<Outcome>>,
    kernels: RowKernels,
}

impl Take {
    fn received(self, time: Duration) -> PlaneResult<Vec<Contribution>> {
        let enqueued = self.outcome.as_ref().map(|outcome| outcome.wait(time));
        let enqueued = enqueued.transpose()?;
        let memory = enqueued.as_ref().map(|enqueued| enqueued.lease.memory());
        let blocks = self.layout.result.iter().flatten();
        let blocks: Vec<(GpuAddress, TensorMeta)> = blocks
            .map(|block| {
                let start = memory.unwrap_or(GpuAddress(0));
                (start.at(block.offset), block.meta.clone())
            })
            .collect();
        let (tensors, read) = self.api.import(
            self.gpu,
            self.rank,
            &self.device,
            blocks,
            enqueued.as_ref().map(|enqueued| &enqueued.done),
        )?;
        if let Some(Enqueued { mut lease, .. }) = enqueued {
            lease.set_read(read);
        }
        let mut tensors = tensors.into_iter();
        let member = self.layout.member;
        let contribution = |(from, blocks): (usize, &Vec<layout::Block>)| {
            let tensors: Vec<_> = tensors.by_ref().take(blocks.len()).collect();
            if self.layout.is_reduced && from == member {
                let reduced = Arc::new(NcclContribution::Reduced(tensors));
                return Contribution::new(Vec::new(), PlaneContribution::Nccl(reduced));
            }
            let recipients = match self.is_addressed {
                true => vec![member; tensors.len()],
                false => Vec::new(),
            };
            Contribution::received(recipients, tensors).exclusive()
        };
        let contributions = self.layout.result.iter().enumerate().map(contribution);
        let mut contributions: Vec<_> = contributions.collect();
        self.kernels.add_to(&mut contributions[member]);
        Ok(contributions)
    }
}
