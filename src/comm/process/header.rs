//! [`Header`]: what one process says to another.

use std::sync::Arc;

use super::wire::{Decode, Encode, wire_enum, wire_struct};
use crate::comm::engine::{Failure, CallSignature};
use crate::comm::local::{WaitForEdge, MembershipMessage};
use crate::comm::{Digests, RankReport, TensorMeta};
use crate::memory::common::Address;

/// What one process says to another, about one launch.
#[derive(Debug)]
pub(in crate::comm) struct Header<P = CallSignature> {
    pub launch: LaunchKey,
    pub word: Word<P>,
}

/// Which of the launches that all processes make: 0, 1, .., and which of the worlds in which its ranks have gone on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::comm) struct LaunchKey {
    pub number: u64,
    pub shrunk: u64,
}

impl LaunchKey {
    pub fn first(number: u64) -> Self {
        Self { number, shrunk: 0 }
    }

    pub fn next(self) -> Self {
        Self { shrunk: self.shrunk + 1, ..self }
    }
}

#[derive(Debug)]
pub(in crate::comm) enum Word<P = CallSignature> {
    /// A rank has joined a collective.
    Joined { channel: Channel, seq: u64, print: Said<P>, digests: Beside, when: When, contents: Contents },
    /// Whether what a rank offered in a call of a channel of the addressee is wanted.
    Asked { channel: usize, seq: u64, wanted: bool },
    /// What was offered, and asked for, or what comes later.
    Brought { channel: usize, seq: u64, contents: Contents },
    /// A rank has sent a message to member `to` of the group.
    Sent { channel: Channel, to: usize, tag: u32, print: P, contents: Contents },
    /// A rank's program is over.
    Left(RankReport),
    /// A failure was found, or, if `decided`, was the first.
    Failed { failure: Failure, decided: bool },
    /// Who goes on after a failure.
    GoesOn(MembershipMessage),
    /// Of a rank that has waited for long.
    Waits(WaitForEdge),
}

/// The digests of a print: beside it, for they are new every time.
type Beside = Option<Arc<[Digests]>>;

/// When what others need of a call is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum When {
    /// With word of it.
    Now,
    /// If they ask: it is offered.
    Asked,
    /// Once it is there.
    Later,
}

/// A print, which may be long, and the same in every step: then it is said once, and known by its number on the channel.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) enum Said<P> {
    Full { number: Option<usize>, print: P },
    Known { number: usize },
}

/// A rank's place in a group, by a number that its process has given it.
#[derive(Debug)]
pub(in crate::comm) struct Channel {
    pub number: usize,
    /// What that is, the first time it is named to a process.
    pub introduction: Option<Introduction>,
}

#[derive(Debug)]
pub(in crate::comm) struct Introduction {
    /// Global ranks of the group.
    pub ranks: Vec<usize>,
    pub name: String,
    /// The rank's position in the group.
    pub member: usize,
}

/// The tensors of which the payloads hold the elements; of one without elements there is none.
#[derive(Debug, Clone, Default)]
pub(in crate::comm) struct Contents {
    /// Of parts, the member that each is for, ascending; none if what there is is for all.
    pub addressees: Vec<usize>,
    pub tensors: Vec<TensorMeta>,
    pub common: Option<InCommon>,
}

/// What a rank says of a result that ranks of one host have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum InCommon {
    /// It wants it, and here is memory for it.
    At { address: Address },
    /// It wants it.
    Wanted {},
    /// It does not.
    Unwanted {},
}

impl InCommon {
    /// Where there is memory.
    pub fn address(self) -> Option<Address> {
        match self {
            Self::At { address } => Some(address),
            Self::Wanted {} | Self::Unwanted {} => None,
        }
    }
}

impl<P> Word<P> {
    /// What the payloads hold.
    pub fn contents(&mut self) -> Contents {
        match self {
            Self::Joined { contents, .. } | Self::Brought { contents, .. } | Self::Sent { contents, .. } => {
                std::mem::take(contents)
            }
            Self::Asked { .. } | Self::Left(_) | Self::Failed { .. } | Self::GoesOn(_) | Self::Waits(_) => {
                Contents::default()
            }
        }
    }
}

/// A [`Print`] that has been written once for several processes.
pub(in crate::comm) struct Written(Vec<u8>);

impl Written {
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn of(print: &CallSignature) -> Self {
        let mut bytes = Vec::with_capacity(64);
        print.encode(&mut bytes);
        Self(bytes)
    }
}

impl Header<&Written> {
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
        let header = Self { launch: LaunchKey::decode(&mut bytes)?, word: Word::decode(&mut bytes)? };
        bytes.is_empty().then_some(header)
    }
}

wire_struct!(LaunchKey { number, shrunk });
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
wire_struct!(Channel { number, introduction });
wire_struct!(Introduction { ranks, name, member });
wire_struct!(Contents { addressees, tensors, common });
wire_struct!(Address { process, file, number });
wire_enum!(InCommon {
    0 At { address },
    1 Wanted {},
    2 Unwanted {},
});

impl Encode for Written {
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

impl Encode for When {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }
}

impl Decode for When {
    fn decode(input: &mut &[u8]) -> Option<Self> {
        let said = u8::decode(input)?;
        [Self::Now, Self::Asked, Self::Later].into_iter().find(|when| *when as u8 == said)
    }
}

impl Encode for Word<&Written> {
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
            Self::Left(report) => {
                out.push(2);
                report.encode(out);
            }
            Self::Failed { failure, decided } => {
                out.push(3);
                failure.encode(out);
                decided.encode(out);
            }
            Self::GoesOn(notice) => {
                out.push(6);
                notice.encode(out);
            }
            Self::Waits(chain) => {
                out.push(7);
                chain.encode(out);
            }
            Self::Asked { channel, seq, wanted } => {
                out.push(4);
                (channel, seq, wanted).encode(out);
            }
            Self::Brought { channel, seq, contents } => {
                out.push(5);
                (channel, seq, contents).encode(out);
            }
        }
    }
}

impl Decode for Word {
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
            2 => Self::Left(Decode::decode(input)?),
            3 => Self::Failed { failure: Decode::decode(input)?, decided: Decode::decode(input)? },
            4 => {
                let (channel, seq, wanted) = Decode::decode(input)?;
                Self::Asked { channel, seq, wanted }
            }
            5 => {
                let (channel, seq, contents) = Decode::decode(input)?;
                Self::Brought { channel, seq, contents }
            }
            6 => Self::GoesOn(Decode::decode(input)?),
            7 => Self::Waits(Decode::decode(input)?),
            _ => return None,
        })
    }
}
