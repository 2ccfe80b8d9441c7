//! [`RemoteGroup`]: a rank's view of the group's members in other processes; sends the rank's calls to them.

use std::mem;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;
use parking_lot::Mutex;

use super::HostBackend;
use super::exchanged_messages::MessageBody;
use crate::comm::backend::{CallSignature, GroupMember};
use crate::comm::control::exchange_report::ExchangeReport;
use crate::comm::control::match_table::DataMode;
use crate::comm::data::call::RecipientData;
use crate::comm::data::contribution::Contribution;
use crate::comm::data::payload::payload;
use crate::comm::data::{result_buffer, shard};
use crate::comm::transport::SendStamp;
use crate::comm::transport::header::{
    ControlMessage, KnownSignatures, PayloadDesc, RemoteGroupId, RemoteGroupInfo, SentSignature,
};
use crate::comm::transport::peer_processes::PayloadData;
use crate::comm::{CommError, TensorMeta};
use crate::memory;

/// A rank's view of a group that has members in other processes.
pub(super) struct RemoteGroup {
    backend: Arc<HostBackend>,
    member: GroupMember,
    name: String,
    /// Number of this remote group in this process.
    number: usize,
    /// Other processes, each with the group ranks that it has.
    processes: Vec<(usize, Vec<usize>)>,
    /// Locked while a call is posted here and sent, so that other processes receive calls in the
    /// order in which they were posted.
    sent: Mutex<SentState>,
}

/// State that the other processes have received.
#[derive(Default)]
struct SentState {
    /// Number of collectives so far.
    calls: u64,
    /// True for each process that has received the description of the group.
    introduced: Vec<bool>,
    /// True if the first process has, which may have no rank of the group.
    introduced_to_first: bool,
    /// Signatures that all other processes have received.
    signatures: KnownSignatures<()>,
}

impl RemoteGroup {
    /// Returns `None` if all ranks of the group are in this process.
    pub fn new(backend: &Arc<HostBackend>, member: &GroupMember, name: String) -> Option<Self> {
        let peers = &backend.remote.as_ref()?.peers;
        let mut processes: Vec<(usize, Vec<usize>)> = Vec::new();
        let ranks = member.group.ranks().iter().enumerate();
        for (member, rank) in ranks.filter(|(_, rank)| !peers.local_ranks().contains(rank)) {
            let process = peers.process_of(*rank);
            match processes.iter_mut().find(|(other, _)| *other == process) {
                Some((_, members)) => members.push(member),
                None => processes.push((process, vec![member])),
            }
        }
        let sent = SentState {
            introduced: vec![false; processes.len()],
            ..SentState::default()
        };
        let backend = backend.clone();
        let member = member.clone();
        let number = peers.number();
        let sent = Mutex::new(sent);
        (!processes.is_empty()).then_some(Self {
            backend,
            member,
            name,
            number,
            processes,
            sent,
        })
    }

    /// Posts a collective locally with `post`, and sends the call to the other processes with the
    /// `data` for each of them; data on a device follows when it is read. Also returns a stamp of
    /// the time at which the call was sent.
    pub fn post<T>(
        &self,
        signature: CallSignature,
        data: Vec<PayloadData>,
        mode: DataMode,
        post: impl FnOnce(CallSignature) -> Result<T, CommError>,
    ) -> Result<(T, SendStamp), CommError> {
        let message = SentSignature::new(&signature);
        let mut sent = self.sent.lock();
        let posted = post(signature)?;
        let seq = sent.calls;
        sent.calls += 1;
        let signature = message.abbreviated(&mut sent.signatures);
        let stamp = SendStamp::default();
        for (at, data) in data.into_iter().enumerate() {
            let channel = self.channel(&mut sent, at);
            let to = self.processes[at].0;
            let signature = signature.clone();
            let mode = match mode {
                DataMode::OnDemand if data.payloads.is_empty() => DataMode::Eager,
                DataMode::Eager if data.device_of.is_some() => DataMode::Deferred,
                mode => mode,
            };
            let mut now = PayloadData::default();
            let mut later = None;
            match mode {
                DataMode::Eager => now = data,
                DataMode::OnDemand => self.backend.remote().offer(to, self.number, seq, data),
                DataMode::Deferred => later = data.device_of.map(|_| data),
            }
            let message = ControlMessage::Joined {
                channel,
                seq,
                signature,
                mode,
                contents: now.contents,
            };
            self.backend
                .remote()
                .send(to, message, now.payloads, Some(stamp.clone()));
            if let Some(data) = later {
                self.backend.send_data(to, self.number, seq, data);
            }
        }
        Ok((posted, stamp))
    }

    /// Sends the data of a contribution to a collective that was posted as
    /// [`Deferred`](DataMode::Deferred).
    pub fn send_data(&self, seq: u64, data: Vec<PayloadData>) {
        for ((to, _), data) in self.processes.iter().zip(data) {
            self.backend.send_data(*to, self.number, seq, data);
        }
    }

    /// Returns the number of processes that have ranks of the group.
    pub fn processes(&self) -> usize {
        // Only a group with a local rank has a `RemoteGroup`.
        self.processes.len() + 1
    }

