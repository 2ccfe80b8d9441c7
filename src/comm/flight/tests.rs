//! Flight recorder: written data is read back exactly, or not at all.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Shape};

use super::layout::{OPERATIONS, RECORD_WORDS, RECORDS};
use super::{
    ExitKind, FaultKind, FirstFailure, FlightError, LaunchStart, LaunchTrace, OpOutcome, Posting, ProcessState,
    ProgramExit, RankTrace, Recorder, file, record,
};
use crate::comm::backend::{CallSignature, TensorSignature};
use crate::comm::{Group, Op, Phase, StartError};

/// A temporary folder, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("burn-dtensor-flight-{}-{name}", std::process::id())))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn in_memory() -> Recorder {
    Recorder::new(1, &LaunchStart::new(3, 0), None).unwrap()
}

/// Returns a call whose label and tensors depend on `index`.
fn print(index: u64) -> CallSignature {
    let length = index as usize % 5;
    let tensor = |at: usize| TensorSignature {
        shape: Shape::from([at, index as usize]),
        dtype: DType::F32,
        sharding: None,
        to: None,
    };
    let call = format!("call {index}{}", "!".repeat(length)).as_str().into();
    CallSignature::new(Op::AllReduce, &call, (0..length).map(tensor).collect::<Vec<_>>())
}

/// Posts call `index` of a rank that makes no other calls.
fn post(recorder: &Recorder, at: Instant, index: u64) {
    let print = print(index);
    let posting =
        Posting { channel: 1, seq: index, print: &print, phase: Phase::Forward, bytes: 3 * index, peer: None };
    assert_eq!(recorder.posted(at, &posting), index);
}

/// Returns true if every operation in the trace is a call that [`post`] made, with all its data.
fn is_complete(flight: &RankTrace) -> bool {
    flight.operations.iter().all(|operation| {
        let (index, expected) = (operation.index, print(operation.index));
        let tensors = expected.tensors.iter().map(|tensor| format!("{:?} f32", &tensor.shape[..]));
        (operation.id.seq, operation.bytes, &operation.id.label) == (index, 3 * index, &expected.label)
            && operation.tensors.iter().map(ToString::to_string).eq(tensors)
            && operation.count == operation.tensors.len()
    })
}

fn read(recorder: &Recorder) -> RankTrace {
    RankTrace::of_words(&recorder.words()).unwrap()
}

#[test]
fn the_last_operations_are_kept() {
    let recorder = in_memory();
    let count = OPERATIONS as u64 + 5;
    (0..count).for_each(|index| post(&recorder, Instant::now(), index));
    let flight = read(&recorder);
    assert_eq!((flight.posted, flight.operations.len()), (count, OPERATIONS));
    assert!(flight.operations.iter().map(|operation| operation.index).eq(5..count));
    assert!(is_complete(&flight));
    // A mark for an operation whose record was reused has no effect.
    recorder.over(4, Duration::ZERO, OpOutcome::Failed);
    recorder.over(5, Duration::from_nanos(7), OpOutcome::Done(Some(2)));
    let flight = read(&recorder);
    let first = &flight.operations[0];
    assert_eq!(first.over, Some((first.posted + Duration::from_nanos(7), OpOutcome::Done(Some(2)))));
    assert!(flight.operations[1..].iter().all(|operation| operation.over.is_none()));
}

#[test]
fn of_an_operation_the_first_end_counts() {
    let recorder = in_memory();
    post(&recorder, Instant::now(), 0);
    recorder.waited(0, Duration::from_nanos(3));
    assert!(read(&recorder).operations[0].is_awaited());
    recorder.over(0, Duration::from_nanos(9), OpOutcome::Done(None));
    recorder.over(0, Duration::from_nanos(10), OpOutcome::Dropped);
    let operation = &read(&recorder).operations[0];
    let at = |nanos| operation.posted + Duration::from_nanos(nanos);
    assert_eq!((operation.waited, operation.over), (Some(at(3)), Some((at(9), OpOutcome::Done(None)))));
    assert!(!operation.is_awaited());
}

