//! [`RequestTable`]: MPI requests in flight, with the memory that MPI reads or writes for them.
//!
//! The table owns this memory until the request completes. If MPI fails, a request may never
//! complete. Its memory is then never freed, because another process might still write to it.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem::{self, ManuallyDrop};
use std::rc::Rc;

use mpi::ffi::MPI_Request;

use super::error::MpiError;
use super::library::{Library, ProbedMessage};
use crate::comm::transport::{Payload, RecvBuffer};

/// Tag of MPI messages with frames.
pub(super) const FRAME: c_int = 0;
/// Tag of MPI messages with payloads.
pub(super) const PART: c_int = 1;

/// MPI requests in flight, the memory that they use, and receives that are waiting to be posted.
pub(super) struct RequestTable {
    library: Library,
    /// Maximum number of bytes of one MPI message.
    limit: usize,
    requests: Vec<MPI_Request>,
    /// Memory of each request, at the same index.
    held: Vec<RequestMemory>,
    /// Announced payloads of each process that are not being received yet.
    announced: Vec<Announced>,
    /// Receives that could not be posted.
    failed: Vec<Failed>,
}

/// Payloads that one process has announced, in the order in which it sends them.
#[derive(Default)]
struct Announced {
    /// Fragments that are not being received yet.
    fragments: VecDeque<Fragment>,
    /// Number of bytes that are being received.
    coming: usize,
}

/// Fragment of a payload, and its destination.
struct Fragment {
    space: *mut u8,
    length: usize,
    message: Rc<IncomingMessage>,
}

/// Number of full-size MPI messages from one process that are received at the same time; more if
/// they are shorter. With a shared-memory MPI transport, the data is copied when its receive is
/// posted. The limit keeps one MPI call short. It also makes processes that read the same data do
/// so at the same time, while the data is in their shared cache.
const AT_ONCE: usize = 2;

// SAFETY: one thread at a time uses MPI, as its thread level requires, see `Library`. The `Rc`s are
// shared only inside this table, so all handles move together.
unsafe impl Send for RequestTable {}

/// Memory of one request.
struct RequestMemory {
    /// Process on the other side.
    with: usize,
    /// Freed when the request completes, and only then.
    memory: ManuallyDrop<RequestPayload>,
}

/// Memory that MPI reads or writes.
enum RequestPayload {
    Sent(Payload),
    Frame(ReceivedFrame),
    Parts(Rc<IncomingMessage>, usize),
}

/// A received MPI message with a frame or a fragment of one.
pub(super) struct ReceivedFrame {
    pub from: usize,
    /// Index among all MPI messages with frames from this process.
    pub number: u64,
    pub bytes: Vec<u8>,
}

/// A message whose payloads are being received.
pub(super) struct IncomingMessage {
    pub from: usize,
    pub number: u64,
    pub buffers: Vec<Box<dyn RecvBuffer>>,
    /// Length of each payload that is sent separately; `None` for inlined ones.
    pub lengths: Vec<Option<usize>>,
}

/// Requests that completed since the last call.
#[derive(Default)]
pub(super) struct Done {
    /// Number of MPI messages sent.
    pub sent: usize,
    /// Number of MPI messages with payloads received.
    pub received: usize,
    pub frames: Vec<ReceivedFrame>,
    pub messages: Vec<IncomingMessage>,
    pub failed: Vec<Failed>,
}

/// A request that failed.
pub(super) struct Failed {
    /// Process on the other side.
    pub with: usize,
    pub error: MpiError,
    memory: ManuallyDrop<RequestPayload>,
}

impl Failed {
    /// Frees the memory of the request. Call this only if the other process is lost, because it can
    /// no longer access the memory then.
    pub fn free(self) {
        drop(ManuallyDrop::into_inner(self.memory));
    }
}

impl IncomingMessage {
    /// Splits the payloads into fragments of at most `limit` bytes.
    fn into_fragments(mut self, limit: usize) -> Vec<Fragment> {
        let mut places = Vec::new();
        for (buffer, length) in self.buffers.iter_mut().zip(&self.lengths) {
            let Some(length) = length else { continue };
            let space = buffer.space();
            assert_eq!(
                space.len(),
                *length,
                "a buffer has the length of its payload"
            );
            places.extend(
                space
                    .chunks_mut(limit)
                    .map(|fragment| (fragment.as_mut_ptr().cast(), fragment.len())),
            );
        }
        let message = Rc::new(self);
        places
            .into_iter()
            .map(|(space, length)| Fragment {
                space,
                length,
                message: message.clone(),
            })
            .collect()
    }
}

impl RequestTable {
    pub fn new(library: Library, processes: usize, limit: usize) -> Self {
        let announced = (0..processes).map(|_| Announced::default()).collect();
        Self {
            library,
            limit,
            requests: Vec::new(),
            held: Vec::new(),
            announced,
            failed: Vec::new(),
        }
    }

    /// Returns true if no request is in flight and no announced payload is waiting.
    pub fn is_empty(&self) -> bool {
        !self.are_any_with(|_| true)
    }

