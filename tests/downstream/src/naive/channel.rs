//! [`NaiveChannel`]: the collectives of a group by envelopes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::{Device, TensorData};
use burn_dtensor::comm::backend::{
    CallContext, CallSignature, Completed, GroupBackend, GroupMember, PostResult, ReceivedTensors,
    Request,
};
use burn_dtensor::comm::{CollectiveId, CollectivePlan, CommError, ReduceOp, TensorMeta};
use burn_dtensor::placement::ShardSizes;

use super::Naive;
use super::host::{self, concat, narrow, reduce};
use super::inbox::{About, Desk, Envelope, Key, Receive, Seen};

/// The handle of a rank on one group.
#[derive(Debug)]
pub struct NaiveChannel {
    backend: Arc<Naive>,
    member: GroupMember,
    name: Arc<str>,
    /// Collectives so far.
    calls: AtomicU64,
    /// Sends and receives so far.
    messages: AtomicU64,
}

/// One call of a rank.
struct Called {
    backend: Arc<Naive>,
    channel: Key,
    /// The group rank.
    place: usize,
    signature: Arc<CallSignature>,
    id: CollectiveId,
}

impl NaiveChannel {
    pub fn new(backend: Arc<Naive>, member: GroupMember, name: &'static str) -> Self {
        Self {
            backend,
            member,
            name: name.into(),
            calls: AtomicU64::new(0),
            messages: AtomicU64::new(0),
        }
    }

    fn device(&self) -> Device {
        self.member.device.clone()
    }

    fn size(&self) -> usize {
        self.member.group.size()
    }

    /// Counts a call.
    fn enter(&self, post: CallContext, calls: &AtomicU64) -> Result<Called, CommError> {
        let (signature, ranks) = (
            Arc::new(post.signature),
            Arc::from(self.member.group.ranks()),
        );
        let (backend, place, channel) = (
            self.backend.clone(),
            self.member.group.rank(),
            (ranks, self.name.clone()),
        );
        let id = id(&signature, calls.fetch_add(1, Ordering::SeqCst), &channel);
        backend.enter(self.member.rank(), &id)?;
        Ok(Called {
            backend,
            channel,
            place,
            signature,
            id,
        })
    }

    /// Sends `parts` to the ranks of the group. The result is that of `finish` on the parts of all
    /// ranks for this one.
    fn call<T: 'static>(
        &self,
        post: CallContext,
        parts: Vec<Vec<TensorData>>,
        finish: impl FnOnce(Vec<Vec<TensorData>>) -> T + Send + 'static,
    ) -> PostResult<T> {
        let called = self.enter(post, &self.calls)?;
        for (to, tensors) in parts.into_iter().enumerate() {
            called.send(to, About::Call(called.id.seq), tensors);
        }
        Ok(Box::new(Meeting {
            called,
            finish: Box::new(finish),
        }))
    }
}

fn id(signature: &CallSignature, seq: u64, (ranks, _): &Key) -> CollectiveId {
    CollectiveId {
        op: signature.op,
        seq,
        label: signature.label.clone(),
        ranks: ranks.clone(),
    }
}

fn read(tensors: Vec<DispatchTensor>) -> Vec<TensorData> {
    tensors.into_iter().map(host::read).collect()
}

fn write(data: Vec<TensorData>, device: &Device) -> Vec<DispatchTensor> {
    data.into_iter()
        .map(|data| host::write(data, device))
        .collect()
}

/// Returns tensor `at` of each rank.
fn column(of_ranks: &[Vec<TensorData>], at: usize) -> Vec<TensorData> {
    of_ranks.iter().map(|tensors| tensors[at].clone()).collect()
}

impl GroupBackend for NaiveChannel {
    fn member(&self) -> &GroupMember {
        &self.member
    }

