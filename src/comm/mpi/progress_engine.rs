//! [`ProgressEngine`]: what whoever communicates does, one thread at a time.

use std::collections::VecDeque;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::error::MpiError;
use super::frame::{self, Frame};
use super::library::Library;
use super::request_table::{FRAME, IncomingMessage, PART, RequestTable};
use super::{FragmentLimits, MpiShared};
use crate::comm::panic::panic_text;
use crate::comm::transport::{Message, MessageHandler, RecvBuffer, SendStamp};

/// How many messages of frames are taken in before what has come with others is looked at.
const AT_ONCE: usize = 64;

pub(super) struct ProgressEngine {
    shared: Arc<MpiShared>,
    limits: FragmentLimits,
    transfers: RequestTable,
    /// What comes from each process.
    senders: Vec<Sender>,
    /// When the last look for lost processes was.
    looked: Instant,
    /// The process ends.
    ending: bool,
    /// Why nothing can be carried any more.
    problem: Option<String>,
}

/// What has come of one look at everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PollResult {
    /// Something has moved.
    Moved,
    /// Nothing has; something may be under way.
    Still { under_way: bool },
    /// The process ends, and everything has been sent and received.
    Over,
    /// Nothing can be carried any more.
    Failed,
}

/// What comes from one process.
#[derive(Default)]
struct Sender {
    /// Messages of frames that are being received; those that are there, with their bytes. The oldest first.
    messages: VecDeque<Option<Vec<u8>>>,
    /// Messages of frames that have been taken from them.
    taken: u64,
    /// The beginning of a frame of several messages.
    begun: Vec<u8>,
    /// Parcels so far.
    parcels: u64,
    /// Of which payloads are under way.
    incoming: usize,
    end: ShutdownState,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, PartialOrd)]
enum ShutdownState {
    /// More may come.
    #[default]
    Open,
    /// The last frame has come, and payloads may.
    Last,
    /// Everything has.
    Notified,
    /// MPI has lost it.
    Lost,
}

/// Between looks for processes that MPI has lost while nothing is sent to them.
const LOOK: Duration = Duration::from_millis(5);

/// Why nothing can be carried any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum CarryError {
    #[error(transparent)]
    Mpi(#[from] MpiError),
    #[error("process {from} has sent what is no frame: all processes must run the same program")]
    NoFrame { from: usize },
}

impl ProgressEngine {
    pub fn new(shared: Arc<MpiShared>, library: Library, limits: FragmentLimits) -> Self {
        let senders = (0..shared.place.processes).map(|_| Sender::default()).collect();
        let transfers = RequestTable::new(library, shared.place.processes, limits.message);
        Self { shared, limits, transfers, senders, looked: Instant::now(), ending: false, problem: None }
    }

    /// Sends what ranks have left, and gives the addressee what has come. Never waits.
    pub fn turn(&mut self) -> PollResult {
        if self.problem.is_none() {
            match catch_unwind(AssertUnwindSafe(|| self.carry())) {
                Ok(Ok(turn)) => return turn,
                Ok(Err(error)) => self.problem = Some(error.to_string()),
                Err(panic) => self.problem = Some(format!("the courier panicked: {}", panic_text(&*panic))),
            }
        }
        PollResult::Failed
    }

