//! The calls, as the plane makes them.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, TensorData};
use parking_lot::{Mutex, MutexGuard};

use super::clocks::{Accesses, StreamKey};
use super::state::{
    Clique, CommState, Command, EventState, ExportedTensor, FakeState, GroupedCall, NcclCall,
    PairGroup, PairSpan, Part, Recorded,
};
use super::{FakeApi, OrderingStep};
use crate::comm::data::nccl::api::{
    Comm, CommStream, CopyArgs, Exported, Gpu, GpuAddress, GpuApi, GpuEvent, GpuIdentity,
    InProgress, NativeOp, NcclVersion, ReduceArgs, Registration, UniqueId, error,
};
use crate::comm::data::payload::payload;
use crate::comm::data::plane::PlaneResult;
use crate::comm::{TensorMeta, backend};

/// Number of polls for which a call continues in the background.
const POLLS: usize = 2;

/// Time after which a stream that waits for others is taken to wait forever.
const FOREVER: Duration = Duration::from_secs(120);

/// Tensors of a rank.
struct ExportedTensors {
    rank: usize,
    tensors: Arc<Vec<ExportedTensor>>,
}

impl FakeApi {
    fn state(&self) -> MutexGuard<'_, FakeState> {
        self.gpus.state.lock()
    }

    fn event(
        &self,
        state: &mut FakeState,
        stream: StreamKey,
        step: OrderingStep,
    ) -> Arc<EventState> {
        let is_recorded = !self.gpus.forgets(step);
        let event = Arc::new(EventState {
            stream,
            clock: Mutex::new(None),
            is_recorded,
        });
        if is_recorded {
            state.push(stream, Command::Record(event.clone()));
        }
        event
    }

    /// Lets a stream wait for an event, which does nothing if it was not recorded (CUDA).
    fn wait_on_event(
        &self,
        state: &mut FakeState,
        stream: StreamKey,
        event: &GpuEvent,
        step: OrderingStep,
    ) {
        let event = state_of(event);
        if event.is_recorded && !self.gpus.forgets(step) {
            state.push(stream, Command::Wait(event));
        }
    }

    /// Runs a stream until nothing is enqueued, and blocks where a GPU would, but not forever.
    fn run(&self, stream: StreamKey) {
        let mut state = self.state();
        while !state.run(stream) {
            let until = Instant::now() + FOREVER;
            if self.gpus.changed.wait_until(&mut state, until).timed_out() {
                state.hang(format!(
                    "{stream:?} waits, and nothing was enqueued for {FOREVER:?}"
                ));
            }
        }
        self.gpus.changed.notify_all();
    }

    /// Checks that a call on a communicator is allowed, and returns its clique and rank.
    fn enter_call(&self, state: &mut FakeState, comm: Comm, call: &str) -> PlaneResult<()> {
        let Some(known) = state.comms.get(&comm.0) else {
            return error(format!("{call} of an unknown communicator"));
        };
        let (gpu, is_over, busy) = (known.gpu, known.is_over, known.busy);
        if state.submitters.get(&gpu) != Some(&thread::current().id()) {
            state.violation(format!("{call} by a second thread for GPU {gpu}"));
        }
        if is_over {
            state.violation(format!("{call} of a communicator that was freed"));
        }
        if busy > 0 && !matches!(call, "progress" | "abort") {
            state.violation(format!("{call} while the last call continues"));
        }
        Ok(())
    }

    fn check_registered(&self, state: &mut FakeState, comm: Comm, range: Range<usize>) {
        let is_within = |registered: &(usize, Range<usize>)| {
            registered.0 == comm.0
                && registered.1.start <= range.start
                && range.end <= registered.1.end
        };
        if !range.is_empty() && !state.registrations.values().any(is_within) {
            state.violation(format!("memory {range:?} is not registered"));
        }
    }

    /// Issues a member's part of the next operation of a communicator.
    fn issue(&self, comm: Comm, stream: CommStream, mut part: Part) -> PlaneResult<InProgress> {
        let mut state = self.state();
        self.enter_call(&mut state, comm, "operation")?;
        let call = part.call.clone();
        let of = state.comms.get_mut(&comm.0).expect("it was checked");
        let (clique, rank, gpu, index) = (of.clique, of.rank, of.gpu, of.collectives);
        of.collectives += 1;
        of.busy = POLLS;
        self.issued(of);
        part.comm = comm.0;
        part.stream = StreamKey::Communication(stream.0);
        let members = &mut state.cliques.get_mut(&clique).expect("it is connected");
        if members.operations.len() == index {
            members.operations.push(vec![None; members.members.len()]);
            members.done.push(false);
        }
        let parts = &mut members.operations[index];
        let differs = parts.iter().flatten().find(|other| other.call != call);
        let differs = differs.map(|other| other.call.clone());
        parts[rank] = Some(part);
        if let Some(other) = differs {
            state.violation(format!(
                "operation {index} is {call:?} here and {other:?} there"
            ));
        }
        state.calls.push(Recorded {
            gpu,
            clique,
            member: rank,
            stream: Some(stream.0),
            call,
        });
        state.push(
            StreamKey::Communication(stream.0),
            Command::Operation {
                comm: comm.0,
                index,
            },
        );
        self.gpus.changed.notify_all();
        Ok(true)
    }

    /// Counts an operation of a communicator.
    fn issued(&self, comm: &mut CommState) {
        comm.issued += 1;
        if let Some((failing, after)) = self.gpus.fails_after
            && failing == comm.gpu
            && comm.issued >= after
        {
            comm.error = Some("unhandled system error".into());
        }
    }

    fn transfer(
        &self,
        args: CopyArgs,
        recv: GpuAddress,
        registered: usize,
        call: NcclCall,
    ) -> PlaneResult<InProgress> {
        let start = recv.0;
        self.check_registered(&mut self.state(), args.comm, start..start + registered);
        self.issue(args.comm, args.stream, part(call, args.memory, recv))
    }

    fn reduction(
        &self,
        args: ReduceArgs,
        call: NcclCall,
        blocks: usize,
    ) -> PlaneResult<InProgress> {
        if !is_supported(args.op, args.dtype) {
            return error(format!(
                "NCCL has no {:?} of {:?} (ncclInvalidArgument)",
                args.op, args.dtype
            ));
        }
        let start = args.send.0;
        let bytes = blocks * args.count * args.dtype.size();
        self.check_registered(&mut self.state(), args.comm, start..start + bytes);
        self.issue(args.comm, args.stream, part(call, args.send, args.recv))
    }

    fn ranks_of(&self, comm: Comm) -> usize {
        let state = self.state();
        let clique = state.comms[&comm.0].clique;
        state.cliques[&clique].members.len()
    }
}

