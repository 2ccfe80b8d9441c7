//! [`Header`]: a control message from one process to another, and its encoding.
//!
//! ```text
//! version, as text    launch and message, in the format of `postcard`
//! ┌───────────┬────┬──────────────────
//! │ 0.1.0+6   │ \n │
//! └───────────┴────┴──────────────────
//! ```
//!
//! The version comes first in every header, so that a process recognizes any message of another
//! version.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use burn_dtensor_flight::LaunchId;
use serde::{Deserialize, Serialize};

use crate::comm::backend::{CallSignature, Failure};
use crate::comm::control::exchange_report::ExchangeReport;
use crate::comm::control::match_table::DataMode;
use crate::comm::control::membership::MembershipMessage;
use crate::comm::control::wait_for_graph::WaitForEdge;
use crate::comm::{Digests, RankReport, TensorMeta};

/// Version of the messages: that of this crate, and a number. Increase the number when the encoding
/// or the meaning of a message changes.
pub(super) const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "+6");

/// A control message, with the launch to which it belongs.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::comm) struct Header {
    pub launch: LaunchId,
    pub message: ControlMessage,
}

/// Content of a [`Header`].
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::comm) enum ControlMessage {
    /// A rank has called a collective.
    Joined {
        channel: RemoteGroupId,
        seq: u64,
        signature: SentSignature,
        mode: DataMode,
        contents: PayloadDesc,
    },
    /// Accepts or declines the data that a rank offered with [`DataMode::OnDemand`], in call `seq`
    /// of the receiver's `channel`.
    Pull {
        channel: usize,
        seq: u64,
        wanted: bool,
    },
    /// Data of an earlier `Joined` message: offered and accepted, or deferred.
    Data {
        channel: usize,
        seq: u64,
        contents: PayloadDesc,
    },
    /// A rank has sent a point-to-point message to member `to` of the group.
    Sent {
        channel: RemoteGroupId,
        to: usize,
        tag: u32,
        signature: CallSignature,
        contents: PayloadDesc,
        /// Number of a message whose tensors are exchanged, which has no data.
        exchanged: Option<u64>,
    },
    /// The program of a rank has ended.
    RankExited {
        report: RankReport,
        /// True if ranks of the process exchange tensors.
        exchanges: bool,
    },
    /// A failure. If `decided`, it is the first one of the world; otherwise the sender reports it
    /// to the deciding process.
    Failed { failure: Failure, decided: bool },
    /// Message of the agreement on which ranks survive a failure.
    Membership(MembershipMessage),
    /// Message of deadlock detection about a rank whose wait is stalled.
    Waits(WaitForEdge),
    /// Reports a call whose tensors are exchanged to the process that orders exchanges.
    ExchangeReported {
        channel: RemoteGroupId,
        seq: u64,
        report: ExchangeReport,
    },
    /// Puts call `seq` of a channel of process `owner` next in the order of exchanges, or drops it
    /// if it is not started.
    ExchangeOrdered {
        owner: usize,
        channel: usize,
        seq: u64,
        is_started: bool,
    },
    /// Tells the process that orders exchanges that a receive has taken a message, whose tensors are
    /// to be exchanged.
    MessageTaken(MessageId),
    /// Puts a message next in the order of exchanges.
    MessageOrdered(MessageId),
    /// The process reports no more exchanges, because the programs of all ranks have ended; from the
    /// one that orders them, that the order is complete.
    ExchangesEnded,
    /// The process has made the launch, with this number of ranks in each process. The first
    /// message of a launch, except of one that continues after a shrink.
    Launched { each: usize },
}

/// Identifies a message whose tensors are exchanged: the sender's process, and a number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(in crate::comm) struct MessageId {
    pub process: usize,
    pub number: u64,
}

/// Signature of a call. Its names and shapes may be long, but are the same in every step. They are
/// sent in the first call that has them, and are known by their hash afterwards.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::comm) struct SentSignature {
    /// Hash of the signature without the fields below.
    hash: SignatureHash,
    /// The signature without the fields below, unless it was sent before.
    full: Option<CallSignature>,
    /// Fields that differ in every call, or in every step.
    forward_index: Option<u64>,
    decision: Option<Arc<str>>,
    digests: Option<Arc<[Digests]>>,
    /// The states of a [`ShardedModel`](crate::comm::ShardedModel); none without a model.
    states: Arc<[u64]>,
}

/// [Hash](CallSignature::hash128) of a signature.
type SignatureHash = [u8; 16];

