//! [`Transfers`]: messages under way, with the memory that MPI reads and writes meanwhile.
//!
//! Whoever begins a transfer gives its memory away until it is done. Transfers that are never done, because MPI
//! has failed, keep it for ever: other processes might still write there.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::rc::Rc;

use mpi::ffi::MPI_Request;

use super::error::MpiError;
use super::library::{Library, Message};
use crate::comm::courier::{Landing, Payload};

/// Tag of messages of frames.
pub(super) const FRAME: c_int = 0;
/// Tag of messages of payloads.
pub(super) const PART: c_int = 1;

pub(super) struct Transfers {
    library: Library,
    /// Bytes of one message.
    limit: usize,
    requests: Vec<MPI_Request>,
    /// Of each request.
    held: Vec<Held>,
}

// SAFETY: of MPI at its thread level, see `Library`. Parcels, too, are shared here only, so all their handles move at once.
unsafe impl Send for Transfers {}

struct Held {
    /// The other process.
    with: usize,
    /// Freed when the request is done, and never otherwise.
    memory: ManuallyDrop<Memory>,
}

/// What MPI reads or writes.
enum Memory {
    Sent(Payload),
    Frame(ReceivedFrame),
    Parts(Rc<Incoming>),
}

/// A message of a frame.
pub(super) struct ReceivedFrame {
    pub from: usize,
    /// Of all messages of frames from there.
    pub number: u64,
    pub bytes: Vec<u8>,
}

/// A parcel whose payloads come.
pub(super) struct Incoming {
    pub from: usize,
    pub number: u64,
    pub landings: Vec<Box<dyn Landing>>,
}

/// What is done.
#[derive(Default)]
pub(super) struct Done {
    /// Messages sent.
    pub sent: usize,
    pub frames: Vec<ReceivedFrame>,
    pub parcels: Vec<Incoming>,
    pub failed: Vec<Failed>,
}

/// A message that has failed.
pub(super) struct Failed {
    /// The other process.
    pub with: usize,
    pub error: MpiError,
    memory: ManuallyDrop<Memory>,
}

impl Failed {
    /// Frees what MPI has read or written, now that the other process is gone: nobody else does.
    pub fn free(self) {
        drop(ManuallyDrop::into_inner(self.memory));
    }
}

impl Transfers {
    pub fn new(library: Library, limit: usize) -> Self {
        Self { library, limit, requests: Vec::new(), held: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Begins to send `payload`, in as many messages as it takes.
    pub fn send(&mut self, to: usize, tag: c_int, payload: &Payload) -> Result<(), MpiError> {
        for piece in (**payload).as_ref().chunks(self.limit) {
            // SAFETY: `held` has the payload, which is shared and so does not change, until the request is done.
            let request = unsafe { self.library.send(piece.as_ptr(), piece.len(), to, tag) }?;
            self.hold(request, to, Memory::Sent(payload.clone()));
        }
        Ok(())
    }

    /// The next message of a frame, if one has come.
    pub fn next_frame(&mut self) -> Result<Option<Message>, MpiError> {
        self.library.next(FRAME)
    }

    /// Begins to receive `message`, the `number`-th of frames from its sender.
    pub fn receive_frame(&mut self, message: Message, number: u64) -> Result<(), MpiError> {
        let (from, mut bytes) = (message.from, vec![0; message.bytes]);
        // SAFETY: `held` has the bytes, which nobody reads or moves until the request is done.
        let request = unsafe { self.library.take(message, bytes.as_mut_ptr()) }?;
        self.hold(request, from, Memory::Frame(ReceivedFrame { from, number, bytes }));
        Ok(())
    }

    /// Begins to receive payloads of `parcel`: those for whose landings `comes` is true, in order. Returns the parcel if
    /// none does.
    pub fn receive_parts(&mut self, mut parcel: Incoming, comes: &[bool]) -> Result<Option<Incoming>, MpiError> {
        let mut pieces = Vec::new();
        for (landing, _) in parcel.landings.iter_mut().zip(comes).filter(|(_, comes)| **comes) {
            pieces.extend(landing.space().chunks_mut(self.limit).map(|piece| (piece.as_mut_ptr().cast(), piece.len())));
        }
        let parcel = Rc::new(parcel);
        for (space, length) in pieces {
            // SAFETY: `held` has the landing, which nobody asks for its space until the last request for the parcel
            // is done. The pieces do not overlap.
            let request = unsafe { self.library.receive(space, length, parcel.from, PART) }?;
            self.hold(request, parcel.from, Memory::Parts(parcel.clone()));
        }
        Ok(Rc::into_inner(parcel))
    }

    /// What has been done since the last call; all transfers make progress.
    pub fn done(&mut self) -> Result<Done, MpiError> {
        let mut done = Done::default();
        if self.is_empty() {
            return Ok(done);
        }
        // From the end, where what takes the place of one that is done has been looked at.
        for (index, outcome) in self.library.done(&mut self.requests)?.into_iter().rev() {
            self.requests.swap_remove(index);
            let Held { with, memory } = self.held.swap_remove(index);
            if let Err(error) = outcome {
                done.failed.push(Failed { with, error, memory });
                continue;
            }
            match ManuallyDrop::into_inner(memory) {
                Memory::Sent(payload) => {
                    drop(payload);
                    done.sent += 1;
                }
                Memory::Frame(frame) => done.frames.push(frame),
                // Of a parcel's last message.
                Memory::Parts(parcel) => done.parcels.extend(Rc::into_inner(parcel)),
            }
        }
        Ok(done)
    }

    /// The processes that have failed, where MPI goes on without them.
    pub fn failed(&self) -> Result<Vec<usize>, MpiError> {
        self.library.failed()
    }

    fn hold(&mut self, request: MPI_Request, with: usize, memory: Memory) {
        self.requests.push(request);
        self.held.push(Held { with, memory: ManuallyDrop::new(memory) });
    }

    /// Ends MPI.
    pub fn finalize(&self) -> Result<(), MpiError> {
        assert!(self.is_empty(), "MPI ends when nothing is under way");
        self.library.finalize()
    }
}
