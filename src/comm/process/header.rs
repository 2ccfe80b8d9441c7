//! [`Header`]: a control message from one process to another.

use std::sync::Arc;

use burn_dtensor_flight::LaunchId;

use super::wire::{Decode, Encode, wire_enum, wire_struct};
use crate::comm::backend::{CallSignature, Failure};
use crate::comm::local::{MembershipMessage, WaitForEdge};
use crate::comm::{Digests, RankReport, TensorMeta};
use crate::memory::shared_memory::SharedMemoryHandle;

/// A control message, with the launch to which it belongs.
#[derive(Debug)]
pub(in crate::comm) struct Header<P = CallSignature> {
    pub launch: LaunchId,
    pub word: ControlMessage<P>,
}

/// Content of a [`Header`].
#[derive(Debug)]
pub(in crate::comm) enum ControlMessage<P = CallSignature> {
    /// A rank has called a collective.
    Joined {
        channel: RemoteGroupId,
        seq: u64,
        print: Said<P>,
        digests: HeaderDigests,
        when: DataMode,
        contents: PayloadDesc,
    },
    /// Accepts or declines the data that a rank offered with [`DataMode::OnDemand`], in call `seq` of the
    /// receiver's `channel`.
    Pull { channel: usize, seq: u64, wanted: bool },
    /// Data of an earlier `Joined` message: offered and accepted, or deferred.
    Data { channel: usize, seq: u64, contents: PayloadDesc },
    /// A rank has sent a point-to-point message to member `to` of the group.
    Sent { channel: RemoteGroupId, to: usize, tag: u32, print: P, contents: PayloadDesc },
    /// The program of a rank has ended.
    RankExited(RankReport),
    /// A failure. If `decided`, it is the first one of the world; otherwise the sender reports it to the deciding
    /// process.
    Failed { failure: Failure, decided: bool },
    /// Message of the agreement on which ranks survive a failure.
    Membership(MembershipMessage),
    /// Message of deadlock detection about a rank whose wait is stalled.
    Waits(WaitForEdge),
}

/// Digests of a signature. They are encoded separately from it, because they differ in every call.
type HeaderDigests = Option<Arc<[Digests]>>;

/// Describes when the data of a call is sent to the other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum DataMode {
    /// With the `Joined` message.
    Eager,
    /// If the receiver accepts the offer with a `Pull` message.
    OnDemand,
    /// As soon as the data is available, in a `Data` message.
    Deferred,
}

/// Signature of a call. A signature may be long and identical in every step; it is then sent once, and afterwards
/// referred to by its number on the channel.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) enum Said<P> {
    Full { number: Option<usize>, print: P },
    Known { number: usize },
}

/// Identifies a rank's membership of a group, by a number that the rank's process has assigned.
#[derive(Debug)]
pub(in crate::comm) struct RemoteGroupId {
    pub number: usize,
    /// Description of the group; present in the first message to a process that uses this number.
    pub introduction: Option<RemoteGroupInfo>,
}

/// Describes a group to another process.
#[derive(Debug)]
pub(in crate::comm) struct RemoteGroupInfo {
    /// Global ranks of the group.
    pub ranks: Vec<usize>,
    pub name: String,
    /// Group rank of the sender.
    pub member: usize,
}

/// Describes the tensors whose elements the payloads hold. A tensor without elements has no payload.
#[derive(Debug, Clone, Default)]
pub(in crate::comm) struct PayloadDesc {
    /// Recipient (group rank) of each tensor, ascending; empty if all recipients need all tensors.
    pub addressees: Vec<usize>,
    pub tensors: Vec<TensorMeta>,
    pub common: Option<SharedMemoryMessage>,
}

/// Part of the negotiation of a gather result in shared memory, sent by each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum SharedMemoryMessage {
    /// The rank requests the result, and has allocated memory for it at this address.
    At { address: SharedMemoryHandle },
    /// The rank requests the result.
    Wanted {},
    /// The rank does not request the result.
    Unwanted {},
}

impl SharedMemoryMessage {
    /// Returns the address of the allocated memory, if the message has one.
    pub fn address(self) -> Option<SharedMemoryHandle> {
        match self {
            Self::At { address } => Some(address),
            Self::Wanted {} | Self::Unwanted {} => None,
        }
    }
}

impl<P> ControlMessage<P> {
    /// Removes and returns the description of the payloads.
    pub fn contents(&mut self) -> PayloadDesc {
        match self {
            Self::Joined { contents, .. } | Self::Data { contents, .. } | Self::Sent { contents, .. } => {
                std::mem::take(contents)
            }
            Self::Pull { .. } | Self::RankExited(_) | Self::Failed { .. } | Self::Membership(_) | Self::Waits(_) => {
                PayloadDesc::default()
            }
        }
    }
}

