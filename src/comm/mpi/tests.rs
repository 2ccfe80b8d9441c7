//! Tests of [`MpiCourier`] in several processes, by the numbers in [`mpi`](super).

use std::mem::MaybeUninit;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::*;
use crate::comm::Launch;
use crate::comm::courier::{Landing, Payload};
use crate::testing::{Conformance, ProcessTest};

/// What an addressee was told.
#[derive(Debug, PartialEq)]
enum News {
    Header { from: usize, header: Vec<u8>, lengths: Vec<usize> },
    Arrived { from: usize, number: u64, payloads: Vec<Vec<u8>> },
    Lost { process: Option<usize>, problem: String },
}

struct Inbox(Mutex<Sender<News>>);

impl Inbox {
    fn tell(&self, news: News) {
        // A test may end before all that comes has.
        drop(self.0.lock().send(news));
    }
}

impl Addressee for Inbox {
    fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn Landing>> {
        let order = header.clone();
        self.tell(News::Header { from, header, lengths: lengths.to_vec() });
        match &order[..] {
            b"panic" => panic!("as asked"),
            b"exit" => std::process::exit(3),
            b"exit if helping" if thread::current().name() != Some("courier") => std::process::exit(3),
            b"wait" => thread::sleep(Duration::from_millis(300)),
            _ => (),
        }
        lengths.iter().map(|length| Box::new(Space(Box::new_uninit_slice(*length))) as Box<dyn Landing>).collect()
    }

    unsafe fn arrived(&self, from: usize, number: u64, landings: Vec<Box<dyn Landing>>) {
        let bytes = |mut landing: Box<dyn Landing>| {
            // SAFETY: as the courier says.
            unsafe { landing.space().assume_init_ref() }.to_vec()
        };
        self.tell(News::Arrived { from, number, payloads: landings.into_iter().map(bytes).collect() });
    }

    fn lost(&self, process: Option<usize>, problem: &str) {
        self.tell(News::Lost { process, problem: problem.into() });
    }
}

struct Space(Box<[MaybeUninit<u8>]>);

impl Landing for Space {
    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        &mut self.0
    }
}

fn start(limits: Limits) -> MpiCourier {
    let place = launcher::place().unwrap().expect("a launcher has started this");
    let courier = MpiCourier::start(place, limits).unwrap();
    assert_eq!((courier.processes(), courier.here()), (place.processes, place.here));
    courier
}

fn inbox(courier: &MpiCourier) -> Receiver<News> {
    let (tell, told) = channel();
    courier.deliver_to(Arc::new(Inbox(Mutex::new(tell))));
    told
}

fn parcel(header: &str, payloads: impl IntoIterator<Item = Payload>) -> Parcel {
    Parcel { header: header.into(), payloads: payloads.into_iter().collect(), taken: None }
}

/// The payload of that length which one process sends another.
fn payload(from: usize, to: usize, length: usize) -> Payload {
    let mut state = (from * 64 + to * 8) as u64 + length as u64;
    let block = (0..10_007).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    });
    let mut bytes = block.collect::<Vec<_>>().repeat(length.div_ceil(10_007));
    bytes.truncate(length);
    Arc::new(bytes)
}

fn others(courier: &MpiCourier) -> impl Iterator<Item = usize> + use<> {
    let here = courier.here();
    (0..courier.processes()).filter(move |process| *process != here)
}

/// Every process sends every other each of `lengths` by itself, then all in one parcel, and gets the like.
fn all_pairs(limits: Limits, header: usize, lengths: &[usize]) {
    let courier = start(limits);
    let told = inbox(&courier);
    let (here, header) = (courier.here(), "h".repeat(header));
    let parcels: Vec<_> = lengths.iter().map(std::slice::from_ref).chain([lengths, &[]]).collect();
    for lengths in &parcels {
        for to in others(&courier) {
            courier.send(to, parcel(&header, lengths.iter().map(|length| payload(here, to, *length))));
        }
    }
    let mut headers = vec![0; courier.processes()];
    let mut arrived = headers.clone();
    let mut told_done = false;
    // Who has got everything of this process's says so: then all of it has been sent.
    while others(&courier).any(|from| arrived[from] <= parcels.len()) {
        match told.recv().unwrap() {
            News::Header { from, header: bytes, lengths } => {
                let expected =
                    parcels.get(headers[from]).map_or((b"done".to_vec(), &[][..]), |of| (header.clone().into(), of));
                assert_eq!((bytes, &lengths[..]), expected);
                headers[from] += 1;
            }
            News::Arrived { from, number, payloads } => {
                arrived[from] += 1;
                assert!(headers[from] > number as usize, "the header comes first");
                let lengths = parcels.get(number as usize).copied().unwrap_or_default();
                let expected: Vec<_> = lengths.iter().map(|length| payload(from, here, *length)).collect();
                assert!(payloads.iter().map(Vec::as_slice).eq(expected.iter().map(|payload| (**payload).as_ref())));
            }
            News::Lost { process, .. } => assert_eq!(arrived[process.unwrap()], parcels.len() + 1),
        }
        if !told_done && others(&courier).all(|from| arrived[from] >= parcels.len()) {
            told_done = true;
            others(&courier).for_each(|to| courier.send(to, parcel("done", [])));
        }
    }
    let bytes = parcels.len() * header.len() + 2 * lengths.iter().sum::<usize>();
    for to in others(&courier) {
        assert!([bytes, bytes + 4].contains(&(courier.sent()[to] as usize)), "{:?} of {bytes}", courier.sent());
    }
    assert_eq!(courier.sent()[here], 0);
}

