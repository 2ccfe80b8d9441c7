//! Written data is read back exactly, or not at all, and the rank at fault is found from traces
//! alone.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use std::{env, fs};

use crate::format::{
    DecodeError, ElementType, ExitKind, FirstFailure, FlightRecord, Identity, OPERATIONS,
    OpOutcome, PostedCall, ProgramExit, RecorderMemory, Reduction, StableHasher, VERSION, WORDS,
    record,
};
use crate::{FaultKind, FlightError, LaunchId, LaunchTrace, Op, Phase, ProcessState, RankTrace};

/// Number of words of a record, and index of the first record.
const RECORD_WORDS: usize = 32;
const RECORDS: usize = WORDS - RECORD_WORDS * OPERATIONS;

/// Launch of the ranks of a test.
const LAUNCH: LaunchId = LaunchId {
    number: 0,
    shrunk: 0,
    process: Some(0),
};

/// A temporary folder, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("burn-dtensor-flight-{}-{name}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

/// Memory of a rank of a launch of three.
struct Rank {
    words: Vec<AtomicU64>,
    channel: usize,
}

impl Rank {
    fn new(rank: usize) -> Self {
        Self::of(Identity {
            rank,
            ..Identity::here(3, LAUNCH)
        })
    }

    fn of(identity: Identity) -> Self {
        let words: Vec<_> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let memory = RecorderMemory::new(&words);
        memory.begin(&identity);
        let ranks: Vec<_> = (0..identity.size).collect();
        let channel = memory.add_channel("", &ranks).unwrap();
        Self { words, channel }
    }

    fn memory(&self) -> RecorderMemory<'_> {
        RecorderMemory::new(&self.words)
    }

    /// Posts call `index`, whose label and time depend on it.
    fn post(&self, index: u64) {
        let call = PostedCall {
            channel: 1,
            seq: index,
            op: Op::AllReduce,
            phase: Phase::Backward,
            bytes: 3 * index,
            label: &format!("call {index}"),
            reduction: Some(Reduction::Average),
            root: None,
            peer: None,
            is_of_pairs: false,
            agreement: 7,
        };
        let tensors = [Some((&[4, 300][..], ElementType::BF16)), None];
        assert_eq!(
            self.memory()
                .post(Duration::from_micros(index), &call, tensors.into_iter()),
            index
        );
    }

    fn trace(&self) -> RankTrace {
        RankTrace::decode(&self.memory().copy()).unwrap()
    }
}

#[test]
fn of_an_operation_the_first_end_counts() {
    let rank = Rank::new(1);
    let recorder = rank.memory();
    rank.post(0);
    recorder.waited(0, Duration::from_nanos(3));
    assert!(rank.trace().operations[0].is_awaited());
    recorder.over(0, Duration::from_nanos(9), OpOutcome::Done(None));
    recorder.over(0, Duration::from_nanos(10), OpOutcome::Dropped);
    let operation = &rank.trace().operations[0];
    let at = |nanos| operation.posted + Duration::from_nanos(nanos);
    assert_eq!(
        (operation.waited, operation.over),
        (Some(at(3)), Some((at(9), OpOutcome::Done(None))))
    );
    assert!(!operation.is_awaited());
}

/// Combines words of an operation and of the next one in the same record. A mixture must be
/// rejected, or read as one of the two.
#[test]
fn a_torn_record_is_left_out() {
    let rank = Rank::new(1);
    let recorder = rank.memory();
    let count = OPERATIONS as u64;
    let record_of = |index: u64| {
        let at = RECORDS + (index as usize % OPERATIONS) * RECORD_WORDS;
        recorder.copy()[at..at + RECORD_WORDS].to_vec()
    };
    (0..count).for_each(|index| rank.post(index));
    recorder.over(3, Duration::from_nanos(5), OpOutcome::Failed);
    let before = record_of(3);
    (count..count + 4).for_each(|index| rank.post(index));
    recorder.over(count + 3, Duration::from_nanos(6), OpOutcome::Dropped);
    let after = record_of(3);
    let old = record::read(&before).unwrap();
    let new = record::read(&after).unwrap();
    assert_eq!((old.index, new.index), (3, count + 3));
    let mut torn = 0;
    for from in 0..=RECORD_WORDS {
        for to in from..=RECORD_WORDS {
            let mut mixed = before.clone();
            mixed[from..to].copy_from_slice(&after[from..to]);
            let Some(found) = record::read(&mixed) else {
                torn += 1;
                continue;
            };
            let full = if found.index == old.index { &old } else { &new };
            let marks = [
                found.ended.is_none_or(|ended| Some(ended) == full.ended),
                found.over.is_none_or(|over| Some(over) == full.over),
            ];
            assert_eq!(marks, [true; 2], "a mark of another operation: {found:?}");
            let unmarked = |found: &FlightRecord| FlightRecord {
                ended: None,
                over: None,
                ..found.clone()
            };
            assert_eq!(unmarked(&found), unmarked(full));
        }
    }
    assert!(torn > 50, "{torn}");
    // The record is being written.
    let mut writing = after.clone();
    writing[0] -= 1;
    assert!(record::read(&writing).is_none());
    for at in [1, 2, 3, 7, 8, 13] {
        let mut flipped = after.clone();
        flipped[at] ^= 1 << 40;
        assert!(record::read(&flipped).is_none(), "word {at}");
    }
}

