//! [`RequestTable`]: messages under way, with the memory that MPI reads and writes meanwhile.
//!
//! Whoever begins a transfer gives its memory away until it is done. Transfers that are never done, because MPI
//! has failed, keep it for ever: other processes might still write there.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem::{self, ManuallyDrop};
use std::rc::Rc;

use mpi::ffi::MPI_Request;

use super::error::MpiError;
use super::library::{Library, ProbedMessage};
use crate::comm::transport::{Payload, RecvBuffer};

/// Tag of messages of frames.
pub(super) const FRAME: c_int = 0;
/// Tag of messages of payloads.
pub(super) const PART: c_int = 1;

pub(super) struct RequestTable {
    library: Library,
    /// Bytes of one message.
    limit: usize,
    requests: Vec<MPI_Request>,
    /// Of each request.
    held: Vec<RequestMemory>,
    /// What each other process has announced.
    announced: Vec<Announced>,
    /// Receives that could not be begun.
    failed: Vec<Failed>,
}

/// Payloads that one process has announced, in the order in which they come.
#[derive(Default)]
struct Announced {
    parcels: VecDeque<IncomingMessage>,
    /// Of the parcels before, messages that are not being received yet.
    fragments: VecDeque<Fragment>,
    /// Bytes of those that are.
    coming: usize,
}

/// One message of a payload, and where it goes.
struct Fragment {
    space: *mut u8,
    length: usize,
    parcel: Rc<IncomingMessage>,
}

/// The most messages of one process that are received at once, but for short ones. What has come with shared memory is
/// copied when its receive begins: so a call of MPI does not copy for long, and processes that read the same do so at the
/// same time, while it is in the cache that they share.
const AT_ONCE: usize = 2;

// SAFETY: of MPI at its thread level, see `Library`. Parcels, too, are shared here only, so all their handles move at once.
unsafe impl Send for RequestTable {}

struct RequestMemory {
    /// The other process.
    with: usize,
    /// Freed when the request is done, and never otherwise.
    memory: ManuallyDrop<RequestPayload>,
}

/// What MPI reads or writes.
enum RequestPayload {
    Sent(Payload),
    Frame(ReceivedFrame),
    Parts(Rc<IncomingMessage>, usize),
}

/// A message of a frame.
pub(super) struct ReceivedFrame {
    pub from: usize,
    /// Of all messages of frames from there.
    pub number: u64,
    pub bytes: Vec<u8>,
}

/// A parcel whose payloads come.
pub(super) struct IncomingMessage {
    pub from: usize,
    pub number: u64,
    pub landings: Vec<Box<dyn RecvBuffer>>,
    /// Of the payloads that come by messages of their own, the lengths.
    pub lengths: Vec<Option<usize>>,
}

/// What is done.
#[derive(Default)]
pub(super) struct Done {
    /// Messages sent.
    pub sent: usize,
    /// Messages of payloads received.
    pub received: usize,
    pub frames: Vec<ReceivedFrame>,
    pub parcels: Vec<IncomingMessage>,
    pub failed: Vec<Failed>,
}

/// A message that has failed.
pub(super) struct Failed {
    /// The other process.
    pub with: usize,
    pub error: MpiError,
    memory: ManuallyDrop<RequestPayload>,
}

impl Failed {
    /// Frees what MPI has read or written, now that the other process is gone: nobody else does.
    pub fn free(self) {
        drop(ManuallyDrop::into_inner(self.memory));
    }
}

impl IncomingMessage {
    /// The messages of at most `limit` bytes that it comes in.
    fn into_fragments(mut self, limit: usize) -> Vec<Fragment> {
        let mut places = Vec::new();
        for (landing, length) in self.landings.iter_mut().zip(&self.lengths) {
            let Some(length) = length else { continue };
            let space = landing.space();
            assert_eq!(space.len(), *length, "a landing has the payload's length");
            places.extend(space.chunks_mut(limit).map(|fragment| (fragment.as_mut_ptr().cast(), fragment.len())));
        }
        let parcel = Rc::new(self);
        places.into_iter().map(|(space, length)| Fragment { space, length, parcel: parcel.clone() }).collect()
    }
}

