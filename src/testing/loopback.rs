//! [`LoopbackJob`]: processes that are simulated by threads, connected by queues.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use parking_lot::{Condvar, Mutex};
use twox_hash::XxHash3_64;

use crate::comm::ProcessJob;
use crate::comm::transport::{Message, MessageHandler, Payload, RecvBuffer, SendStamp, Transport};
use crate::memory::UninitBytes;

/// Connections of one simulated process. Headers of one sender arrive in order; payloads arrive
/// late, in a pseudo-random order that depends on a seed.
pub struct LoopbackTransport {
    here: usize,
    inboxes: Arc<[Inbox]>,
    sent: Box<[AtomicU64]>,
    /// Number of bytes that were received directly into a result.
    placed: AtomicU64,
    /// True while payloads for this process are held back.
    held: AtomicBool,
    /// Number of times that [`Transport::poll_now`] was called.
    polled: AtomicU64,
    handler: OnceLock<Arc<dyn MessageHandler>>,
}

/// Queue of events for one process.
#[derive(Default)]
struct Inbox {
    events: Mutex<VecDeque<LoopbackEvent>>,
    bell: Condvar,
}

enum LoopbackEvent {
    Message(usize, Message),
    /// This process is lost.
    Lost(usize),
    /// The job has ended.
    Over,
}

/// Payloads of a message that are not received yet.
struct Late {
    from: usize,
    number: u64,
    payloads: Vec<Payload>,
    buffers: Vec<Box<dyn RecvBuffer>>,
}

impl Inbox {
    fn put(&self, event: LoopbackEvent) {
        self.events.lock().push_back(event);
        self.bell.notify_all();
    }
}

impl Transport for LoopbackTransport {
    fn processes(&self) -> usize {
        self.inboxes.len()
    }

    fn process_index(&self) -> usize {
        self.here
    }

    fn send(&self, to: usize, message: Message) {
        assert_ne!(to, self.here, "no process sends to itself");
        let payloads: usize = message
            .payloads
            .iter()
            .map(|payload| payload.as_ref().as_ref().len())
            .sum();
        self.sent[to].fetch_add((message.header.len() + payloads) as u64, Ordering::SeqCst);
        self.inboxes[to].put(LoopbackEvent::Message(self.here, message));
    }

    fn poll_now(&self) {
        self.polled.fetch_add(1, Ordering::SeqCst);
    }

    fn sent(&self) -> Vec<u64> {
        self.sent
            .iter()
            .map(|sent| sent.load(Ordering::SeqCst))
            .collect()
    }

    fn set_handler(&self, handler: Arc<dyn MessageHandler>) {
        assert!(self.handler.set(handler).is_ok(), "the handler is set once");
    }
}

impl LoopbackTransport {
    fn handler(&self) -> &dyn MessageHandler {
        &**self
            .handler
            .get()
            .expect("the handler is set before the job runs")
    }

    fn run(&self, seed: u64) {
        let mut drawn = 0_u64;
        let mut draw = |below: usize| {
            drawn += 1;
            XxHash3_64::oneshot_with_seed(seed, &drawn.to_le_bytes()) as usize % below
        };
        let mut headers = vec![0; self.processes()];
        let mut late: Vec<Late> = Vec::new();
        let mut lost = Vec::new();
        loop {
            let event = {
                let mut events = self.inboxes[self.here].events.lock();
                while events.is_empty() && late.is_empty() {
                    self.inboxes[self.here].bell.wait(&mut events);
                }
                let only_events = late.is_empty() || self.held.load(Ordering::SeqCst);
                if only_events || draw(2) == 0 {
                    events.pop_front()
                } else {
                    None
                }
            };
            match event {
                // The process is lost, so its messages are discarded, even if it continues to send.
                Some(LoopbackEvent::Message(from, _)) if lost.contains(&from) => {}
                Some(LoopbackEvent::Message(
                    from,
                    Message {
                        header,
                        payloads,
                        taken,
                    },
                )) => {
                    taken.iter().for_each(SendStamp::note);
                    let lengths: Vec<_> = payloads
                        .iter()
                        .map(|payload| payload.as_ref().as_ref().len())
                        .collect();
                    let buffers = self.handler().header(from, header, &lengths);
                    let number = headers[from];
                    headers[from] += 1;
                    if payloads.is_empty() {
                        // SAFETY: there are no buffers.
                        unsafe { self.handler().arrived(from, number, buffers) };
                    } else {
                        late.push(Late {
                            from,
                            number,
                            payloads,
                            buffers,
                        });
                    }
                }
                Some(LoopbackEvent::Lost(process)) => {
                    lost.push(process);
                    late.retain(|late| late.from != process);
                    self.handler()
                        .lost(Some(process), "the process was removed from the queue");
                }
                Some(LoopbackEvent::Over) => return,
                None if late.is_empty() || self.held.load(Ordering::SeqCst) => thread::yield_now(),
                None => {
                    let Late {
                        from,
                        number,
                        payloads,
                        mut buffers,
                    } = late.swap_remove(draw(late.len()));
                    if buffers
                        .iter()
                        .any(|buffer| !(&**buffer as &dyn Any).is::<UninitBytes>())
                    {
                        let bytes: usize =
                            buffers.iter_mut().map(|buffer| buffer.space().len()).sum();
                        self.placed.fetch_add(bytes as u64, Ordering::SeqCst);
                    }
                    for (payload, buffer) in payloads.iter().zip(&mut buffers) {
                        let bytes = payload.as_ref().as_ref();
                        let source: &[MaybeUninit<u8>] = uninit(bytes);
                        buffer.space().copy_from_slice(source);
                    }
                    // SAFETY: all bytes of each buffer were written.
                    unsafe { self.handler().arrived(from, number, buffers) };
                }
            }
        }
    }
}

