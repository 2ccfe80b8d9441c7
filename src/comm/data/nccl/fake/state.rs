//! Memory, streams and communicators of the GPUs.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{DType, TensorData};
use half::{bf16, f16};
use parking_lot::Mutex;

use super::clocks::{Accesses, Clock, StreamKey};
use crate::comm::backend::ranges::full;
use crate::comm::data::nccl::api::{CopyArgs, NativeOp};
use crate::comm::transport::Payload;
use crate::comm::{ReduceOp, backend};
use crate::memory;

/// Byte that fills memory before anything is written to it.
const POISON: u8 = 0xA5;

/// An operation of NCCL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) enum NcclCall {
    Connect,
    Abort,
    Destroy,
    AllGather {
        bytes: usize,
    },
    ReduceScatter {
        count: usize,
        dtype: DType,
        op: NativeOp,
    },
    AllReduce {
        count: usize,
        dtype: DType,
        op: NativeOp,
    },
    Broadcast {
        bytes: usize,
        root: usize,
    },
    /// A group of sends and receives: number of bytes sent to, and received from, each peer.
    Pairs {
        sent: Vec<(usize, usize)>,
        received: Vec<(usize, usize)>,
    },
}

/// A call as it was made.
#[derive(Debug, Clone)]
pub(in crate::comm) struct Recorded {
    #[cfg_attr(not(test), expect(dead_code, reason = "tests count by it"))]
    pub gpu: usize,
    /// Number of the communicator's clique.
    pub clique: usize,
    /// Rank of the communicator.
    pub member: usize,
    /// Stream of an operation, which only one rank has.
    pub stream: Option<usize>,
    pub call: NcclCall,
}

/// Memory of one allocation.
#[derive(Debug)]
pub struct Memory {
    pub bytes: Vec<u8>,
    pub accesses: Accesses,
}

/// Point on a stream.
#[derive(Debug)]
pub struct EventState {
    pub stream: StreamKey,
    /// Clock once it was reached; `None` before, and for an event that was never recorded.
    pub clock: Mutex<Option<Clock>>,
    pub is_recorded: bool,
}

/// An exported tensor, and the work of the rank's stream that wrote it.
pub struct ExportedTensor {
    pub payload: Payload,
    pub accesses: Mutex<Accesses>,
}

/// One member's part of an operation.
#[derive(Debug, Clone)]
pub struct Part {
    pub comm: usize,
    pub call: NcclCall,
    pub send: usize,
    pub recv: usize,
    pub stream: StreamKey,
}

/// One member's group of sends and receives, which involves only its peers.
#[derive(Debug, Clone)]
pub struct PairGroup {
    pub comm: usize,
    pub stream: StreamKey,
    pub sent: Vec<PairSpan>,
    pub received: Vec<PairSpan>,
    pub is_done: bool,
}

/// Bytes that are sent to a peer, or received from it.
#[derive(Debug, Clone, Copy)]
pub struct PairSpan {
    pub peer: usize,
    pub bytes: usize,
    pub at: usize,
    /// Number of those between the two before.
    pub number: usize,
}

/// A rank's part of an operation. In a collective, `peer` is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct OperationPart {
    clique: usize,
    member: usize,
    peer: Option<usize>,
    sends: bool,
    /// Number of the operations of this kind before.
    number: usize,
}

/// Streams each of which waits for the next, and the group of pairs in which it waits.
type WaitingStreams = Vec<(StreamKey, Option<usize>)>;

pub enum Command {
    /// Copies an exported tensor, which the plane must keep until then.
    CopyIn(Weak<Vec<ExportedTensor>>, usize, usize),
    /// Copies from an address.
    CopyOut(usize, Arc<Mutex<Vec<u8>>>),
    Record(Arc<EventState>),
    Wait(Arc<EventState>),
    /// Operation of this index of a communicator.
    Operation {
        comm: usize,
        index: usize,
    },
    /// Group of sends and receives of this number.
    PairGroup(usize),
}

/// A send or receive in a group.
#[derive(Debug, Clone, Copy)]
pub struct GroupedCall {
    pub args: CopyArgs,
    pub peer: usize,
    pub sends: bool,
}

