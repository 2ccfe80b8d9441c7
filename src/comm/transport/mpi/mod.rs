//! [`MpiTransport`]: sends messages between processes with any MPI library.
//!
//! MPI libraries make no progress on their own. A progress thread of the process therefore
//! initializes MPI, calls it and finalizes it; ranks only add messages to a queue. A rank that
//! waits for other processes drives the [`ProgressEngine`](progress_engine) itself, which saves
//! waking the thread and being woken by it. The engine owns all messages in flight, and one thread
//! at a time may use it. This requires `MPI_THREAD_SERIALIZED`. If a library supports only
//! `MPI_THREAD_FUNNELED`, the progress thread does everything.
//!
//! ```text
//! rank: send --> queue of messages --> +----------------+
//!                                      | ProgressEngine | <--> RequestTable <--> Library <--> MPI
//! MessageHandler <-------------------- +----------------+
//!                                      used by the progress thread or by a rank that waits
//! ```
//!
//! # How a message is sent
//!
//! 1. Its [frame](frame) is sent as one MPI message with tag [`FRAME`](request_table): the header,
//!    the payload lengths, and small payloads, which cost less to copy than to send separately.
//! 2. Each other payload is sent from its own memory and received into its destination without a
//!    copy, by MPI messages with tag [`PART`](request_table). MPI matches messages of one sender
//!    and tag in order, so they need no sequence number.
//! 3. No MPI message is longer than [`FragmentLimits::message`]. Longer frames and payloads are
//!    split into fragments.
//!
//! # How a process ends
//!
//! 4. A process may end by returning from `main`, by `std::process::exit` or by a panic. At exit,
//!    [`ending`] makes the progress thread send all queued messages and a last frame to each
//!    process, receive until the last frames of the others have arrived, and finalize MPI. So every
//!    message is delivered, and a process ends when all do. After a failed launch it does not wait
//!    for processes with ranks that are stuck in their programs, and does not finalize MPI, which
//!    would wait for them. The launcher then ends these.
//! 5. When the last frame of a process and all payloads before it have arrived, the handler is
//!    notified that the process is [lost](MessageHandler::lost).
//! 6. If MPI continues after the failure of a process ([`ulfm`]), the handler is notified that the
//!    process is lost. MPI is then not finalized, because that would wait for the lost process.
//! 7. After an error of MPI, or a panic in the engine, the handler is notified that all processes
//!    are lost. Nothing is sent or received any more, and at exit the job is aborted, because other
//!    processes may wait in MPI for this one.

mod ending;
mod error;
mod frame;
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
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::library::Library;
use self::progress_engine::{PollResult, ProgressEngine};
use crate::comm::launcher::{self, ProcessRank, StartError};
use crate::comm::transport::{Message, MessageHandler, Transport};

/// MPI implementation of [`Transport`] for one process.
pub(crate) struct MpiTransport {
    shared: Arc<MpiShared>,
    /// Engine that sends and receives, locked by the thread that uses it.
    engine: Arc<Mutex<ProgressEngine>>,
    /// True if ranks may use the engine, not only the progress thread.
    helped: bool,
    thread: Thread,
}

/// Limits by which messages are split into MPI messages. They must be the same in all processes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FragmentLimits {
    /// Maximum number of bytes of one MPI message; at most `i32::MAX`, because MPI counts in `int`.
    pub message: usize,
    /// Maximum number of bytes of a payload that is sent inside the frame.
    pub inline_limit: usize,
}

impl Default for FragmentLimits {
    fn default() -> Self {
        // The fragment size is large enough for bandwidth, and small enough that some request
        // completes all the time, which shows that there is progress.
        Self {
            message: 2 << 20,
            inline_limit: 8 << 10,
        }
    }
}

/// State shared by ranks and the thread that uses the engine.
struct MpiShared {
    place: ProcessRank,
    /// False for each process that this process does not wait for when it ends.
    awaited: Box<[AtomicBool]>,
    queue: Mutex<SendQueue>,
    handler: OnceLock<Arc<dyn MessageHandler>>,
    /// Number of bytes sent to each process.
    sent: Vec<AtomicU64>,
    /// Set when a rank is about to block, so that the progress thread polls now.
    hurried: AtomicBool,
    /// Set when a rank has used the engine since the progress thread last checked.
    helped: AtomicBool,
    /// True while the progress thread sleeps for longer than a message may wait; a sender then
    /// wakes it.
    sleeps: AtomicBool,
}

/// Messages that ranks have queued for sending.
#[derive(Default)]
struct SendQueue {
    messages: Vec<(usize, Message)>,
    /// True once the process is ending.
    ended: bool,
}

impl MpiTransport {
    /// Returns the transport of this process; the first call connects the processes. Returns `None`
    /// if there is only one process.
    ///
    /// # Collective
    /// Returns when all processes have called it.
    ///
    /// # Errors
    /// If the processes could not be connected. Every later call returns the same error.
    pub fn of_process() -> Result<Option<Arc<Self>>, StartError> {
        static TRANSPORT: OnceLock<Result<Option<Arc<MpiTransport>>, StartError>> = OnceLock::new();
        TRANSPORT
            .get_or_init(|| {
                launcher::place()?
                    .map(|place| Self::start(place, FragmentLimits::default()).map(Arc::new))
                    .transpose()
            })
            .clone()
    }

