//! [`Streams`]: simulated streams of several devices, in host memory.
//!
//! A stream runs only when a wait needs it: as late as it may, and no further than the wait needs.
//! Work that is not ordered by an event is therefore done too late, and its result is read as
//! [`POISON`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::comm::TensorMeta;
use crate::comm::data::plane::{DataPlaneError, PlaneResult};

/// Time after which a wait that nothing ends is over.
const FAR: Duration = Duration::from_secs(60);

/// Byte that fills memory before anything is written to it.
const POISON: u8 = 0xA5;

/// Memory of a device.
pub(in crate::comm) type Buffer = Arc<Mutex<Vec<u8>>>;

/// Returns memory of `bytes` bytes.
pub(super) fn buffer(bytes: usize) -> Buffer {
    Arc::new(Mutex::new(vec![POISON; bytes]))
}

/// A tensor in memory of a device.
#[derive(Debug, Clone)]
pub(in crate::comm) struct DeviceTensor {
    pub meta: TensorMeta,
    pub bytes: Buffer,
}

impl DeviceTensor {
    pub fn new(meta: TensorMeta) -> Self {
        let bytes = buffer(meta.shape.num_elements() * meta.dtype.size());
        Self { meta, bytes }
    }
}

/// Identifies one collective in all processes: the ranks of its group, the name of the channel, and
/// the sequence number.
pub(in crate::comm) type ExchangeId = (Vec<usize>, &'static str, u64);

/// Identifies a stream of a rank: the one on which it computes, or that of an exchange.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::comm) enum StreamId {
    Compute(usize),
    Exchange(usize, ExchangeId),
}

/// Index of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) struct EventId(usize);

/// Work on a stream.
enum Command {
    Run(Box<dyn FnOnce() + Send>),
    Record(EventId),
    Wait(EventId),
    /// Copies what each member sends to the others, once the streams of all members are here.
    Exchange(ExchangeId),
}

#[derive(Default)]
struct Event {
    /// Stream on which it was recorded.
    recorded: Option<StreamId>,
    is_done: bool,
}

/// Tensors of one exchange, by sender and receiver.
#[derive(Default)]
struct Exchange {
    /// What each member sends to each, and its stream, once it has started the exchange.
    sent: Vec<Option<(StreamId, Vec<Vec<DeviceTensor>>)>>,
    /// What each member receives from each; allocated once all have started.
    received: Vec<Vec<Vec<DeviceTensor>>>,
    is_done: bool,
}

#[derive(Default)]
struct State {
    is_aborted: bool,
    streams: HashMap<StreamId, VecDeque<Command>>,
    events: Vec<Event>,
    exchanges: HashMap<ExchangeId, Exchange>,
}

/// The streams of all ranks. Ranks of several simulated processes share them.
#[derive(Default)]
pub(in crate::comm) struct Streams {
    state: Mutex<State>,
    changed: Condvar,
}

fn aborted() -> DataPlaneError {
    DataPlaneError {
        problem: "the exchange was aborted".into(),
    }
}

impl Streams {
    pub(super) fn event(&self) -> EventId {
        let mut state = self.state.lock();
        state.events.push(Event::default());
        EventId(state.events.len() - 1)
    }

    pub(super) fn run(&self, stream: &StreamId, work: impl FnOnce() + Send + 'static) {
        self.state.lock().push(stream, Command::Run(Box::new(work)));
    }

    pub(super) fn record(&self, stream: &StreamId, event: EventId) {
        let mut state = self.state.lock();
        state.events[event.0].recorded = Some(stream.clone());
        state.push(stream, Command::Record(event));
    }

    /// Lets `stream` wait for `event`. Does nothing if the event was not recorded (CUDA).
    pub(super) fn wait(&self, stream: &StreamId, event: EventId) {
        let mut state = self.state.lock();
        if state.events[event.0].recorded.is_some() {
            state.push(stream, Command::Wait(event));
        }
    }