/// Signatures of a channel that its process has sent, or another process has received, by hash.
/// When there are [`CAPACITY`](Self::CAPACITY), the next one replaces all of them, on both sides:
/// both see the same calls in the same order.
#[derive(Debug)]
pub(in crate::comm) struct KnownSignatures<T>(HashMap<SignatureHash, T>);

impl<T> Default for KnownSignatures<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> KnownSignatures<T> {
    /// Number of signatures that are kept. A model has about as many as units, or a few times that.
    const CAPACITY: usize = 1024;

    fn insert(&mut self, hash: SignatureHash, signature: T) {
        if self.0.len() == Self::CAPACITY {
            self.0.clear();
        }
        self.0.insert(hash, signature);
    }
}

impl SentSignature {
    /// Prepares a signature for sending, in full.
    pub fn new(signature: &CallSignature) -> Self {
        let mut full = signature.clone();
        let forward_index = full.forward_index.take();
        let decision = full.decision.take();
        let digests = full.digests.take();
        let states = full
            .model
            .as_mut()
            .map(|model| mem::take(&mut model.states))
            .unwrap_or_default();
        Self {
            hash: full.hash128().to_le_bytes(),
            full: Some(full),
            forward_index,
            decision,
            digests,
            states,
        }
    }

    /// Removes what the receivers know, as the sender's `known` says.
    pub fn abbreviated(self, known: &mut KnownSignatures<()>) -> Self {
        if known.0.contains_key(&self.hash) {
            return Self { full: None, ..self };
        }
        known.insert(self.hash, ());
        self
    }

    /// Returns the complete signature. `known` holds those that the sender has sent before. Returns
    /// `None` if it has not sent this one.
    pub fn complete(self, known: &mut KnownSignatures<CallSignature>) -> Option<CallSignature> {
        let Self {
            hash,
            full,
            forward_index,
            decision,
            digests,
            states,
        } = self;
        if let Some(full) = full {
            known.insert(hash, full);
        }
        let mut signature = known.0.get(&hash)?.clone();
        signature
            .model
            .iter_mut()
            .for_each(|model| model.states = states.clone());
        Some(CallSignature {
            forward_index,
            decision,
            digests,
            ..signature
        })
    }
}

/// Identifies a rank's membership of a group, by a number that the rank's process has assigned.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::comm) struct RemoteGroupId {
    pub number: usize,
    /// Description of the group; present in the first message to a process that uses this number.
    pub introduction: Option<RemoteGroupInfo>,
}

/// Describes a group to another process.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::comm) struct RemoteGroupInfo {
    /// Global ranks of the group.
    pub ranks: Vec<usize>,
    pub name: String,
    /// Group rank of the sender.
    pub member: usize,
}

/// Describes the tensors whose elements the payloads hold. A tensor without elements has no
/// payload.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(in crate::comm) struct PayloadDesc {
    /// Recipient (group rank) of each tensor, ascending; empty if all recipients need all tensors.
    pub recipients: Vec<usize>,
    pub tensors: Vec<TensorMeta>,
}

impl ControlMessage {
    /// Returns the description of the payloads; `None` if the message has none.
    pub fn contents(&self) -> Option<&PayloadDesc> {
        match self {
            Self::Joined { contents, .. }
            | Self::Data { contents, .. }
            | Self::Sent { contents, .. } => Some(contents),
            Self::Pull { .. }
            | Self::RankExited { .. }
            | Self::Failed { .. }
            | Self::Membership(_)
            | Self::Waits(_)
            | Self::ExchangeReported { .. }
            | Self::ExchangeOrdered { .. }
            | Self::MessageTaken(_)
            | Self::MessageOrdered(_)
            | Self::ExchangesEnded
            | Self::Launched { .. } => None,
        }
    }
}

impl Header {
    /// Encodes the header.
    pub fn write(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(64);
        bytes.extend_from_slice(VERSION.as_bytes());
        bytes.push(b'\n');
        postcard::to_extend(self, bytes).expect("a vector takes every message")
    }

    /// Decodes a header. Takes no more memory than a constant times the number of bytes.
    ///
    /// # Errors
    /// Describes the problem if the bytes are not a valid header, or one of another version.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        let invalid = "cannot be decoded";
        let line = bytes
            .iter()
            .take(64)
            .position(|byte| *byte == b'\n')
            .ok_or(invalid)?;
        let version = String::from_utf8_lossy(&bytes[..line]);
        if version != VERSION {
            return Err(format!(
                "has version `{}`, but this process has version `{VERSION}`",
                version.escape_debug()
            ));
        }
        match postcard::take_from_bytes(&bytes[line + 1..]) {
            Ok((header, [])) => Ok(header),
            _ => Err(invalid.into()),
        }
    }
}
