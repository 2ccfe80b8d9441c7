//! [`Header`]: what one process says to another.

use std::sync::Arc;

use super::wire::{Decode, Encode, wire_enum, wire_struct};
use crate::comm::backend::{CallSignature, Failure};
use crate::comm::local::{MembershipMessage, WaitForEdge};
use crate::comm::{Digests, RankReport, TensorMeta};
use crate::memory::shared_memory::SharedMemoryHandle;

/// What one process says to another, about one launch.
#[derive(Debug)]
pub(in crate::comm) struct Header<P = CallSignature> {
    pub launch: LaunchId,
    pub word: ControlMessage<P>,
}

/// Which of the launches that all processes make: 0, 1, .., and which of the worlds in which its ranks have gone on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::comm) struct LaunchId {
    pub number: u64,
    pub shrunk: u64,
}

impl LaunchId {
    pub fn first(number: u64) -> Self {
        Self { number, shrunk: 0 }
    }

    pub fn next(self) -> Self {
        Self { shrunk: self.shrunk + 1, ..self }
    }
}

#[derive(Debug)]
pub(in crate::comm) enum ControlMessage<P = CallSignature> {
    /// A rank has joined a collective.
    Joined {
        channel: RemoteGroupId,
        seq: u64,
        print: Said<P>,
        digests: HeaderDigests,
        when: DataMode,
        contents: PayloadDesc,
    },
    /// Whether what a rank offered in a call of a channel of the addressee is wanted.
    Pull { channel: usize, seq: u64, wanted: bool },
    /// What was offered, and asked for, or what comes later.
    Data { channel: usize, seq: u64, contents: PayloadDesc },
    /// A rank has sent a message to member `to` of the group.
    Sent { channel: RemoteGroupId, to: usize, tag: u32, print: P, contents: PayloadDesc },
    /// A rank's program is over.
    RankExited(RankReport),
    /// A failure was found, or, if `decided`, was the first.
    Failed { failure: Failure, decided: bool },
    /// Who goes on after a failure.
    Membership(MembershipMessage),
    /// Of a rank that has waited for long.
    Waits(WaitForEdge),
}

/// The digests of a print: beside it, for they are new every time.
type HeaderDigests = Option<Arc<[Digests]>>;

/// When what others need of a call is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum DataMode {
    /// With word of it.
    Eager,
    /// If they ask: it is offered.
    OnDemand,
    /// Once it is there.
    Deferred,
}

/// A print, which may be long, and the same in every step: then it is said once, and known by its number on the channel.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) enum Said<P> {
    Full { number: Option<usize>, print: P },
    Known { number: usize },
}

/// A rank's place in a group, by a number that its process has given it.
#[derive(Debug)]
pub(in crate::comm) struct RemoteGroupId {
    pub number: usize,
    /// What that is, the first time it is named to a process.
    pub introduction: Option<RemoteGroupInfo>,
}

#[derive(Debug)]
pub(in crate::comm) struct RemoteGroupInfo {
    /// Global ranks of the group.
    pub ranks: Vec<usize>,
    pub name: String,
    /// The rank's position in the group.
    pub member: usize,
}

/// The tensors of which the payloads hold the elements; of one without elements there is none.
#[derive(Debug, Clone, Default)]
pub(in crate::comm) struct PayloadDesc {
    /// Of parts, the member that each is for, ascending; none if what there is is for all.
    pub addressees: Vec<usize>,
    pub tensors: Vec<TensorMeta>,
    pub common: Option<SharedMemoryMessage>,
}

/// What a rank says of a result that ranks of one host have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum SharedMemoryMessage {
    /// It wants it, and here is memory for it.
    At { address: SharedMemoryHandle },
    /// It wants it.
    Wanted {},
    /// It does not.
    Unwanted {},
}

impl SharedMemoryMessage {
    /// Where there is memory.
    pub fn address(self) -> Option<SharedMemoryHandle> {
        match self {
            Self::At { address } => Some(address),
            Self::Wanted {} | Self::Unwanted {} => None,
        }
    }
}

impl<P> ControlMessage<P> {
    /// What the payloads hold.
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

/// A [`CallSignature`] that has been written once for several processes.
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
    /// `None` if these bytes are no header.
    pub fn read(mut bytes: &[u8]) -> Option<Self> {
        let header = Self { launch: LaunchId::decode(&mut bytes)?, word: ControlMessage::decode(&mut bytes)? };
        bytes.is_empty().then_some(header)
    }
}

wire_struct!(LaunchId { number, shrunk });
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
