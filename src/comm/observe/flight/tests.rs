//! Flight recorder: written data is read back exactly, or not at all.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Shape};
use burn_dtensor_flight::format::OPERATIONS;
use burn_dtensor_flight::{LaunchId, LaunchTrace};

use super::super::event::Posting;
use super::{ExitKind, LaunchStart, OpOutcome, ProgramExit, RankTrace, Recorder};
use crate::comm::backend::{CallSignature, TensorSignature};
use crate::comm::{Group, Op, Phase, StartError};

/// A temporary folder, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        Self(
            std::env::temp_dir().join(format!("burn-dtensor-flight-{}-{name}", std::process::id())),
        )
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn in_memory() -> Recorder {
    Recorder::new(1, &LaunchStart::new(3, LaunchId::of_process(0, 0)), None).unwrap()
}

/// Returns a call whose label and tensors depend on `index`.
fn signature(index: u64) -> CallSignature {
    let length = index as usize % 5;
    let tensor = |at: usize| TensorSignature {
        shape: Shape::from([at, index as usize]),
        dtype: DType::F32,
        sharding: None,
        to: None,
    };
    let call = format!("call {index}{}", "!".repeat(length))
        .as_str()
        .into();
    CallSignature::new(
        Op::AllReduce,
        &call,
        (0..length).map(tensor).collect::<Vec<_>>(),
    )
}

/// Posts call `index` of a rank that makes no other calls.
fn post(recorder: &Recorder, at: Instant, index: u64) {
    let group = Group::new([0, 1, 2], 1);
    let signature = signature(index);
    let seq = index;
    let bytes = 3 * index;
    let phase = Phase::Forward;
    let posting = Posting {
        group: &group,
        channel: 1,
        seq,
        signature: &signature,
        phase,
        bytes,
        peer: None,
    };
    assert_eq!(recorder.post(at, &posting), index);
}

/// Returns true if every operation in the trace is a call that [`post`] made, with all its data.
fn is_complete(flight: &RankTrace) -> bool {
    flight.operations.iter().all(|operation| {
        let (index, expected) = (operation.index, signature(operation.index));
        let tensors = expected
            .tensors
            .iter()
            .map(|tensor| format!("{:?} f32", &tensor.shape[..]));
        (operation.id.seq, operation.bytes, &operation.id.label)
            == (index, 3 * index, &expected.label)
            && operation
                .tensors
                .iter()
                .map(ToString::to_string)
                .eq(tensors)
            && operation.count == operation.tensors.len()
    })
}

fn read(recorder: &Recorder) -> RankTrace {
    recorder.trace()
}

#[test]
fn the_last_operations_are_kept() {
    let recorder = in_memory();
    let count = OPERATIONS as u64 + 5;
    (0..count).for_each(|index| post(&recorder, Instant::now(), index));
    let flight = read(&recorder);
    assert_eq!(
        (flight.posted, flight.operations.len()),
        (count, OPERATIONS)
    );
    assert!(
        flight
            .operations
            .iter()
            .map(|operation| operation.index)
            .eq(5..count)
    );
    assert!(is_complete(&flight));
    // A mark for an operation whose record was reused has no effect.
    recorder.memory().over(4, Duration::ZERO, OpOutcome::Failed);
    recorder
        .memory()
        .over(5, Duration::from_nanos(7), OpOutcome::Done(Some(2)));
    let flight = read(&recorder);
    let first = &flight.operations[0];
    assert_eq!(
        first.over,
        Some((
            first.posted + Duration::from_nanos(7),
            OpOutcome::Done(Some(2))
        ))
    );
    assert!(
        flight.operations[1..]
            .iter()
            .all(|operation| operation.over.is_none())
    );
}

