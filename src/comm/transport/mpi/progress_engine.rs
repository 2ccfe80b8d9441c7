//! [`ProgressEngine`]: sends queued messages and delivers received ones. One thread at a time uses it.

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

/// Maximum number of MPI messages with frames that are received in one poll before completed
/// requests are checked.
const AT_ONCE: usize = 64;

/// Sends and receives the messages of a process; see [`mpi`](super).
pub(super) struct ProgressEngine {
    shared: Arc<MpiShared>,
    limits: FragmentLimits,
    transfers: RequestTable,
    /// State of the messages from each process.
    senders: Vec<Sender>,
    /// Time of the last check for lost processes.
    looked: Instant,
    /// True once the process is ending and its last frames are sent.
    ending: bool,
    /// Reason why nothing can be sent or received any more.
    problem: Option<String>,
}

/// Result of one poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PollResult {
    /// A message was sent or received.
    Moved,
    /// Nothing was sent or received. `under_way` is true if requests are in flight.
    Still { under_way: bool },
    /// The process is ending, and everything has been sent and received.
    Over,
    /// Nothing can be sent or received any more.
    Failed,
}

/// Messages from one process.
#[derive(Default)]
struct Sender {
    /// MPI messages with frames, oldest first; `None` while a message is being received.
    frames: VecDeque<Option<Vec<u8>>>,
    /// Number of MPI messages that were removed from `frames`.
    taken: u64,
    /// Beginning of a frame that consists of several MPI messages.
    partial: Vec<u8>,
    /// Number of messages received so far.
    messages: u64,
    /// Number of messages whose payloads are being received.
    incoming: usize,
    end: ShutdownState,
}

/// Progress of the end of a process.
#[derive(Debug, Default, Clone, Copy, PartialEq, PartialOrd)]
enum ShutdownState {
    /// The process may send more.
    #[default]
    Open,
    /// The last frame has arrived; payloads may still arrive.
    Last,
    /// Everything has arrived, and the handler is notified.
    Notified,
    /// MPI has lost the process.
    Lost,
}

/// Interval between checks for processes that MPI has lost. It matters while nothing is sent to
/// them.
const LOOK: Duration = Duration::from_millis(5);

/// Reason why nothing can be sent or received any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum CarryError {
    #[error(transparent)]
    Mpi(#[from] MpiError),
    #[error(
        "process {from} sent an invalid message. Run the same build of the program in all processes"
    )]
    NoFrame { from: usize },
}

impl ProgressEngine {
    pub fn new(shared: Arc<MpiShared>, library: Library, limits: FragmentLimits) -> Self {
        let senders = (0..shared.place.processes)
            .map(|_| Sender::default())
            .collect();
        let transfers = RequestTable::new(library, shared.place.processes, limits.message);
        Self {
            shared,
            limits,
            transfers,
            senders,
            looked: Instant::now(),
            ending: false,
            problem: None,
        }
    }

    /// Sends queued messages and passes received ones to the handler. Never blocks.
    pub fn turn(&mut self) -> PollResult {
        if self.problem.is_none() {
            match catch_unwind(AssertUnwindSafe(|| self.carry())) {
                Ok(Ok(turn)) => return turn,
                Ok(Err(error)) => self.problem = Some(error.to_string()),
                Err(panic) => {
                    self.problem = Some(format!(
                        "the MPI transport panicked: {}",
                        panic_text(&*panic)
                    ))
                }
            }
        }
        PollResult::Failed
    }