/// State of a communicator of one rank.
#[derive(Debug)]
pub struct CommState {
    pub clique: usize,
    pub rank: usize,
    pub gpu: usize,
    /// True once all ranks have joined.
    pub is_connected: bool,
    /// Number of polls until its last call no longer continues in the background.
    pub busy: usize,
    pub issued: usize,
    pub collectives: usize,
    pub is_over: bool,
    pub error: Option<String>,
}

/// The communicators that were connected with one identity.
#[derive(Debug)]
pub struct Clique {
    pub members: Vec<Option<usize>>,
    /// Parts of each operation, by member.
    pub operations: Vec<Vec<Option<Part>>>,
    pub done: Vec<bool>,
    /// Groups that send, and those that receive, from one member to another, in order.
    pub sends: HashMap<(usize, usize), Vec<usize>>,
    pub receives: HashMap<(usize, usize), Vec<usize>>,
    /// Transfers that are done: from, to, and number.
    pub transfers: HashSet<(usize, usize, usize)>,
}

#[derive(Default)]
pub struct FakeState {
    pub violations: Vec<String>,
    pub calls: Vec<Recorded>,
    pub host_waits: usize,
    /// Number of the collective of each communicator that never ends.
    pub hangs_in: Option<usize>,
    pub memory: BTreeMap<usize, Memory>,
    pub streams: HashMap<StreamKey, VecDeque<Command>>,
    pub clocks: HashMap<StreamKey, Clock>,
    pub comms: HashMap<usize, CommState>,
    pub cliques: HashMap<usize, Clique>,
    pub pairs: HashMap<usize, PairGroup>,
    /// Communicator and memory of each registration.
    pub registrations: HashMap<usize, (usize, Range<usize>)>,
    /// Thread that makes the calls for each GPU.
    pub submitters: HashMap<usize, ThreadId>,
    /// Calls of the open group of each thread.
    pub groups: HashMap<ThreadId, Vec<GroupedCall>>,
    next: usize,
}

impl std::fmt::Debug for FakeState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeState")
            .field("violations", &self.violations)
            .finish_non_exhaustive()
    }
}