    fn all_gather(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        tensors: Vec<DispatchTensor>,
    ) -> PostResult<Vec<DispatchTensor>> {
        let device = self.device();
        self.call(post, vec![read(tensors); self.size()], move |parts| {
            let full_tensors = plan
                .shardings()
                .iter()
                .enumerate()
                .map(|(at, (dim, _))| concat(&column(&parts, at), *dim));
            write(full_tensors.collect(), &device)
        })
    }

    fn reduce_scatter(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let (device, size, count) = (self.device(), self.size(), full_tensors.len());
        let full_tensors = read(full_tensors);
        let part = |rank: usize, (full, (dim, sizes)): (_, &(usize, ShardSizes))| {
            narrow(full, *dim, sizes.range(size, rank))
        };
        let parts_of = |rank: usize| {
            full_tensors
                .iter()
                .zip(plan.shardings())
                .map(|full| part(rank, full))
                .collect()
        };
        self.call(post, (0..size).map(parts_of).collect(), move |terms| {
            write(
                (0..count)
                    .map(|at| reduce(&column(&terms, at), op))
                    .collect(),
                &device,
            )
        })
    }

    fn all_to_all(
        &self,
        post: CallContext,
        mut parts: Vec<Vec<DispatchTensor>>,
        _metas: Vec<Vec<TensorMeta>>,
    ) -> PostResult<Vec<Vec<DispatchTensor>>> {
        let (place, device) = (self.member.group.rank(), self.device());
        let own = std::mem::take(&mut parts[place]);
        self.call(post, parts.into_iter().map(read).collect(), move |parts| {
            let mut parts: Vec<_> = parts
                .into_iter()
                .map(|tensors| write(tensors, &device))
                .collect();
            parts[place] = own;
            parts
        })
    }

    fn broadcast(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        _metas: Vec<TensorMeta>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        let device = self.device();
        self.call(post, vec![read(tensors); self.size()], move |mut parts| {
            write(parts.swap_remove(root), &device)
        })
    }

    fn barrier(&self, post: CallContext) -> PostResult<()> {
        self.call(post, vec![Vec::new(); self.size()], |_| ())
    }

    fn send(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        to: usize,
        tag: u32,
    ) -> PostResult<()> {
        let called = self.enter(post, &self.messages)?;
        called.send(to, About::Message(tag), read(tensors));
        Ok(Box::new(Sent))
    }

    fn receive(
        &self,
        post: CallContext,
        from: Option<usize>,
        tag: u32,
        _metas: Option<Vec<TensorMeta>>,
    ) -> PostResult<ReceivedTensors> {
        let called = self.enter(post, &self.messages)?;
        let (channel, number) = (called.channel.clone(), called.id.seq);
        called.desk(|desk| {
            desk.receive(Receive {
                channel,
                number,
                from,
                tag,
                message: None,
            })
        });
        Ok(Box::new(Awaited {
            called,
            from,
            device: self.device(),
        }))
    }
}

impl Called {
    fn rank(&self) -> usize {
        self.channel.0[self.place]
    }

    fn desk<T>(&self, look: impl FnOnce(&mut Desk) -> T) -> T {
        look(&mut self.backend.inbox(self.rank()).desk.lock())
    }

    fn send(&self, to: usize, about: About, tensors: Vec<TensorData>) {
        let (channel, signature) = (self.channel.clone(), self.signature.clone());
        self.backend.deliver(
            self.channel.0[to],
            Envelope {
                channel,
                about,
                from: self.place,
                signature,
                tensors,
            },
        );
    }

    fn is_over(&self) -> bool {
        self.backend.end.get().is_some()
    }