#[test]
fn two_processes_exchange_parcels_of_every_size() {
    ProcessTest::new(2).run(|| all_pairs(Limits::default(), 100, &[0, 8, 100 << 10, (64 << 20) + 1]));
}

#[test]
fn three_processes_exchange_parcels_of_every_size() {
    ProcessTest::new(3).run(|| all_pairs(Limits::default(), 0, &[0, 8, 100 << 10, (64 << 20) + 1]));
}

#[test]
fn four_processes_exchange_parcels_of_every_size() {
    ProcessTest::new(4).run(|| all_pairs(Limits::default(), 10_000, &[0, 8, 100 << 10, (64 << 20) + 1]));
}

#[test]
fn invariant_3_what_is_longer_than_a_message_goes_in_pieces() {
    let limits = Limits { message: 1000, riding: 1500 };
    ProcessTest::new(3)
        .run(|| all_pairs(limits, 2500, &[0, 1, 999, 1000, 1001, 1500, 1501, 2000, 100 << 10, 1_000_000]));
}

/// Launches whose messages are of these limits.
fn launches(limits: Limits) -> impl Fn(usize) -> Launch {
    let processes = Processes::new(Arc::new(start(limits)));
    move |ranks| Launch::on(processes.engine(ranks / processes.count()))
}

#[test]
fn invariant_3_every_collective_of_tensors_longer_than_a_message() {
    ProcessTest::new(2).deadline(Duration::from_secs(600)).run(|| {
        let conformance = Conformance::of(launches(Limits { message: 1000, riding: 500 })).ranks([2]).long();
        for check in Conformance::<fn(usize) -> Launch>::names() {
            assert!(conformance.check(check) > 0, "{check}");
        }
    });
}

/// Then headers, too, go in pieces.
#[test]
fn invariant_3_the_conformance_suite_in_messages_of_64_bytes() {
    ProcessTest::new(2).deadline(Duration::from_secs(600)).run(|| {
        let report = Conformance::of(launches(Limits { message: 64, riding: 0 })).ranks([2]).run();
        assert!(report.total() > 10_000, "{report}");
    });
}

#[test]
fn headers_come_in_order_and_payloads_as_they_can() {
    ProcessTest::new(3).run(|| {
        let courier = start(Limits::default());
        let told = inbox(&courier);
        let here = courier.here();
        // Some so large that MPI receives the next before.
        let header = |number: u64| number.to_string() + &"-".repeat(if number % 100 == 50 { 1 << 20 } else { 0 });
        let length = |number: u64| if number.is_multiple_of(100) { 4 << 20 } else { number as usize % 2 * 10 };
        for number in 0..1000 {
            for to in others(&courier) {
                courier.send(to, parcel(&header(number), [payload(here, to, length(number))]));
            }
        }
        let mut headers = vec![0; courier.processes()];
        let mut arrived = headers.clone();
        while others(&courier).any(|from| arrived[from] < 1000) {
            match told.recv().unwrap() {
                News::Header { from, header: bytes, lengths } => {
                    assert!(bytes == header(headers[from]).into_bytes(), "not header {} of {from}", headers[from]);
                    assert_eq!(lengths, [length(headers[from])]);
                    headers[from] += 1;
                }
                News::Arrived { from, number, payloads } => {
                    assert_eq!(payloads, [(*payload(from, here, length(number))).as_ref()]);
                    arrived[from] += 1;
                }
                News::Lost { process, .. } => assert_eq!(arrived[process.unwrap()], 1000),
            }
        }
    });
}