impl FakeState {
    /// Returns a number that nothing else has.
    pub(super) fn number(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    pub(super) fn violation(&mut self, problem: String) {
        self.violations.push(problem);
    }

    /// Notes that streams wait forever, and ends the operations for which they wait.
    pub(super) fn hang(&mut self, problem: String) {
        self.violation(problem);
        self.comms.values_mut().for_each(|comm| comm.is_over = true);
    }

    pub(super) fn all_violations(&mut self) -> Vec<String> {
        let mut all = self.violations.clone();
        all.extend(
            self.memory
                .keys()
                .map(|at| format!("memory {at} was not freed")),
        );
        all.extend(
            self.registrations
                .keys()
                .map(|number| format!("registration {number} was not ended")),
        );
        let open = self.comms.iter().filter(|(_, comm)| !comm.is_over);
        all.extend(open.map(|(number, _)| format!("communicator {number} was not freed")));
        let groups = self.groups.iter().filter(|(_, calls)| !calls.is_empty());
        all.extend(groups.map(|(thread, _)| format!("{thread:?} has left a group open")));
        if all.is_empty() {
            all = self.waiting_streams();
        }
        all
    }

    /// Describes the streams that wait for each other if every operation needs all its ranks to have
    /// reached it, as those of NCCL may. Those of this simulation are carried out by one thread, and
    /// may have found a way.
    fn waiting_streams(&self) -> Vec<String> {
        let mut streams = BTreeMap::<usize, Vec<&Recorded>>::new();
        // Streams and places of the parts of each operation.
        let mut parts = HashMap::<OperationPart, (usize, usize)>::new();
        let mut needed = HashMap::<(usize, usize), Vec<OperationPart>>::new();
        let mut counts = HashMap::<OperationPart, usize>::new();
        for call in &self.calls {
            let Some(stream) = call.stream else { continue };
            let calls = streams.entry(stream).or_default();
            let place = (stream, calls.len());
            calls.push(call);
            let (clique, member) = (call.clique, call.member);
            let mut add = |part: OperationPart, others: &mut dyn Iterator<Item = OperationPart>| {
                let count = counts.entry(part).or_default();
                parts.insert(
                    OperationPart {
                        number: *count,
                        ..part
                    },
                    place,
                );
                let others = others.map(|other| OperationPart {
                    number: *count,
                    ..other
                });
                needed.entry(place).or_default().extend(others);
                *count += 1;
            };
            let part = |member, peer, sends| OperationPart {
                clique,
                member,
                peer,
                sends,
                number: 0,
            };
            match &call.call {
                NcclCall::Pairs { sent, received } => {
                    for (peer, _) in sent {
                        let other = part(*peer, Some(member), false);
                        add(part(member, Some(*peer), true), &mut [other].into_iter());
                    }
                    for (peer, _) in received {
                        let other = part(*peer, Some(member), true);
                        add(part(member, Some(*peer), false), &mut [other].into_iter());
                    }
                }
                _ => {
                    let members = 0..self.cliques[&clique].members.len();
                    let mut others = members.map(|other| part(other, None, false));
                    add(part(member, None, false), &mut others);
                }
            }
        }
        let mut reached: HashMap<usize, usize> = streams.keys().map(|of| (*of, 0)).collect();
        let is_blocked = |reached: &HashMap<usize, usize>, place: (usize, usize)| {
            let mut others = needed.get(&place).into_iter().flatten();
            // A rank that has failed may have no part.
            others.any(|other| {
                let other = parts.get(other);
                other.is_some_and(|(stream, at)| reached[stream] < *at)
            })
        };
        let mut has_moved = true;
        while has_moved {
            has_moved = false;
            for (stream, calls) in &streams {
                while reached[stream] < calls.len()
                    && !is_blocked(&reached, (*stream, reached[stream]))
                {
                    *reached.get_mut(stream).expect("it is known") += 1;
                    has_moved = true;
                }
            }
        }
        let stuck = streams
            .iter()
            .filter(|(stream, calls)| reached[stream] < calls.len());
        stuck
            .map(|(stream, calls)| {
                let at = reached[stream];
                format!(
                    "stream {stream} waits forever in operation {at}, {:?}",
                    calls[at].call
                )
            })
            .collect()
    }

    /// Allocates memory. Addresses are far apart, so that a wrong one is noticed.
    pub(super) fn allocate(&mut self, bytes: usize) -> usize {
        let at = self.number() << 32;
        self.memory.insert(
            at,
            Memory {
                bytes: vec![POISON; bytes],
                accesses: Accesses::default(),
            },
        );
        at
    }

    /// Enqueues work.
    pub(super) fn push(&mut self, stream: StreamKey, command: Command) {
        self.streams.entry(stream).or_default().push_back(command);
    }

    fn memory_at(&mut self, at: usize, len: usize) -> Option<(&mut Memory, usize)> {
        let (start, memory) = self.memory.range_mut(..=at).next_back()?;
        let offset = at - start;
        (offset + len <= memory.bytes.len()).then_some((memory, offset))
    }

    /// Notes an access of the next work of `stream`.
    fn access(&mut self, stream: StreamKey, number: u64, at: usize, len: usize, writes: bool) {
        if len == 0 {
            return;
        }
        let clock = self.clocks.entry(stream).or_default().clone();
        let Some((memory, offset)) = self.memory_at(at, len) else {
            return self.violation(format!("{len} bytes at {at} are not allocated"));
        };
        let conflict = memory
            .accesses
            .add(offset..offset + len, writes, stream, number, &clock);
        if let Some(other) = conflict {
            let what = if writes { "writes" } else { "reads" };
            self.violation(format!(
                "{stream:?} {what} memory that {other:?} uses, without waiting for it"
            ));
        }
    }

    fn tick(&mut self, stream: StreamKey) -> u64 {
        self.clocks.entry(stream).or_default().tick(stream)
    }

    fn read(&mut self, at: usize, len: usize) -> Vec<u8> {
        self.memory_at(at, len)
            .map(|(memory, offset)| memory.bytes[offset..offset + len].to_vec())
            .unwrap_or_else(|| vec![POISON; len])
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        if let Some((memory, offset)) = self.memory_at(at, bytes.len()) {
            memory.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Runs what is enqueued on `stream`. Returns false if it needs a rank that has not issued an
    /// operation.
    pub(super) fn run(&mut self, stream: StreamKey) -> bool {
        self.advance(stream, &mut Vec::new(), &|_| false)
    }

    fn advance(
        &mut self,
        stream: StreamKey,
        waiting: &mut WaitingStreams,
        is_enough: &dyn Fn(&Self) -> bool,
    ) -> bool {
        if waiting.iter().any(|(other, _)| *other == stream) {
            self.hang(format!("streams wait for each other: {waiting:?}"));
            return false;
        }
        waiting.push((stream, None));
        let is_done = self.advance_only(stream, waiting, is_enough);
        waiting.pop();
        is_done
    }

    fn advance_only(
        &mut self,
        stream: StreamKey,
        waiting: &mut WaitingStreams,
        is_enough: &dyn Fn(&Self) -> bool,
    ) -> bool {
        while !is_enough(self) {
            let Some(command) = self.streams.get_mut(&stream).and_then(VecDeque::pop_front) else {
                return true;
            };
            match command {
                Command::CopyIn(tensors, index, to) => {
                    let Some(tensors) = tensors.upgrade() else {
                        self.violation(format!("{stream:?} copies a tensor that was given up"));
                        continue;
                    };
                    let bytes = (*tensors[index].payload).as_ref().to_vec();
                    let number = self.tick(stream);
                    let clock = self.clocks[&stream].clone();
                    let tensor = &tensors[index];
                    let conflict =
                        tensor
                            .accesses
                            .lock()
                            .add(0..bytes.len(), false, stream, number, &clock);
                    if conflict.is_some() {
                        self.violation(format!("{stream:?} copies a tensor that is not ready"));
                    }
                    self.access(stream, number, to, bytes.len(), true);
                    self.write(to, &bytes);
                }
                Command::CopyOut(from, target) => {
                    let number = self.tick(stream);
                    let len = target.lock().len();
                    self.access(stream, number, from, len, false);
                    let bytes = self.read(from, len);
                    *target.lock() = bytes;
                }
                Command::Record(event) => {
                    self.tick(stream);
                    let clock = self.clocks[&stream].clone();
                    *event.clock.lock() = Some(clock);
                }
                Command::Wait(event) => {
                    let is_reached = || event.clock.lock().is_some();
                    if !is_reached()
                        && !self.advance(event.stream, waiting, &|_| event.clock.lock().is_some())
                    {
                        self.requeue(stream, Command::Wait(event));
                        return false;
                    }
                    let clock = event.clock.lock().clone();
                    if let Some(clock) = clock {
                        self.clocks.entry(stream).or_default().merge(&clock);
                    }
                }
                Command::PairGroup(number) => {
                    if !self.meet_peers(number, waiting) {
                        self.requeue(stream, Command::PairGroup(number));
                        return false;
                    }
                }
                Command::Operation { comm, index } => {
                    if !self.meet(comm, index, waiting) {
                        self.requeue(stream, Command::Operation { comm, index });
                        return false;
                    }
                }
            }
        }
        true
    }

    fn requeue(&mut self, stream: StreamKey, command: Command) {
        self.streams.entry(stream).or_default().push_front(command);
    }

    /// Carries out an operation that the stream of `comm` has reached, once those of all members
    /// have. Returns false if a member has not issued its part.
    fn meet(&mut self, comm: usize, index: usize, waiting: &mut WaitingStreams) -> bool {
        let CommState {
            clique, is_over, ..
        } = self.comms[&comm];
        let parts = &self.cliques[&clique].operations[index];
        let has_ended = self.cliques[&clique].done[index];
        // After an abort the operation ends, and its result is never used.
        if has_ended || is_over {
            return true;
        }
        let parts: Option<Vec<Part>> = parts.iter().cloned().collect();
        let Some(parts) = parts.filter(|_| self.hangs_in != Some(index)) else {
            return false;
        };
        // It never ends if a member has aborted it.
        if parts.iter().any(|part| self.comms[&part.comm].is_over) {
            return false;
        }
        for part in parts.iter().filter(|part| part.comm != comm) {
            let of = (part.comm, index);
            let is_next = |state: &Self| {
                let next = state.streams.get(&part.stream).and_then(VecDeque::front);
                matches!(next, Some(Command::Operation { comm, index }) if (*comm, *index) == of)
            };
            if !self.advance(part.stream, waiting, &is_next) {
                return false;
            }
        }
        self.carry_out(&parts);
        let clique = self.cliques.get_mut(&clique).expect("it is connected");
        clique.done[index] = true;
        true
    }

    /// Moves the data of an operation of all members.
    fn carry_out(&mut self, parts: &[Part]) {
        let numbers: Vec<u64> = parts.iter().map(|part| self.tick(part.stream)).collect();
        for (part, number) in parts.iter().zip(numbers) {
            let mut access = |at, len, writes| self.access(part.stream, number, at, len, writes);
            let ranks = parts.len();
            match &part.call {
                NcclCall::AllGather { bytes } => access(part.recv, ranks * bytes, true),
                NcclCall::ReduceScatter { count, dtype, .. } => {
                    access(part.send, ranks * count * dtype.size(), false);
                    access(part.recv, count * dtype.size(), true);
                }
                NcclCall::AllReduce { count, dtype, .. } => {
                    access(part.recv, count * dtype.size(), true);
                }
                NcclCall::Broadcast { bytes, .. } => access(part.recv, *bytes, true),
                NcclCall::Pairs { .. }
                | NcclCall::Connect
                | NcclCall::Abort
                | NcclCall::Destroy => {}
            }
        }
        match parts[0].call.clone() {
            NcclCall::AllGather { bytes } => {
                let rows: Vec<_> = parts
                    .iter()
                    .map(|part| self.read(part.send, bytes))
                    .collect();
                for part in parts {
                    self.write(part.recv, &rows.concat());
                }
            }
            NcclCall::ReduceScatter { count, dtype, op } => {
                let len = count * dtype.size();
                for (rank, to) in parts.iter().enumerate() {
                    let operands = parts
                        .iter()
                        .map(|part| self.read(part.send + rank * len, len))
                        .collect();
                    let sum = reduced(operands, dtype, op);
                    self.write(to.recv, &sum);
                }
            }
            NcclCall::AllReduce { count, dtype, op } => {
                let len = count * dtype.size();
                let operands = parts.iter().map(|part| self.read(part.send, len)).collect();
                let sum = reduced(operands, dtype, op);
                parts.iter().for_each(|part| self.write(part.recv, &sum));
            }
            NcclCall::Broadcast { bytes, root } => {
                let data = self.read(parts[root].send, bytes);
                parts.iter().for_each(|part| self.write(part.recv, &data));
            }
            NcclCall::Pairs { .. } | NcclCall::Connect | NcclCall::Abort | NcclCall::Destroy => {}
        }
    }

    /// Carries out a group of sends and receives, once the streams of all its peers have reached
    /// theirs. Returns false if a peer has not issued its part.
    fn meet_peers(&mut self, number: usize, waiting: &mut WaitingStreams) -> bool {
        let group = self.pairs[&number].clone();
        let CommState {
            clique,
            rank,
            is_over,
            ..
        } = self.comms[&group.comm];
        if is_over {
            return true;
        }
        let of = &self.cliques[&clique];
        let peer_of = |list: Option<&Vec<usize>>, at: usize| list?.get(at).copied();
        let receivers = group
            .sent
            .iter()
            .map(|span| peer_of(of.receives.get(&(rank, span.peer)), span.number));
        let senders = group
            .received
            .iter()
            .map(|span| peer_of(of.sends.get(&(span.peer, rank)), span.number));
        let peers: Option<Vec<usize>> = receivers.chain(senders).collect();
        let Some(peers) = peers else { return false };
        let is_over = |peer: &usize| {
            let group = &self.pairs[peer];
            !group.is_done && self.comms[&group.comm].is_over
        };
        if peers.iter().any(is_over) {
            return false;
        }
        if let Some((_, waits_in)) = waiting.last_mut() {
            *waits_in = Some(number);
        }
        for peer in &peers {
            let is_there = |state: &Self| {
                let group = &state.pairs[peer];
                let next = state.streams.get(&group.stream).and_then(VecDeque::front);
                group.is_done || matches!(next, Some(Command::PairGroup(next)) if next == peer)
            };
            // A peer that is done may wait for something else, and one whose stream waits in this very
            // group has reached it.
            let stream = self.pairs[peer].stream;
            let is_there_already =
                self.pairs[peer].is_done || waiting.contains(&(stream, Some(*peer)));
            if !is_there_already && !self.advance(stream, waiting, &is_there) {
                return false;
            }
        }
        let work = self.tick(group.stream);
        for span in &group.sent {
            self.access(group.stream, work, span.at, span.bytes, false);
        }
        for span in &group.received {
            self.access(group.stream, work, span.at, span.bytes, true);
        }
        let (receivers, senders) = peers.split_at(group.sent.len());
        for (span, receiver) in group.sent.iter().zip(receivers) {
            let other = self.pairs[receiver].received.iter();
            let other = other.filter(|other| (other.peer, other.number) == (rank, span.number));
            let to = *other.clone().next().expect("the receive is in the group");
            self.transfer(clique, (rank, span.peer), *span, to);
        }
        for (span, sender) in group.received.iter().zip(senders) {
            let other = self.pairs[sender].sent.iter();
            let other = other.filter(|other| (other.peer, other.number) == (rank, span.number));
            let from = *other.clone().next().expect("the send is in the group");
            self.transfer(clique, (span.peer, rank), from, *span);
        }
        self.pairs.get_mut(&number).expect("it is known").is_done = true;
        true
    }

    /// Moves the bytes of one send and its receive, unless that is done.
    fn transfer(
        &mut self,
        clique: usize,
        (from, to): (usize, usize),
        sent: PairSpan,
        received: PairSpan,
    ) {
        let of = self.cliques.get_mut(&clique).expect("it is connected");
        if !of.transfers.insert((from, to, sent.number)) {
            return;
        }
        if sent.bytes != received.bytes {
            self.violation(format!(
                "member {from} sends {} bytes to member {to}, which receives {}",
                sent.bytes, received.bytes
            ));
            return;
        }
        let data = self.read(sent.at, sent.bytes);
        self.write(received.at, &data);
    }
}

/// Reduces operands from the last to the first: another order than the fixed tree's, as NCCL's is.
/// Integers wrap around, since the bytes between tensors may have any value. Minima and maxima of
/// floats ignore NaN.
fn reduced(operands: Vec<Vec<u8>>, dtype: DType, op: NativeOp) -> Vec<u8> {
    macro_rules! integers {
        ($($dtype:ident $int:ty),*) => {
            match dtype {
                $(DType::$dtype => {
                    return folded(operands, |a: $int, b| match op {
                        NativeOp::Sum | NativeOp::Avg => a.wrapping_add(b),
                        NativeOp::Product => a.wrapping_mul(b),
                        NativeOp::Min => a.min(b),
                        NativeOp::Max => a.max(b),
                    });
                })*
                _ => {}
            }
        };
    }
    integers!(I64 i64, I32 i32, I8 i8, U64 u64, U32 u32, U8 u8);
    macro_rules! extremes {
        ($($dtype:ident $float:ty),*) => {
            match (dtype, op) {
                $((DType::$dtype, NativeOp::Min) => return folded(operands, <$float>::min),
                (DType::$dtype, NativeOp::Max) => return folded(operands, <$float>::max),)*
                _ => {}
            }
        };
    }
    extremes!(F64 f64, F32 f32, F16 f16, BF16 bf16);
    let count = operands.len();
    let step = match op {
        NativeOp::Sum | NativeOp::Avg => ReduceOp::Sum,
        NativeOp::Product => ReduceOp::Product,
        NativeOp::Min | NativeOp::Max => unreachable!("all their dtypes are above"),
    };
    let host = memory::host();
    let tensor = |bytes: Vec<u8>| {
        let shape = [bytes.len() / dtype.size()];
        backend::from_data(TensorData::from_bytes_vec(bytes, shape, dtype), &host)
    };
    let reduce = |operands: &[&DispatchTensor], op: ReduceOp| {
        let ranges = full(&operands[0].shape()[..]);
        backend::reduce(operands, &ranges, op, &host)
    };
    let mut sum = operands
        .into_iter()
        .rev()
        .map(tensor)
        .reduce(|sum, next| reduce(&[&sum, &next], step))
        .expect("a communicator has members");
    if op == NativeOp::Avg {
        sum = reduce(&[&sum], ReduceOp::premul_sum(1.0 / count as f64));
    }
    backend::into_data(sum).as_bytes().to_vec()
}

fn folded<T: bytemuck::Pod>(operands: Vec<Vec<u8>>, step: impl Fn(T, T) -> T) -> Vec<u8> {
    let size = size_of::<T>();
    let values = |bytes: &Vec<u8>| -> Vec<T> {
        bytes
            .chunks_exact(size)
            .map(bytemuck::pod_read_unaligned)
            .collect()
    };
    let sum = operands.iter().rev().map(values).reduce(|sum, next| {
        let pairs = sum.into_iter().zip(next);
        pairs.map(|(a, b)| step(a, b)).collect()
    });
    let sum = sum.expect("a communicator has members");
    sum.iter()
        .flat_map(|value| bytemuck::bytes_of(value).to_vec())
        .collect()
}
