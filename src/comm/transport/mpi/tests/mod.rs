//! Tests of [`MpiTransport`] in several processes. Their names cite the numbers of the invariants
//! in [`mpi`](super).

mod ending;
mod helping;
mod messages;

use std::mem::MaybeUninit;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::*;
use crate::comm::transport::{Payload, RecvBuffer};
use crate::testing::ProcessTest;

/// Call of the message handler, as a test sees it.
#[derive(Debug, PartialEq)]
enum News {
    Header {
        from: usize,
        header: Vec<u8>,
        lengths: Vec<usize>,
    },
    Arrived {
        from: usize,
        number: u64,
        payloads: Vec<Vec<u8>>,
    },
    Lost {
        process: Option<usize>,
        problem: String,
    },
}

/// Handler that forwards its calls to a test, and misbehaves if a header requests it.
struct Inbox(Mutex<Sender<News>>);

impl Inbox {
    fn tell(&self, news: News) {
        // A test may end before everything has arrived.
        drop(self.0.lock().send(news));
    }
}

impl MessageHandler for Inbox {
    fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
        let order = header.clone();
        self.tell(News::Header {
            from,
            header,
            lengths: lengths.to_vec(),
        });
        match &order[..] {
            b"panic" => panic!("as requested"),
            b"exit" => std::process::exit(3),
            b"exit if helping" if thread::current().name() != Some("transport") => {
                std::process::exit(3)
            }
            b"wait" => thread::sleep(Duration::from_millis(300)),
            _ => (),
        }
        lengths
            .iter()
            .map(|length| Box::new(Space(Box::new_uninit_slice(*length))) as Box<dyn RecvBuffer>)
            .collect()
    }

    unsafe fn arrived(&self, from: usize, number: u64, buffers: Vec<Box<dyn RecvBuffer>>) {
        let bytes = |mut buffer: Box<dyn RecvBuffer>| {
            // SAFETY: the transport guarantees that all bytes are written.
            unsafe { buffer.space().assume_init_ref() }.to_vec()
        };
        self.tell(News::Arrived {
            from,
            number,
            payloads: buffers.into_iter().map(bytes).collect(),
        });
    }

    fn lost(&self, process: Option<usize>, problem: &str) {
        self.tell(News::Lost {
            process,
            problem: problem.into(),
        });
    }
}

struct Space(Box<[MaybeUninit<u8>]>);

impl RecvBuffer for Space {
    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        &mut self.0
    }
}

fn start(limits: FragmentLimits) -> MpiTransport {
    let place = launcher::place()
        .unwrap()
        .expect("a launcher started this process");
    let courier = MpiTransport::start(place, limits).unwrap();
    assert_eq!(
        (courier.processes(), courier.process_index()),
        (place.processes, place.here)
    );
    courier
}

fn inbox(courier: &MpiTransport) -> Receiver<News> {
    let (tell, told) = channel();
    courier.set_handler(Arc::new(Inbox(Mutex::new(tell))));
    told
}

fn message(header: &str, payloads: impl IntoIterator<Item = Payload>) -> Message {
    Message {
        header: header.into(),
        payloads: payloads.into_iter().collect(),
        taken: None,
    }
}

/// Returns the payload of this length that one process sends to another.
fn payload(from: usize, to: usize, length: usize) -> Payload {
    let mut state = (from * 64 + to * 8) as u64 + length as u64;
    let block = (0..10_007).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    });
    let mut bytes = block.collect::<Vec<_>>().repeat(length.div_ceil(10_007));
    bytes.truncate(length);
    Arc::new(bytes)
}

fn others(courier: &MpiTransport) -> impl Iterator<Item = usize> + use<> {
    let here = courier.process_index();
    (0..courier.processes()).filter(move |process| *process != here)
}

/// Runs on process 0: makes the handler of process 1 panic, and waits until this ends the job.
fn have_the_other_panic(courier: &MpiTransport, told: &Receiver<News>) -> ! {
    courier.send(1, message("panic", []));
    told.recv().unwrap();
    panic!("process 0 receives no notification");
}

#[test]
fn a_process_alone_starts_no_mpi() {
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").is_none() {
        assert!(MpiTransport::of_process().unwrap().is_none());
        assert!(!mpi::environment::is_initialized());
    }
}

#[test]
fn the_process_has_one_courier() {
    ProcessTest::new(2).run(|| {
        let courier = || MpiTransport::of_process().unwrap().unwrap();
        assert!(Arc::ptr_eq(&courier(), &courier()));
        assert_eq!(
            format!("{:?}", courier()),
            format!(
                "MPI transport of process {} of 2",
                courier().process_index()
            )
        );
    });
}

#[test]
fn a_program_that_has_initialized_mpi_itself_is_told() {
    ProcessTest::new(2).run(|| {
        let _mpi = mpi::initialize().unwrap();
        assert_eq!(
            MpiTransport::of_process().unwrap_err(),
            StartError::Initialized
        );
    });
}