    /// Returns true if a request is in flight, or an announced payload is waiting, with a process
    /// for which `which` returns true.
    pub fn are_any_with(&self, which: impl Fn(usize) -> bool) -> bool {
        let comes = |of: &Announced| !of.fragments.is_empty();
        self.held.iter().any(|request| which(request.with))
            || self.failed.iter().any(|failed| which(failed.with))
            || self
                .announced
                .iter()
                .enumerate()
                .any(|(from, announced)| comes(announced) && which(from))
    }

    /// Starts to send `payload` in as many MPI messages as necessary.
    pub fn send(&mut self, to: usize, tag: c_int, payload: &Payload) -> Result<(), MpiError> {
        for fragment in (**payload).as_ref().chunks(self.limit) {
            // SAFETY: `held` owns a handle to the payload until the request completes. The payload
            // is shared and therefore not written.
            let request = unsafe {
                self.library
                    .send(fragment.as_ptr(), fragment.len(), to, tag)
            }?;
            self.hold(request, to, RequestPayload::Sent(payload.clone()));
        }
        Ok(())
    }

    /// Returns the next MPI message with a frame, if one has arrived.
    pub fn next_frame(&mut self) -> Result<Option<ProbedMessage>, MpiError> {
        self.library.next(FRAME)
    }

    /// Starts to receive `message`, the `number`-th MPI message with a frame from its sender.
    pub fn receive_frame(&mut self, message: ProbedMessage, number: u64) -> Result<(), MpiError> {
        let from = message.from;
        let mut bytes = vec![0; message.bytes];
        // SAFETY: `held` owns the bytes, and no other code reads or moves them until the request
        // completes.
        let request = unsafe { self.library.take(message, bytes.as_mut_ptr()) }?;
        self.hold(
            request,
            from,
            RequestPayload::Frame(ReceivedFrame {
                from,
                number,
                bytes,
            }),
        );
        Ok(())
    }

    /// Receives the separately sent payloads of `message`. Their receives are posted after those of
    /// earlier messages.
    pub fn receive_parts(&mut self, message: IncomingMessage) {
        let from = message.from;
        self.announced[from]
            .fragments
            .extend(message.into_fragments(self.limit));
        self.begin_receives(from);
    }

    /// Posts receives for announced payloads of process `from`, as far as the limit [`AT_ONCE`]
    /// allows.
    fn begin_receives(&mut self, from: usize) {
        loop {
            let Announced { fragments, coming } = &mut self.announced[from];
            let Some(Fragment {
                space,
                length,
                message,
            }) = fragments
                .pop_front_if(|next| *coming == 0 || *coming + next.length <= AT_ONCE * self.limit)
            else {
                return;
            };
            *coming += length;
            let memory = RequestPayload::Parts(message, length);
            // SAFETY: the memory in `held` owns the buffer. No other code accesses its bytes until
            // the last request for the message completes. Fragments do not overlap.
            match unsafe { self.library.receive(space, length, from, PART) } {
                Ok(request) => self.hold(request, from, memory),
                Err(error) => self.failed.push(Failed {
                    with: from,
                    error,
                    memory: ManuallyDrop::new(memory),
                }),
            }
        }
    }

    /// Discards the announced payloads of a lost process.
    pub fn give_up(&mut self, process: usize) {
        // Receives in flight fail on their own.
        self.announced[process].fragments.clear();
    }

    /// Returns the requests that completed since the last call. All requests make progress.
    pub fn done(&mut self) -> Result<Done, MpiError> {
        let mut done = Done {
            failed: mem::take(&mut self.failed),
            ..Done::default()
        };
        // Receives that completed in the last call have made room for others.
        (0..self.announced.len()).for_each(|from| self.begin_receives(from));
        if self.requests.is_empty() {
            return Ok(done);
        }
        // Iterates from the end: `swap_remove` then moves an entry that was already handled.
        for (index, outcome) in self.library.done(&mut self.requests)?.into_iter().rev() {
            self.requests.swap_remove(index);
            let RequestMemory { with, memory } = self.held.swap_remove(index);
            if let Err(error) = outcome {
                done.failed.push(Failed {
                    with,
                    error,
                    memory,
                });
                continue;
            }
            match ManuallyDrop::into_inner(memory) {
                RequestPayload::Sent(payload) => {
                    drop(payload);
                    done.sent += 1;
                }
                RequestPayload::Frame(frame) => done.frames.push(frame),
                RequestPayload::Parts(message, length) => {
                    self.announced[with].coming -= length;
                    done.received += 1;
                    // Only the last request for the message has a unique handle.
                    done.messages.extend(Rc::into_inner(message));
                }
            }
        }
        Ok(done)
    }

    /// Returns the failed processes, if MPI continues without them.
    pub fn failed(&self) -> Result<Vec<usize>, MpiError> {
        self.library.failed()
    }

    /// Adds a request, with the memory that it uses.
    fn hold(&mut self, request: MPI_Request, with: usize, memory: RequestPayload) {
        self.requests.push(request);
        self.held.push(RequestMemory {
            with,
            memory: ManuallyDrop::new(memory),
        });
    }

    /// Finalizes MPI.
    pub fn finalize(&self) -> Result<(), MpiError> {
        assert!(
            self.is_empty(),
            "MPI is finalized only when no request is in flight"
        );
        self.library.finalize()
    }
}