#[test]
fn what_has_come_before_it_is_asked_for_is_kept() {
    ProcessTest::new(2).run(|| {
        let courier = start(Limits::default());
        for to in others(&courier) {
            courier.send(to, parcel("small", [payload(0, 0, 8)]));
            courier.send(to, parcel("large", [payload(0, 0, 1 << 20)]));
        }
        thread::sleep(Duration::from_millis(100 * courier.here() as u64));
        let told = inbox(&courier);
        let headers = told.iter().filter(|news| matches!(news, News::Header { .. })).take(2);
        let headers = headers.map(|news| if let News::Header { header, .. } = news { header } else { Vec::new() });
        assert_eq!(headers.collect::<Vec<_>>(), [b"small", b"large"]);
    });
}

/// Process 0 sends process 1 something large, and ends by `end` before its courier's thread, which process 1 has made wait,
/// has seen it; process 1 gets it, and then is told.
fn end_at_once(end: impl FnOnce()) {
    let courier = start(Limits::default());
    let large = || payload(0, 1, 32 << 20);
    let told = inbox(&courier);
    if courier.here() == 0 {
        told.recv().unwrap();
        for _ in 0..3 {
            courier.send(1, parcel("large", [large()]));
        }
        return end();
    }
    courier.send(0, parcel("wait", []));
    let mut arrived = 0;
    loop {
        match told.recv().unwrap() {
            News::Header { .. } => (),
            News::Arrived { payloads, .. } => {
                arrived += 1;
                assert_eq!(payloads, [(*large()).as_ref()]);
            }
            News::Lost { process, problem } => {
                assert_eq!((process, &problem[..]), (Some(0), "process 0 has ended"));
                break;
            }
        }
    }
    println!("{arrived} have arrived");
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_main_returns() {
    let text = ProcessTest::new(2).run(|| end_at_once(|| ()));
    assert!(text.is_none_or(|text| text.contains("3 have arrived")));
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_the_process_exits() {
    let text = ProcessTest::new(2).run_failing(|| end_at_once(|| std::process::exit(7)));
    assert!(text.is_none_or(|text| text.contains("3 have arrived") && text.starts_with("exit status: 7\n")));
}

#[test]
fn invariants_4_and_5_what_is_sent_arrives_when_main_panics() {
    let text = ProcessTest::new(2).run_failing(|| end_at_once(|| panic!("process 0 ends by this")));
    assert!(text.is_none_or(|text| text.contains("3 have arrived") && text.contains("ends by this")));
}

#[test]
fn invariant_4_a_process_that_never_asked_ends_what_is_sent_to_it() {
    ProcessTest::new(3).run(|| {
        let courier = start(Limits::default());
        others(&courier).for_each(|to| courier.send(to, parcel("unwanted", [payload(0, 0, 32 << 20)])));
    });
}

#[test]
fn invariant_6_a_panic_of_the_addressee_loses_all_and_aborts_the_job() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(Limits::default());
        let told = inbox(&courier);
        if courier.here() == 0 {
            courier.send(1, parcel("panic", []));
            // The job ends while this waits.
            told.recv().unwrap();
            panic!("process 0 is told nothing");
        }
        assert!(matches!(told.recv().unwrap(), News::Header { .. }));
        match told.recv().unwrap() {
            News::Lost { process: None, problem } => println!("lost: {problem}"),
            news => panic!("{news:?}"),
        }
    });
    let Some(text) = text else { return };
    assert!(text.contains("lost: the courier panicked: as asked"), "{text}");
    // Which Open MPI's launcher says of processes that end without either.
    assert!(!text.contains("is told nothing") && !text.contains("finalize"), "{text}");
}

#[test]
fn a_process_that_ends_on_the_couriers_thread_does_so_at_once() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(Limits::default());
        let told = inbox(&courier);
        others(&courier).for_each(|to| courier.send(to, parcel("exit", [])));
        while told.recv().is_ok() {}
    });
    assert!(text.is_none_or(|text| text.starts_with("exit status: 3\n") && !text.contains("panicked")));
}

/// Two processes send each other parcels by turns, and each lends its thread while it waits.
#[test]
fn whoever_helps_carries() {
    ProcessTest::new(2).run(|| {
        let courier = start(Limits::default());
        let (told, other) = (inbox(&courier), 1 - courier.here());
        let mut own = 0;
        for turn in 0..200_usize {
            if turn % 2 == courier.here() {
                courier.send(other, parcel("turn", [payload(0, 0, turn * 1000)]));
            }
            while turn % 2 != courier.here() {
                let moved = courier.help().expect("Debian's Open MPI is serialized");
                if let Ok(News::Arrived { payloads, .. }) = told.try_recv() {
                    assert_eq!(payloads, [(*payload(0, 0, turn * 1000)).as_ref()]);
                    own += usize::from(moved);
                    break;
                }
            }
        }
        assert!(own > 0, "this thread has received nothing");
        // What was sent last is delivered by the thread that is there for it.
    });
}

