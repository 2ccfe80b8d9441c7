//! Simulated streams of several devices, in host memory.
//!
//! A stream runs only when a wait needs it: as late as it may, and no further than the wait needs.
//! Work that is not ordered by an event is therefore done too late, and its result is read as
//! [`POISON`].

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::comm::TensorMeta;
use crate::comm::data::plane::{DataPlaneError, PlaneResult};

/// Byte that fills memory before anything is written to it.
const POISON: u8 = 0xA5;

/// A tensor in memory of a device.
#[derive(Debug, Clone)]
pub(super) struct DeviceTensor {
    pub meta: TensorMeta,
    pub bytes: Arc<Mutex<Vec<u8>>>,
}

impl DeviceTensor {
    /// Allocates memory for a tensor.
    pub fn new(meta: TensorMeta) -> Self {
        let bytes = vec![POISON; meta.shape.num_elements() * meta.dtype.size()];
        Self {
            meta,
            bytes: Arc::new(Mutex::new(bytes)),
        }
    }
}

/// Returns a number that nothing else has.
pub(super) fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Identifies a plane, and with it a simulated process.
pub(super) type PlaneId = u64;

/// Identifies one collective in all processes: the number of a connected channel, and the sequence
/// number of the call.
pub(super) type ExchangeId = (u64, u64);

/// Identifies a stream of a rank: the one on which it computes, or that of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum StreamId {
    Compute(PlaneId, usize),
    Exchange(PlaneId, usize, ExchangeId),
}

/// A point on a stream, once it is recorded.
#[derive(Debug, Clone, Default)]
pub(super) struct Event(Arc<Mutex<EventState>>);

#[derive(Debug, Default)]
struct EventState {
    /// Stream on which it was recorded.
    recorded: Option<StreamId>,
    is_done: bool,
}

impl Event {
    fn is_done(&self) -> bool {
        self.0.lock().is_done
    }
}

/// Work on a stream.
enum Command {
    Run(Box<dyn FnOnce() + Send>),
    Record(Event),
    Wait(Event),
    /// Copies what each member sends to the others, once the streams of all members are here.
    Exchange(ExchangeId),
}

/// Tensors of one exchange, by sender and receiver.
struct Exchange {
    /// Tensors that each member sends to each, and its stream, once it has started the exchange.
    sent: Vec<Option<(StreamId, Vec<Vec<DeviceTensor>>)>>,
    /// Memory into which each member receives from each; allocated once all have started.
    received: Vec<Vec<Vec<DeviceTensor>>>,
    is_done: bool,
    /// Number of members that have not taken what they receive.
    open: usize,
}

/// All devices.
#[derive(Default)]
struct Devices {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    aborted: HashSet<PlaneId>,
    streams: HashMap<StreamId, VecDeque<Command>>,
    exchanges: HashMap<ExchangeId, Exchange>,
}

static DEVICES: LazyLock<Devices> = LazyLock::new(Devices::default);

fn error(problem: &str) -> DataPlaneError {
    DataPlaneError {
        problem: problem.into(),
    }
}

/// Enqueues work.
pub(super) fn run(stream: StreamId, work: impl FnOnce() + Send + 'static) {
    DEVICES
        .state
        .lock()
        .push(stream, Command::Run(Box::new(work)));
}

/// Records `event` after what was enqueued on `stream`.
pub(super) fn record(stream: StreamId, event: &Event) {
    let mut state = DEVICES.state.lock();
    event.0.lock().recorded = Some(stream);
    state.push(stream, Command::Record(event.clone()));
}

/// Lets `stream` wait for `event`. Does nothing if the event was not recorded (CUDA).
pub(super) fn wait(stream: StreamId, event: &Event) {
    let mut state = DEVICES.state.lock();
    if event.0.lock().recorded.is_some() {
        state.push(stream, Command::Wait(event.clone()));
    }
}

