//! [`MpiTransport`]: parcels between processes by any MPI library.
//!
//! A thread of the process calls MPI and makes progress on its own, since no MPI library does; ranks only leave parcels
//! with it. It initializes MPI and finalizes it. A rank that waits for other processes has nothing else to do, and no
//! thread need be woken for it, nor wake it: it takes the [`ProgressEngine`](progress_engine), which owns what is being
//! sent and received, and does what the thread does. That is at `MPI_THREAD_SERIALIZED`; where a library has no more
//! than `MPI_THREAD_FUNNELED`, the thread does all.
//!
//! # How a parcel goes
//!
//! 1. Its [frame](frame) is one message of tag [`FRAME`](request_table): the header, the payloads' lengths, and the
//!    bytes of payloads so small that a message of their own would cost more than copying them.
//! 2. Every other payload goes from where it lies to where it is to be, without a copy between, by messages of tag
//!    [`PART`](request_table). MPI matches messages of one sender and tag in order, so none needs a number.
//! 3. No message is longer than [`FragmentLimits::message`]: frames and payloads that are go in pieces.
//!
//! Which processes are of one host, so that ranks may put what they gather in memory of both, is [tried](host) at the start.
//!
//! # How a process ends
//!
//! 4. By returning from `main`, by `std::process::exit` or by a panic: at exit, [`ending`] lets the thread send what
//!    it has, then a last frame to each process, and receive until theirs have come; then it finalizes MPI. So
//!    whatever was sent is delivered, and a process ends when all do.
//! 5. When a process's last frame has come, and every payload before it, the addressee is told that it is
//!    [lost](MessageHandler::lost).
//! 6. Where MPI goes on without a process that has failed ([`ulfm`]), the addressee is told that it is lost, and MPI is
//!    not finalized: that would wait for it.
//! 7. An error of MPI's, or a panic while something is carried, loses all processes: nothing is carried any more, and at exit the
//!    job is aborted, for other processes may wait in MPI for this one.

mod ending;
mod error;
mod frame;
mod host;
mod idle_backoff;
mod library;
mod progress_engine;
mod request_table;
#[cfg(test)]
mod tests;
mod ulfm;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, Thread};
use std::time::Duration;

use parking_lot::Mutex;

use self::idle_backoff::IdleBackoff;
use self::library::Library;
use self::progress_engine::{PollResult, ProgressEngine};
use super::launcher::{self, ProcessRank, StartError};
use super::process::ProcessJob;
use super::transport::{Message, MessageHandler, Transport};

/// The courier of a process that MPI connects with others.
pub(crate) struct MpiTransport {
    shared: Arc<MpiShared>,
    /// Of whoever communicates.
    carrier: Arc<Mutex<ProgressEngine>>,
    /// Whether ranks may.
    helped: bool,
    thread: Thread,
}

/// How parcels are cut into messages: alike in all processes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FragmentLimits {
    /// Bytes of one message: at most `i32::MAX`, as MPI counts.
    pub message: usize,
    /// Bytes of a payload that goes along with the header.
    pub riding: usize,
}

impl Default for FragmentLimits {
    fn default() -> Self {
        // Large enough for bandwidth, small enough that messages are done all the time: then something is known to move.
        Self { message: 2 << 20, riding: 8 << 10 }
    }
}

/// What ranks and whoever communicates have in common.
struct MpiShared {
    place: ProcessRank,
    /// The processes that this one can have memory in common with.
    common: Box<[bool]>,
    queue: Mutex<SendQueue>,
    addressee: OnceLock<Arc<dyn MessageHandler>>,
    /// Bytes for each process.
    sent: Vec<AtomicU64>,
    /// A rank sleeps until something comes.
    hurried: AtomicBool,
    /// A rank has helped.
    helped: AtomicBool,
    /// The thread sleeps for longer than a parcel may wait.
    sleeps: AtomicBool,
}

/// What ranks have left to be sent.
#[derive(Default)]
struct SendQueue {
    parcels: Vec<(usize, Message)>,
    /// The process ends.
    ended: bool,
}

impl MpiTransport {
    /// The one of this process, connected at the first call. `None`: the process is alone.
    ///
    /// # Collective
    /// Returns when all processes have called it.
    ///
    /// # Errors
    /// If the processes could not be connected; then at every call.
    pub fn of_process() -> Result<Option<Arc<Self>>, StartError> {
        static COURIER: OnceLock<Result<Option<Arc<MpiTransport>>, StartError>> = OnceLock::new();
        let start = |place| Self::start(place, FragmentLimits::default()).map(Arc::new);
        COURIER.get_or_init(|| launcher::place()?.map(start).transpose()).clone()
    }

    /// Starts the thread. Once a process, since MPI is initialized only once.
    fn start(place: ProcessRank, limits: FragmentLimits) -> Result<Self, StartError> {
        let (tell, told) = mpsc::channel();
        let thread = thread::Builder::new().name("courier".into());
        let connect = move || {
            let library = Library::start(place)?;
            let common = host::shared_with(&library, place)?;
            Ok((library, common))
        };
        let thread = thread.spawn(move || match connect() {
            Err(error) => drop(tell.send(Err(error))),
            Ok((library, common)) => {
                let sent = (0..place.processes).map(|_| AtomicU64::new(0)).collect();
                let (queue, addressee) = (Mutex::default(), OnceLock::new());
                let [hurried, helped, sleeps] = [(); 3].map(|()| AtomicBool::new(false));
                let shared = Arc::new(MpiShared { place, common, queue, addressee, sent, hurried, helped, sleeps });
                let may_help = library.is_serialized();
                let carrier = Arc::new(Mutex::new(ProgressEngine::new(shared.clone(), library, limits)));
                // The starter waits for it.
                drop(tell.send(Ok((shared.clone(), carrier.clone(), may_help))));
                run(&shared, &carrier);
            }
        });
        let thread = thread.map_err(|error| StartError::NoThread { problem: error.to_string() })?;
        let ended = StartError::NoThread { problem: "it ended at once".into() };
        let (shared, carrier, helped) = told.recv().unwrap_or(Err(ended))?;
        let courier = Self { shared: shared.clone(), carrier, helped, thread: thread.thread().clone() };
        ending::at_exit(shared, thread);
        Ok(courier)
    }
}