fn part(call: NcclCall, send: GpuAddress, recv: GpuAddress) -> Part {
    Part {
        comm: 0,
        call,
        send: send.0,
        recv: recv.0,
        stream: StreamKey::Communication(0),
    }
}

/// Returns true for the reductions that NCCL has.
fn is_supported(op: NativeOp, dtype: DType) -> bool {
    let is_float = matches!(
        dtype,
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::Flex32
    );
    let is_integer = matches!(
        dtype,
        DType::I64 | DType::I32 | DType::I8 | DType::U64 | DType::U32 | DType::U8
    );
    match op {
        NativeOp::Avg => is_float,
        _ => is_float || is_integer,
    }
}

fn state_of(event: &GpuEvent) -> Arc<EventState> {
    event
        .0
        .clone()
        .downcast()
        .expect("the event is one of these GPUs")
}

fn as_event(event: Arc<EventState>) -> GpuEvent {
    GpuEvent(event)
}

impl GpuApi for FakeApi {
    fn version(&self) -> NcclVersion {
        self.gpus.version
    }

    fn gpu(&self, _device: &Device, rank: usize) -> PlaneResult<Gpu> {
        Ok(Gpu(*self.gpus.gpus.get(&rank).unwrap_or(&rank)))
    }

    fn identity(&self, gpu: Gpu) -> PlaneResult<GpuIdentity> {
        Ok(GpuIdentity {
            host: "simulated".into(),
            bus: format!("GPU {}", gpu.0),
        })
    }

    fn alignment(&self, _gpu: Gpu) -> usize {
        16
    }

    fn unique_id(&self) -> PlaneResult<UniqueId> {
        Ok(self.state().number().to_le_bytes().to_vec())
    }

    fn export(
        &self,
        _gpu: Gpu,
        rank: usize,
        tensors: Vec<DispatchTensor>,
    ) -> PlaneResult<Exported> {
        let stream = StreamKey::Rank(self.process, rank);
        let payloads: Vec<_> = tensors.iter().map(payload).collect();
        let mut state = self.state();
        let number = {
            let clock = state.clocks.entry(stream).or_default();
            clock.tick(stream)
        };
        let clock = state.clocks[&stream].clone();
        let exported = payloads.into_iter().map(|payload| {
            let mut accesses = Accesses::default();
            let len = (*payload).as_ref().len();
            accesses.add(0..len, true, stream, number, &clock);
            ExportedTensor {
                payload,
                accesses: Mutex::new(accesses),
            }
        });
        let tensors = Arc::new(exported.collect());
        let ready = self.event(&mut state, stream, OrderingStep::RecordReady);
        Ok(Exported {
            ready: as_event(ready),
            tensors: Arc::new(ExportedTensors { rank, tensors }) as Arc<dyn Any + Send + Sync>,
        })
    }