/// Views initialized bytes as possibly uninitialized ones.
fn uninit(bytes: &[u8]) -> &[MaybeUninit<u8>] {
    // SAFETY: `u8` is a valid `MaybeUninit<u8>`.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) }
}

impl fmt::Debug for LoopbackTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "LoopbackTransport({} of {})",
            self.here,
            self.processes()
        )
    }
}

/// Simulated processes, each with ranks of its own, in one process. Tests of ranks in several
/// processes run in it without a launcher, and can lose a process or delay what it receives.
///
/// ```
/// use burn_dtensor::comm::{Launch, launch};
/// use burn_dtensor::testing::LoopbackJob;
///
/// let ends = LoopbackJob::new(2, 0).run(|_, processes| {
///     launch(Launch::on_backend(processes.backend(2)), |world| Ok(world.size())).map_err(Box::new)
/// });
/// assert_eq!(ends.into_iter().flat_map(Result::unwrap).collect::<Vec<_>>(), [(0, 4), (1, 4), (2, 4), (3, 4)]);
/// ```
///
/// Dropping this value ends the connections.
pub struct LoopbackJob {
    /// Transport of each process.
    pub transports: Vec<Arc<LoopbackTransport>>,
    /// The job as each process sees it.
    pub processes: Vec<Arc<ProcessJob>>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl LoopbackJob {
    /// Connects `processes` processes. `seed` determines the order in which payloads arrive.
    pub fn new(processes: usize, seed: u64) -> Self {
        let inboxes: Arc<[Inbox]> = (0..processes).map(|_| Inbox::default()).collect();
        let transport = |here| {
            let sent = (0..processes).map(|_| AtomicU64::default()).collect();
            let placed = AtomicU64::default();
            let polled = AtomicU64::default();
            let handler = OnceLock::new();
            let held = AtomicBool::new(false);
            Arc::new(LoopbackTransport {
                here,
                inboxes: inboxes.clone(),
                sent,
                placed,
                held,
                polled,
                handler,
            })
        };
        let transports: Vec<_> = (0..processes).map(transport).collect();
        let processes = transports
            .iter()
            .map(|transport| ProcessJob::new(transport.clone()))
            .collect();
        let start = |transport: &Arc<LoopbackTransport>| {
            let transport = transport.clone();
            let seed = seed + transport.here as u64;
            thread::spawn(move || {
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| transport.run(seed))) {
                    transport
                        .handler()
                        .lost(None, "the transport's thread panicked");
                    resume_unwind(payload);
                }
            })
        };
        let threads = transports.iter().map(start).collect();
        Self {
            transports,
            processes,
            threads,
        }
    }

    /// Runs `body` in every process at the same time. If it panics in a process, the other
    /// processes lose that process.
    pub fn run<T: Send>(&self, body: impl Fn(usize, &ProcessJob) -> T + Sync) -> Vec<T> {
        let run = |(process, processes): (usize, &Arc<ProcessJob>)| {
            let result = catch_unwind(AssertUnwindSafe(|| body(process, processes)));
            if result.is_err() {
                self.lose(process);
            }
            result
        };
        let ends: Vec<_> = thread::scope(|scope| {
            let run = &run;
            let threads = self
                .processes
                .iter()
                .enumerate()
                .map(|process| scope.spawn(move || run(process)));
            let threads: Vec<_> = threads.collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("panics are caught inside the thread"))
                .collect()
        });
        ends.into_iter()
            .map(|end| end.unwrap_or_else(|payload| resume_unwind(payload)))
            .collect()
    }

    /// Notifies all other processes that a process is lost.
    pub fn lose(&self, process: usize) {
        let inboxes = self.transports[0].inboxes.iter().enumerate();
        inboxes
            .filter(|(other, _)| *other != process)
            .for_each(|(_, inbox)| inbox.put(LoopbackEvent::Lost(process)));
    }

    /// Returns the number of processes.
    pub fn processes(&self) -> usize {
        self.transports.len()
    }

    /// Returns the number of bytes that the process received directly into results.
    pub fn placed(&self, process: usize) -> u64 {
        self.transports[process].placed.load(Ordering::SeqCst)
    }

    /// Starts or stops holding back the payloads for a process.
    pub fn hold(&self, process: usize, held: bool) {
        self.transports[process].held.store(held, Ordering::SeqCst);
    }

    /// Returns the number of times that a rank of the process began to block.
    pub fn polled(&self, process: usize) -> u64 {
        self.transports[process].polled.load(Ordering::SeqCst)
    }

    /// Returns the number of bytes that the process has sent to all others.
    pub fn sent(&self, process: usize) -> u64 {
        self.transports[process].sent().iter().sum()
    }
}

impl Drop for LoopbackJob {
    fn drop(&mut self) {
        self.transports[0]
            .inboxes
            .iter()
            .for_each(|inbox| inbox.put(LoopbackEvent::Over));
        for thread in self.threads.drain(..) {
            if thread.join().is_err() && !thread::panicking() {
                panic!("a transport's thread panicked");
            }
        }
    }
}
