//! Payloads of other processes are received directly into results.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::comm::backend::Backend;
use burn_dtensor::comm::{Communicator, Launch, ShardedTensor, Work, World, launch};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::testing::LoopbackJob;

use super::bits::values;
use super::read;

/// Number of columns: a row of 4-byte elements has 200 bytes.
const COLUMNS: usize = 50;

/// A collective of two ranks, the number of bytes that rank 1 sends, and when these are received in
/// place.
type Case = (fn(&Communicator) -> Work<Vec<DispatchTensor>>, u64, InPlace);

/// Describes when a payload is received in the result of rank 0.
#[derive(Clone, Copy, PartialEq)]
enum InPlace {
    /// Before and after rank 0 has called: the signature determines the layout.
    Always,
    /// Once rank 0 has called: only its arguments determine the layout.
    Called,
    /// Never: the shards are not contiguous in the result, or too small.
    Never,
}

const CASES: [Case; 6] = [
    (
        |comm| rows(comm, [[100, 800], [700, 300]]),
        700 * 200,
        InPlace::Called,
    ),
    (
        |comm| rows(comm, [[100, 800], [300, 900]]),
        300 * 200,
        InPlace::Never,
    ),
    (
        |comm| {
            one(comm.all_to_all(
                "rows".into(),
                shard(comm, 0, [900, 1600]),
                1,
                ShardSizes::Chunked(COLUMNS),
            ))
        },
        1600 * 100,
        InPlace::Called,
    ),
    (
        |comm| {
            one(comm.all_to_all(
                "columns".into(),
                shard(comm, 1, [30, 20]),
                0,
                ShardSizes::Chunked(4000),
            ))
        },
        2000 * 80,
        InPlace::Never,
    ),
    (
        |comm| comm.all_gather("rows".into(), vec![shard(comm, 0, [900, 1600])]),
        1600 * 200,
        InPlace::Always,
    ),
    (
        |comm| comm.all_gather("columns".into(), vec![shard(comm, 1, [30, 20])]),
        4000 * 80,
        InPlace::Never,
    ),
];

fn one(work: Work<DispatchTensor>) -> Work<Vec<DispatchTensor>> {
    work.then(|tensor| vec![tensor])
}

fn given(comm: &Communicator, shape: [usize; 2]) -> Tensor<2> {
    Tensor::from_data(
        TensorData::new(values(comm.group().rank(), shape.iter().product()), shape),
        &Device::flex(),
    )
}

/// Returns this rank's shard of a tensor of 4000 rows and [`COLUMNS`] columns, sharded along `dim`
/// with these shard sizes.
fn shard(comm: &Communicator, dim: usize, lengths: [usize; 2]) -> ShardedTensor {
    let mut shape = [4000, COLUMNS];
    shape[dim] = lengths[comm.group().rank()];
    ShardedTensor {
        tensor: given(comm, shape).into_dispatch(),
        dim,
        sizes: ShardSizes::Uneven(lengths.into()),
    }
}

/// Exchanges rows: rank `i` sends `given_rows[i][j]` rows to rank `j`.
fn rows(comm: &Communicator, given_rows: [[usize; 2]; 2]) -> Work<Vec<DispatchTensor>> {
    let own = comm.group().rank();
    let (given_rows, taken) = (given_rows[own], given_rows.map(|given| given[own]));
    let tensor = given(comm, [given_rows.iter().sum(), COLUMNS]).into_dispatch();
    one(comm.all_to_all_single("rows".into(), tensor, &given_rows, &taken))
}

fn taken(work: Work<Vec<DispatchTensor>>) -> Result<TensorData> {
    Ok(read(work.wait()?.remove(0)))
}