#[test]
fn what_does_not_fit_is_truncated_and_still_compared() {
    let recorder = in_memory();
    let tensors = |last: usize| {
        let shape = |at: usize| Shape::from([1000, if at == 99 { last } else { 1 << 20 }]);
        let tensor = |at| TensorSignature { shape: shape(at), dtype: DType::BF16, sharding: None, to: None };
        (0..100).map(tensor).collect::<Vec<_>>()
    };
    let label = "ü".repeat(50);
    for (seq, (label, last)) in [(&*label, 1), (&*label, 2), ("short", 1)].into_iter().enumerate() {
        let print = CallSignature::new(Op::AllGather, &label.into(), tensors(last));
        let (channel, seq, phase) = (1, seq as u64, Phase::Other);
        recorder.posted(Instant::now(), &Posting { channel, seq, print: &print, phase, bytes: 0, peer: None });
    }
    let flight = read(&recorder);
    let [first, second, short] = &flight.operations[..] else { panic!("{flight:?}") };
    assert_eq!((&*first.id.label, first.count), (&*"ü".repeat(36), 100));
    assert!(short.tensors.len() > first.tensors.len() && first.tensors.len() > 5, "{first}");
    assert!(first.tensors.iter().all(|tensor| tensor.to_string() == "[1000, 1048576] bf16"));
    assert!(first.to_string().contains("(label truncated)") && first.to_string().ends_with("more"), "{first}");
    assert!(first.difference(second).unwrap().contains("differ"), "{:?}", first.difference(second));
    assert_eq!(first.difference(first), None);
}

