//! [`RemoteGroup`]: a rank's view of the group's members in other processes; sends the rank's calls to them.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use parking_lot::Mutex;

use super::contribution::{self, Contribution};
use super::peer_processes::PeerProcesses;
use crate::comm::backend::{CallSignature, GroupMember};
pub(super) use crate::comm::process::header::DataMode;
use crate::comm::process::header::{
    ControlMessage, KnownSignatures, PayloadDesc, RemoteGroupId, RemoteGroupInfo, SentSignature,
};
use crate::comm::process::payload::payload;
use crate::comm::process::result_buffer;
use crate::comm::transport::{Payload, SendStamp};
use crate::comm::{CommError, TensorMeta};
use crate::placement::ShardSizes;

/// Data of a contribution that the ranks of another process need.
pub(super) enum RecipientData<'a> {
    /// All tensors.
    Full,
    /// Shards of the recipients, each given as (dimension, shard sizes).
    Parts(&'a [(usize, ShardSizes)]),
    /// Tensors that are addressed to the recipients.
    Addressed,
}

/// Data that is sent to each other process.
pub(super) type OutgoingData = Vec<(PayloadDesc, Vec<Payload>)>;

/// A rank's view of a group that has members in other processes.
pub(super) struct RemoteGroup {
    others: Arc<PeerProcesses>,
    member: GroupMember,
    name: String,
    /// Number of this remote group in this process.
    number: usize,
    /// Other processes, each with the group ranks that it has.
    members: Vec<(usize, Vec<usize>)>,
    /// Locked while a call is posted here and sent, so that other processes receive calls in the order in which
    /// they were posted.
    told: Mutex<SentState>,
}

/// State that the other processes have received.
struct SentState {
    /// Number of collectives so far.
    calls: u64,
    /// True for each process that has received the description of the group.
    introduced: Vec<bool>,
    /// Signatures that all other processes have received.
    prints: KnownSignatures<()>,
}

impl RemoteGroup {
    /// Returns `None` if all ranks of the group are in this process.
    pub fn new(others: &Arc<PeerProcesses>, member: &GroupMember, name: String) -> Option<Self> {
        let mut members: Vec<(usize, Vec<usize>)> = Vec::new();
        for (place, rank) in member.group.ranks().iter().enumerate().filter(|(_, rank)| !others.here().contains(rank)) {
            let process = others.process_of(*rank);
            match members.iter_mut().find(|(other, _)| *other == process) {
                Some((_, places)) => places.push(place),
                None => members.push((process, vec![place])),
            }
        }
        if members.is_empty() {
            return None;
        }
        let told = SentState { calls: 0, introduced: vec![false; members.len()], prints: KnownSignatures::default() };
        let (others, member, number) = (others.clone(), member.clone(), others.number());
        Some(Self { others, member, name, number, members, told: Mutex::new(told) })
    }

    /// Posts a collective locally with `join`, and sends the call to the other processes with the data that they
    /// need. Also returns a stamp of the time at which the message was sent.
    pub fn joined<T>(
        &self,
        print: CallSignature,
        shares: OutgoingData,
        when: DataMode,
        join: impl FnOnce(CallSignature) -> Result<T, CommError>,
    ) -> Result<(T, SendStamp), CommError> {
        let sent = SentSignature::new(&print);
        let mut told = self.told.lock();
        let joined = join(print)?;
        let seq = told.calls;
        told.calls += 1;
        let (sent, taken) = (sent.abbreviated(&mut told.prints), SendStamp::default());
        for (at, (contents, payloads)) in shares.into_iter().enumerate() {
            let (channel, to) = (self.channel(&mut told, at), self.members[at].0);
            let when = if when == DataMode::OnDemand && payloads.is_empty() { DataMode::Eager } else { when };
            let (contents, payloads) = match when {
                DataMode::Eager | DataMode::Deferred => (contents, payloads),
                DataMode::OnDemand => {
                    self.others.keep((to, self.number, seq), contents, payloads);
                    Default::default()
                }
            };
            let word = ControlMessage::Joined { channel, seq, print: sent.clone(), when, contents };
            self.others.send_noted(to, word, payloads, Some(taken.clone()));
        }
        Ok((joined, taken))
    }