    fn import(
        &self,
        _gpu: Gpu,
        rank: usize,
        device: &Device,
        blocks: Vec<(GpuAddress, TensorMeta)>,
        done: Option<&GpuEvent>,
    ) -> PlaneResult<(Vec<DispatchTensor>, GpuEvent)> {
        let stream = StreamKey::Rank(self.process, rank);
        let (targets, read) = {
            let mut state = self.state();
            if let Some(done) = done {
                self.wait_on_event(&mut state, stream, done, OrderingStep::WaitDone);
            }
            let copy = |(from, meta): &(GpuAddress, TensorMeta)| {
                let bytes = meta.shape.num_elements() * meta.dtype.size();
                let target = Arc::new(Mutex::new(vec![0; bytes]));
                if bytes > 0 {
                    state.push(stream, Command::CopyOut(from.0, target.clone()));
                }
                target
            };
            let targets: Vec<_> = blocks.iter().map(copy).collect();
            let read = self.event(&mut state, stream, OrderingStep::RecordRead);
            (targets, read)
        };
        // The operations of burn that follow run at once, as those of a GPU do when it gets there.
        self.run(stream);
        let tensor = |((_, meta), bytes): ((GpuAddress, TensorMeta), Arc<Mutex<Vec<u8>>>)| {
            let bytes = std::mem::take(&mut *bytes.lock());
            let data = TensorData::from_bytes_vec(bytes, meta.shape, meta.dtype);
            backend::from_data(data, device)
        };
        let tensors = blocks.into_iter().zip(targets).map(tensor).collect();
        Ok((tensors, as_event(read)))
    }

    fn enter(&self, gpu: Gpu) -> PlaneResult<()> {
        let mut state = self.state();
        let thread = thread::current().id();
        // The thread of an earlier world may have ended.
        state.submitters.insert(gpu.0, thread);
        Ok(())
    }

    fn create_stream(&self, _gpu: Gpu) -> PlaneResult<CommStream> {
        Ok(CommStream(self.state().number()))
    }

    fn destroy_stream(&self, stream: CommStream) {
        let mut state = self.state();
        let left = state.streams.remove(&StreamKey::Communication(stream.0));
        if left.is_some_and(|left| !left.is_empty()) {
            state.violation("a stream with pending work was freed".into());
        }
    }

    fn record(&self, stream: CommStream) -> PlaneResult<GpuEvent> {
        let mut state = self.state();
        let stream = StreamKey::Communication(stream.0);
        Ok(as_event(self.event(
            &mut state,
            stream,
            OrderingStep::RecordDone,
        )))
    }

    fn wait(&self, stream: CommStream, event: &GpuEvent) -> PlaneResult<()> {
        let stream = StreamKey::Communication(stream.0);
        self.wait_on_event(&mut self.state(), stream, event, OrderingStep::Wait);
        Ok(())
    }

    fn is_recorded(&self, _event: &GpuEvent) -> PlaneResult<bool> {
        Ok(true)
    }

    fn is_done(&self, event: &GpuEvent) -> PlaneResult<bool> {
        let event = state_of(event);
        // As far as the GPUs get by themselves.
        self.state().run(event.stream);
        Ok(!event.is_recorded || event.clock.lock().is_some())
    }

    fn synchronize(&self, event: &GpuEvent) -> PlaneResult<()> {
        self.state().host_waits += 1;
        self.run(state_of(event).stream);
        Ok(())
    }

