//! A [`Transport`] carries messages from process to process.
//!
//! Ranks of one process hand each other tensors by reference. To the ranks of other processes a call goes as a parcel: a
//! header that says who calls what, and payloads, the bytes of tensors. Whoever has connections between processes makes
//! them a courier; [`ProcessJob`](super::ProcessJob) makes engines of it.

use std::any::Any;
use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Bytes to send, alive until the courier has sent them.
pub type Payload = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// What one process sends another.
pub struct Message {
    /// What the receiver reads first.
    pub header: Vec<u8>,
    /// What follows; each of at least one byte.
    pub payloads: Vec<Payload>,
    /// When it is on its way, if somebody wants to know.
    pub taken: Option<SendStamp>,
}

/// When the courier has taken a parcel up: of several, the first. Whoever has left them keeps a clone.
#[derive(Debug, Clone, Default)]
pub struct SendStamp(Arc<OnceLock<Instant>>);

impl SendStamp {
    /// Notes that it is now, unless that was noted before.
    pub fn note(&self) {
        self.0.get_or_init(Instant::now);
    }

    /// What was noted.
    pub fn at(&self) -> Option<Instant> {
        self.0.get().copied()
    }
}

/// Memory into which one payload is received, of exactly its length. Its owner recognizes it, in
/// [`MessageHandler::arrived`], by its type.
pub trait RecvBuffer: Any + Send {
    /// Whether its place is known, which a courier that may leave the payload where it is waits for: not long.
    fn is_settled(&mut self) -> bool {
        true
    }

    /// Its bytes, to be written.
    fn space(&mut self) -> &mut [MaybeUninit<u8>];
}

/// The connections of one process to the others of its job; there for as long as the process is.
pub trait Transport: Debug + Send + Sync {
    /// Number of processes.
    fn processes(&self) -> usize;

    /// Which of them this is.
    fn process_index(&self) -> usize;

    /// Takes a parcel for another process: at once, without waiting for it. The headers of one sender arrive in the order
    /// in which they were sent; of the payloads, each as soon as it can. [`SendStamp`] is noted by the thread that
    /// sends it.
    fn send(&self, to: usize, parcel: Message);

    /// Somebody here sleeps until something comes. A courier that has to look whether something has come looks now.
    fn poll_now(&self) {}

    /// Lends the courier the calling thread, which waits for what is to come, for a moment: it sends what there is to send,
    /// and gives the addressee what has come. Returns whether something has moved; `None` from a courier that does all on
    /// a thread of its own.
    fn progress(&self) -> Option<bool> {
        None
    }

    /// Whether this process and another can have memory in common, as those of one host can: each can open what the other
    /// has in its `/proc/<process>/fd`. The answer is the same in all processes, and stays.
    fn shares_memory(&self, with: usize) -> bool {
        let _ = with;
        false
    }

    /// Bytes of headers and payloads handed over so far for each process.
    fn sent(&self) -> Vec<u64>;

    /// Has `addressee` get what arrives; what has arrived before is kept for it. Called once.
    fn set_handler(&self, addressee: Arc<dyn MessageHandler>);
}

/// Who gets the parcels of one process. Called on the courier's thread, or on one that [helps](Transport::progress),
/// which carries nothing meanwhile: it does not wait for ranks, and copies nothing large.
pub trait MessageHandler: Send + Sync {
    /// A header is there; payloads of these `lengths` follow, into what is returned.
    fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>>;

    /// The payloads of the header that was the `number`-th of `from` (0, 1, ..) are in their landings. At once after the
    /// header where it has none.
    ///
    /// # Safety
    /// Of each landing all bytes are written.
    unsafe fn arrived(&self, from: usize, number: u64, landings: Vec<Box<dyn RecvBuffer>>);

    /// Nothing more comes from `process`, or from any.
    fn lost(&self, process: Option<usize>, problem: &str);
}

impl Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lengths: Vec<_> = self.payloads.iter().map(|payload| (**payload).as_ref().len()).collect();
        f.debug_struct("Message").field("header", &self.header.len()).field("payloads", &lengths).finish()
    }
}