/// Combines words of an operation and of the next one in the same record. A mixture must be rejected, or read as
/// one of the two.
#[test]
fn a_torn_record_is_left_out() {
    let recorder = in_memory();
    let count = OPERATIONS as u64;
    let record_of = |index: u64| {
        let at = RECORDS + (index as usize % OPERATIONS) * RECORD_WORDS;
        recorder.words()[at..at + RECORD_WORDS].to_vec()
    };
    (0..count).for_each(|index| post(&recorder, Instant::now(), index));
    recorder.over(3, Duration::from_nanos(5), OpOutcome::Failed);
    let before = record_of(3);
    (count..count + 4).for_each(|index| post(&recorder, Instant::now(), index));
    recorder.over(count + 3, Duration::from_nanos(6), OpOutcome::Dropped);
    let after = record_of(3);
    let (old, new) = (record::read(&before).unwrap(), record::read(&after).unwrap());
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
            let unmarked =
                |found: &record::FlightRecord| record::FlightRecord { ended: None, over: None, ..found.clone() };
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

/// Returns the trace of three ranks with the given numbers of calls, on the group of all ranks. Each rank waits
/// for its last call.
fn flights(calls: [u64; 3], lives: [ProcessState; 3]) -> LaunchTrace {
    let start = LaunchStart::new(3, 0);
    let flight = |rank: usize| {
        let recorder = Recorder::new(rank, &start, None).unwrap();
        let sequence = recorder.sequence(&Group::new([0, 1, 2], rank), "");
        for index in 0..calls[rank] {
            post(&recorder, Instant::now(), index);
            recorder.taken(&sequence, Op::AllReduce, index);
            recorder.waited(index, Duration::ZERO);
            if calls.iter().all(|calls| *calls > index) {
                recorder.over(index, Duration::ZERO, OpOutcome::Done(None));
            }
        }
        read(&recorder)
    };
    let mut flights = LaunchTrace::of((0..3).map(flight).collect()).remove(0);
    flights.lives = lives.into();
    flights
}

#[test]
fn a_process_that_is_lost_is_at_fault() {
    use ProcessState::{Gone, Runs, Stopped, Unknown};
    let fault = |calls, lives| flights(calls, lives).fault().map(|fault| (fault.rank, fault.why));
    assert_eq!(fault([2, 2, 2], [Runs; 3]), None);
    assert_eq!(fault([2, 2, 2], [Runs, Gone, Runs]), Some((1, FaultKind::Gone)), "no rank waits for it yet");
    assert_eq!(fault([2, 2, 2], [Unknown, Runs, Stopped]), Some((2, FaultKind::Stopped)));
    // Rank 1 is only late; its last activity is older than that of rank 2.
    assert_eq!(fault([3, 2, 2], [Runs; 3]), Some((1, FaultKind::Absent)));
    assert_eq!(fault([3, 2, 2], [Runs, Runs, Gone]), Some((2, FaultKind::Gone)));
    // The launcher has ended all processes.
    assert_eq!(fault([3, 2, 3], [Gone; 3]), Some((1, FaultKind::Gone)), "other ranks wait for it");
    assert_eq!(fault([2, 2, 2], [Gone; 3]), Some((0, FaultKind::Gone)), "its last activity is the oldest");
}

#[test]
fn a_program_that_ends_its_process_is_at_fault() {
    let ended = |how: ExitKind, at: u64, by: Option<usize>| {
        let failure = |rank| FirstFailure { rank, is_own: false, is_difference: false, text: format!("rank {rank}") };
        Some(ProgramExit { how, at: Duration::from_secs(at), text: String::new(), failure: by.map(failure) })
    };
    let fault = |calls, life, endings: [Option<ProgramExit>; 3]| {
        let mut flights = flights(calls, [ProcessState::Runs, life, ProcessState::Runs]);
        flights.ranks.iter_mut().zip(endings).for_each(|(flight, ending)| flight.ending = ending);
        flights.fault().map(|fault| (fault.rank, fault.why))
    };
    let (runs, returned) = (None, ended(ExitKind::Returned, 9, Some(1)));
    let exited = |at, by| ended(ExitKind::Exited, at, by);
    // The process of the rank that exited waits for the other processes to end. The others survive without it, or
    // wait.
    for life in [ProcessState::Runs, ProcessState::Gone, ProcessState::Unknown] {
        let others_return = [returned.clone(), exited(3, None), returned.clone()];
        assert_eq!(fault([2, 2, 2], life, others_return), Some((1, FaultKind::Exited)));
        assert_eq!(fault([3, 2, 3], life, [runs.clone(), exited(3, None), runs.clone()]), Some((1, FaultKind::Exited)));
    }
    // Rank 2 is in the process of rank 1, and rank 0 exits when it receives the failure.
    let of_one_process = [exited(4, Some(1)), exited(3, None), exited(2, Some(1))];
    assert_eq!(fault([3, 2, 2], ProcessState::Runs, of_one_process), Some((1, FaultKind::Exited)));
    // A rank that exits because another one is lost is not at fault.
    let after_a_loss = [exited(3, Some(1)), runs, exited(4, Some(1))];
    assert_eq!(fault([3, 2, 3], ProcessState::Gone, after_a_loss), Some((1, FaultKind::Gone)));
}

#[test]
fn a_program_ends_once() {
    let recorder = in_memory();
    for (how, text) in [(ExitKind::Exited, "its process has ended"), (ExitKind::Returned, "")] {
        recorder.ended(|at| ProgramExit { how, at, text: text.into(), failure: None });
    }
    let ending = read(&recorder).ending.unwrap();
    assert_eq!((ending.how, &*ending.text), (ExitKind::Exited, "its process has ended"));
}

#[test]
fn a_file_is_read_while_its_rank_writes() {
    let folder = Folder::new("written");
    let recorder = Recorder::new(0, &LaunchStart::new(1, 5), Some(&folder.0)).unwrap();
    recorder.sequence(&Group::new([0], 0), "");
    let (is_over, path) = (AtomicBool::new(false), file::path(&folder.0, 5, 0));
    thread::scope(|scope| {
        scope.spawn(|| {
            (0..20_000).for_each(|index| post(&recorder, Instant::now(), index));
            is_over.store(true, Ordering::Release);
        });
        let mut last = 0;
        while !is_over.load(Ordering::Acquire) {
            for flight in [RankTrace::read(&path).unwrap(), read(&recorder)] {
                assert!(is_complete(&flight), "{flight:?}");
                assert!(flight.posted >= last);
                last = flight.posted;
            }
        }
    });
    let flight = RankTrace::read(&path).unwrap();
    assert!(flight.operations.iter().map(|operation| operation.index).eq(20_000 - OPERATIONS as u64..20_000));
}

#[test]
fn a_file_holds_what_memory_does() {
    let folder = Folder::new("same");
    let (start, at) = (LaunchStart::new(3, 7), Instant::now());
    let [first, second] = [None, Some(&*folder.0)].map(|folder| {
        let recorder = Recorder::new(2, &start, folder).unwrap();
        recorder.sequence(&Group::new([0, 1, 2], 2), "");
        let pair = recorder.sequence(&Group::new([2, 0], 0), "reduced");
        (0..10).for_each(|index| post(&recorder, at, index));
        recorder.taken(&pair, Op::AllReduce, 4);
        recorder.waited(8, Duration::from_nanos(1));
        recorder.over(8, Duration::from_nanos(2), OpOutcome::Done(Some(1)));
        recorder
    });
    let of_file = RankTrace::read(file::path(&folder.0, 7, 2)).unwrap();
    assert_eq!([read(&first), read(&second)], [of_file.clone(), of_file.clone()]);
    assert_eq!((of_file.rank, of_file.size, of_file.launch, of_file.pid), (2, 3, 7, std::process::id()));
    assert_eq!(of_file.channels[1].taken, 5);
    assert_eq!((&*of_file.channels[1].name, &*of_file.channels[1].ranks), ("reduced", &[2, 0][..]));
    assert_eq!(of_file.operations[0].id.ranks, [0, 1, 2].into());
    assert!(is_complete(&of_file));
    // The words of a file are those of the recorder, and the rest of its ring is empty.
    let bytes = fs::read(file::path(&folder.0, 7, 2)).unwrap();
    let words: Vec<_> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let own = second.words();
    assert!(words.starts_with(&own) && words[own.len()..].iter().all(|word| *word == 0));
}

/// A launch with the same number as one of an earlier run in the same folder does not change that run's files.
#[test]
fn files_of_another_run_are_not_touched() {
    let folder = Folder::new("again");
    let old = Recorder::new(0, &LaunchStart::new(2, 0), Some(&folder.0)).unwrap();
    drop(Recorder::new(1, &LaunchStart::new(2, 0), Some(&folder.0)).unwrap());
    let new = Recorder::new(0, &LaunchStart::new(1, 0), Some(&folder.0)).unwrap();
    post(&old, Instant::now(), 0);
    post(&old, Instant::now(), 1);
    post(&new, Instant::now(), 0);
    assert_eq!(RankTrace::read(file::path(&folder.0, 0, 0)).unwrap().operations.len(), 1);
    let launches = LaunchTrace::read(&folder.0).unwrap();
    assert_eq!(
        (launches.len(), launches[0].size, launches[0].ranks.len()),
        (1, 1, 1),
        "the file of rank 1 belongs to a run with two ranks"
    );
}

#[test]
fn what_is_no_flight_file_is_an_error() {
    let folder = Folder::new("others");
    let path = file::path(&folder.0, 0, 0);
    let text = |error: FlightError| error.to_string();
    assert!(text(LaunchTrace::read(&folder.0).unwrap_err()).contains("burn-dtensor-flight-"), "no such folder");
    fs::create_dir(&folder.0).unwrap();
    assert!(matches!(LaunchTrace::read(&folder.0), Err(FlightError::Empty { .. })));
    for (bytes, what) in [(vec![1; 4096], "not a flight file"), (b"text".to_vec(), "not a flight file")] {
        fs::write(&path, bytes).unwrap();
        assert!(text(LaunchTrace::read(&folder.0).unwrap_err()).contains(what));
    }
    fs::write(&path, vec![0; 1 << 16]).unwrap();
    assert!(matches!(RankTrace::read(&path), Err(FlightError::NotBegun { .. })));
    assert!(LaunchTrace::read(&folder.0).unwrap().is_empty(), "the header is not written yet");
    drop(Recorder::new(0, &LaunchStart::new(1, 0), Some(&folder.0)).unwrap());
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 9;
    fs::write(&path, &bytes).unwrap();
    assert!(text(LaunchTrace::read(&folder.0).unwrap_err()).contains("the file has format version 9, not 1"));
    bytes[8] = 1;
    bytes[24] = 77;
    fs::write(&path, &bytes).unwrap();
    assert!(text(LaunchTrace::read(&folder.0).unwrap_err()).contains("the header is incomplete"));
}

#[test]
fn a_file_that_cannot_be_made_is_an_error_with_its_path() {
    let folder = Folder::new("refused");
    fs::write(&folder.0, "a file").unwrap();
    let error = Recorder::new(4, &LaunchStart::new(5, 6), Some(&folder.0)).unwrap_err();
    let StartError::Flight { rank: 4, path, .. } = &error else { panic!("{error}") };
    assert_eq!(*path, folder.0.join("launch-6-rank-4.flight"));
    assert!(error.to_string().contains("Name a folder to which the program can write ("), "{error}");
    fs::remove_file(&folder.0).unwrap();
}

#[test]
fn an_operation_writes_its_record_alone() {
    let recorder = in_memory();
    recorder.sequence(&Group::new([0, 1, 2], 1), "");
    (0..3).for_each(|index| post(&recorder, Instant::now(), index));
    let before = recorder.words();
    post(&recorder, Instant::now(), 3);
    recorder.waited(3, Duration::ZERO);
    recorder.over(3, Duration::ZERO, OpOutcome::Done(None));
    recorder.counted(3, 3);
    let after = recorder.words();
    let changed: Vec<_> = (0..before.len()).filter(|at| before[*at] != after[*at]).collect();
    assert_eq!(changed.len(), 1, "only the counter of operations changes: {changed:?}");
    assert_eq!(after.len(), before.len() + RECORD_WORDS);
    assert_eq!(after[changed[0]], 4);
}