impl RequestTable {
    pub fn new(library: Library, processes: usize, limit: usize) -> Self {
        let announced = (0..processes).map(|_| Announced::default()).collect();
        Self { library, limit, requests: Vec::new(), held: Vec::new(), announced, failed: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        let nothing_comes = |of: &Announced| of.parcels.is_empty() && of.fragments.is_empty();
        self.requests.is_empty() && self.failed.is_empty() && self.announced.iter().all(nothing_comes)
    }

    /// Begins to send `payload`, in as many messages as it takes.
    pub fn send(&mut self, to: usize, tag: c_int, payload: &Payload) -> Result<(), MpiError> {
        for fragment in (**payload).as_ref().chunks(self.limit) {
            // SAFETY: `held` has the payload, which is shared and so does not change, until the request is done.
            let request = unsafe { self.library.send(fragment.as_ptr(), fragment.len(), to, tag) }?;
            self.hold(request, to, RequestPayload::Sent(payload.clone()));
        }
        Ok(())
    }

    /// The next message of a frame, if one has come.
    pub fn next_frame(&mut self) -> Result<Option<ProbedMessage>, MpiError> {
        self.library.next(FRAME)
    }

    /// Begins to receive `message`, the `number`-th of frames from its sender.
    pub fn receive_frame(&mut self, message: ProbedMessage, number: u64) -> Result<(), MpiError> {
        let (from, mut bytes) = (message.from, vec![0; message.bytes]);
        // SAFETY: `held` has the bytes, which nobody reads or moves until the request is done.
        let request = unsafe { self.library.take(message, bytes.as_mut_ptr()) }?;
        self.hold(request, from, RequestPayload::Frame(ReceivedFrame { from, number, bytes }));
        Ok(())
    }

    /// Receives the payloads of `parcel` that come by messages of their own, when those announced before are being received,
    /// and their places are settled.
    pub fn receive_parts(&mut self, parcel: IncomingMessage) {
        let from = parcel.from;
        self.announced[from].parcels.push_back(parcel);
        self.begin_receives(from);
    }

    /// Begins to receive what process `from` has announced, if not too much is coming already.
    fn begin_receives(&mut self, from: usize) {
        loop {
            let Announced { parcels, fragments, coming } = &mut self.announced[from];
            if fragments.is_empty() {
                let is_settled =
                    |next: &mut IncomingMessage| next.landings.iter_mut().all(|landing| landing.is_settled());
                let Some(parcel) = parcels.pop_front_if(is_settled) else { return };
                fragments.extend(parcel.into_fragments(self.limit));
            }
            let may_come = |next: &mut Fragment| *coming == 0 || *coming + next.length <= AT_ONCE * self.limit;
            let Some(Fragment { space, length, parcel }) = fragments.pop_front_if(may_come) else { return };
            *coming += length;
            let memory = RequestPayload::Parts(parcel, length);
            // SAFETY: what is held has the landing, which nobody asks for its space until the last request for the parcel
            // is done. The pieces do not overlap.
            match unsafe { self.library.receive(space, length, from, PART) } {
                Ok(request) => self.hold(request, from, memory),
                Err(error) => self.failed.push(Failed { with: from, error, memory: ManuallyDrop::new(memory) }),
            }
        }
    }

    /// Expects nothing more of a process that is gone.
    pub fn give_up(&mut self, process: usize) {
        // What is being received fails by itself.
        self.announced[process].fragments.clear();
        self.announced[process].parcels.clear();
    }

    /// What has been done since the last call; all transfers make progress.
    pub fn done(&mut self) -> Result<Done, MpiError> {
        let mut done = Done { failed: mem::take(&mut self.failed), ..Done::default() };
        // Some places may be settled now.
        (0..self.announced.len()).for_each(|from| self.begin_receives(from));
        if self.requests.is_empty() {
            return Ok(done);
        }
        // From the end, where what takes the place of one that is done has been looked at.
        for (index, outcome) in self.library.done(&mut self.requests)?.into_iter().rev() {
            self.requests.swap_remove(index);
            let RequestMemory { with, memory } = self.held.swap_remove(index);
            if let Err(error) = outcome {
                done.failed.push(Failed { with, error, memory });
                continue;
            }
            match ManuallyDrop::into_inner(memory) {
                RequestPayload::Sent(payload) => {
                    drop(payload);
                    done.sent += 1;
                }
                RequestPayload::Frame(frame) => done.frames.push(frame),
                RequestPayload::Parts(parcel, length) => {
                    self.announced[with].coming -= length;
                    done.received += 1;
                    // Of a parcel's last message.
                    done.parcels.extend(Rc::into_inner(parcel));
                }
            }
        }
        Ok(done)
    }

    /// The processes that have failed, where MPI goes on without them.
    pub fn failed(&self) -> Result<Vec<usize>, MpiError> {
        self.library.failed()
    }

    fn hold(&mut self, request: MPI_Request, with: usize, memory: RequestPayload) {
        self.requests.push(request);
        self.held.push(RequestMemory { with, memory: ManuallyDrop::new(memory) });
    }

    /// Ends MPI.
    pub fn finalize(&self) -> Result<(), MpiError> {
        assert!(self.is_empty(), "MPI ends when nothing is under way");
        self.library.finalize()
    }
}