/// The first payload has no place before the header of the second is there, and comes before it all the same.
#[test]
fn a_payload_waits_for_its_place_and_those_after_it_wait_for_it() {
    struct Unsettled(Box<[MaybeUninit<u8>]>, Arc<AtomicBool>);
    impl Landing for Unsettled {
        fn is_settled(&mut self) -> bool {
            self.1.load(Ordering::SeqCst)
        }
        fn space(&mut self) -> &mut [MaybeUninit<u8>] {
            assert!(self.is_settled(), "it has no place");
            &mut self.0
        }
    }
    struct Late(Inbox, Arc<AtomicBool>);
    impl Addressee for Late {
        fn header(&self, from: usize, header: Vec<u8>, lengths: &[usize]) -> Vec<Box<dyn Landing>> {
            let late = header == b"first";
            let landings = self.0.header(from, header, lengths);
            if !late {
                return landings;
            }
            let space = |length: &usize| Box::new_uninit_slice(*length);
            lengths
                .iter()
                .map(|length| Box::new(Unsettled(space(length), self.1.clone())) as Box<dyn Landing>)
                .collect()
        }
        unsafe fn arrived(&self, from: usize, number: u64, landings: Vec<Box<dyn Landing>>) {
            // SAFETY: as the courier says.
            unsafe { self.0.arrived(from, number, landings) }
        }
        fn lost(&self, process: Option<usize>, problem: &str) {
            self.0.lost(process, problem);
        }
    }
    ProcessTest::new(2).run(|| {
        let courier = start(Limits { message: 10_000, riding: 0 });
        let (tell, told) = channel();
        let settled = Arc::new(AtomicBool::new(false));
        courier.deliver_to(Arc::new(Late(Inbox(Mutex::new(tell)), settled.clone())));
        let (here, other) = (courier.here(), 1 - courier.here());
        let sizes = [1_000_000, 95_000];
        for (name, size) in ["first", "second"].into_iter().zip(sizes) {
            courier.send(other, parcel(name, [payload(here, other, size)]));
        }
        for name in ["first", "second"] {
            assert!(matches!(told.recv().unwrap(), News::Header { header, .. } if header == name.as_bytes()));
        }
        settled.store(true, Ordering::SeqCst);
        for (number, size) in (0..).zip(sizes) {
            let payloads = vec![(*payload(other, here, size)).as_ref().to_vec()];
            assert!(told.recv().unwrap() == News::Arrived { from: other, number, payloads }, "payload {number}");
        }
    });
}

#[test]
fn invariant_7_a_panic_on_a_thread_that_helps_loses_all() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(Limits::default());
        let told = inbox(&courier);
        if courier.here() == 0 {
            courier.send(1, parcel("panic", []));
            told.recv().unwrap();
            panic!("process 0 is told nothing");
        }
        let problem = loop {
            courier.help();
            if let Ok(News::Lost { process: None, problem }) = told.try_recv() {
                break problem;
            }
        };
        assert_eq!(courier.help(), Some(false), "nothing moves any more");
        println!("lost: {problem}");
    });
    assert!(text.is_none_or(|text| text.contains("lost: the courier panicked: as asked")));
}

#[test]
fn a_process_that_ends_on_a_thread_that_helps_does_so_at_once() {
    let text = ProcessTest::new(2).run_failing(|| {
        let courier = start(Limits::default());
        let _told = inbox(&courier);
        loop {
            // Some the courier's own thread may take.
            others(&courier).for_each(|to| courier.send(to, parcel("exit if helping", [])));
            (0..100).for_each(|_| _ = courier.help());
        }
    });
    assert!(text.is_none_or(|text| text.starts_with("exit status: 3\n") && !text.contains("panicked")));
}

#[test]
fn a_process_alone_starts_no_mpi() {
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").is_none() {
        assert!(MpiCourier::of_process().unwrap().is_none());
        assert!(!mpi::environment::is_initialized());
    }
}

#[test]
fn the_process_has_one_courier() {
    ProcessTest::new(2).run(|| {
        let courier = || MpiCourier::of_process().unwrap().unwrap();
        assert!(Arc::ptr_eq(&courier(), &courier()));
        assert_eq!(format!("{:?}", courier()), format!("MPI courier of process {} of 2", courier().here()));
    });
}

#[test]
fn a_program_that_has_initialized_mpi_itself_is_told() {
    ProcessTest::new(2).run(|| {
        let _mpi = mpi::initialize().unwrap();
        assert_eq!(MpiCourier::of_process().unwrap_err(), StartError::Initialized);
    });
}