    /// Returns the reason why a poll has failed.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    fn carry(&mut self) -> Result<PollResult, CarryError> {
        let (messages, ended) = {
            let mut queue = self.shared.queue.lock();
            (mem::take(&mut queue.messages), queue.ended)
        };
        let mut moved = !messages.is_empty();
        let shared = self.shared.clone();
        let handler: Option<&dyn MessageHandler> = match shared.handler.get() {
            Some(handler) => Some(&**handler),
            // Without a handler, messages must be received nevertheless, because their senders end
            // only after that.
            None => self.ending.then_some(&NoHandler),
        };
        for (to, message) in messages {
            self.unless_lost(handler, to, |engine| engine.send(to, &message))?;
        }
        if ended && !mem::replace(&mut self.ending, ended) {
            for to in self.others() {
                self.unless_lost(handler, to, |engine| {
                    engine.transfers.send(to, FRAME, &frame::last())
                })?;
            }
        }
        match handler {
            Some(handler) => moved |= self.receive(handler)?,
            None => moved |= self.transfers.done()?.sent > 0,
        }
        if self.looked.elapsed() > LOOK {
            moved |= self.find_lost(handler)?;
        }
        let under_way = !self.transfers.is_empty();
        let has_ended = |process: usize| self.senders[process].end >= ShutdownState::Notified;
        let is_awaited = |process: usize| {
            has_ended(process) || self.shared.awaited[process].load(Ordering::Relaxed)
        };
        if self.ending
            && self
                .others()
                .all(|other| has_ended(other) || !is_awaited(other))
            && !self.transfers.are_any_with(is_awaited)
        {
            return Ok(PollResult::Over);
        }
        Ok(if moved {
            PollResult::Moved
        } else {
            PollResult::Still { under_way }
        })
    }

    /// Finalizes MPI after the last poll. Must be called on the thread that initialized MPI.
    pub fn finalize(&mut self) -> Result<(), MpiError> {
        self.problem = Some("the process ends".into());
        // `MPI_Finalize` is collective, and might not return without processes that are lost or do
        // not end.
        let all_end = self
            .others()
            .all(|other| self.senders[other].end == ShutdownState::Notified);
        if all_end {
            self.transfers.finalize()
        } else {
            Ok(())
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let here = self.shared.place.here;
        (0..self.shared.place.processes).filter(move |process| *process != here)
    }

    /// Calls `send`, which sends to process `to`, and ignores its error if the process is lost.
    /// Does nothing if the process was already lost.
    fn unless_lost(
        &mut self,
        handler: Option<&dyn MessageHandler>,
        to: usize,
        send: impl FnOnce(&mut Self) -> Result<(), MpiError>,
    ) -> Result<(), MpiError> {
        if self.senders[to].end == ShutdownState::Lost {
            return Ok(());
        }
        let sent = send(self);
        if sent.is_err() {
            self.find_lost(handler)?;
        }
        if self.senders[to].end == ShutdownState::Lost {
            Ok(())
        } else {
            sent
        }
    }

    /// Checks for failed processes, if MPI continues without them, and notifies the handler.
    /// Returns true if there is a new one.
    fn find_lost(&mut self, handler: Option<&dyn MessageHandler>) -> Result<bool, MpiError> {
        self.looked = Instant::now();
        let mut found = false;
        for process in self.transfers.failed()? {
            let sender = &mut self.senders[process];
            let was = mem::replace(&mut sender.end, ShutdownState::Lost);
            self.transfers.give_up(process);
            // A process that has reported its end may fail before this process ends.
            if was < ShutdownState::Notified
                && let Some(handler) = handler
            {
                let problem =
                    format!("process {process} was killed, has crashed or is unreachable");
                handler.lost(Some(process), &problem);
            }
            found |= was < ShutdownState::Lost;
        }
        Ok(found)
    }

    fn send(&mut self, to: usize, message: &Message) -> Result<(), MpiError> {
        message.taken.iter().for_each(SendStamp::note);
        let sent = &self.shared.sent[to];
        self.transfers.send(
            to,
            FRAME,
            &frame::of_message(message, self.limits.inline_limit),
        )?;
        sent.fetch_add(message.header.len() as u64, Ordering::Relaxed);
        for payload in &message.payloads {
            let bytes = (**payload).as_ref();
            if !frame::is_inlined(bytes, self.limits.inline_limit) {
                self.transfers.send(to, PART, payload)?;
            }
            sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Receives messages and passes them to `handler`. Returns true if anything was sent or
    /// received.
    fn receive(&mut self, handler: &dyn MessageHandler) -> Result<bool, CarryError> {
        for _ in 0..AT_ONCE {
            let message = match self.transfers.next_frame() {
                // A receive from any source fails until failed processes are acknowledged.
                Err(_) if self.find_lost(Some(handler))? => continue,
                message => message?,
            };
            let Some(message) = message else { break };
            let sender = &mut self.senders[message.from];
            let number = sender.taken + sender.frames.len() as u64;
            sender.frames.push_back(None);
            self.transfers.receive_frame(message, number)?;
        }
        let done = self.transfers.done()?;
        let busy = done.sent + done.received > 0 || !done.frames.is_empty();
        for failed in done.failed {
            self.find_lost(Some(handler))?;
            if self.senders[failed.with].end != ShutdownState::Lost {
                return Err(failed.error.into());
            }
            failed.free();
        }
        for IncomingMessage {
            from,
            number,
            buffers,
            ..
        } in done.messages
        {
            self.senders[from].incoming -= 1;
            if self.senders[from].end == ShutdownState::Lost {
                // Some of its payloads may not have arrived.
                continue;
            }
            // SAFETY: all requests for the payloads are complete.
            unsafe { handler.arrived(from, number, buffers) };
        }
        for frame in done.frames {
            let sender = &mut self.senders[frame.from];
            sender.frames[(frame.number - sender.taken) as usize] = Some(frame.bytes);
        }
        if busy {
            for from in 0..self.senders.len() {
                self.deliver(from, handler)?;
            }
        }
        Ok(busy)
    }

    /// Passes the complete frames of a process, and its end, to `handler`.
    fn deliver(&mut self, from: usize, handler: &dyn MessageHandler) -> Result<(), CarryError> {
        if self.senders[from].end == ShutdownState::Lost {
            return Ok(());
        }
        while let Some(bytes) = self.senders[from].next_frame() {
            match frame::read(&bytes).ok_or(CarryError::NoFrame { from })? {
                Frame::Message {
                    header,
                    lengths,
                    inlined,
                } => self.open(from, header, &lengths, &inlined, handler)?,
                Frame::Last => self.senders[from].end = ShutdownState::Last,
            }
        }
        let sender = &mut self.senders[from];
        if sender.end == ShutdownState::Last && sender.incoming == 0 {
            sender.end = ShutdownState::Notified;
            handler.lost(Some(from), &format!("process {from} has ended"));
        }
        Ok(())
    }

    /// Passes a header to `handler`, copies the inlined payloads to the buffers that it returns,
    /// and starts to receive the other payloads.
    fn open(
        &mut self,
        from: usize,
        header: &[u8],
        lengths: &[usize],
        inlined: &[Option<&[u8]>],
        handler: &dyn MessageHandler,
    ) -> Result<(), MpiError> {
        let sender = &mut self.senders[from];
        let number = sender.messages;
        sender.messages += 1;
        let mut buffers = handler.header(from, header.to_vec(), lengths);
        assert_eq!(
            buffers.len(),
            lengths.len(),
            "the handler returns one buffer per payload"
        );
        for (buffer, inlined) in buffers.iter_mut().zip(inlined) {
            if let Some(inlined) = inlined {
                let space = buffer.space();
                assert_eq!(
                    space.len(),
                    inlined.len(),
                    "a buffer has the length of its payload"
                );
                space.write_copy_of_slice(inlined);
            }
        }
        let lengths: Vec<_> = lengths
            .iter()
            .zip(inlined)
            .map(|(length, inlined)| inlined.is_none().then_some(*length))
            .collect();
        if lengths.iter().all(Option::is_none) {
            // SAFETY: all payloads have been copied.
            unsafe { handler.arrived(from, number, buffers) };
            return Ok(());
        }
        self.senders[from].incoming += 1;
        self.transfers.receive_parts(IncomingMessage {
            from,
            number,
            buffers,
            lengths,
        });
        Ok(())
    }
}

impl Sender {
    /// Returns the next complete frame.
    fn next_frame(&mut self) -> Option<Vec<u8>> {
        while let Some(bytes) = self.frames.front_mut().and_then(Option::take) {
            self.frames.pop_front();
            self.taken += 1;
            if self.partial.is_empty() {
                self.partial = bytes;
            } else {
                self.partial.extend(bytes);
            }
            if frame::is_complete(&self.partial) {
                return Some(mem::take(&mut self.partial));
            }
        }
        None
    }
}

/// Discards messages to a process that ends without having set a handler.
struct NoHandler;

impl MessageHandler for NoHandler {
    fn header(&self, _: usize, _: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
        lengths
            .iter()
            .map(|length| {
                Box::new(Discarded(Box::new_uninit_slice(*length))) as Box<dyn RecvBuffer>
            })
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
