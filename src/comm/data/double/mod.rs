//! Test double of a plane whose ranks exchange tensors over streams of their devices: memory of a
//! device is host memory, and [streams](streams) run only when an event or a wait needs them. If
//! the plane forgets one of its [steps](Step), values are wrong.
//!
//! ```text
//! compute stream    copies tensors in, records `packed`                waits for `exchanged`, copies out
//! exchange stream                 waits for `packed`, exchanges, records `exchanged`
//! the rank's thread                                                                   waits for the compute stream
//! ```
//!
//! Each call has an exchange stream of its own, so processes may start calls in different orders. A
//! plane with one stream for several calls needs one order of all calls on it.

mod streams;

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::TensorData;

use super::PlaneContribution;
use super::call::{DataCall, RecipientData};
use super::contribution::Contribution;
use super::inputs::CollectiveInputs;
use super::payload::payload;
use super::plane::{DataPlane, DataPlaneError, PlaneResult, TakeExchanged};
use super::shard;
use crate::comm::{Capabilities, Group, Op, TensorMeta, backend};
use crate::memory;
pub(in crate::comm) use streams::Streams;
use streams::{DeviceTensor, EventId, ExchangeId, StreamId};

/// A step that orders the streams. Without any of them, ranks read memory before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum Step {
    /// Records an event after the tensors were copied in.
    RecordPacked,
    /// Lets the exchange wait for it.
    WaitPacked,
    /// Records an event after the exchange.
    RecordExchanged,
    /// Lets the compute stream wait for it.
    WaitExchanged,
    /// Waits for the compute stream before the host reads the result.
    Synchronize,
}

impl Step {
    pub const ALL: [Self; 5] = [
        Self::RecordPacked,
        Self::WaitPacked,
        Self::RecordExchanged,
        Self::WaitExchanged,
        Self::Synchronize,
    ];
}

/// The plane of the ranks of one process.
#[derive(Debug)]
pub(in crate::comm) struct DoublePlane {
    streams: Arc<Streams>,
    /// Step that the plane forgets.
    forgotten: Option<Step>,
    /// Rank whose device is lost: it cannot start an exchange.
    lost: Option<usize>,
}

/// What a rank has copied to its device for a call.
#[derive(Debug)]
pub(in crate::comm) struct Staged {
    group: Group,
    name: &'static str,
    /// Tensors for each member.
    sent: Vec<Vec<DeviceTensor>>,
    /// True if each member receives only its own shards or tensors.
    is_addressed: bool,
    packed: EventId,
}

impl DoublePlane {
    pub fn new(streams: Arc<Streams>, forgotten: Option<Step>) -> Arc<Self> {
        Arc::new(Self {
            streams,
            forgotten,
            lost: None,
        })
    }

    /// Creates the plane of ranks of which one has lost its device.
    pub fn without_device(lost: usize) -> Arc<Self> {
        Arc::new(Self {
            streams: Arc::default(),
            forgotten: None,
            lost: Some(lost),
        })
    }

    fn takes(&self, step: Step) -> bool {
        self.forgotten != Some(step)
    }

    /// Copies a tensor to the device, on the compute stream.
    fn copied_in(&self, stream: &StreamId, tensor: &DispatchTensor) -> DeviceTensor {
        let copy = DeviceTensor::new(TensorMeta {
            shape: tensor.shape(),
            dtype: tensor.dtype(),
        });
        let to = copy.bytes.clone();
        let elements = payload(tensor);
        self.streams.run(stream, move || {
            *to.lock() = (*elements).as_ref().to_vec();
        });
        copy
    }
}

/// Returns the tensors of `contribution` that `member` of `size` members needs.
fn needed_by(
    member: usize,
    size: usize,
    contribution: &Contribution,
    needed: RecipientData<'_>,
) -> Vec<DispatchTensor> {
    match needed {
        RecipientData::Shards(shardings) => contribution
            .tensors
            .iter()
            .zip(shardings)
            .map(|(tensor, (dim, sizes))| shard(tensor, *dim, sizes.range(size, member)))
            .collect(),
        RecipientData::Full | RecipientData::Addressed => contribution.tensors_for(member).to_vec(),
    }
}