    /// Why a turn has failed.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    fn carry(&mut self) -> Result<PollResult, CarryError> {
        let (parcels, ended) = {
            let mut queue = self.shared.queue.lock();
            (mem::take(&mut queue.parcels), queue.ended)
        };
        let mut moved = !parcels.is_empty();
        let shared = self.shared.clone();
        let addressee: Option<&dyn MessageHandler> = match shared.addressee.get() {
            Some(addressee) => Some(&**addressee),
            // Others end only once what they have sent is received.
            None => self.ending.then_some(&NoHandler),
        };
        for (to, parcel) in parcels {
            self.unless_lost(addressee, to, |carrier| carrier.send(to, &parcel))?;
        }
        if ended && !mem::replace(&mut self.ending, ended) {
            for to in self.others() {
                self.unless_lost(addressee, to, |carrier| carrier.transfers.send(to, FRAME, &frame::last()))?;
            }
        }
        match addressee {
            Some(addressee) => moved |= self.receive(addressee)?,
            None => moved |= self.transfers.done()?.sent > 0,
        }
        if self.looked.elapsed() > LOOK {
            moved |= self.find_lost(addressee)?;
        }
        let under_way = !self.transfers.is_empty();
        if self.ending && !under_way && self.others().all(|other| self.senders[other].end >= ShutdownState::Notified) {
            return Ok(PollResult::Over);
        }
        Ok(if moved { PollResult::Moved } else { PollResult::Still { under_way } })
    }

    /// Ends MPI, on the thread that has begun it, once all is over.
    pub fn finalize(&mut self) -> Result<(), MpiError> {
        self.problem = Some("the process ends".into());
        // The end of MPI is one of all processes: without some it may not come.
        let all_end = self.senders.iter().all(|sender| sender.end != ShutdownState::Lost);
        if all_end { self.transfers.finalize() } else { Ok(()) }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let here = self.shared.place.here;
        (0..self.shared.place.processes).filter(move |process| *process != here)
    }

    /// Does what sends to a process, unless that is lost, also if this is how it is found.
    fn unless_lost(
        &mut self,
        addressee: Option<&dyn MessageHandler>,
        to: usize,
        send: impl FnOnce(&mut Self) -> Result<(), MpiError>,
    ) -> Result<(), MpiError> {
        if self.senders[to].end == ShutdownState::Lost {
            return Ok(());
        }
        let sent = send(self);
        if sent.is_err() {
            self.find_lost(addressee)?;
        }
        if self.senders[to].end == ShutdownState::Lost { Ok(()) } else { sent }
    }

    /// Looks for processes that have failed, where MPI goes on without them. Returns whether there is one more.
    fn find_lost(&mut self, addressee: Option<&dyn MessageHandler>) -> Result<bool, MpiError> {
        self.looked = Instant::now();
        let mut found = false;
        for process in self.transfers.failed()? {
            let sender = &mut self.senders[process];
            let was = mem::replace(&mut sender.end, ShutdownState::Lost);
            self.transfers.give_up(process);
            // One that has said that it ends may go before this one does.
            if was < ShutdownState::Notified
                && let Some(addressee) = addressee
            {
                let problem = format!("process {process} is gone: killed, crashed, or out of reach");
                addressee.lost(Some(process), &problem);
            }
            found |= was < ShutdownState::Lost;
        }
        Ok(found)
    }

    fn send(&mut self, to: usize, parcel: &Message) -> Result<(), MpiError> {
        parcel.taken.iter().for_each(SendStamp::note);
        let sent = &self.shared.sent[to];
        self.transfers.send(to, FRAME, &frame::of_parcel(parcel, self.limits.riding))?;
        sent.fetch_add(parcel.header.len() as u64, Ordering::Relaxed);
        for payload in &parcel.payloads {
            let bytes = (**payload).as_ref();
            if !frame::rides(bytes, self.limits.riding) {
                self.transfers.send(to, PART, payload)?;
            }
            sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Gives `addressee` what has come. Returns whether anything has, or has gone.
    fn receive(&mut self, addressee: &dyn MessageHandler) -> Result<bool, CarryError> {
        for _ in 0..AT_ONCE {
            let message = match self.transfers.next_frame() {
                // From anyone: until it is known who has failed.
                Err(_) if self.find_lost(Some(addressee))? => continue,
                message => message?,
            };
            let Some(message) = message else { break };
            let sender = &mut self.senders[message.from];
            let number = sender.taken + sender.messages.len() as u64;
            sender.messages.push_back(None);
            self.transfers.receive_frame(message, number)?;
        }
        let done = self.transfers.done()?;
        let busy = done.sent + done.received > 0 || !done.frames.is_empty();
        for failed in done.failed {
            self.find_lost(Some(addressee))?;
            if self.senders[failed.with].end != ShutdownState::Lost {
                return Err(failed.error.into());
            }
            failed.free();
        }
        for IncomingMessage { from, number, landings, .. } in done.parcels {
            self.senders[from].incoming -= 1;
            if self.senders[from].end == ShutdownState::Lost {
                // Some of it may never have come.
                continue;
            }
            // SAFETY: its last payload is done.
            unsafe { addressee.arrived(from, number, landings) };
        }
        for frame in done.frames {
            let sender = &mut self.senders[frame.from];
            sender.messages[(frame.number - sender.taken) as usize] = Some(frame.bytes);
        }
        if busy {
            for from in 0..self.senders.len() {
                self.deliver(from, addressee)?;
            }
        }
        Ok(busy)
    }

    /// Gives `addressee` the frames of a process that are whole, and its end.
    fn deliver(&mut self, from: usize, addressee: &dyn MessageHandler) -> Result<(), CarryError> {
        if self.senders[from].end == ShutdownState::Lost {
            return Ok(());
        }
        while let Some(bytes) = self.senders[from].next_frame() {
            match frame::read(&bytes).ok_or(CarryError::NoFrame { from })? {
                Frame::Message { header, lengths, riders } => self.open(from, header, &lengths, &riders, addressee)?,
                Frame::Last => self.senders[from].end = ShutdownState::Last,
            }
        }
        let sender = &mut self.senders[from];
        if sender.end == ShutdownState::Last && sender.incoming == 0 {
            sender.end = ShutdownState::Notified;
            addressee.lost(Some(from), &format!("process {from} has ended"));
        }
        Ok(())
    }

    /// Has `addressee` say where the payloads go.
    fn open(
        &mut self,
        from: usize,
        header: &[u8],
        lengths: &[usize],
        riders: &[Option<&[u8]>],
        addressee: &dyn MessageHandler,
    ) -> Result<(), MpiError> {
        let sender = &mut self.senders[from];
        let number = sender.parcels;
        sender.parcels += 1;
        let mut landings = addressee.header(from, header.to_vec(), lengths);
        assert_eq!(landings.len(), lengths.len(), "a landing for each payload");
        for (landing, rider) in landings.iter_mut().zip(riders) {
            if let Some(rider) = rider {
                let space = landing.space();
                assert_eq!(space.len(), rider.len(), "a landing has the payload's length");
                space.write_copy_of_slice(rider);
            }
        }
        let of_its_own = |(length, rider): (&usize, &Option<&[u8]>)| rider.is_none().then_some(*length);
        let lengths: Vec<_> = lengths.iter().zip(riders).map(of_its_own).collect();
        if lengths.iter().all(Option::is_none) {
            // SAFETY: all payloads have been copied.
            unsafe { addressee.arrived(from, number, landings) };
            return Ok(());
        }
        self.senders[from].incoming += 1;
        self.transfers.receive_parts(IncomingMessage { from, number, landings, lengths });
        Ok(())
    }
}

impl Sender {
    /// The next whole frame.
    fn next_frame(&mut self) -> Option<Vec<u8>> {
        while let Some(bytes) = self.messages.front_mut().and_then(Option::take) {
            self.messages.pop_front();
            self.taken += 1;
            if self.begun.is_empty() {
                self.begun = bytes;
            } else {
                self.begun.extend(bytes);
            }
            if frame::is_complete(&self.begun) {
                return Some(mem::take(&mut self.begun));
            }
        }
        None
    }
}

/// Gets what comes to a process that ends without ever having asked for it.
struct NoHandler;

impl MessageHandler for NoHandler {
    fn header(&self, _: usize, _: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
        lengths
            .iter()
            .map(|length| Box::new(Discarded(Box::new_uninit_slice(*length))) as Box<dyn RecvBuffer>)
            .collect()
    }

    unsafe fn arrived(&self, _: usize, _: u64, _: Vec<Box<dyn RecvBuffer>>) {}

    fn lost(&self, _: Option<usize>, _: &str) {}
}

struct Discarded(Box<[mem::MaybeUninit<u8>]>);

impl RecvBuffer for Discarded {
    fn space(&mut self) -> &mut [mem::MaybeUninit<u8>] {
        &mut self.0
    }
}
