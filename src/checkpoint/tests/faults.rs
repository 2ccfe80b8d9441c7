//! A save that fails is an error on every rank, and leaves the checkpoint before it.

use std::io::ErrorKind;
use std::path::Path;

use super::states::{RUN, is_saved, manager, state};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::fs::FileSystem;
use crate::checkpoint::fs::recorder::{Fault, Recorder};
use crate::mesh::DeviceMesh;
use crate::prelude::*;

/// Returns the outcomes of both ranks of saving a step, keeping one.
fn save(of_ranks: [&Recorder; 2], step: u64) -> [Result<(), CheckpointError>; 2] {
    let saved = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        match manager(of_ranks[mesh.rank()], &mesh).with_keep(1).save(&state(&mesh, step, 0)?) {
            Ok(_) => Ok(Ok(())),
            Err(crate::Error::Checkpoint(error)) => Ok(Err(error)),
            Err(error) => Err(error),
        }
    });
    let outcomes: Vec<_> = saved.unwrap().into_iter().map(|(_, outcome)| outcome).collect();
    outcomes.try_into().expect("there are two ranks")
}

/// Loads the latest checkpoint, which must be as it was saved, and returns its step.
fn latest(fs: &Recorder) -> u64 {
    let loaded = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let latest = manager(fs, &mesh).latest()?.expect("there is a checkpoint");
        let step = latest.step().expect("it has a step");
        is_saved(&latest, &mesh, 2, step).unwrap();
        Ok(step)
    });
    loaded.unwrap()[0].1
}

/// The disk is full, read-only, broken or gone from any call on, or for one call, on one rank or the other.
#[test]
fn an_error_at_any_call_is_returned_by_every_rank_and_the_last_checkpoint_remains() {
    let start = Recorder::new();
    assert_eq!(save([&start; 2], 1), [Ok(()), Ok(())]);
    let (mut failed, mut saved) = (0, 0);
    for kind in [ErrorKind::StorageFull, ErrorKind::ReadOnlyFilesystem, ErrorKind::Other, ErrorKind::NotFound] {
        for lasting in [false, true] {
            for call in 0.. {
                let fs = start.durable_copy();
                fs.fail(Fault { call, kind, lasting });
                let [first, second] = save([&fs; 2], 2);
                assert_eq!(first, second, "{kind} at call {call}");
                let is_over = fs.calls() <= call;
                fs.heal();
                match first {
                    Ok(()) => saved += 1,
                    Err(CheckpointError::Io { .. }) => failed += 1,
                    // A file that is not found is how another folder is recognized.
                    Err(CheckpointError::NotShared { .. }) if kind == ErrorKind::NotFound => failed += 1,
                    Err(error) => panic!("{kind} at call {call}: {error}"),
                }
                let steps = [latest(&fs), latest(&fs.lose_pending())];
                let is_right = |step: u64| if first.is_ok() { step == 2 } else { [1, 2].contains(&step) };
                assert!(steps.into_iter().all(is_right), "{kind} at call {call}: {steps:?}");
                assert_eq!(save([&fs; 2], 3), [Ok(()), Ok(())], "{kind} at call {call}");
                assert_eq!(latest(&fs.lose_pending()), 3);
                if is_over {
                    break;
                }
            }
        }
    }
    println!("{failed} errors were returned, {saved} saves succeeded");
}

#[test]
fn two_folders_of_one_name_are_found_before_a_byte_is_written() {
    let of_ranks = [Recorder::new(), Recorder::new()];
    let path = Path::new(RUN).join("step-1");
    let expected = Err(CheckpointError::NotShared { path: path.clone(), rank: 1, of: 0 });
    assert_eq!(save([&of_ranks[0], &of_ranks[1]], 1), [expected.clone(), expected]);
    for fs in &of_ranks {
        assert_eq!(fs.list(&path).unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_eq!(of_ranks[1].steps(), 0, "rank 1 has changed nothing");
}