/// One member's part of an exchange. It is over when this is dropped.
pub(super) struct ExchangePart {
    plane: PlaneId,
    id: ExchangeId,
    member: usize,
}

impl ExchangePart {
    /// Enqueues the exchange `id` on `stream`, in which `member` sends `sent[i]` to member `i`.
    pub fn start(
        plane: PlaneId,
        stream: StreamId,
        id: ExchangeId,
        member: usize,
        sent: Vec<Vec<DeviceTensor>>,
    ) -> PlaneResult<Self> {
        let size = sent.len();
        let mut state = DEVICES.state.lock();
        if state.aborted.contains(&plane) {
            return Err(error("the plane was aborted"));
        }
        let exchange = state.exchanges.entry(id).or_insert_with(|| Exchange {
            sent: (0..size).map(|_| None).collect(),
            received: Vec::new(),
            is_done: false,
            open: size,
        });
        let before = exchange.sent[member].replace((stream, sent));
        assert!(before.is_none(), "an exchange is started once on each rank");
        exchange.allocate();
        state.push(stream, Command::Exchange(id));
        DEVICES.changed.notify_all();
        Ok(Self { plane, id, member })
    }

    /// Waits until all members have started the exchange, at most for `time`. Returns the memory
    /// into which this one receives, by sender.
    pub fn received(&self, time: Duration) -> PlaneResult<Vec<Vec<DeviceTensor>>> {
        let until = Instant::now() + time;
        let mut state = DEVICES.state.lock();
        loop {
            if state.aborted.contains(&self.plane) {
                return Err(error("the plane was aborted"));
            }
            if let Some(received) = state.exchanges[&self.id].received.get(self.member) {
                return Ok(received.clone());
            }
            if DEVICES.changed.wait_until(&mut state, until).timed_out() {
                return Err(error("some ranks have not started the exchange in time"));
            }
        }
    }
}

impl Drop for ExchangePart {
    fn drop(&mut self) {
        let mut state = DEVICES.state.lock();
        let Some(exchange) = state.exchanges.get_mut(&self.id) else {
            return;
        };
        exchange.open -= 1;
        if exchange.open == 0 {
            state.exchanges.remove(&self.id);
            let id = self.id;
            let is_other =
                |stream: &StreamId| !matches!(stream, StreamId::Exchange(_, _, of) if *of == id);
            state.streams.retain(|stream, _| is_other(stream));
        }
    }
}

/// Runs what was enqueued on `stream`, of whose exchanges all members have started theirs.
pub(super) fn synchronize(stream: StreamId) {
    let mut state = DEVICES.state.lock();
    state.advance(stream, &|state| state.is_empty(stream));
}

/// Makes all waits and exchanges of the plane return an error, now and later.
pub(super) fn abort(plane: PlaneId) {
    DEVICES.state.lock().aborted.insert(plane);
    DEVICES.changed.notify_all();
}

/// Returns the number of exchanges that some member of the plane has started and not taken.
pub(super) fn open_exchanges(plane: PlaneId) -> usize {
    let state = DEVICES.state.lock();
    let of_plane = |exchange: &&Exchange| {
        let mut streams = exchange.sent.iter().flatten().map(|(stream, _)| stream);
        streams.any(|stream| matches!(stream, StreamId::Exchange(of, ..) if *of == plane))
    };
    state.exchanges.values().filter(of_plane).count()
}

impl Exchange {
    /// Allocates what the members receive, once all have started.
    fn allocate(&mut self) {
        let all: Option<Vec<_>> = self.sent.iter().map(Option::as_ref).collect();
        let Some(all) = all else { return };
        let copy = |tensor: &DeviceTensor| DeviceTensor::new(tensor.meta.clone());
        let from = |to: usize| {
            let lists = all.iter().map(|(_, sent)| &sent[to]);
            lists.map(|list| list.iter().map(copy).collect()).collect()
        };
        self.received = (0..all.len()).map(from).collect();
    }