    /// Returns true if remote data is received in place in results of `bytes` bytes: if they are
    /// large enough and this is the only local rank of the group.
    pub fn receives_in_place(&self, bytes: u64) -> bool {
        let size = self.member.group.size();
        let remote: usize = self
            .processes
            .iter()
            .map(|(_, members)| members.len())
            .sum();
        result_buffer::pay(bytes, size) && remote + 1 == size
    }

    /// Returns the index among `processes` of the process of a member; `None` if the member is in
    /// this process.
    pub fn process_of(&self, member: usize) -> Option<usize> {
        self.processes
            .iter()
            .position(|(_, members)| members.contains(&member))
    }

    /// Sends a message to member `to` of the group, in the process with index `at`, after `count`
    /// has counted it locally. Waits for the device of the tensors, because messages arrive in the
    /// order in which they were sent, and before their sender exits.
    pub fn send(
        &self,
        at: usize,
        to: usize,
        tag: u32,
        signature: &CallSignature,
        body: &MessageBody,
        count: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let (data, exchanged) = match body {
            MessageBody::Tensors(of) => (self.payload_data(Vec::new(), &of.tensors), None),
            MessageBody::Exchanged(id) => (PayloadData::default(), Some(id.number)),
        };
        data.read();
        let mut sent = self.sent.lock();
        count()?;
        let channel = self.channel(&mut sent, at);
        let message = ControlMessage::Sent {
            channel,
            to,
            tag,
            signature: signature.clone(),
            contents: data.contents,
            exchanged,
        };
        self.backend
            .remote()
            .send(self.processes[at].0, message, data.payloads, None);
        Ok(())
    }

    /// Returns the number of the channel in this process.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Sends the report about call `seq`, whose tensors are exchanged, to the first process.
    pub fn report_exchange(&self, seq: u64, report: ExchangeReport) {
        let first = self.backend.remote().first();
        let mut sent = self.sent.lock();
        let channel = match self.processes.iter().position(|(other, _)| *other == first) {
            Some(at) => self.channel(&mut sent, at),
            None => {
                let is_new = !mem::replace(&mut sent.introduced_to_first, true);
                self.introduced(is_new)
            }
        };
        let message = ControlMessage::ExchangeReported {
            channel,
            seq,
            report,
        };
        self.backend.remote().notify_process(first, message);
    }

    fn channel(&self, sent: &mut SentState, at: usize) -> RemoteGroupId {
        self.introduced(!mem::replace(&mut sent.introduced[at], true))
    }

    /// Returns the id of the channel, with a description for a process to which it is new.
    fn introduced(&self, is_new: bool) -> RemoteGroupId {
        let group = &self.member.group;
        let name = &self.name;
        RemoteGroupId {
            number: self.number,
            introduction: is_new.then(|| RemoteGroupInfo {
                ranks: group.ranks().to_vec(),
                name: name.clone(),
                member: group.rank(),
            }),
        }
    }

    /// Returns `data` for every other process.
    pub fn same_for_all(&self, data: PayloadData) -> Vec<PayloadData> {
        vec![data; self.processes.len()]
    }

    /// Returns the data of `contribution` that each other process needs.
    pub fn data(&self, contribution: &Contribution, needed: RecipientData<'_>) -> Vec<PayloadData> {
        let ranks = self.member.group.size();
        let tensors_for = |member: usize| -> Vec<DispatchTensor> {
            match needed {
                RecipientData::Shards(shardings) => contribution
                    .tensors
                    .iter()
                    .zip(shardings)
                    .map(|(tensor, (dim, sizes))| shard(tensor, *dim, sizes.range(ranks, member)))
                    .collect(),
                RecipientData::Full | RecipientData::Addressed => {
                    contribution.tensors_for(member).to_vec()
                }
            }
        };
        let of_process = |(_, members): &(usize, Vec<usize>)| {
            let tensors = members
                .iter()
                .flat_map(|member| tensors_for(*member).into_iter().map(|t| (*member, t)));
            let (recipients, tensors): (Vec<_>, Vec<_>) = tensors.unzip();
            self.payload_data(recipients, &tensors)
        };
        match needed {
            // Built once for all processes.
            RecipientData::Full => {
                self.same_for_all(self.payload_data(Vec::new(), &contribution.tensors))
            }
            _ => self.processes.iter().map(of_process).collect(),
        }
    }

    fn payload_data(&self, recipients: Vec<usize>, tensors: &[DispatchTensor]) -> PayloadData {
        let meta = |tensor: &DispatchTensor| TensorMeta {
            shape: tensor.shape(),
            dtype: tensor.dtype(),
        };
        let sent = || {
            tensors
                .iter()
                .filter(|tensor| tensor.shape().num_elements() > 0)
        };
        let is_on_device = sent().any(|tensor| !memory::is_host(&Device::new(tensor.device())));
        PayloadData {
            contents: PayloadDesc {
                recipients,
                tensors: tensors.iter().map(meta).collect(),
            },
            payloads: sent().map(payload).collect(),
            device_of: is_on_device.then(|| self.member.rank()),
        }
    }
}

impl std::fmt::Debug for RemoteGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteGroup")
            .field("number", &self.number)
            .field("processes", &self.processes)
            .finish()
    }
}