/// Runs all [`CASES`] on two ranks in two processes. Rank 1 calls once `there` returns true, given
/// the backend of rank 0 and whether rank 0 has called.
fn lands(
    there: fn(&dyn Backend, bool) -> bool,
    take: fn(Work<Vec<DispatchTensor>>) -> Result<TensorData>,
) {
    for (at, (call, bytes, lands)) in CASES.into_iter().enumerate() {
        let program = |world: &World| taken(call(&world.all()));
        let expected =
            launch(Launch::threads(2), program).unwrap_or_else(|error| panic!("{error}"));
        let (job, first, called) = (
            LoopbackJob::new(2, 50),
            OnceLock::<Arc<dyn Backend>>::new(),
            AtomicBool::new(false),
        );
        let ends = job.run(|process, processes| {
            let backend = processes.backend(1);
            if process == 0 {
                first.set(backend.clone()).expect("set once");
            }
            launch(Launch::on_backend(backend), |world| {
                world.barrier("both ranks have started")?;
                let is_there =
                    |backend: &Arc<dyn Backend>| there(&**backend, called.load(Ordering::SeqCst));
                while world.rank() == 1 && !first.get().is_some_and(is_there) {
                    thread::yield_now();
                }
                let work = call(&world.all());
                called.store(true, Ordering::SeqCst);
                if world.rank() == 0 {
                    take(work)
                } else {
                    taken(work)
                }
            })
        });
        let got = ends
            .into_iter()
            .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")))
            .collect::<Vec<_>>();
        assert_eq!(got, expected, "case {at}");
        assert_eq!(
            job.placed(0),
            if lands == InPlace::Never { 0 } else { bytes },
            "case {at}"
        );
    }
}

#[test]
fn what_comes_to_a_rank_that_waits_lands_in_its_result() {
    lands(
        |backend, _| backend.activity(0).starts_with("waiting in all_"),
        taken,
    );
}

#[test]
fn what_comes_to_a_rank_that_has_called_lands_in_what_will_be_its_result() {
    fn take(work: Work<Vec<DispatchTensor>>) -> Result<TensorData> {
        while !work.is_complete() {
            thread::yield_now();
        }
        taken(work)
    }
    lands(|_, called| called, take);
}

/// The headers arrive before rank 0 calls, and the payloads after.
#[test]
fn what_comes_before_its_rank_has_called_lands_where_the_signature_says() {
    for (at, (call, bytes, lands)) in CASES.into_iter().enumerate() {
        let program = |world: &World| taken(call(&world.all()));
        let expected =
            launch(Launch::threads(2), program).unwrap_or_else(|error| panic!("{error}"));
        let job = LoopbackJob::new(2, 50);
        let ends = job.run(|process, processes| {
            launch(Launch::on_backend(processes.backend(1)), |world| {
                world.barrier("both ranks have started")?;
                if process == 1 {
                    job.hold(0, true);
                    let work = call(&world.all());
                    let sent = work.is_complete();
                    // Headers of one sender arrive in order.
                    world
                        .all()
                        .duplicate("control")
                        .barrier("the header has arrived".into())
                        .wait()?;
                    assert!(!sent, "case {at}: rank 0 has not called");
                    return taken(work);
                }
                world
                    .all()
                    .duplicate("control")
                    .barrier("the header has arrived".into())
                    .wait()?;
                let work = call(&world.all());
                job.hold(0, false);
                taken(work)
            })
        });
        let got = ends
            .into_iter()
            .flat_map(|end| end.unwrap_or_else(|error| panic!("{error}")))
            .collect::<Vec<_>>();
        assert_eq!(got, expected, "case {at}");
        assert_eq!(
            job.placed(0),
            if lands == InPlace::Always { bytes } else { 0 },
            "case {at}"
        );
    }
}

#[cfg(all(target_os = "linux", not(sanitized)))]
#[test]
fn results_take_each_others_memory_whichever_is_first() {
    let (job, called) = (LoopbackJob::new(2, 50), AtomicBool::new(false));
    let ends = job.run(|_, processes| {
        launch(Launch::on_backend(processes.backend(1)), |world| {
            let comm = world.all();
            let gather = || comm.all_gather("rows".into(), vec![shard(&comm, 0, [1600, 900])]);
            let address = |work: Work<Vec<DispatchTensor>>| -> Result<usize> {
                match work.wait()?.remove(0).kind {
                    DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => {
                        Ok(tensor.bytes().as_ptr().addr())
                    }
                    other => panic!("not on the CPU: {other:?}"),
                }
            };
            let until = |there: &dyn Fn() -> bool| {
                while !there() {
                    thread::yield_now();
                }
            };
            let is_first = world.rank() == 0;
            // Rank 0 first calls before any data has arrived, and then when all data has arrived.
            if !is_first {
                until(&|| called.load(Ordering::SeqCst));
            }
            let work = gather();
            called.store(true, Ordering::SeqCst);
            let before = address(work)?;
            world.barrier("both have the result")?;
            if is_first {
                until(&|| job.placed(0) == 2 * 900 * 200);
            }
            let after = address(gather())?;
            Ok([before, after])
        })
    });
    for end in ends {
        for (rank, [before, after]) in end.unwrap_or_else(|error| panic!("{error}")) {
            assert_eq!(before, after, "rank {rank}");
        }
    }
}
