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
//! The ranks of a channel connect in its first exchange: member 0 sends a number with the call, by
//! which all know the channel. Each call has an exchange stream of its own, so ranks may start the
//! calls of several channels in different orders. A plane with one stream for several channels needs
//! one order of all calls on it.

mod streams;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, TensorData};
use parking_lot::Mutex;

use super::PlaneContribution;
use super::call::{DataCall, RecipientData};
use super::contribution::Contribution;
use super::inputs::CollectiveInputs;
use super::payload::payload;
use super::plane::{DataPlane, DataPlaneError, PlaneResult, TakeExchanged};
use super::shard;
use crate::comm::{Capabilities, Group, Op, TensorMeta, backend};
use crate::memory;
use streams::{DeviceTensor, Event, ExchangePart, PlaneId, StreamId};

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
    id: PlaneId,
    /// Step that the plane forgets.
    forgotten: Option<Step>,
    /// Rank whose device is lost: it cannot start an exchange.
    lost: Option<usize>,
    /// True if tensors in host memory have another plane.
    is_of_device: bool,
    /// Number of each connected channel, by its ranks and its name.
    channels: Mutex<HashMap<(Vec<usize>, &'static str), u64>>,
    aborts: AtomicUsize,
}

/// Tensors that a rank has copied to its device for a call.
#[derive(Debug)]
pub(in crate::comm) struct Staged {
    group: Group,
    name: &'static str,
    /// Tensors for each member.
    sent: Vec<Vec<DeviceTensor>>,
    /// True if each member receives only its own shards or tensors.
    is_addressed: bool,
    packed: Event,
}

impl DoublePlane {
    pub fn new() -> Self {
        Self {
            id: streams::number(),
            forgotten: None,
            lost: None,
            is_of_device: false,
            channels: Mutex::default(),
            aborts: AtomicUsize::new(0),
        }
    }

    pub fn with_forgotten(self, forgotten: Option<Step>) -> Self {
        Self { forgotten, ..self }
    }

    pub fn with_lost(self, rank: usize) -> Self {
        Self {
            lost: Some(rank),
            ..self
        }
    }

    /// Leaves tensors in host memory to their own plane.
    #[allow(dead_code, reason = "only tests with a GPU have two planes")]
    pub fn of_device(self) -> Self {
        Self {
            is_of_device: true,
            ..self
        }
    }

    /// Returns true if the plane takes tensors on `device`.
    pub fn takes(&self, device: &Device) -> bool {
        !self.is_of_device || !memory::is_host(device)
    }

    /// Returns how often the plane was aborted.
    pub fn aborts(&self) -> usize {
        self.aborts.load(Ordering::Relaxed)
    }

    /// Returns the number of exchanges that a rank has started and neither taken nor dropped.
    pub fn open_exchanges(&self) -> usize {
        streams::open_exchanges(self.id)
    }

    fn makes(&self, step: Step) -> bool {
        self.forgotten != Some(step)
    }

    /// Returns the number of the channel, which the call connects if it has none yet.
    fn channel(&self, staged: &Staged, inputs: &CollectiveInputs<'_>) -> u64 {
        let key = (staged.group.ranks().to_vec(), staged.name);
        *self.channels.lock().entry(key).or_insert_with(|| {
            let number = backend::into_data(inputs.all[0].tensors[0].clone());
            let number = number.as_bytes().try_into().expect("eight bytes");
            u64::from_le_bytes(number)
        })
    }
}

/// Copies a tensor to the device, on the compute stream.
fn copied_in(stream: StreamId, tensor: &DispatchTensor) -> DeviceTensor {
    let copy = DeviceTensor::new(TensorMeta {
        shape: tensor.shape(),
        dtype: tensor.dtype(),
    });
    let to = copy.bytes.clone();
    let elements = payload(tensor);
    streams::run(stream, move || {
        *to.lock() = (*elements).as_ref().to_vec();
    });
    copy
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
        if call.signature.op == Op::Send {
            return contribution;
        }
        let group = call.member.group.clone();
        let size = group.size();
        let stream = StreamId::Compute(self.id, call.member.rank());
        let sent = (0..size).map(|member| {
            needed_by(member, size, &contribution, call.needed)
                .iter()
                .map(|tensor| copied_in(stream, tensor))
                .collect()
        });
        let sent = sent.collect();
        let packed = Event::default();
        if self.makes(Step::RecordPacked) {
            streams::record(stream, &packed);
        }
        let introduces = call.is_first_exchange && group.rank() == 0;
        let introduction = introduces.then(|| {
            let number = streams::number().to_le_bytes().to_vec();
            let data = TensorData::from_bytes_vec(number, [8], DType::U8);
            backend::from_data(data, &memory::host())
        });
        let staged = Staged {
            group,
            name: call.name,
            sent,
            is_addressed: !matches!(call.needed, RecipientData::Full),
            packed,
        };
        let introduction = introduction.into_iter().collect();
        Contribution::new(introduction, PlaneContribution::Double(Arc::new(staged)))
    }

    fn start(&self, inputs: &CollectiveInputs<'_>) -> PlaneResult<TakeExchanged> {
        let PlaneContribution::Double(staged) = &inputs.own().plane else {
            unreachable!("the plane has prepared the contribution")
        };
        let member = staged.group.rank();
        let rank = staged.group.ranks()[member];
        if self.lost == Some(rank) {
            return Err(DataPlaneError {
                problem: "the device is lost".into(),
            });
        }
        let id = (self.channel(staged, inputs), inputs.op.seq);
        let stream = StreamId::Exchange(self.id, rank, id);
        if self.makes(Step::WaitPacked) {
            streams::wait(stream, &staged.packed);
        }
        let part = ExchangePart::start(self.id, stream, id, member, staged.sent.clone())?;
        let exchanged = Event::default();
        if self.makes(Step::RecordExchanged) {
            streams::record(stream, &exchanged);
        }
        let waits = self.makes(Step::WaitExchanged);
        let synchronizes = self.makes(Step::Synchronize);
        let compute = StreamId::Compute(self.id, rank);
        let is_addressed = staged.is_addressed;
        Ok(Box::new(move |time| {
            let received = part.received(time)?;
            if waits {
                streams::wait(compute, &exchanged);
            }
            let copied_out = |from: &DeviceTensor| {
                let result = DeviceTensor::new(from.meta.clone());
                let (from, to) = (from.bytes.clone(), result.bytes.clone());
                streams::run(compute, move || *to.lock() = from.lock().clone());
                result
            };
            let results: Vec<Vec<_>> = received
                .iter()
                .map(|list| list.iter().map(copied_out).collect())
                .collect();
            if synchronizes {
                streams::synchronize(compute);
            }
            let contribution = |list: Vec<DeviceTensor>| {
                let recipients = vec![member; if is_addressed { list.len() } else { 0 }];
                let tensors = list.into_iter().map(on_host).collect();
                Contribution::received(recipients, tensors).exclusive()
            };
            Ok(results.into_iter().map(contribution).collect())
        }))
    }

    fn abort(&self) {
        self.aborts.fetch_add(1, Ordering::Relaxed);
        streams::abort(self.id);
    }
}

fn on_host(tensor: DeviceTensor) -> DispatchTensor {
    let DeviceTensor { meta, bytes } = tensor;
    let data = TensorData::from_bytes_vec(bytes.lock().clone(), meta.shape, meta.dtype);
    backend::from_data(data, &memory::host())
}