    /// Enqueues the exchange `id` on `stream`, in which `member` of `size` members sends `sent[i]`
    /// to member `i`.
    pub(super) fn exchange(
        &self,
        stream: &StreamId,
        id: &ExchangeId,
        (member, size): (usize, usize),
        sent: Vec<Vec<DeviceTensor>>,
    ) -> PlaneResult<()> {
        let mut state = self.state.lock();
        if state.is_aborted {
            return Err(aborted());
        }
        let exchange = state.exchanges.entry(id.clone()).or_default();
        exchange.sent.resize_with(size, || None);
        let before = exchange.sent[member].replace((stream.clone(), sent));
        assert!(before.is_none(), "an exchange is started once on each rank");
        if let Some(all) = exchange
            .sent
            .iter()
            .map(Option::as_ref)
            .collect::<Option<Vec<_>>>()
        {
            let from = |to: usize| {
                let lists = all.iter().map(|(_, sent)| &sent[to]);
                lists
                    .map(|list| {
                        list.iter()
                            .map(|tensor| DeviceTensor::new(tensor.meta.clone()))
                            .collect()
                    })
                    .collect()
            };
            exchange.received = (0..size).map(from).collect();
        }
        state.push(stream, Command::Exchange(id.clone()));
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until all members have started the exchange. Returns the memory into which `member`
    /// receives, by sender.
    pub(super) fn receives(
        &self,
        id: &ExchangeId,
        member: usize,
    ) -> PlaneResult<Vec<Vec<DeviceTensor>>> {
        let mut state = self.state.lock();
        loop {
            if state.is_aborted {
                return Err(aborted());
            }
            if let Some(received) = state.exchanges[id].received.get(member) {
                return Ok(received.clone());
            }
            // A failure ends the wait. Bounded, so that a test without it ends, too.
            if self.changed.wait_for(&mut state, FAR).timed_out() {
                return Err(aborted());
            }
        }
    }

    /// Runs what was enqueued on `stream`.
    pub(super) fn synchronize(&self, stream: &StreamId) -> PlaneResult<()> {
        let mut state = self.state.lock();
        while !state.advance(stream, &|state| state.is_empty(stream)) {
            if state.is_aborted {
                return Err(aborted());
            }
            self.changed.wait(&mut state);
        }
        Ok(())
    }

    /// Starts an exchange of two members on one of them, and waits for the other.
    pub fn waits_for_a_member_that_does_not_start(&self) -> PlaneResult<()> {
        let id = (vec![0, 1], "", 0);
        let stream = StreamId::Exchange(0, id.clone());
        self.exchange(&stream, &id, (0, 2), vec![Vec::new(), Vec::new()])?;
        self.receives(&id, 0).map(drop)
    }

    /// Ends every wait, now and later.
    pub fn abort(&self) {
        self.state.lock().is_aborted = true;
        self.changed.notify_all();
    }
}

impl State {
    fn push(&mut self, stream: &StreamId, command: Command) {
        self.streams
            .entry(stream.clone())
            .or_default()
            .push_back(command);
    }

    fn is_empty(&self, stream: &StreamId) -> bool {
        self.streams.get(stream).is_none_or(VecDeque::is_empty)
    }

    /// Runs commands of `stream` until `is_enough`. Returns false if it needs a member that has not
    /// started its exchange.
    fn advance(&mut self, stream: &StreamId, is_enough: &dyn Fn(&Self) -> bool) -> bool {
        while !is_enough(self) {
            let Some(command) = self.streams.get_mut(stream).and_then(VecDeque::pop_front) else {
                return true;
            };
            match command {
                Command::Run(work) => work(),
                Command::Record(event) => self.events[event.0].is_done = true,
                Command::Wait(event) => {
                    let recorded = self.events[event.0].recorded.clone();
                    let recorded = recorded.expect("only recorded events are waited for");
                    if !self.advance(&recorded, &|state| state.events[event.0].is_done) {
                        self.requeue(stream, Command::Wait(event));
                        return false;
                    }
                }
                Command::Exchange(id) => {
                    if !self.meet(stream, &id) {
                        self.requeue(stream, Command::Exchange(id));
                        return false;
                    }
                }
            }
        }
        true
    }

    fn requeue(&mut self, stream: &StreamId, command: Command) {
        self.streams
            .entry(stream.clone())
            .or_default()
            .push_front(command);
    }

    /// Carries out an exchange that `stream` has reached, once the streams of all members have.
    /// Returns false if a member has not started it.
    fn meet(&mut self, stream: &StreamId, id: &ExchangeId) -> bool {
        let exchange = &self.exchanges[id];
        if exchange.is_done {
            return true;
        }
        let streams: Option<Vec<_>> = exchange
            .sent
            .iter()
            .map(|sent| sent.as_ref().map(|(stream, _)| stream.clone()))
            .collect();
        let Some(streams) = streams else { return false };
        let is_next = |state: &Self, other: &StreamId| {
            let next = state.streams.get(other).and_then(VecDeque::front);
            matches!(next, Some(Command::Exchange(next)) if next == id)
        };
        for other in streams.iter().filter(|other| *other != stream) {
            if !self.advance(other, &|state| is_next(state, other)) {
                return false;
            }
        }
        let exchange = self.exchanges.get_mut(id).expect("it was started");
        for (from, sent) in exchange.sent.iter().enumerate() {
            let (_, sent) = sent.as_ref().expect("all have started it");
            for (to, list) in sent.iter().enumerate() {
                for (sent, received) in list.iter().zip(&exchange.received[to][from]) {
                    let bytes = sent.bytes.lock().clone();
                    *received.bytes.lock() = bytes;
                }
            }
        }
        exchange.is_done = true;
        // The memory that is sent is free from now on.
        exchange.sent.clear();
        true
    }
}

impl std::fmt::Debug for Streams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Streams").finish_non_exhaustive()
    }
}
