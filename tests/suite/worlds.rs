//! Whose tensor it is: several launches, several ranks and several threads at once.
//!
//! The deadline is far longer than the suite's time limit for one test, so only prompt errors pass.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use burn::tensor::Tensor;
use burn_dtensor::comm::{CommError, Launch, World, launch};
use burn_dtensor::dtensor::{DTensor, DTensorError};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement::{Replicate, Shard};
use burn_dtensor::{Error, Result};

use crate::launched;

const FAR: Duration = Duration::from_secs(3600);

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Launches two ranks on a mesh of their own.
fn pair<T: Send>(program: impl Fn(&World, &DeviceMesh) -> Result<T> + Sync) -> Vec<T> {
    let program = |world: &World| program(world, &DeviceMesh::new(world, [2], ["x"])?);
    launch(Launch::threads(2).with_deadline(FAR), program)
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_launch_inside_a_rank_that_uses_both_meshes_keeps_them_apart() {
    let seen = pair(|outer, outer_mesh| {
        let inner = pair(|inner, mesh| {
            // Local: a tensor of the outer mesh, of the same layout and shape.
            let _ = DTensor::<1>::zeros([4], outer_mesh, &[Shard(0)], inner.device())?;
            let value = 10.0 * outer.rank() as f32 + inner.rank() as f32;
            let mine = DTensor::<1>::full([4], value, mesh, &[Shard(0)], inner.device())?;
            Ok(values(mine.full_tensor()?))
        });
        Ok(inner)
    });
    for (outer, inner) in seen.into_iter().enumerate() {
        let ten = 10.0 * outer as f32;
        assert_eq!(
            inner,
            [[ten, ten, ten + 1.0, ten + 1.0]; 2],
            "outer rank {outer}"
        );
    }
}

#[test]
fn one_thread_may_hold_the_tensors_of_two_ranks() {
    let parts = pair(|world, mesh| DTensor::<2>::ones([4, 4], mesh, &[Shard(0)], world.device()));
    // The upper triangle of a matrix of ones, cut after two rows.
    let rows = [
        [1., 1., 1., 1., 0., 1., 1., 1.],
        [0., 0., 1., 1., 0., 0., 0., 1.],
    ];
    for (part, expected) in parts.into_iter().zip(rows) {
        assert_eq!(values(part.clone().triu(0).to_local()), expected);
        assert_eq!(values((part * 1.0).triu(0).to_local()), expected);
    }
}

/// The error that `operation` unwinds with.
fn unwound<T>(operation: impl FnOnce() -> T) -> String {
    let payload = catch_unwind(AssertUnwindSafe(operation))
        .err()
        .expect("it fails");
    match payload.downcast::<Error>() {
        Ok(error) => error.to_string(),
        Err(payload) => *payload.downcast::<String>().expect("a message"),
    }
}

#[test]
fn tensors_of_two_ranks_do_not_mix() {
    let mut parts = pair(|world, mesh| DTensor::<1>::ones([4], mesh, &[Shard(0)], world.device()));
    let other = parts.pop().unwrap();
    let mine = parts.pop().unwrap();
    let error = mine.spec().check_same_mesh(other.spec()).unwrap_err();
    assert!(
        matches!(&error, DTensorError::RankMismatch { .. }),
        "{error:?}"
    );
    let told = unwound(|| mine + other);
    assert_eq!(told, error.to_string());
    let launch = told
        .split("rank 0 of launch ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .expect(&told);
    assert!(
        told.contains(&format!(
            "rank 0 of launch {launch} and of rank 1 of launch {launch}"
        )),
        "{told}"
    );
    assert!(
        told.contains("`full_tensor`") && told.contains("`distribute_replicated`"),
        "{told}"
    );
}

#[test]
fn tensors_of_two_launches_do_not_mix() {
    let tensor = || {
        pair(|world, mesh| DTensor::<1>::ones([4], mesh, &[Replicate], world.device())).remove(0)
    };
    let (first, second) = (tensor(), tensor());
    let error = first.spec().check_same_mesh(second.spec()).unwrap_err();
    assert!(
        matches!(error, DTensorError::RankMismatch { .. }),
        "{error:?}"
    );
    assert_ne!(first.mesh(), second.mesh());
    assert_eq!(unwound(|| first + second), error.to_string());
}

#[test]
fn meshes_of_one_array_mix_whatever_they_were_sliced_from() {
    pair(|world, alone| {
        let full = DeviceMesh::new(world, [1, 2], ["y", "x"])?;
        let slice = full.slice("x")?;
        let ones = |mesh| DTensor::<1>::ones([4], mesh, &[Shard(0)], world.device());
        // In this order `alone` is the first mesh of this spec that the thread sees.
        let (first, second) = (ones(alone)?, ones(&slice)?);
        assert_eq!((first.mesh().root(), second.mesh().root()), (alone, &full));
        assert_eq!(values((first + second).full_tensor()?), [2.0; 4]);
        Ok(())
    });
}

/// Rank 1 gets rank 0's tensor and does `wrong` with it and its own.
fn smuggled(wrong: impl Fn(DTensor<1>, DTensor<1>) -> Result<DTensor<1>> + Sync) -> Error {
    let (send, receive) = mpsc::channel::<DTensor<1>>();
    let receive = Mutex::new(receive);
    let error = launch(
        Launch::threads(2).with_deadline(FAR),
        |world| -> Result<Vec<f32>> {
            let mesh = DeviceMesh::new(world, [2], ["x"])?;
            let mut mine = DTensor::<1>::ones([4], &mesh, &[Shard(0)], world.device())?;
            match world.rank() {
                0 => send.send(mine.clone()).unwrap(),
                _ => mine = wrong(mine, receive.lock().unwrap().recv().unwrap())?,
            }
            Ok(values(mine.full_tensor()?))
        },
    )
    .unwrap_err();
    assert_eq!(error.rank, 1, "{error}");
    error.cause
}

#[test]
fn a_rank_that_communicates_with_anothers_tensor_is_told_whose_it_is() {
    let error = smuggled(|_, theirs| Ok(theirs));
    let Error::Comm(CommError::ForeignRankObject {
        rank: 1, owner: 0, ..
    }) = &error
    else {
        panic!("{error}")
    };
    assert!(error.to_string().contains("belongs to rank 0"), "{error}");
}

#[test]
fn a_rank_that_mixes_anothers_tensor_with_its_own_is_told() {
    let error = smuggled(|mine, theirs| Ok(mine + theirs));
    assert!(
        matches!(error, Error::DTensor(DTensorError::RankMismatch { .. })),
        "{error}"
    );
}

#[test]
fn a_rank_that_waits_for_anothers_work_is_told() {
    let (send, receive) = mpsc::channel();
    let receive = Mutex::new(receive);
    let error = launch(
        Launch::threads(2).with_deadline(FAR),
        |world| -> Result<()> {
            let work = world.all().barrier("meet".into());
            if world.rank() == 0 {
                send.send(work).unwrap();
                return Ok(());
            }
            Ok(receive.lock().unwrap().recv().unwrap().wait()?)
        },
    )
    .unwrap_err();
    assert!(
        matches!(
            error.cause,
            Error::Comm(CommError::ForeignRankObject {
                rank: 1,
                owner: 0,
                ..
            })
        ),
        "{error}"
    );
}

#[test]
fn ranks_of_an_inner_launch_may_speak_for_the_rank_that_launched_them_and_no_other() {
    let worlds: Vec<Mutex<Option<World>>> = (0..2).map(|_| Mutex::default()).collect();
    let meet = |of: usize, from: &World| {
        worlds[of]
            .lock()
            .unwrap()
            .clone()
            .unwrap_or_else(|| from.clone())
    };
    pair(|outer, _| {
        *worlds[outer.rank()].lock().unwrap() = Some(outer.clone());
        outer.barrier("both are there")?;
        launch(Launch::threads(1), |_| {
            meet(outer.rank(), outer).barrier("inner")
        })
        .map_err(Error::from)?;
        Ok(())
    });
    let error = launch(
        Launch::threads(2).with_deadline(FAR),
        |outer| -> Result<()> {
            *worlds[outer.rank()].lock().unwrap() = Some(outer.clone());
            outer.barrier("both are there")?;
            Ok(launch(Launch::threads(1), |_| meet(0, outer).barrier("inner")).map(drop)?)
        },
    )
    .unwrap_err();
    assert!(error.to_string().contains("belongs to rank 0"), "{error}");
}

#[test]
fn a_thread_that_a_rank_started_speaks_for_it() {
    let sums = pair(|world, mesh| {
        let mine = DTensor::<1>::full([4], world.rank() as f32, mesh, &[Shard(0)], world.device())?;
        thread::scope(|scope| {
            scope
                .spawn(|| Ok(values(mine.full_tensor()?)))
                .join()
                .unwrap()
        })
    });
    assert_eq!(sums, [[0.0, 0.0, 1.0, 1.0]; 2]);
}

#[test]
fn ranks_that_wait_on_several_threads_do_so_when_that_was_declared() {
    // Each group is used by a thread of its own on both ranks. Each thread comes late on one of the
    // ranks: when the other thread has called, there or here.
    let called = |world: &World, label: &str| {
        world
            .ledger()
            .recent()
            .iter()
            .any(|entry| *entry.label == *label)
    };
    for _ in 0..50 {
        let worlds = Mutex::new(Vec::new());
        launch(
            Launch::threads(2)
                .with_multithreaded_ranks()
                .with_deadline(FAR),
            |world| -> Result<()> {
                worlds.lock().unwrap().push(world.clone());
                let after = |label: &str| {
                    while !worlds
                        .lock()
                        .unwrap()
                        .iter()
                        .any(|world| called(world, label))
                    {}
                };
                let (data, log) = (world.group(&[0, 1])?, world.group(&[1, 0])?);
                thread::scope(|scope| {
                    let other = scope.spawn(|| {
                        if world.rank() == 0 {
                            after("data");
                        }
                        log.barrier("log".into()).wait()
                    });
                    if world.rank() == 1 {
                        after("log");
                    }
                    data.barrier("data".into()).wait()?;
                    Ok(other.join().unwrap()?)
                })
            },
        )
        .unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn multithreaded_ranks_that_wait_for_each_other_run_into_the_deadline() {
    let config = Launch::threads(2)
        .with_multithreaded_ranks()
        .with_deadline(Duration::from_millis(50));
    let error = launch(config, |world| {
        let ranks = if world.rank() == 0 { [0, 1] } else { [1, 0] };
        Ok(world.group(&ranks)?.barrier("mine first".into()).wait()?)
    });
    let cause = error.unwrap_err().cause;
    assert!(
        matches!(cause, Error::Comm(CommError::DeadlineExceeded { .. })),
        "{cause}"
    );
}

#[test]
fn groups_without_end_are_refused() {
    launch(Launch::threads(8), |world| -> Result<()> {
        // Every order of all ranks: 40,320.
        let orders = (0..40_320).map(|mut nth| {
            let mut rest: Vec<usize> = (0..8).collect();
            let mut next = |left: usize| {
                let rank = rest.remove(nth % left);
                nth /= left;
                rank
            };
            (1..=8).rev().map(&mut next).collect::<Vec<_>>()
        });
        let refused = orders
            .map(|ranks| world.group(&ranks))
            .position(|group| group.is_err());
        assert_eq!(refused, Some(4096));
        let error = world.group(&[7, 0, 1]).map(drop).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("Create each mesh once and keep it"),
            "{error}"
        );
        assert!(
            world.group(&[0, 1, 2, 3, 4, 5, 6, 7]).is_ok(),
            "those there are stay"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rank_that_calls_while_it_waits_is_told_how_to_declare_it() {
    let told = AtomicBool::new(false);
    let error = launch(
        Launch::threads(2).with_deadline(FAR),
        |world| -> Result<()> {
            if world.rank() == 1 {
                while !told.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                return Ok(());
            }
            let (data, log) = (world.group(&[0, 1])?, world.group(&[1, 0])?);
            thread::scope(|scope| {
                // Calls again and again, until the program's own thread waits.
                let other = scope.spawn(|| {
                    let failed = loop {
                        let work = log.barrier("log".into());
                        if work.is_complete() {
                            break work;
                        }
                    };
                    told.store(true, Ordering::Release);
                    failed.wait()
                });
                let error = data.barrier("data".into()).wait().unwrap_err();
                assert_eq!(other.join().unwrap().unwrap_err(), error);
                Err(error.into())
            })
        },
    )
    .unwrap_err();
    let Error::Comm(CommError::ConcurrentCalls {
        rank: 0, during, ..
    }) = &error.cause
    else {
        panic!("{error}")
    };
    assert_eq!(&*during.label, "data");
    assert!(
        error
            .cause
            .to_string()
            .contains("`Launch::with_multithreaded_ranks`"),
        "{error}"
    );
}

#[test]
fn one_thread_of_a_rank_after_another_needs_no_declaration() {
    pair(|world, _| {
        for round in 0..20 {
            let label = format!("round {round}");
            thread::scope(|scope| {
                scope
                    .spawn(|| world.barrier(label.as_str()))
                    .join()
                    .unwrap()
            })?;
            world.barrier("program")?;
        }
        Ok(())
    });
}