impl DataPlane for DoublePlane {
    fn name(&self) -> &'static str {
        "double"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            needs_remote_bytes: false,
            ..Capabilities::default()
        }
    }

    fn contribute(
        &self,
        call: &DataCall<'_>,
        tensors: Vec<DispatchTensor>,
        recipients: Vec<usize>,
    ) -> Contribution {
        let contribution =
            Contribution::new(tensors, PlaneContribution::bytes(None)).with_recipients(recipients);
        if call.op == Op::Send {
            return contribution;
        }
        let group = call.member.group.clone();
        let size = group.size();
        let stream = StreamId::Compute(call.member.rank());
        let sent = (0..size).map(|member| {
            needed_by(member, size, &contribution, call.needed)
                .iter()
                .map(|tensor| self.copied_in(&stream, tensor))
                .collect()
        });
        let sent = sent.collect();
        let packed = self.streams.event();
        if self.takes(Step::RecordPacked) {
            self.streams.record(&stream, packed);
        }
        let staged = Staged {
            group,
            name: call.name,
            sent,
            is_addressed: !matches!(call.needed, RecipientData::Full),
            packed,
        };
        Contribution::new(Vec::new(), PlaneContribution::Double(Arc::new(staged)))
    }

    fn start(&self, inputs: &CollectiveInputs<'_>) -> PlaneResult<TakeExchanged> {
        let PlaneContribution::Double(staged) = &inputs.own().plane else {
            unreachable!("the plane has prepared the contribution")
        };
        let Staged {
            group,
            name,
            sent,
            is_addressed,
            packed,
        } = &**staged;
        let member = group.rank();
        let rank = group.ranks()[member];
        if self.lost == Some(rank) {
            return Err(DataPlaneError {
                problem: "the device is lost".into(),
            });
        }
        let id: ExchangeId = (group.ranks().to_vec(), name, inputs.op.seq);
        let stream = StreamId::Exchange(rank, id.clone());
        let streams = self.streams.clone();
        if self.takes(Step::WaitPacked) {
            streams.wait(&stream, *packed);
        }
        streams.exchange(&stream, &id, (member, group.size()), sent.clone())?;
        let exchanged = streams.event();
        if self.takes(Step::RecordExchanged) {
            streams.record(&stream, exchanged);
        }
        let waits = self.takes(Step::WaitExchanged);
        let synchronizes = self.takes(Step::Synchronize);
        let is_addressed = *is_addressed;
        Ok(Box::new(move || {
            let received = streams.receives(&id, member)?;
            let compute = StreamId::Compute(rank);
            if waits {
                streams.wait(&compute, exchanged);
            }
            let results: Vec<Vec<_>> = received
                .iter()
                .map(|list| {
                    let result = |tensor: &DeviceTensor| DeviceTensor::new(tensor.meta.clone());
                    list.iter().map(result).collect()
                })
                .collect();
            for (from, to) in received.iter().flatten().zip(results.iter().flatten()) {
                let (from, to) = (from.bytes.clone(), to.bytes.clone());
                streams.run(&compute, move || *to.lock() = from.lock().clone());
            }
            if synchronizes {
                streams.synchronize(&compute)?;
            }
            let contribution = |list: Vec<DeviceTensor>| {
                let recipients = vec![member; if is_addressed { list.len() } else { 0 }];
                Contribution::received(recipients, list.into_iter().map(on_host).collect())
            };
            Ok(results.into_iter().map(contribution).collect())
        }))
    }

    fn abort(&self) {
        self.streams.abort();
    }
}

fn on_host(tensor: DeviceTensor) -> DispatchTensor {
    let DeviceTensor { meta, bytes } = tensor;
    let data = TensorData::from_bytes_vec(bytes.lock().clone(), meta.shape, meta.dtype);
    backend::from_data(data, &memory::host())
}