/// A [`CallSignature`] that is encoded once and then sent to several processes.
pub(in crate::comm) struct EncodedSignature(Vec<u8>);

impl EncodedSignature {
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn of(print: &CallSignature) -> Self {
        let mut bytes = Vec::with_capacity(64);
        print.encode(&mut bytes);
        Self(bytes)
    }
}

impl Header<&EncodedSignature> {
    pub fn write(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        self.launch.encode(&mut out);
        self.word.encode(&mut out);
        out
    }
}

impl Header {
    /// Decodes a header; returns `None` if the bytes are not a valid header.
    pub fn read(mut bytes: &[u8]) -> Option<Self> {
        let header = Self { launch: LaunchId::decode(&mut bytes)?, word: ControlMessage::decode(&mut bytes)? };
        bytes.is_empty().then_some(header)
    }
}

wire_struct!(LaunchId { number, shrunk, process });
wire_enum!(MembershipMessage {
    0 Came { rank },
    1 Gone { ranks },
    2 Missed { process },
    3 Roster { ranks },
});
wire_enum!(WaitForEdge {
    0 Needs { rank, number, other },
    1 Waiting { rank, number, other, in_wait },
    2 WaitsFor { rank, number, during, other, in_wait },
});
wire_struct!(RemoteGroupId { number, introduction });
wire_struct!(RemoteGroupInfo { ranks, name, member });
wire_struct!(PayloadDesc { addressees, tensors, common });
wire_struct!(SharedMemoryHandle { process, file, number });
wire_enum!(SharedMemoryMessage {
    0 At { address },
    1 Wanted {},
    2 Unwanted {},
});

impl Encode for EncodedSignature {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }
}

impl<P: Encode> Encode for Said<P> {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Full { number, print } => {
                out.push(0);
                number.encode(out);
                print.encode(out);
            }
            Self::Known { number } => {
                out.push(1);
                number.encode(out);
            }
        }
    }
}

impl<P: Decode> Decode for Said<P> {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        Some(match u8::decode(input)? {
            0 => Self::Full { number: Decode::decode(input)?, print: Decode::decode(input)? },
            1 => Self::Known { number: Decode::decode(input)? },
            _ => return None,
        })
    }
}

impl Encode for DataMode {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }
}

impl Decode for DataMode {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        let said = u8::decode(input)?;
        [Self::Eager, Self::OnDemand, Self::Deferred].into_iter().find(|when| *when as u8 == said)
    }
}

impl Encode for ControlMessage<&EncodedSignature> {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Joined { channel, seq, print, digests, when, contents } => {
                out.push(0);
                (channel, seq, print).encode(out);
                digests.encode(out);
                when.encode(out);
                contents.encode(out);
            }
            Self::Sent { channel, to, tag, print, contents } => {
                out.push(1);
                (channel, to, tag).encode(out);
                print.encode(out);
                contents.encode(out);
            }
            Self::RankExited(report) => {
                out.push(2);
                report.encode(out);
            }
            Self::Failed { failure, decided } => {
                out.push(3);
                failure.encode(out);
                decided.encode(out);
            }
            Self::Membership(notice) => {
                out.push(6);
                notice.encode(out);
            }
            Self::Waits(chain) => {
                out.push(7);
                chain.encode(out);
            }
            Self::Pull { channel, seq, wanted } => {
                out.push(4);
                (channel, seq, wanted).encode(out);
            }
            Self::Data { channel, seq, contents } => {
                out.push(5);
                (channel, seq, contents).encode(out);
            }
        }
    }
}

impl Decode for ControlMessage {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        Some(match u8::decode(input)? {
            0 => {
                let (channel, seq, print) = Decode::decode(input)?;
                Self::Joined {
                    channel,
                    seq,
                    print,
                    digests: Decode::decode(input)?,
                    when: Decode::decode(input)?,
                    contents: Decode::decode(input)?,
                }
            }
            1 => {
                let (channel, to, tag) = Decode::decode(input)?;
                Self::Sent { channel, to, tag, print: Decode::decode(input)?, contents: Decode::decode(input)? }
            }
            2 => Self::RankExited(Decode::decode(input)?),
            3 => Self::Failed { failure: Decode::decode(input)?, decided: Decode::decode(input)? },
            4 => {
                let (channel, seq, wanted) = Decode::decode(input)?;
                Self::Pull { channel, seq, wanted }
            }
            5 => {
                let (channel, seq, contents) = Decode::decode(input)?;
                Self::Data { channel, seq, contents }
            }
            6 => Self::Membership(Decode::decode(input)?),
            7 => Self::Waits(Decode::decode(input)?),
            _ => return None,
        })
    }
}