    /// Looks for all ranks' parts of the collective, in group order.
    fn parts(&self, desk: &mut Desk) -> Seen<Vec<Vec<TensorData>>> {
        let came: Vec<_> = desk.of_call(&self.channel, self.id.seq).collect();
        if let Some(error) = self.disagreement(&came) {
            return Seen::Wrong(error);
        }
        let ranks = self.channel.0.iter().enumerate();
        let missing: Vec<_> = ranks
            .filter(|(place, _)| came.iter().all(|envelope| envelope.from != *place))
            .map(|(_, &r)| r)
            .collect();
        if !missing.is_empty() {
            return Seen::Awaited(missing);
        }
        let mut came = desk.take_call(&self.channel, self.id.seq);
        came.sort_by_key(|envelope| envelope.from);
        if let Some(divergence) =
            CallSignature::divergence(came.iter().map(|envelope| &*envelope.signature))
        {
            return Seen::Wrong(divergence.error(&self.channel.0, self.id.clone()));
        }
        Seen::There(came.into_iter().map(|envelope| envelope.tensors).collect())
    }

    /// Blames the rank that fewer ranks agree with. Every rank compares its signature with every
    /// other, by itself.
    fn disagreement(&self, came: &[&Envelope]) -> Option<CommError> {
        let other = came
            .iter()
            .find(|envelope| self.signature.difference(&envelope.signature).is_some())?;
        let agree = |own: &CallSignature| {
            came.iter()
                .filter(|envelope| own.difference(&envelope.signature).is_none())
                .count()
        };
        let (own, its) = (
            (self.place, &self.signature),
            (other.from, &other.signature),
        );
        let (blamed, other) = if agree(own.1) < agree(its.1) {
            (own, its)
        } else {
            (its, own)
        };
        Some(CommError::Mismatch {
            rank: self.channel.0[blamed.0],
            other: self.channel.0[other.0],
            during: id(other.1, self.id.seq, &self.channel),
            differs: blamed.1.difference(other.1).unwrap_or_default(),
        })
    }

    /// Looks for the message of a receive.
    fn message(&self, desk: &mut Desk, from: Option<usize>) -> Seen<Envelope> {
        let Some(message) = desk.take_message(&self.channel, self.id.seq) else {
            return Seen::Awaited(from.map_or_else(
                || self.channel.0.to_vec(),
                |from| vec![self.channel.0[from]],
            ));
        };
        let Some(differs) = self.signature.refusal(&message.signature) else {
            return Seen::There(message);
        };
        let (rank, other, during) = (self.rank(), self.channel.0[message.from], self.id.clone());
        Seen::Wrong(CommError::Mismatch {
            rank,
            other,
            during,
            differs,
        })
    }
}

/// A collective that this rank takes part in.
struct Meeting<T> {
    called: Called,
    finish: Box<dyn FnOnce(Vec<Vec<TensorData>>) -> T + Send>,
}

impl<T> Request<T> for Meeting<T> {
    fn is_complete(&self) -> bool {
        let Called { channel, id, .. } = &self.called;
        self.called.is_over()
            || self
                .called
                .desk(|desk| desk.of_call(channel, id.seq).count() == channel.0.len())
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        let Self { called, finish } = *self;
        let parts = called
            .backend
            .wait(called.rank(), &called.id, deadline, |desk| {
                called.parts(desk)
            })?;
        Ok(Completed::timed(|| finish(parts)))
    }
}

/// A message that this rank waits for.
struct Awaited {
    called: Called,
    from: Option<usize>,
    device: Device,
}

impl Request<ReceivedTensors> for Awaited {
    fn is_complete(&self) -> bool {
        let Called { channel, id, .. } = &self.called;
        self.called.is_over() || self.called.desk(|desk| desk.has_message(channel, id.seq))
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<ReceivedTensors>, CommError> {
        let Self {
            called,
            from,
            device,
        } = *self;
        let look = |desk: &mut Desk| called.message(desk, from);
        let message = called
            .backend
            .wait(called.rank(), &called.id, deadline, look)?;
        Ok(Completed::timed(|| ReceivedTensors {
            from: message.from,
            tensors: write(message.tensors, &device),
        }))
    }
}

/// A message that has been delivered.
struct Sent;

impl Request<()> for Sent {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>, _: Duration) -> Result<Completed<()>, CommError> {
        Ok(Completed::timed(|| ()))
    }
}