/// Returns the trace of three ranks with the given numbers of calls, on the group of all ranks.
/// Each rank waits for its last call.
fn flights(calls: [u64; 3], lives: [ProcessState; 3]) -> LaunchTrace {
    let flight = |number: usize| {
        let rank = Rank::new(number);
        for index in 0..calls[number] {
            rank.post(index);
            rank.memory().count(rank.channel, index + 1);
            rank.memory().waited(index, Duration::ZERO);
            if calls.iter().all(|calls| *calls > index) {
                rank.memory()
                    .over(index, Duration::ZERO, OpOutcome::Done(None));
            }
        }
        rank.trace()
    };
    let mut flights = LaunchTrace::of((0..3).map(flight).collect()).remove(0);
    flights.lives = lives.into();
    flights
}

#[test]
fn a_process_that_is_lost_is_at_fault() {
    use ProcessState::{Gone, Runs, Stopped, Unknown};
    let fault = |calls, lives| {
        flights(calls, lives)
            .fault()
            .map(|fault| (fault.rank, fault.why))
    };
    assert_eq!(fault([2, 2, 2], [Runs; 3]), None);
    assert_eq!(
        fault([2, 2, 2], [Runs, Gone, Runs]),
        Some((1, FaultKind::Gone)),
        "no rank waits for it yet"
    );
    assert_eq!(
        fault([2, 2, 2], [Unknown, Runs, Stopped]),
        Some((2, FaultKind::Stopped))
    );
    // Rank 1 is only late; its last activity is older than that of rank 2.
    assert_eq!(fault([3, 2, 2], [Runs; 3]), Some((1, FaultKind::Absent)));
    assert_eq!(
        fault([3, 2, 2], [Runs, Runs, Gone]),
        Some((2, FaultKind::Gone))
    );
    // The launcher has ended those of this host. Rank 1, for which they waited, is on another.
    assert_eq!(
        fault([3, 2, 3], [Gone, Unknown, Gone]),
        Some((1, FaultKind::Absent))
    );
    // The launcher has ended all processes.
    assert_eq!(
        fault([3, 2, 3], [Gone; 3]),
        Some((1, FaultKind::Gone)),
        "other ranks wait for it"
    );
    assert_eq!(
        fault([2, 2, 2], [Gone; 3]),
        Some((0, FaultKind::Gone)),
        "its last activity is the oldest"
    );
}