#[test]
fn what_does_not_fit_is_truncated_and_still_compared() {
    let recorder = in_memory();
    let tensors = |last: usize| {
        let shape = |at: usize| Shape::from([1000, if at == 99 { last } else { 1 << 20 }]);
        (0..100)
            .map(|at| TensorSignature {
                shape: shape(at),
                dtype: DType::BF16,
                sharding: None,
                to: None,
            })
            .collect::<Vec<_>>()
    };
    let label = "ü".repeat(50);
    for (seq, (label, last)) in [(&*label, 1), (&*label, 2), ("short", 1)]
        .into_iter()
        .enumerate()
    {
        let signature = CallSignature::new(Op::AllGather, &label.into(), tensors(last));
        let group = Group::new([0, 1], 1);
        let seq = seq as u64;
        let phase = Phase::Other;
        let posting = Posting {
            group: &group,
            channel: 1,
            seq,
            signature: &signature,
            phase,
            bytes: 0,
            peer: None,
        };
        recorder.post(Instant::now(), &posting);
    }
    let flight = read(&recorder);
    let [first, second, short] = &flight.operations[..] else {
        panic!("{flight:?}")
    };
    assert_eq!((&*first.id.label, first.count), (&*"ü".repeat(36), 100));
    assert!(
        short.tensors.len() > first.tensors.len() && first.tensors.len() > 5,
        "{first}"
    );
    assert!(
        first
            .tensors
            .iter()
            .all(|tensor| tensor.to_string() == "[1000, 1048576] bf16")
    );
    assert!(
        first.to_string().contains("(label truncated)") && first.to_string().ends_with("more"),
        "{first}"
    );
    assert!(
        first.difference(second).unwrap().contains("differ"),
        "{:?}",
        first.difference(second)
    );
    assert_eq!(first.difference(first), None);
}

#[test]
fn a_channel_that_does_not_fit_takes_no_number() {
    let recorder = in_memory();
    let irregular: Vec<_> = (0..20_000).map(|rank| rank * rank).collect();
    let groups = [Group::new(irregular, 0), Group::new([0, 1], 1)];
    assert_eq!(
        groups.map(|group| recorder.sequence(&group, "").number()),
        [0, 1]
    );
}

#[test]
fn a_program_ends_once() {
    let recorder = in_memory();
    for (how, text) in [
        (ExitKind::Exited, "its process has ended"),
        (ExitKind::Returned, ""),
    ] {
        recorder.ended(|at| ProgramExit {
            how,
            at,
            text: text.into(),
            failure: None,
        });
    }
    let ending = read(&recorder).ending.unwrap();
    assert_eq!(
        (ending.how, &*ending.text),
        (ExitKind::Exited, "its process has ended")
    );
}

#[test]
fn a_file_is_read_while_its_rank_writes() {
    let folder = Folder::new("written");
    let recorder = Recorder::new(
        0,
        &LaunchStart::new(1, LaunchId::of_process(0, 5)),
        Some(&folder.0),
    )
    .unwrap();
    recorder.sequence(&Group::new([0], 0), "");
    let is_over = AtomicBool::new(false);
    let path = folder.0.join(LaunchId::of_process(0, 5).file_name(0));
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
    assert!(
        flight
            .operations
            .iter()
            .map(|operation| operation.index)
            .eq(20_000 - OPERATIONS as u64..20_000)
    );
}

