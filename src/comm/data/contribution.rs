//! [`Contribution`]: what a rank contributes to a collective.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

#[cfg(feature = "cube")]
use burn::backend::DispatchTensorKind;
use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;
#[cfg(feature = "cube")]
use burn_cubecl::tensor::CubeTensor;
#[cfg(feature = "cube")]
use itertools::Itertools;

#[cfg(feature = "flex")]
use super::host;
use super::result_buffer::ResultBuffer;
use crate::comm::backend::ranges::{Ranges, slice};
use crate::comm::transport::SendStamp;
use crate::comm::{CollectivePlan, TransferTiming, backend};
#[cfg(feature = "cuda")]
use crate::memory::cube::SubmittedWork;

/// Source of a contribution, which determines who owns its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContributionSource {
    /// A rank of this process.
    Local,
    /// A rank of another process; several local ranks share the data.
    RemoteShared,
    /// A rank of another process; the data is for one local rank, which owns the memory.
    RemoteExclusive,
}

/// Time at which a contribution arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    /// Time at which its bytes were announced, if it is from another process.
    started: Option<Instant>,
    completed: Instant,
}

/// Contribution of one rank to a collective.
#[derive(Debug)]
pub(crate) struct Contribution {
    pub tensors: Vec<DispatchTensor>,
    /// Group rank that each tensor is for, ascending. Set for an all-to-all of lists, and for
    /// remote data that differs between the local ranks; empty otherwise.
    pub recipients: Vec<usize>,
    /// Plan of an all-gather.
    pub plan: Option<Arc<CollectivePlan>>,
    pub source: ContributionSource,
    /// Result buffer that has the data, if it was received there instead of into `tensors`.
    pub result_buffer: Option<Arc<ResultBuffer>>,
    /// Time of arrival, if there are several processes.
    pub arrival: Option<Arrival>,
    /// All tensors packed into one buffer, in addition to `tensors`.
    #[cfg(feature = "cube")]
    pub flat: Option<CubeTensor>,
    /// Work that the rank had submitted to its GPU when it contributed.
    #[cfg(feature = "cuda")]
    pub work: Option<SubmittedWork>,
    /// Cache of the collective; only that of the first member is used.
    #[cfg(feature = "flex")]
    pub cache: host::CollectiveCache,
}

impl Contribution {
    /// Creates a contribution of references to `tensors`. Copies only tensors that peers cannot
    /// read in place.
    pub fn new(tensors: Vec<DispatchTensor>) -> Self {
        #[cfg(feature = "flex")]
        let tensors: Vec<_> = tensors.into_iter().map(host::contiguous).collect();
        #[cfg(feature = "cube")]
        let tensors = tensors
            .into_iter()
            .map(crate::memory::cube::ensure_persistent)
            .collect();
        Self {
            tensors,
            recipients: Vec::new(),
            plan: None,
            source: ContributionSource::Local,
            result_buffer: None,
            arrival: None,
            #[cfg(feature = "cube")]
            flat: None,
            #[cfg(feature = "cuda")]
            work: None,
            #[cfg(feature = "flex")]
            cache: host::CollectiveCache::default(),
        }
    }

    /// Creates a contribution of separate tensors for each member: `shards[i]` is for group rank
    /// `i`.
    pub fn addressed(shards: Vec<Vec<DispatchTensor>>) -> Self {
        let to = shards.into_iter().enumerate();
        let (recipients, tensors) = to
            .flat_map(|(member, of)| of.into_iter().map(move |t| (member, t)))
            .unzip();
        Self {
            recipients,
            ..Self::new(tensors)
        }
    }

    /// Creates the contribution of a rank of another process from received tensors. They are for
    /// all local ranks, or, if `recipients` is not empty, for these members.
    pub fn received(recipients: Vec<usize>, tensors: Vec<DispatchTensor>) -> Self {
        Self {
            recipients,
            source: ContributionSource::RemoteShared,
            ..Self::new(tensors)
        }
    }

    /// Creates a contribution whose data is in the result buffer of the only local rank.
    pub fn of_result_buffer(result_buffer: Arc<ResultBuffer>) -> Self {
        Self {
            result_buffer: Some(result_buffer),
            ..Self::received(Vec::new(), Vec::new())
        }
    }

