//! [`RemoteGroup`]: what a rank's calls on one group send to other processes.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use hashbrown::HashMap;
use parking_lot::Mutex;

use super::contribution::{self, Contribution};
use super::peer_processes::PeerProcesses;
use crate::comm::backend::{CallSignature, GroupMember};
pub(super) use crate::comm::process::header::DataMode;
use crate::comm::process::header::{
    ControlMessage, EncodedSignature, PayloadDesc, RemoteGroupId, RemoteGroupInfo, Said, SharedMemoryMessage,
};
use crate::comm::process::payload::payload;
use crate::comm::process::result_buffer;
use crate::comm::transport::{Payload, SendStamp};
use crate::comm::{CommError, TensorMeta};
use crate::memory::shared_memory::SharedMemoryPool;
use crate::placement::ShardSizes;

/// What the ranks of another process need of a deposit.
pub(super) enum RecipientData<'a> {
    /// All of it.
    Full,
    /// Their parts, by dimension and cut.
    Parts(&'a [(usize, ShardSizes)]),
    /// What is addressed to them.
    Addressed,
}

/// What each other process gets of a deposit.
pub(super) type OutgoingData = Vec<(PayloadDesc, Vec<Payload>)>;

/// A rank's place in a group that has ranks in other processes.
pub(super) struct RemoteGroup {
    others: Arc<PeerProcesses>,
    member: GroupMember,
    name: String,
    /// Of this channel, in this process.
    number: usize,
    /// The positions in the group of the ranks of each other process.
    members: Vec<(usize, Vec<usize>)>,
    common: bool,
    /// Locked while a call is made here and told there: they hear of calls in the order in which they are made.
    told: Mutex<SentState>,
}

/// What the other processes know.
struct SentState {
    /// Collectives so far.
    calls: u64,
    /// Which of them know the channel.
    introduced: Vec<bool>,
    /// The prints that all of them know, and their numbers.
    prints: HashMap<Vec<u8>, usize>,
}

/// Shorter prints are said every time: to look for them would cost as much.
const LONG: usize = 256;

/// The most long prints of one channel that are said once. A model has as many as it has units, or a few times that.
const MOST: usize = 1024;

impl SentState {
    /// What is said of a print.
    fn say<'a>(&mut self, print: &'a EncodedSignature) -> Said<&'a EncodedSignature> {
        if print.bytes().len() < LONG {
            return Said::Full { number: None, print };
        }
        if let Some(number) = self.prints.get(print.bytes()) {
            return Said::Known { number: *number };
        }
        let number = (self.prints.len() < MOST).then(|| {
            let number = self.prints.len();
            self.prints.insert(print.bytes().to_vec(), number);
            number
        });
        Said::Full { number, print }
    }
}

impl RemoteGroup {
    /// `None` if all ranks of the group are here.
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
        let told = SentState { calls: 0, introduced: vec![false; members.len()], prints: HashMap::new() };
        let (others, member, number) = (others.clone(), member.clone(), others.number());
        let common = members.len() + 1 == member.group.size()
            && others.have_in_common(members.iter().map(|(process, _)| *process));
        Some(Self { others, member, name, number, members, common, told: Mutex::new(told) })
    }

    /// Has `join` join a collective here, and the ranks of other processes hear of it, with what they need of the deposit.
    /// Returns also when that is on its way.
    pub fn joined<T>(
        &self,
        print: CallSignature,
        shares: OutgoingData,
        when: DataMode,
        join: impl FnOnce(CallSignature) -> Result<T, CommError>,
    ) -> Result<(T, SendStamp), CommError> {
        let (written, digests) = (EncodedSignature::of(&print), print.digests.clone());
        let mut told = self.told.lock();
        let joined = join(print)?;
        let seq = told.calls;
        told.calls += 1;
        let (print, taken) = (told.say(&written), SendStamp::default());
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
            let digests = digests.clone();
            let word = ControlMessage::Joined { channel, seq, print, digests, when, contents };
            self.others.send_noted(to, word, payloads, Some(taken.clone()));
        }
        Ok((joined, taken))
    }

    /// Brings `shares` of a deposit to a collective that was joined for [`Later`](DataMode::Deferred).
    pub fn bring(&self, seq: u64, shares: OutgoingData) {
        for ((to, _), (contents, payloads)) in self.members.iter().zip(shares) {
            self.others.send(*to, ControlMessage::Data { channel: self.number, seq, contents }, payloads);
        }
    }

    /// What other processes get of a deposit that is not there yet.
    pub fn nothing(&self) -> OutgoingData {
        self.same_for_all(Default::default())
    }

    /// Number of processes that ranks of the group are in.
    pub fn processes(&self) -> usize {
        // Only groups with a rank here have an outlet.
        self.members.len() + 1
    }

    /// Whether every rank of the group is alone in its process, and they can have memory in common: all ranks say the same.
    pub fn has_common_memory(&self) -> bool {
        self.common
    }

    /// What this process has in common with others.
    pub fn commons(&self) -> &SharedMemoryPool {
        self.others.commons()
    }

    /// Whether what others send may land in results of so many `bytes`: those of a rank that is the only one of the group
    /// here.
    pub fn lands(&self, bytes: u64) -> bool {
        let size = self.member.group.size();
        result_buffer::pay(bytes, size)
            && self.members.iter().map(|(_, places)| places.len()).sum::<usize>() + 1 == size
    }

    /// Whether member `to` of the group is in another process.
    pub fn is_elsewhere(&self, to: usize) -> bool {
        self.process_of(to).is_some()
    }

    /// Sends a message to member `to` of the group, which is in another process.
    pub fn sent(&self, to: usize, tag: u32, print: &CallSignature, deposit: &Contribution) {
        let at = self.process_of(to).expect("the member is in another process");
        let (contents, payloads) = contents(Vec::new(), &deposit.tensors, None);
        let mut told = self.told.lock();
        let channel = self.channel(&mut told, at);
        let word = ControlMessage::Sent { channel, to, tag, print: &EncodedSignature::of(print), contents };
        self.others.send(self.members[at].0, word, payloads);
    }

    /// The place here of the process that member `to` is in.
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

    /// What each other process gets, where all get this.
    pub fn same_for_all(&self, share: (PayloadDesc, Vec<Payload>)) -> OutgoingData {
        vec![share; self.members.len()]
    }

    /// What each other process needs of `deposit`.
    pub fn shares(&self, deposit: &Contribution, share: RecipientData<'_>) -> OutgoingData {
        let ranks = self.member.group.size();
        if let RecipientData::Full = share {
            // Once for all.
            return self.same_for_all(contents(Vec::new(), &deposit.tensors, deposit.common));
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
            contents(addressees, &tensors, deposit.common)
        };
        self.members.iter().map(of_process).collect()
    }
}

fn contents(
    addressees: Vec<usize>,
    tensors: &[DispatchTensor],
    common: Option<SharedMemoryMessage>,
) -> (PayloadDesc, Vec<Payload>) {
    let meta = |tensor: &DispatchTensor| TensorMeta { shape: tensor.shape(), dtype: tensor.dtype() };
    let full = tensors.iter().filter(|tensor| tensor.shape().num_elements() > 0);
    let tensors = tensors.iter().map(meta).collect();
    (PayloadDesc { addressees, tensors, common }, full.map(payload).collect())
}

impl std::fmt::Debug for RemoteGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteGroup").field("number", &self.number).field("members", &self.members).finish()
    }
}
