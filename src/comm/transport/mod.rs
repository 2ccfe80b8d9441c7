//! A [`Transport`] sends messages between processes.
//!
//! Ranks of one process pass tensors to each other by reference. A call is sent to the ranks of
//! other processes as a message: a header that describes the call, and payloads, which are the
//! bytes of tensors. To connect processes in another way than by MPI, implement [`Transport`];
//! [`ProcessJob`](super::ProcessJob) creates backends on top of it.

pub(in crate::comm) mod header;
#[cfg(test)]
mod header_tests;
#[cfg(feature = "mpi")]
pub(in crate::comm) mod mpi;
pub(in crate::comm) mod peer_processes;
pub(in crate::comm) mod remote_error;

use std::any::Any;
use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Bytes to send, kept alive until the transport has sent them.
pub type Payload = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A header and payloads that are sent to one process.
pub struct Message {
    /// Header, which the receiver reads first.
    pub header: Vec<u8>,
    /// Payloads that follow the header, each at least one byte long.
    pub payloads: Vec<Payload>,
    /// Records when the message is handed to the network, if the sender needs the time.
    pub taken: Option<SendStamp>,
}

/// Records the time when the transport began to send a message; for several messages with clones of
/// one stamp, the first of them. The sender keeps a clone.
#[derive(Debug, Clone, Default)]
pub struct SendStamp(Arc<OnceLock<Instant>>);

impl SendStamp {
    /// Records the current time, unless a time was recorded before.
    pub fn note(&self) {
        self.0.get_or_init(Instant::now);
    }

    /// Returns the recorded time.
    pub fn at(&self) -> Option<Instant> {
        self.0.get().copied()
    }
}

/// Memory into which one payload is received, exactly as long as the payload.
/// [`MessageHandler::arrived`] recognizes a buffer by its type.
pub trait RecvBuffer: Any + Send {
    /// Returns the memory, to be written.
    fn space(&mut self) -> &mut [MaybeUninit<u8>];
}

/// The connections of one process to the other processes of its job. They exist as long as the
/// process.
pub trait Transport: Debug + Send + Sync {
    /// Returns the number of processes.
    fn processes(&self) -> usize;

    /// Returns the index of this process.
    fn process_index(&self) -> usize;

    /// Queues a message for another process, without blocking. The headers of one sender arrive in
    /// the order in which they were sent; each payload arrives as soon as possible. The thread that
    /// sends the message records the [`SendStamp`].
    fn send(&self, to: usize, message: Message);

    /// Notifies the transport that a local rank is about to block. A transport that polls should
    /// poll now instead of sleeping until its next poll.
    fn poll_now(&self) {}

    /// Makes progress for a moment on the calling thread, which is waiting for messages: sends
    /// queued messages, and passes received ones to the handler. Returns true if any data moved,
    /// and `None` if the transport does all work on its own thread.
    fn progress(&self) -> Option<bool> {
        None
    }

    /// Tells the transport whether this process may end only when process `of` ends, which is so at
    /// first. After a failure, a process may be stuck in its program. The provided implementation
    /// is for transports that wait for no process.
    fn await_end(&self, of: usize, is_awaited: bool) {
        let _ = (of, is_awaited);
    }

    /// Returns, for each process, the bytes of headers and payloads handed over for it so far.
    fn sent(&self) -> Vec<u64>;

    /// Sets the handler of received messages. Messages received earlier are kept for it. Called
    /// once.
    fn set_handler(&self, handler: Arc<dyn MessageHandler>);
}

/// Handler of the messages of one process. It is called on the transport's thread, or on a thread
/// that calls [`progress`](Transport::progress). The transport makes no progress during a call, so
/// the handler must not wait for ranks, and must not copy large data.
pub trait MessageHandler: Send + Sync {
    /// Handles a header. Returns the memory for the payloads that follow it, which have these
    /// `lengths`.
    fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>>;

    /// Handles the payloads of the `number`-th header of process `from` (0, 1, ..), which were
    /// received into `buffers`. For a header without payloads it is called immediately after
    /// [`header`](Self::header).
    ///
    /// # Safety
    /// All bytes of all `buffers` must have been written.
    unsafe fn arrived(&self, from: usize, number: u64, buffers: Vec<Box<dyn RecvBuffer>>);

    /// Handles a lost connection: no more messages arrive from `process`, or from any process if it
    /// is `None`.
    fn lost(&self, process: Option<usize>, problem: &str);
}

impl Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lengths: Vec<_> = self
            .payloads
            .iter()
            .map(|payload| (**payload).as_ref().len())
            .collect();
        f.debug_struct("Message")
            .field("header", &self.header.len())
            .field("payloads", &lengths)
            .finish()
    }
}