    fn connect(&self, id: &UniqueId, ranks: usize, rank: usize) -> PlaneResult<(Comm, InProgress)> {
        let mut state = self.state();
        let Ok(number) = <[u8; 8]>::try_from(&id[..]) else {
            return error("invalid identity (ncclInvalidArgument)");
        };
        let clique = usize::from_le_bytes(number);
        let thread = thread::current().id();
        let gpus = state.submitters.iter();
        let gpu = gpus
            .filter(|(_, of)| **of == thread)
            .map(|(gpu, _)| *gpu)
            .next();
        let Some(gpu) = gpu else {
            return error("no GPU is current (ncclUnhandledCudaError)");
        };
        let comm = state.number();
        let of = state.cliques.entry(clique).or_insert_with(|| Clique {
            members: vec![None; ranks],
            operations: Vec::new(),
            done: Vec::new(),
            sends: HashMap::new(),
            receives: HashMap::new(),
            transfers: HashSet::new(),
        });
        let before = of.members[rank].replace(comm);
        let others: Vec<_> = of.members.iter().flatten().copied().collect();
        if before.is_some() {
            state.violation(format!("member {rank} connects twice"));
        }
        let has_gpu = |other: &usize| state.comms.get(other).is_some_and(|other| other.gpu == gpu);
        if self.gpus.version < NcclVersion(2, 30, 0) && others.iter().any(has_gpu) {
            return error("Duplicate GPU detected (ncclInvalidUsage)");
        }
        state.comms.insert(
            comm,
            CommState {
                clique,
                rank,
                gpu,
                is_connected: false,
                busy: POLLS,
                issued: 0,
                collectives: 0,
                is_over: false,
                error: None,
            },
        );
        let call = NcclCall::Connect;
        state.calls.push(Recorded {
            gpu,
            clique,
            member: rank,
            stream: None,
            call,
        });
        Ok((Comm(comm), true))
    }

    fn progress(&self, comm: Comm) -> PlaneResult<InProgress> {
        let mut state = self.state();
        self.enter_call(&mut state, comm, "progress")?;
        let clique = state.comms[&comm.0].clique;
        let are_here = state.cliques[&clique].members.iter().all(Option::is_some);
        let of = state.comms.get_mut(&comm.0).expect("it was checked");
        if let Some(problem) = &of.error {
            return error(problem.clone());
        }
        of.is_connected |= are_here;
        if of.is_connected {
            of.busy = of.busy.saturating_sub(1);
        }
        Ok(of.busy > 0)
    }

    fn abort(&self, comm: Comm) -> PlaneResult<()> {
        let mut state = self.state();
        self.enter_call(&mut state, comm, "abort")?;
        check_grouped(&mut state, "abort");
        state.registrations.retain(|_, (of, _)| *of != comm.0);
        end(&mut state, comm, NcclCall::Abort);
        self.gpus.changed.notify_all();
        Ok(())
    }