#[test]
fn a_program_that_ends_its_process_is_at_fault() {
    let ended = |how: ExitKind, at: u64, by: Option<usize>| {
        let failure = |rank| FirstFailure {
            rank,
            is_own: false,
            is_difference: false,
            text: format!("rank {rank}"),
        };
        Some(ProgramExit {
            how,
            at: Duration::from_secs(at),
            text: String::new(),
            failure: by.map(failure),
        })
    };
    let fault = |calls, life, endings: [Option<ProgramExit>; 3]| {
        let mut flights = flights(calls, [ProcessState::Runs, life, ProcessState::Runs]);
        flights
            .ranks
            .iter_mut()
            .zip(endings)
            .for_each(|(flight, ending)| flight.ending = ending);
        flights.fault().map(|fault| (fault.rank, fault.why))
    };
    let runs = None;
    let returned = ended(ExitKind::Returned, 9, Some(1));
    let exited = |at, by| ended(ExitKind::Exited, at, by);
    // The process of the rank that exited waits for the other processes to end. The others survive
    // without it, or wait.
    for life in [
        ProcessState::Runs,
        ProcessState::Gone,
        ProcessState::Unknown,
    ] {
        let others_return = [returned.clone(), exited(3, None), returned.clone()];
        assert_eq!(
            fault([2, 2, 2], life, others_return),
            Some((1, FaultKind::Exited))
        );
        assert_eq!(
            fault(
                [3, 2, 3],
                life,
                [runs.clone(), exited(3, None), runs.clone()]
            ),
            Some((1, FaultKind::Exited))
        );
    }
    // Rank 2 is in the process of rank 1, and rank 0 exits when it receives the failure.
    let of_one_process = [exited(4, Some(1)), exited(3, None), exited(2, Some(1))];
    assert_eq!(
        fault([3, 2, 2], ProcessState::Runs, of_one_process),
        Some((1, FaultKind::Exited))
    );
    // Nothing is known of a process on another host but what the others were told.
    let failed = || ended(ExitKind::Failed, 4, Some(1));
    assert_eq!(
        fault([2, 2, 2], ProcessState::Unknown, [failed(), None, failed()]),
        Some((1, FaultKind::Failed))
    );
    // A rank that exits because another one is lost is not at fault.
    let after_a_loss = [exited(3, Some(1)), runs, exited(4, Some(1))];
    assert_eq!(
        fault([3, 2, 3], ProcessState::Gone, after_a_loss),
        Some((1, FaultKind::Gone))
    );
}

#[test]
fn what_is_no_flight_file_is_an_error() {
    let folder = Folder::new("others");
    let path = folder.0.join(LAUNCH.file_name(1));
    let problem = || match LaunchTrace::read(&folder.0).unwrap_err() {
        FlightError::Invalid { path: of, problem } if of == path => problem,
        error => panic!("{error}"),
    };
    assert!(
        matches!(
            LaunchTrace::read(&folder.0),
            Err(FlightError::Unreadable { .. })
        ),
        "no such folder"
    );
    fs::create_dir(&folder.0).unwrap();
    assert!(matches!(
        LaunchTrace::read(&folder.0),
        Err(FlightError::Empty { .. })
    ));
    for bytes in [vec![1; 4096], b"text".to_vec()] {
        fs::write(&path, bytes).unwrap();
        assert_eq!(problem(), DecodeError::NotFlight);
    }
    for bytes in [0, 1 << 16] {
        fs::write(&path, vec![0; bytes]).unwrap();
        let error = RankTrace::read(&path).unwrap_err();
        assert!(
            matches!(
                error,
                FlightError::Invalid {
                    problem: DecodeError::NotBegun,
                    ..
                }
            ),
            "{error}"
        );
        assert!(
            LaunchTrace::read(&folder.0).unwrap().is_empty(),
            "the header is not written yet"
        );
    }

    let valid: Vec<u8> = Rank::new(1)
        .memory()
        .copy()
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .collect();
    let with = |at: usize, byte: u8| {
        let mut bytes = valid.clone();
        bytes[at] = byte;
        fs::write(&path, &bytes).unwrap();
    };
    with(8, 9);
    assert_eq!(problem(), DecodeError::Version { found: 9 });
    let text = LaunchTrace::read(&folder.0).unwrap_err().to_string();
    let expected = format!(
        "launch-0-process-0-rank-1.flight: the file has format version 9, but this program reads version {VERSION}"
    );
    assert!(text.contains(&expected), "{text}");
    with(24, 77);
    assert_eq!(problem(), DecodeError::Header);
    fs::write(&path, &valid).unwrap();
    assert_eq!(LaunchTrace::read(&folder.0).unwrap()[0].ranks[0].rank, 1);
}

/// The numbers in a file: a change needs a new version.
#[test]
fn the_format_is_that_of_its_version() {
    let identity = Identity {
        rank: 1,
        size: 3,
        launch: LaunchId {
            number: 4,
            shrunk: 5,
            process: Some(6),
        },
        pid: 7,
        process_start: 8,
        process_started: 9,
        started: 10,
        host: "host".into(),
    };
    let rank = Rank::of(identity);
    let memory = rank.memory();
    (0..3).for_each(|index| rank.post(index));
    memory.count(rank.channel, 2);
    memory.counted(0, 9);
    memory.waited(1, Duration::from_nanos(10));
    memory.over(1, Duration::from_nanos(11), OpOutcome::Done(Some(2)));
    let failure = FirstFailure {
        rank: 2,
        is_own: false,
        is_difference: true,
        text: "first".into(),
    };
    memory.end(&ProgramExit {
        how: ExitKind::Panicked,
        at: Duration::from_nanos(12),
        text: "boom".into(),
        failure: Some(failure),
    });
    assert_eq!(
        (VERSION, StableHasher::of(memory.copy())),
        (2, 16_194_409_517_040_018_915),
        "a change needs a new version"
    );
}