    /// Copies what each member sends to each.
    fn copy(&mut self) {
        for (from, sent) in self.sent.iter().enumerate() {
            let (_, sent) = sent.as_ref().expect("all have started it");
            for (to, list) in sent.iter().enumerate() {
                for (sent, received) in list.iter().zip(&self.received[to][from]) {
                    let bytes = sent.bytes.lock().clone();
                    *received.bytes.lock() = bytes;
                }
            }
        }
        self.is_done = true;
    }
}

impl State {
    fn push(&mut self, stream: StreamId, command: Command) {
        self.streams.entry(stream).or_default().push_back(command);
    }

    fn requeue(&mut self, stream: StreamId, command: Command) {
        self.streams.entry(stream).or_default().push_front(command);
    }

    fn is_empty(&self, stream: StreamId) -> bool {
        self.streams.get(&stream).is_none_or(VecDeque::is_empty)
    }

    /// Runs commands of `stream` until `is_enough`. Returns false if it needs a member that has not
    /// started its exchange.
    fn advance(&mut self, stream: StreamId, is_enough: &dyn Fn(&Self) -> bool) -> bool {
        while !is_enough(self) {
            let Some(command) = self.streams.get_mut(&stream).and_then(VecDeque::pop_front) else {
                return true;
            };
            match command {
                Command::Run(work) => work(),
                Command::Record(event) => event.0.lock().is_done = true,
                Command::Wait(event) => {
                    let recorded = event.0.lock().recorded;
                    let recorded = recorded.expect("only recorded events are waited for");
                    if !self.advance(recorded, &|_| event.is_done()) {
                        self.requeue(stream, Command::Wait(event));
                        return false;
                    }
                }
                Command::Exchange(id) => {
                    if !self.meet(stream, id) {
                        self.requeue(stream, Command::Exchange(id));
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Carries out an exchange that `stream` has reached, once the streams of all members have.
    /// Returns false if a member has not started it.
    fn meet(&mut self, stream: StreamId, id: ExchangeId) -> bool {
        // All members have taken it, so no rank reads the result.
        let Some(exchange) = self.exchanges.get(&id).filter(|exchange| !exchange.is_done) else {
            return true;
        };
        let streams = exchange.sent.iter();
        let streams: Option<Vec<_>> = streams
            .map(|sent| sent.as_ref().map(|(stream, _)| *stream))
            .collect();
        let Some(streams) = streams else { return false };
        let is_next = |state: &Self, other: StreamId| {
            let next = state.streams.get(&other).and_then(VecDeque::front);
            matches!(next, Some(Command::Exchange(next)) if *next == id)
        };
        for other in streams.into_iter().filter(|other| *other != stream) {
            if !self.advance(other, &|state| is_next(state, other)) {
                return false;
            }
        }
        let exchange = self.exchanges.get_mut(&id).expect("it was started");
        exchange.copy();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts the part of member 0 of an exchange of two members, and waits for the other.
    fn wait_for_other(plane: PlaneId, time: Duration) -> DataPlaneError {
        let id = (number(), 0);
        let stream = StreamId::Exchange(plane, 0, id);
        ExchangePart::start(plane, stream, id, 0, vec![Vec::new(); 2])
            .and_then(|part| part.received(time).map(drop))
            .unwrap_err()
    }

    #[test]
    fn a_wait_for_a_member_that_does_not_start_ends_in_time() {
        let error = wait_for_other(number(), Duration::ZERO);
        assert!(error.problem.contains("in time"), "{error}");
    }

    #[test]
    fn a_wait_for_a_member_that_does_not_start_is_aborted() {
        let plane = number();
        let waits = std::thread::spawn(move || wait_for_other(plane, Duration::from_secs(60)));
        abort(plane);
        let error = waits.join().unwrap();
        assert!(error.problem.contains("aborted"), "{error}");
    }
}