#[test]
fn a_file_holds_what_memory_does() {
    let folder = Folder::new("same");
    let start = LaunchStart::new(3, LaunchId::of_process(0, 7));
    let at = Instant::now();
    let [first, second] = [None, Some(&*folder.0)].map(|folder| {
        let recorder = Recorder::new(2, &start, folder).unwrap();
        recorder.sequence(&Group::new([0, 1, 2], 2), "");
        let pair = recorder.sequence(&Group::new([2, 0], 0), "reduced");
        (0..10).for_each(|index| post(&recorder, at, index));
        recorder.memory().count(pair.at(), 5);
        recorder.memory().waited(8, Duration::from_nanos(1));
        recorder
            .memory()
            .over(8, Duration::from_nanos(2), OpOutcome::Done(Some(1)));
        recorder
    });
    let of_file = RankTrace::read(folder.0.join(LaunchId::of_process(0, 7).file_name(2))).unwrap();
    assert_eq!(
        [read(&first), read(&second)],
        [of_file.clone(), of_file.clone()]
    );
    assert_eq!(
        (of_file.rank, of_file.size, of_file.launch, of_file.pid),
        (2, 3, LaunchId::of_process(0, 7), std::process::id())
    );
    assert_eq!(of_file.channels[1].taken, 5);
    assert_eq!(
        (&*of_file.channels[1].name, &*of_file.channels[1].ranks),
        ("reduced", &[2, 0][..])
    );
    assert_eq!(of_file.operations[0].id.ranks, [0, 1, 2].into());
    assert!(is_complete(&of_file));
    // The words of a file are those of the recorder, and the rest of its ring is empty.
    let bytes = fs::read(folder.0.join(LaunchId::of_process(0, 7).file_name(2))).unwrap();
    let words: Vec<_> = bytes
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
        .collect();
    let own = second.memory().copy();
    assert!(words.starts_with(&own) && words[own.len()..].iter().all(|word| *word == 0));
}

/// A launch with the same number as one of an earlier run in the same folder does not change that
/// run's files.
#[test]
fn files_of_another_run_are_not_touched() {
    let folder = Folder::new("again");
    let old = Recorder::new(
        0,
        &LaunchStart::new(2, LaunchId::of_process(0, 0)),
        Some(&folder.0),
    )
    .unwrap();
    drop(
        Recorder::new(
            1,
            &LaunchStart::new(2, LaunchId::of_process(0, 0)),
            Some(&folder.0),
        )
        .unwrap(),
    );
    let new = Recorder::new(
        0,
        &LaunchStart::new(1, LaunchId::of_process(0, 0)),
        Some(&folder.0),
    )
    .unwrap();
    post(&old, Instant::now(), 0);
    post(&old, Instant::now(), 1);
    post(&new, Instant::now(), 0);
    assert_eq!(
        RankTrace::read(folder.0.join(LaunchId::of_process(0, 0).file_name(0)))
            .unwrap()
            .operations
            .len(),
        1
    );
    let launches = LaunchTrace::read(&folder.0).unwrap();
    assert_eq!(
        (launches.len(), launches[0].size, launches[0].ranks.len()),
        (1, 1, 1),
        "the file of rank 1 belongs to a run with two ranks"
    );
}

#[test]
fn a_file_that_cannot_be_made_is_an_error_with_its_path() {
    let folder = Folder::new("refused");
    fs::write(&folder.0, "a file").unwrap();
    let error = Recorder::new(
        4,
        &LaunchStart::new(5, LaunchId::of_process(0, 6)),
        Some(&folder.0),
    )
    .unwrap_err();
    let StartError::Flight { rank: 4, path, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*path, folder.0.join("launch-6-process-0-rank-4.flight"));
    assert!(
        error
            .to_string()
            .contains("Name a folder to which the program can write ("),
        "{error}"
    );
    fs::remove_file(&folder.0).unwrap();
}

#[test]
fn an_operation_writes_its_record_alone() {
    let recorder = in_memory();
    recorder.sequence(&Group::new([0, 1, 2], 1), "");
    (0..3).for_each(|index| post(&recorder, Instant::now(), index));
    let before = recorder.memory().copy();
    post(&recorder, Instant::now(), 3);
    recorder.memory().waited(3, Duration::ZERO);
    recorder
        .memory()
        .over(3, Duration::ZERO, OpOutcome::Done(None));
    recorder.memory().counted(3, 0);
    let after = recorder.memory().copy();
    let changed: Vec<_> = (0..before.len())
        .filter(|at| before[*at] != after[*at])
        .collect();
    assert_eq!(
        changed.len(),
        1,
        "only the counter of operations changes: {changed:?}"
    );
    assert_eq!(after.len(), before.len() + 32, "one record");
    assert_eq!(after[changed[0]], 4);
}