    /// Sends the data of a contribution to a collective that was posted as [`Deferred`](DataMode::Deferred).
    pub fn bring(&self, seq: u64, shares: OutgoingData) {
        for ((to, _), (contents, payloads)) in self.members.iter().zip(shares) {
            self.others.send(*to, ControlMessage::Data { channel: self.number, seq, contents }, payloads);
        }
    }

    /// Returns empty data for all other processes, for a contribution that is sent later.
    pub fn nothing(&self) -> OutgoingData {
        self.same_for_all(Default::default())
    }

    /// Returns the number of processes that have ranks of the group.
    pub fn processes(&self) -> usize {
        // Only a group with a local rank has a `RemoteGroup`.
        self.members.len() + 1
    }

    /// Returns true if remote data is received in place in results of `bytes` bytes: if they are large enough and
    /// this is the only local rank of the group.
    pub fn lands(&self, bytes: u64) -> bool {
        let size = self.member.group.size();
        result_buffer::pay(bytes, size)
            && self.members.iter().map(|(_, places)| places.len()).sum::<usize>() + 1 == size
    }

    /// Returns true if member `to` of the group is in another process.
    pub fn is_elsewhere(&self, to: usize) -> bool {
        self.process_of(to).is_some()
    }

    /// Sends a message to member `to` of the group, which is in another process.
    pub fn sent(&self, to: usize, tag: u32, print: &CallSignature, deposit: &Contribution) {
        let at = self.process_of(to).expect("the member is in another process");
        let (contents, payloads) = contents(Vec::new(), &deposit.tensors);
        let mut told = self.told.lock();
        let channel = self.channel(&mut told, at);
        let word = ControlMessage::Sent { channel, to, tag, print: print.clone(), contents };
        self.others.send(self.members[at].0, word, payloads);
    }

    /// Returns the index in `members` of the process that member `to` is in.
    fn process_of(&self, to: usize) -> Option<usize> {
        self.members.iter().position(|(_, places)| places.contains(&to))
    }

    fn channel(&self, told: &mut SentState, at: usize) -> RemoteGroupId {
        let group = &self.member.group;
        let is_new = !std::mem::replace(&mut told.introduced[at], true);
        let introduce =
            || RemoteGroupInfo { ranks: group.ranks().to_vec(), name: self.name.clone(), member: group.rank() };
        RemoteGroupId { number: self.number, introduction: is_new.then(introduce) }
    }

    /// Returns outgoing data that is `share` for every other process.
    pub fn same_for_all(&self, share: (PayloadDesc, Vec<Payload>)) -> OutgoingData {
        vec![share; self.members.len()]
    }

    /// Returns the data of `deposit` that each other process needs.
    pub fn shares(&self, deposit: &Contribution, share: RecipientData<'_>) -> OutgoingData {
        let ranks = self.member.group.size();
        if let RecipientData::Full = share {
            // Built once for all processes.
            return self.same_for_all(contents(Vec::new(), &deposit.tensors));
        }
        let parts = |member: usize| -> Vec<DispatchTensor> {
            match share {
                RecipientData::Parts(shardings) => {
                    let part = |(tensor, (dim, sizes)): (&DispatchTensor, &(usize, ShardSizes))| {
                        contribution::part(tensor, *dim, sizes.range(ranks, member))
                    };
                    deposit.tensors.iter().zip(shardings).map(part).collect()
                }
                RecipientData::Full | RecipientData::Addressed => deposit.parts_for(member).to_vec(),
            }
        };
        let of_process = |(_, members): &(usize, Vec<usize>)| {
            let parts = members.iter().flat_map(|member| parts(*member).into_iter().map(|part| (*member, part)));
            let (addressees, tensors): (Vec<_>, Vec<_>) = parts.unzip();
            contents(addressees, &tensors)
        };
        self.members.iter().map(of_process).collect()
    }
}

fn contents(addressees: Vec<usize>, tensors: &[DispatchTensor]) -> (PayloadDesc, Vec<Payload>) {
    let meta = |tensor: &DispatchTensor| TensorMeta { shape: tensor.shape(), dtype: tensor.dtype() };
    let full = tensors.iter().filter(|tensor| tensor.shape().num_elements() > 0);
    let tensors = tensors.iter().map(meta).collect();
    (PayloadDesc { addressees, tensors }, full.map(payload).collect())
}

impl std::fmt::Debug for RemoteGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteGroup").field("number", &self.number).field("members", &self.members).finish()
    }
}
