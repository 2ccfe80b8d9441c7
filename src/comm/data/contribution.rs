//! [`Contribution`]: what a rank contributes to a collective.

use std::sync::Arc;
use std::time::Instant;

use burn::backend::DispatchTensor;

use super::result_buffer::ResultBuffer;
use super::{PlaneContribution, lasting};
use crate::comm::TransferTiming;
use crate::comm::transport::SendStamp;

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

/// Contribution of one rank to a collective: its tensors, as every plane reads them, and what its
/// own plane adds.
#[derive(Debug)]
pub(crate) struct Contribution {
    pub tensors: Vec<DispatchTensor>,
    /// Group rank that each tensor is for, ascending. Set for an all-to-all of lists, and for
    /// remote data that differs between the local ranks; empty otherwise.
    pub recipients: Vec<usize>,
    pub source: ContributionSource,
    /// Time of arrival, if there are several processes.
    pub arrival: Option<Arrival>,
    /// Addition of the contributing rank's plane. Ranks of one group may use different planes.
    pub plane: PlaneContribution,
}

impl Contribution {
    /// Creates the contribution of a local rank, of references to `tensors`. Copies only tensors
    /// that peers cannot read in place.
    pub fn new(tensors: Vec<DispatchTensor>, plane: PlaneContribution) -> Self {
        Self {
            tensors: tensors.into_iter().map(lasting).collect(),
            recipients: Vec::new(),
            source: ContributionSource::Local,
            arrival: None,
            plane,
        }
    }

    /// Sets the group rank that each tensor is for.
    pub fn with_recipients(self, recipients: Vec<usize>) -> Self {
        Self { recipients, ..self }
    }

    /// Creates the contribution of a rank of another process from received tensors. They are for
    /// all local ranks, or, if `recipients` is not empty, for these members.
    pub fn received(recipients: Vec<usize>, tensors: Vec<DispatchTensor>) -> Self {
        Self {
            recipients,
            source: ContributionSource::RemoteShared,
            ..Self::new(tensors, PlaneContribution::bytes(None))
        }
    }

    /// Makes the contribution one whose memory only one local rank uses.
    pub fn exclusive(self) -> Self {
        Self {
            source: ContributionSource::RemoteExclusive,
            ..self
        }
    }

    /// Creates a contribution whose data is in the result buffer of the only local rank.
    pub fn of_result_buffer(buffer: Arc<ResultBuffer>) -> Self {
        Self {
            plane: PlaneContribution::bytes(Some(buffer)),
            ..Self::received(Vec::new(), Vec::new())
        }
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

/// Returns the tensors for each member as one list, and the member that each is for.
pub(in crate::comm) fn addressed(
    shards: Vec<Vec<DispatchTensor>>,
) -> (Vec<usize>, Vec<DispatchTensor>) {
    let to = shards.into_iter().enumerate();
    to.flat_map(|(member, of)| of.into_iter().map(move |tensor| (member, tensor)))
        .unzip()
}