    /// Starts the progress thread and connects the processes. May be called once per process,
    /// because MPI can be initialized only once.
    fn start(place: ProcessRank, limits: FragmentLimits) -> Result<Self, StartError> {
        let (tell, told) = mpsc::channel();
        let thread = thread::Builder::new().name("transport".into());
        let thread = thread.spawn(move || match Library::start(place) {
            Err(error) => drop(tell.send(Err(error))),
            Ok(library) => {
                let sent = (0..place.processes).map(|_| AtomicU64::new(0)).collect();
                let awaited = (0..place.processes)
                    .map(|_| AtomicBool::new(true))
                    .collect();
                let queue = Mutex::default();
                let handler = OnceLock::new();
                let [hurried, helped, sleeps] = [(); 3].map(|()| AtomicBool::new(false));
                let shared = Arc::new(MpiShared {
                    place,
                    awaited,
                    queue,
                    handler,
                    sent,
                    hurried,
                    helped,
                    sleeps,
                });
                let may_help = library.is_serialized();
                let engine = Arc::new(Mutex::new(ProgressEngine::new(
                    shared.clone(),
                    library,
                    limits,
                )));
                // If this send fails, the starting thread has already ended.
                drop(tell.send(Ok((shared.clone(), engine.clone(), may_help))));
                run(&shared, &engine);
            }
        });
        let thread = thread.map_err(|error| StartError::NoThread {
            problem: error.to_string(),
        })?;
        let ended = StartError::NoThread {
            problem: "it ended before MPI was initialized".into(),
        };
        let (shared, engine, helped) = told.recv().unwrap_or(Err(ended))?;
        let transport = Self {
            shared: shared.clone(),
            engine,
            helped,
            thread: thread.thread().clone(),
        };
        ending::at_exit(shared, thread);
        Ok(transport)
    }
}

/// Main function of the progress thread: sends and receives until the process ends.
fn run(shared: &MpiShared, engine: &Mutex<ProgressEngine>) {
    ending::keep_off();
    let problem = match carry(shared, engine) {
        Ok(()) => return,
        Err(problem) => problem,
    };
    log::error!("communication with other processes has stopped: {problem}. Restart the job");
    let mut told = false;
    while !shared.queue.lock().ended {
        if let Some(handler) = shared.handler.get().filter(|_| !told) {
            told = true;
            drop(catch_unwind(AssertUnwindSafe(|| {
                handler.lost(None, &problem)
            })));
        }
        thread::park();
    }
    library::abort();
}

/// Runs the engine until the end of MPI. Returns an error, with the reason, if it fails before.
fn carry(shared: &MpiShared, engine: &Mutex<ProgressEngine>) -> Result<(), String> {
    #[cfg(target_os = "linux")]
    idle_backoff::sleep_exactly();
    // When something was last sent or received, or a rank blocked or polled.
    let mut last = Instant::now();
    loop {
        // If the lock is taken, a rank is using the engine.
        let turn = engine.try_lock().map(|mut engine| engine.turn());
        if let Some(PollResult::Over | PollResult::Failed) = turn {
            let mut engine = engine.lock();
            return match engine.problem() {
                None => engine.finalize().map_err(|error| error.to_string()),
                Some(problem) => Err(problem.into()),
            };
        }
        let is_hurried = shared.hurried.swap(false, Ordering::Relaxed);
        let is_helped = shared.helped.swap(false, Ordering::Relaxed);
        if is_hurried || (turn == Some(PollResult::Moved) && !is_helped) {
            // The rank that used the engine may be the one that blocks now.
            last = Instant::now();
            continue;
        }
        let pause = if is_helped {
            last = Instant::now();
            idle_backoff::SHORT
        } else {
            idle_backoff::sleep(
                last.elapsed(),
                turn != Some(PollResult::Still { under_way: false }),
            )
        };
        match pause {
            Duration::ZERO => thread::yield_now(),
            pause => shared.sleep(pause),
        }
    }
}

impl MpiShared {
    /// Lets the progress thread sleep. If the pause is long, a rank that queues a message wakes it.
    fn sleep(&self, pause: Duration) {
        let is_long = pause > idle_backoff::SHORT;
        self.sleeps.store(is_long, Ordering::SeqCst);
        if !is_long || self.queue.lock().messages.is_empty() {
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

    /// Queues a message. Messages are dropped once the process is ending.
    fn send(&self, to: usize, message: Message) {
        let ProcessRank { processes, here } = self.shared.place;
        assert!(
            to < processes && to != here,
            "process {here} of {processes} sends to process {to}"
        );
        let mut queue = self.shared.queue.lock();
        if !queue.ended {
            queue.messages.push((to, message));
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
        let Some(mut engine) = self.engine.try_lock() else {
            return Some(false);
        };
        self.shared.helped.store(true, Ordering::Relaxed);
        let turn = ending::kept_off(|| engine.turn());
        if let PollResult::Over | PollResult::Failed = turn {
            // Wakes the progress thread, which handles both outcomes.
            self.thread.unpark();
        }
        Some(turn == PollResult::Moved)
    }

    fn await_end(&self, of: usize, is_awaited: bool) {
        self.shared.awaited[of].store(is_awaited, Ordering::Relaxed);
    }

    fn sent(&self) -> Vec<u64> {
        self.shared
            .sent
            .iter()
            .map(|bytes| bytes.load(Ordering::Relaxed))
            .collect()
    }

    fn set_handler(&self, handler: Arc<dyn MessageHandler>) {
        assert!(
            self.shared.handler.set(handler).is_ok(),
            "the handler of a transport can be set only once"
        );
        self.thread.unpark();
    }
}

/// Formats as `MPI transport of process 1 of 4`.
impl fmt::Debug for MpiTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "MPI transport of process {} of {}",
            self.shared.place.here, self.shared.place.processes
        )
    }
}