    /// Adds the work that the calling thread has submitted to the GPU of the tensors, for the
    /// threads that read them.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(unused_mut, reason = "other backends need no order")
    )]
    pub fn after_submitted_work(mut self) -> Self {
        #[cfg(feature = "cuda")]
        {
            self.work = self.tensors.first().and_then(SubmittedWork::on_device_of);
        }
        self
    }

    /// Returns the result of `read`, which reads these contributions. On a GPU, its reads run after
    /// what the contributing ranks had submitted, and before what ranks other than `own` submit
    /// from now on: they may then write to their tensors in place.
    pub fn read_in_order<T>(all: &[Self], own: Option<usize>, read: impl FnOnce() -> T) -> T {
        #[cfg(feature = "cuda")]
        all.iter()
            .filter_map(|contribution| contribution.work.as_ref())
            .for_each(SubmittedWork::wait);
        let value = read();
        #[cfg(feature = "cube")]
        all.iter()
            .enumerate()
            .filter(|(member, contribution)| {
                Some(*member) != own && contribution.source == ContributionSource::Local
            })
            .filter_map(|(_, contribution)| contribution.tensors.first())
            .filter(|tensor| matches!(tensor.kind, DispatchTensorKind::Cube(_)))
            .dedup_by(|a, b| a.device() == b.device())
            .for_each(crate::memory::cube::run_before_others);
        #[cfg(not(feature = "cube"))]
        let _ = (all, own);
        value
    }

    /// Sets the time of arrival to now. `started` is the time at which the bytes were announced, if
    /// they are from another process.
    pub fn arrived(self, started: Option<Instant>) -> Self {
        Self {
            arrival: Some(Arrival {
                started,
                completed: Instant::now(),
            }),
            ..self
        }
    }

    /// Returns the timing of the transfer, if some contributions are from other processes. `sent`
    /// records when this process sent its own.
    pub fn timing(all: &[Self], sent: Option<&SendStamp>) -> Option<TransferTiming> {
        let arrivals = all.iter().filter_map(|contribution| contribution.arrival);
        let started = arrivals
            .clone()
            .filter_map(|arrival| arrival.started)
            .min()?;
        let completed = arrivals.map(|arrival| arrival.completed).max()?;
        Some(TransferTiming {
            send_started: sent.and_then(SendStamp::at),
            started,
            completed,
        })
    }

    /// Returns tensor `index` as `Ok` if the sender has already sliced out the shard of `member`,
    /// and the full tensor as `Err` otherwise.
    pub fn shard_for(
        &self,
        member: usize,
        index: usize,
    ) -> Result<&DispatchTensor, &DispatchTensor> {
        if self.recipients.is_empty() {
            Err(&self.tensors[index])
        } else {
            Ok(&self.tensors_for(member)[index])
        }
    }

    /// Returns the tensors that the result of `member` is built from: those that are addressed to
    /// it, or all.
    pub fn tensors_for(&self, member: usize) -> &[DispatchTensor] {
        if self.recipients.is_empty() {
            return &self.tensors;
        }
        let before = |end: usize| {
            self.recipients
                .partition_point(|recipient| *recipient < end)
        };
        &self.tensors[before(member)..before(member + 1)]
    }
}

/// Returns the slice `range` of `tensor` along `dim`. It is a view if its elements are adjacent,
/// and a copy otherwise.
pub(in crate::comm) fn shard(
    tensor: &DispatchTensor,
    dim: usize,
    range: Range<usize>,
) -> DispatchTensor {
    #[cfg(feature = "flex")]
    if let Some(shard) = host::adjacent(tensor, dim, range.clone()) {
        return shard;
    }
    concat(
        vec![(tensor, slice(&tensor.shape()[..], dim, range))],
        0,
        &Device::new(tensor.device()),
    )
}

/// Concatenates the blocks of `sources` along `dim`, on `device`.
pub(super) fn concat(
    sources: Vec<(&DispatchTensor, Ranges)>,
    dim: usize,
    device: &Device,
) -> DispatchTensor {
    #[cfg(feature = "flex")]
    {
        let host = sources[0].0.device();
        let primitives = sources
            .iter()
            .map(|(tensor, ranges)| Some((host::primitive(tensor)?, ranges.clone())));
        // Received data is on the host, whatever the rank's device is.
        if let Some(sources) = primitives.collect::<Option<Vec<_>>>()
            && host == *device.as_dispatch()
        {
            return host::concat(&sources, dim);
        }
    }
    backend::concat(&sources, dim, device)
}