/// Those that MPI connects with this one, at the first call; `None`: it is alone.
///
/// # Collective
/// Of all processes.
///
/// # Errors
/// If they could not be connected; then at every call.
pub(super) fn processes() -> Result<Option<Arc<ProcessJob>>, StartError> {
    static PROCESSES: OnceLock<Option<Arc<ProcessJob>>> = OnceLock::new();
    let courier = MpiTransport::of_process()?;
    Ok(PROCESSES.get_or_init(|| courier.map(|courier| ProcessJob::new(courier))).clone())
}

/// Carries parcels until the process ends.
fn run(shared: &MpiShared, carrier: &Mutex<ProgressEngine>) {
    ending::keep_off();
    let problem = match carry(shared, carrier) {
        Ok(()) => return,
        Err(problem) => problem,
    };
    log::error!("nothing is sent to other processes or received any more: {problem}");
    let mut told = false;
    while !shared.queue.lock().ended {
        if let Some(addressee) = shared.addressee.get().filter(|_| !told) {
            told = true;
            drop(catch_unwind(AssertUnwindSafe(|| addressee.lost(None, &problem))));
        }
        thread::park();
    }
    library::abort();
}

/// Returns at the end of MPI, or when nothing can be carried any more, with why.
fn carry(shared: &MpiShared, carrier: &Mutex<ProgressEngine>) -> Result<(), String> {
    let mut rest = IdleBackoff::new();
    loop {
        // A rank that has it does the same.
        let turn = carrier.try_lock().map(|mut carrier| carrier.turn());
        if let Some(PollResult::Over | PollResult::Failed) = turn {
            let mut carrier = carrier.lock();
            return match carrier.problem() {
                None => carrier.finalize().map_err(|error| error.to_string()),
                Some(problem) => Err(problem.into()),
            };
        }
        let is_hurried = shared.hurried.swap(false, Ordering::Relaxed);
        let is_helped = shared.helped.swap(false, Ordering::Relaxed);
        if is_hurried || (turn == Some(PollResult::Moved) && !is_helped) {
            // Who helped may be who sleeps now.
            rest.was_busy();
            continue;
        }
        if is_helped {
            rest.was_helped();
        }
        match rest.pause(turn != Some(PollResult::Still { under_way: false })) {
            Duration::ZERO => thread::yield_now(),
            pause => shared.sleep(pause),
        }
    }
}

impl MpiShared {
    /// Has the thread sleep, and whoever leaves a parcel wake it where the pause is long.
    fn sleep(&self, pause: Duration) {
        let is_long = pause > idle_backoff::SHORT;
        self.sleeps.store(is_long, Ordering::SeqCst);
        if !is_long || self.queue.lock().parcels.is_empty() {
            thread::park_timeout(pause);
        }
        self.sleeps.store(false, Ordering::SeqCst);
    }
}

impl Transport for MpiTransport {
    fn processes(&self) -> usize {
        self.shared.place.processes
    }

    fn process_index(&self) -> usize {
        self.shared.place.here
    }

    /// Once the process ends, nothing is taken any more.
    fn send(&self, to: usize, parcel: Message) {
        let ProcessRank { processes, here } = self.shared.place;
        assert!(to < processes && to != here, "process {here} of {processes} sends to process {to}");
        let mut queue = self.shared.queue.lock();
        if !queue.ended {
            queue.parcels.push((to, parcel));
            drop(queue);
            if self.shared.sleeps.swap(false, Ordering::SeqCst) {
                self.thread.unpark();
            }
        }
    }

    fn poll_now(&self) {
        self.shared.hurried.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }

    fn progress(&self) -> Option<bool> {
        if !self.helped {
            return None;
        }
        let Some(mut carrier) = self.carrier.try_lock() else { return Some(false) };
        self.shared.helped.store(true, Ordering::Relaxed);
        let turn = ending::kept_off(|| carrier.turn());
        if let PollResult::Over | PollResult::Failed = turn {
            // For the thread to see.
            self.thread.unpark();
        }
        Some(turn == PollResult::Moved)
    }

    fn shares_memory(&self, with: usize) -> bool {
        self.shared.common[with]
    }

    fn sent(&self) -> Vec<u64> {
        self.shared.sent.iter().map(|bytes| bytes.load(Ordering::Relaxed)).collect()
    }

    fn set_handler(&self, addressee: Arc<dyn MessageHandler>) {
        assert!(self.shared.addressee.set(addressee).is_ok(), "a courier has one addressee");
        self.thread.unpark();
    }
}

/// `MPI courier of process 1 of 4`
impl fmt::Debug for MpiTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MPI courier of process {} of {}", self.shared.place.here, self.shared.place.processes)
    }
}