/// Runs A and B of a program in the same folder: B's launches replace the files of A's ranks as
/// they begin.
#[test]
fn a_rank_that_has_not_begun_is_not_that_of_an_earlier_run() {
    const SECOND: u64 = 1_000_000_000;
    // The process starts, and then the launch begins, so many seconds after 1970.
    let trace = |rank: usize, host: &str, process: Option<u64>, (start, launch): (u64, u64)| {
        let id = LaunchId {
            number: 0,
            shrunk: 0,
            process,
        };
        let pid = start as u32;
        let process_started = start * SECOND;
        let started = launch * SECOND;
        let size = 2;
        let launch = id;
        let host = host.into();
        Rank::of(Identity {
            rank,
            size,
            launch,
            pid,
            process_start: start,
            process_started,
            started,
            host,
        })
        .trace()
    };
    let ranks = |traces: Vec<RankTrace>| {
        let launches = LaunchTrace::of(traces);
        assert_eq!(launches.len(), 1, "{launches:?}");
        launches[0]
            .ranks
            .iter()
            .map(|trace| trace.rank)
            .collect::<Vec<_>>()
    };
    for process in [None, Some(0)] {
        let trace = |rank, times| trace(rank, "a", process, times);
        let ended = trace(1, (100, 101));
        assert_eq!(
            ranks(vec![trace(0, (102, 103)), ended.clone()]),
            [0],
            "rank 1 has not begun"
        );
        let error = LaunchTrace::of(vec![trace(0, (102, 103)), ended]).remove(0);
        assert!(
            error.text(0).contains("no flight file: ranks [1]"),
            "{error}"
        );
    }
    // A rank of the same run that begins hours later, in another process or, alone, in the same.
    assert_eq!(
        ranks(vec![
            trace(0, "a", None, (100, 101)),
            trace(1, "a", None, (100, 9000))
        ]),
        [0, 1]
    );
    assert_eq!(
        ranks(vec![
            trace(0, "a", Some(0), (100, 101)),
            trace(1, "a", Some(0), (100, 101))
        ]),
        [0, 1]
    );
    // The clocks of hosts differ.
    assert_eq!(
        ranks(vec![
            trace(0, "a", None, (100, 101)),
            trace(1, "b", None, (108, 109))
        ]),
        [0, 1]
    );
    assert_eq!(
        ranks(vec![
            trace(0, "a", None, (100, 101)),
            trace(1, "b", None, (120, 121))
        ]),
        [1]
    );
}

/// Process 1 has made a launch alone, so that its numbers are not those of process 0.
#[test]
fn launches_of_all_processes_and_of_one_are_told_apart() {
    let trace = |rank: usize, launch: LaunchId| {
        Rank::of(Identity {
            rank,
            ..Identity::here(3, launch)
        })
        .trace()
    };
    let alone = LaunchId::of_process(1, 0);
    let all = LaunchId::first(0);
    let launches = LaunchTrace::of(vec![
        trace(0, alone),
        trace(1, all.next()),
        trace(1, all),
        trace(0, all),
    ]);
    let found: Vec<_> = launches
        .iter()
        .map(|launch| {
            (
                launch.launch.to_string(),
                launch
                    .ranks
                    .iter()
                    .map(|trace| trace.rank)
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    let expected = [
        ("launch 0".to_owned(), vec![0, 1]),
        ("launch 0 of process 1".to_owned(), vec![0]),
        ("launch 0 after 1 shrink".to_owned(), vec![1]),
    ];
    assert_eq!(found, expected);
    let names = [all, all.next(), alone].map(|launch| launch.file_name(7));
    assert_eq!(
        names,
        [
            "launch-0-rank-7.flight",
            "launch-0-shrunk-1-rank-7.flight",
            "launch-0-process-1-rank-7.flight"
        ]
    );
}