    fn destroy(&self, comm: Comm) -> PlaneResult<()> {
        let mut state = self.state();
        self.enter_call(&mut state, comm, "destroy")?;
        check_grouped(&mut state, "destroy");
        if state.registrations.values().any(|(of, _)| *of == comm.0) {
            state.violation("a communicator with registered memory was freed".into());
        }
        end(&mut state, comm, NcclCall::Destroy);
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> PlaneResult<GpuAddress> {
        Ok(GpuAddress(self.state().allocate(bytes)))
    }

    fn free(&self, memory: GpuAddress) -> PlaneResult<()> {
        let mut state = self.state();
        let mut registered = state.registrations.values();
        if registered.any(|(_, range)| range.start == memory.0) {
            state.violation("registered memory was freed".into());
        }
        if state.memory.remove(&memory.0).is_none() {
            state.violation("memory was freed twice".into());
        }
        Ok(())
    }

    fn register(&self, comm: Comm, memory: GpuAddress, bytes: usize) -> PlaneResult<Registration> {
        let mut state = self.state();
        self.enter_call(&mut state, comm, "register")?;
        let number = state.number();
        let range = memory.0..memory.0 + bytes;
        state.registrations.insert(number, (comm.0, range));
        Ok(Registration(number))
    }

    fn deregister(&self, comm: Comm, registration: Registration) -> PlaneResult<()> {
        let mut state = self.state();
        self.enter_call(&mut state, comm, "deregister")?;
        if state.registrations.remove(&registration.0).is_none() {
            state.violation("a registration was ended twice".into());
        }
        Ok(())
    }

    fn copy_in(
        &self,
        exported: &Exported,
        index: usize,
        to: GpuAddress,
        stream: CommStream,
    ) -> PlaneResult<()> {
        let exported: &ExportedTensors = exported
            .tensors
            .downcast_ref()
            .expect("the tensors are those of these GPUs");
        if self.gpus.lost == Some(exported.rank) {
            return error("the GPU is lost");
        }
        let copy = Command::CopyIn(Arc::downgrade(&exported.tensors), index, to.0);
        self.state().push(StreamKey::Communication(stream.0), copy);
        Ok(())
    }

    fn group_start(&self) -> PlaneResult<()> {
        let mut state = self.state();
        let before = state.groups.insert(thread::current().id(), Vec::new());
        if before.is_some() {
            state.violation("a group of calls was started in another".into());
        }
        Ok(())
    }

    fn group_end(&self) -> PlaneResult<()> {
        let mut calls = {
            let mut state = self.state();
            let Some(calls) = state.groups.remove(&thread::current().id()) else {
                state.violation("a group of calls was ended that was not started".into());
                return Ok(());
            };
            calls
        };
        let Some(first) = calls.first().map(|call| call.args) else {
            return Ok(());
        };
        if calls.iter().any(|call| call.args.comm != first.comm) {
            return error("a group of calls has several communicators");
        }
        calls.sort_by_key(|call| call.peer);
        let mut state = self.state();
        self.enter_call(&mut state, first.comm, "group")?;
        for GroupedCall { args, .. } in &calls {
            let start = args.memory.0;
            self.check_registered(&mut state, args.comm, start..start + args.bytes);
        }
        let of = state.comms.get_mut(&first.comm.0).expect("it was checked");
        of.busy = POLLS;
        let (clique, rank, gpu) = (of.clique, of.rank, of.gpu);
        self.issued(of);
        let number = state.number();
        let members = state.cliques.get_mut(&clique).expect("it is connected");
        let mut span = |call: &GroupedCall| {
            let list = match call.sends {
                true => members.sends.entry((rank, call.peer)),
                false => members.receives.entry((call.peer, rank)),
            };
            let list = list.or_default();
            list.push(number);
            PairSpan {
                peer: call.peer,
                bytes: call.args.bytes,
                at: call.args.memory.0,
                number: list.len() - 1,
            }
        };
        let [sent, received] = [true, false].map(|sends| {
            let calls = calls.iter().filter(|call| call.sends == sends);
            calls.map(&mut span).collect::<Vec<_>>()
        });
        let sizes = |spans: &[PairSpan]| spans.iter().map(|span| (span.peer, span.bytes)).collect();
        let call = NcclCall::Pairs {
            sent: sizes(&sent),
            received: sizes(&received),
        };
        state.calls.push(Recorded {
            gpu,
            clique,
            member: rank,
            stream: Some(first.stream.0),
            call,
        });
        let stream = StreamKey::Communication(first.stream.0);
        state.pairs.insert(
            number,
            PairGroup {
                comm: first.comm.0,
                stream,
                sent,
                received,
                is_done: false,
            },
        );
        state.push(stream, Command::PairGroup(number));
        self.gpus.changed.notify_all();
        Ok(())
    }

    fn all_gather(&self, args: CopyArgs, recv: GpuAddress) -> PlaneResult<InProgress> {
        let bytes = self.ranks_of(args.comm) * args.bytes;
        self.transfer(args, recv, bytes, NcclCall::AllGather { bytes: args.bytes })
    }

    fn reduce_scatter(&self, args: ReduceArgs) -> PlaneResult<InProgress> {
        let ReduceArgs {
            count, dtype, op, ..
        } = args;
        let ranks = self.ranks_of(args.comm);
        self.reduction(args, NcclCall::ReduceScatter { count, dtype, op }, ranks)
    }

    fn all_reduce(&self, args: ReduceArgs) -> PlaneResult<InProgress> {
        let ReduceArgs {
            count, dtype, op, ..
        } = args;
        self.reduction(args, NcclCall::AllReduce { count, dtype, op }, 1)
    }

    fn broadcast(&self, args: CopyArgs, root: usize) -> PlaneResult<InProgress> {
        let bytes = args.bytes;
        self.transfer(
            args,
            args.memory,
            bytes,
            NcclCall::Broadcast { bytes, root },
        )
    }

    fn send(&self, args: CopyArgs, peer: usize) -> PlaneResult<InProgress> {
        self.group(args, peer, true)
    }

    fn receive(&self, args: CopyArgs, peer: usize) -> PlaneResult<InProgress> {
        self.group(args, peer, false)
    }
}

impl FakeApi {
    fn group(&self, args: CopyArgs, peer: usize, sends: bool) -> PlaneResult<InProgress> {
        let mut state = self.state();
        match state.groups.get_mut(&thread::current().id()) {
            Some(calls) => calls.push(GroupedCall { args, peer, sends }),
            // Two ranks that both send first would wait for each other.
            None => state.violation("a send or receive outside a group".into()),
        }
        Ok(false)
    }
}

/// Communicators of a stream wait for each other's work if they end one after the other.
fn check_grouped(state: &mut FakeState, call: &str) {
    if !state.groups.contains_key(&thread::current().id()) {
        state.violation(format!("{call} outside a group"));
    }
}

fn end(state: &mut FakeState, comm: Comm, call: NcclCall) {
    let of = state.comms.get_mut(&comm.0).expect("it was checked");
    of.is_over = true;
    let (gpu, clique, member) = (of.gpu, of.clique, of.rank);
    state.calls.push(Recorded {
        gpu,
        clique,
        member,
        stream: None,
        call,
    });
}
