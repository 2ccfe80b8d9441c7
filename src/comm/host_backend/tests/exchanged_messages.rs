//! Messages whose tensors the sender and the receiver exchange by NCCL, on simulated GPUs.

use std::time::Duration;

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::super::ProcessJob;
use super::exchanged::{
    assert_clean, count, data_plane_error, deferred, on_all, on_processes, process, sum, threads,
};
use crate::comm::data::nccl::fake::{FakeGpus, NcclCall, NcclVersion, OrderingStep};
use crate::comm::{CommError, SimulatedGpus, Work, World, launch};
use crate::testing::LoopbackJob;
use crate::{Error, Result};

/// Sends two tensors of `value`, one of them without elements.
fn send(world: &World, value: usize, to: usize, tag: u32) -> Work<()> {
    let tensor = |len| Tensor::<1>::full([len], value as f32, world.device()).into_dispatch();
    let tensors = vec![tensor(1 + value), tensor(0)];
    world.all().send("message".into(), tensors, to, tag)
}

/// Receives what [`send`] sends, and returns the sender and the value.
fn receive(world: &World, from: Option<usize>, tag: u32) -> Result<(usize, usize)> {
    let message = world.all().receive("message".into(), None, from, tag);
    let message = message.wait()?;
    let [full, empty] = message.tensors.try_into().expect("two were sent");
    let [full, empty] = [full, empty].map(|tensor| Tensor::<1>::from_dispatch(tensor).into_data());
    let values: Vec<f32> = full.iter().collect();
    assert_eq!(empty.shape()[..], [0]);
    let value = values.len() - 1;
    assert_eq!(values, vec![value as f32; values.len()]);
    Ok((message.from, value))
}

/// Returns the number of messages that each GPU has sent.
fn sent(gpus: &SimulatedGpus, ranks: usize) -> Vec<usize> {
    count(
        gpus,
        ranks,
        |call| matches!(call, NcclCall::Pairs { sent, .. } if !sent.is_empty()),
    )
}

/// Sends a message around a ring.
fn ring(world: &World, value: usize) -> Result<()> {
    let (rank, size) = (world.rank(), world.size());
    let last = (rank + size - 1) % size;
    send(world, value + rank, (rank + 1) % size, 0).wait()?;
    assert_eq!(receive(world, Some(last), 0)?, (last, value + last));
    Ok(())
}

#[test]
fn messages_are_exchanged_once_their_sender_knows_that_ranks_have_connected() {
    on_all(4, |world, gpus| {
        ring(world, 3)?;
        // No rank has connected.
        assert_eq!(sent(gpus, 4), [0; 4]);
        world.barrier("connects")?;
        for round in 1..4 {
            ring(world, 5)?;
            world.barrier("done")?;
            assert_eq!(sent(gpus, 4), [round; 4]);
            world.barrier("counted")?;
        }
        // A message to the rank itself is not, nor one without elements.
        send(world, 7, world.rank(), 1).wait()?;
        assert_eq!(receive(world, None, 1)?, (world.rank(), 7));
        let empty = Tensor::<1>::zeros([0], world.device()).into_dispatch();
        let to = (world.rank() + 1) % 4;
        world
            .all()
            .send("empty".into(), vec![empty], to, 2)
            .wait()?;
        let got = world.all().receive("empty".into(), None, None, 2).wait()?;
        assert_eq!(got.tensors.len(), 1);
        world.barrier("done")?;
        assert_eq!(sent(gpus, 4), [3; 4]);
        Ok(())
    });
}

#[test]
fn a_rank_may_receive_while_others_have_not_connected() {
    // Rank 0 has posted the call that connects when it sends. The others post it after they have
    // received.
    on_all(4, |world, _| {
        let connects = (world.rank() == 0).then(|| sum(world, 1.0));
        if world.rank() == 0 {
            (1..4).try_for_each(|to| send(world, to, to, 0).wait())?;
        } else {
            assert_eq!(receive(world, Some(0), 0)?, (0, world.rank()));
        }
        let connects = connects.unwrap_or_else(|| sum(world, 1.0));
        connects.wait()?;
        Ok(())
    });
}

#[test]
fn a_message_outlives_the_program_of_its_sender() {
    on_all(4, |world, gpus| {
        world.barrier("connects")?;
        if world.rank() > 0 {
            // Nothing waits for them, and their ranks return.
            return Ok(send(world, world.rank(), 0, 0).wait()?);
        }
        for from in [2, 3, 1] {
            assert_eq!(receive(world, Some(from), 0)?, (from, from));
        }
        assert_eq!(sent(gpus, 4), [0, 1, 1, 1]);
        Ok(())
    });
}

#[test]
fn messages_that_no_rank_needs_do_not_stop_others() {
    on_all(4, |world, gpus| {
        world.barrier("connects")?;
        let (next, last) = ((world.rank() + 1) % 4, (world.rank() + 3) % 4);
        drop(world.all().receive("message".into(), None, last, 8));
        for value in 0..2 {
            send(world, value, next, 8).wait()?;
        }
        // No rank receives it.
        send(world, 9, next, 9).wait()?;
        assert_eq!(receive(world, Some(last), 8)?, (last, 1));
        world.barrier("done")?;
        // What a receive took is exchanged, also if its rank gave it up.
        assert_eq!(sent(gpus, 4), [2; 4]);
        Ok(())
    });
}

#[test]
fn messages_and_collectives_start_in_one_order() {
    on_all(4, |world, gpus| {
        let (rank, size) = (world.rank(), world.size());
        let pair = world.group(&[rank % 2, rank % 2 + 2])?;
        world.barrier("connects")?;
        pair.barrier("connects".into()).wait()?;
        let others = || (1..size).map(|offset| (rank + offset) % size);
        for round in 0..30 {
            // Each rank sends, receives and reduces in an order of its own.
            let mut sums = Vec::new();
            for step in 0..3 {
                let to = (rank + 1 + (step + round) % 3) % size;
                send(world, step + to, to, 2 * round as u32).wait()?;
                if (step + rank + round) % 2 == 0 {
                    sums.push(sum(world, 1.0));
                    let tensor = Tensor::<1>::full([2], 1.0, world.device()).into_dispatch();
                    let tag = 2 * round as u32 + 1;
                    let to = 1 - pair.group().rank();
                    pair.send("pair".into(), vec![tensor], to, tag).wait()?;
                }
            }
            while sums.len() < 2 {
                sums.push(sum(world, 1.0));
            }
            let mut values: Vec<_> = others()
                .map(|_| receive(world, None, 2 * round as u32))
                .collect::<Result<_>>()?;
            values.sort_unstable();
            let mut senders: Vec<_> = others().collect();
            senders.sort_unstable();
            assert!(values.iter().map(|(from, _)| *from).eq(senders));
            for (from, value) in values {
                let step = (0..3).find(|step| (from + 1 + (step + round) % 3) % size == rank);
                assert_eq!(Some(value), step.map(|step| step + rank));
            }
            // As many as the other rank of the pair has sent.
            let other = (rank + 2) % size;
            for _ in (0..3).filter(|step| (step + other + round) % 2 == 0) {
                let tag = 2 * round as u32 + 1;
                pair.receive("pair".into(), None, None, tag).wait()?;
            }
            for sum in sums.into_iter().rev() {
                let sum = Tensor::<1>::from_dispatch(sum.wait()?.remove(0)).into_data();
                assert!(sum.iter::<f32>().eq([4.0; 3]));
            }
        }
        world.barrier("done")?;
        let expected: usize = (0..30)
            .map(|round| 3 + (0..3).filter(|step| (step + rank + round) % 2 == 0).count())
            .sum();
        assert_eq!(sent(gpus, 4)[rank], expected);
        Ok(())
    });
}

#[test]
fn a_failure_is_the_same_error_for_all_who_wait_for_messages() {
    for (processes, each) in [(1, 3), (3, 1), (2, 2)] {
        let ranks = processes * each;
        let last = ranks - 1;
        let gpus = SimulatedGpus::of(FakeGpus::new().with_failure(last, 3));
        let ended = Mutex::new(vec![None; ranks]);
        let program = |world: &World| -> Result<()> {
            world.barrier("connects")?;
            let next = (world.rank() + 1) % ranks;
            let error = loop {
                let sent = send(world, 1, next, 0).wait();
                // Values are not looked at: after an abort a GPU returns what it had.
                let receive = || world.all().receive("message".into(), None, None, 0).wait();
                if let Err(error) = sent.and_then(|()| receive().map(drop)) {
                    break error;
                }
            };
            ended.lock()[world.rank()] = Some(error.to_string());
            Err(error.into())
        };
        let fails = |launched: crate::comm::Launch| {
            let launched = launched.with_deadline(Duration::from_secs(20));
            launch(launched, program).unwrap_err()
        };
        let errors = match processes {
            1 => vec![fails(threads(each, &gpus, false))],
            _ => LoopbackJob::new(processes, 61)
                .run(|_, job| fails(process(job, each, &gpus, false))),
        };
        for error in errors {
            assert_eq!(
                data_plane_error(&error.cause),
                (last, "nccl", "unhandled system error")
            );
        }
        for error in ended.into_inner() {
            let error = error.expect("every rank has ended");
            assert!(error.contains("unhandled system error"), "{error}");
        }
        assert_clean(&gpus);
    }
}

#[test]
fn what_no_rank_waits_for_is_started_by_both_sides_at_the_end() {
    for processes in [1, 2, 4].repeat(10) {
        let gpus = SimulatedGpus::new();
        let program = |world: &World| -> Result<()> {
            world.barrier("connects")?;
            let (next, last) = ((world.rank() + 1) % 4, (world.rank() + 3) % 4);
            drop(sum(world, 1.0));
            drop(world.all().receive("message".into(), None, last, 0));
            send(world, 2, next, 0).wait()?;
            Ok(())
        };
        let succeeds = |launched| drop(launch(launched, program).unwrap());
        match processes {
            1 => succeeds(threads(4, &gpus, false)),
            _ => drop(
                LoopbackJob::new(processes, 62)
                    .run(|_, job| succeeds(process(job, 4 / processes, &gpus, false))),
            ),
        }
        assert_clean(&gpus);
        let received = count(
            &gpus,
            4,
            |call| matches!(call, NcclCall::Pairs { received, .. } if !received.is_empty()),
        );
        assert_eq!((sent(&gpus, 4), received), (vec![1; 4], vec![1; 4]));
        let sums = count(&gpus, 4, |call| matches!(call, NcclCall::AllReduce { .. }));
        assert_eq!(sums, [1; 4]);
        assert_eq!(count(&gpus, 4, |call| *call == NcclCall::Abort), [0; 4]);
    }
}

#[test]
fn last_calls_that_connect_or_are_deferred_start_on_all_ranks_or_on_none() {
    for processes in [1, 2, 4].repeat(10) {
        on_processes(4, processes, |world, _| {
            drop(sum(world, 1.0));
            let mut later = deferred(world)?;
            later.start();
            drop(later);
            Ok(())
        });
    }
}

#[test]
fn an_exchange_whose_introductions_are_late_starts_at_the_end() {
    let gpus = SimulatedGpus::new();
    let job = LoopbackJob::new(2, 65);
    job.hold(1, true);
    let release = || {
        // Process 0 has started its part, which needs that of process 1, and all ranks have ended.
        let is_started = || count(&gpus, 2, |call| *call == NcclCall::Connect)[0] == 1;
        let have_ended = || {
            let backend = job.processes[1].state.lock().backends().next();
            backend
                .is_none_or(|backend| backend.rendezvous.read(|table| table.running().is_empty()))
        };
        while !is_started() || !have_ended() {
            std::thread::yield_now();
        }
        job.hold(1, false);
    };
    std::thread::scope(|scope| {
        scope.spawn(release);
        job.run(|_, own| {
            let end = launch(process(own, 1, &gpus, false), |world| {
                drop(sum(world, 1.0));
                Ok(())
            });
            drop(end.unwrap());
        });
    });
    assert_clean(&gpus);
    assert_eq!(count(&gpus, 2, |call| *call == NcclCall::Abort), [0; 2]);
}

#[test]
fn survivors_exchange_messages_and_those_of_the_failed_world_are_gone() {
    let gpus = SimulatedGpus::new();
    let heard = launch(threads(4, &gpus, false), |world| {
        // The world may have failed by the time that a rank takes the result.
        let _ = world.barrier("connects");
        // Some are taken, others are not.
        for to in (0..4).filter(|to| *to != world.rank()) {
            let _ = send(world, 1, to, 0).wait();
        }
        drop(world.all().receive("message".into(), None, None, 0));
        if world.rank() == 1 {
            return Err(Error::other("this rank gives up"));
        }
        let _ = world.barrier("fails");
        let world = world.shrink()?;
        world.barrier("connects")?;
        let (rank, size) = (world.rank(), world.size());
        send(&world, 5 + rank, (rank + 1) % size, 0).wait()?;
        receive(&world, None, 0)
    });
    let heard: Vec<_> = heard.unwrap().into_iter().map(|(_, heard)| heard).collect();
    assert_eq!(heard, [(2, 7), (0, 5), (1, 6)]);
    assert_clean(&gpus);
}

#[test]
fn ranks_that_share_a_gpu_exchange_messages() {
    let gpus = FakeGpus::new().with_version(NcclVersion(2, 30, 7));
    let gpus = SimulatedGpus::of(gpus.with_shared(1, 0).with_shared(3, 2));
    launch(threads(4, &gpus, false), |world| {
        world.barrier("connects")?;
        (0..4).try_for_each(|round| ring(world, 3 * round))
    })
    .unwrap();
    assert_eq!(sent(&gpus, 4), [8, 0, 8, 0]);
    assert_clean(&gpus);
}

#[test]
fn a_forgotten_step_of_a_message_is_found() {
    for forgotten in [None].into_iter().chain(OrderingStep::ALL.map(Some)) {
        let gpus = SimulatedGpus::of(FakeGpus::new().with_forgotten(forgotten));
        launch(threads(2, &gpus, false), |world| {
            world.barrier("connects")?;
            // In one direction, since what a rank sends is also ordered with what it has read.
            (0..4).try_for_each(|_| match world.rank() {
                0 => send(world, 3, 1, 0).wait(),
                _ => {
                    let received = world.all().receive("message".into(), None, 0, 0);
                    received.wait().map(drop)
                }
            })?;
            Ok(())
        })
        .unwrap();
        let violations = gpus.gpus().broken_rules();
        assert_eq!(
            violations.is_empty(),
            forgotten.is_none(),
            "{forgotten:?}: {violations:?}"
        );
    }
}

/// Loses the process of `rank`, in which it is the only one, once its program has ended.
fn lose_ended(job: &ProcessJob, rank: usize) {
    let backend = job.state.lock().backends().next().unwrap();
    let is_running = || {
        backend
            .rendezvous
            .read(|table| table.running().contains(&rank))
    };
    while is_running() {
        std::thread::yield_now();
    }
    backend.lost(rank, "lost in this test");
}

#[test]
fn a_process_that_is_lost_before_it_has_sent_a_message_ends_who_may_receive_it() {
    // Process 0 also orders all exchanges.
    for lost in [0, 1] {
        let gpus = SimulatedGpus::new();
        let told = Mutex::new(Vec::new());
        LoopbackJob::new(2, 63).run(|index, job| {
            let end = launch(process(job, 1, &gpus, false), |world| {
                world.barrier("connects")?;
                if index == lost {
                    return Ok(send(world, 3, 1 - lost, 0).wait()?);
                }
                lose_ended(job, lost);
                let receive = world.all().receive("message".into(), None, None, 0);
                told.lock().extend(receive.wait().err());
                Ok(())
            });
            // Its rank has succeeded, or it hears of the failure of the other.
            drop(end);
        });
        let told = told.into_inner();
        assert!(
            matches!(&told[..], [CommError::Disconnected { rank, .. }] if *rank == lost),
            "{told:?}"
        );
    }
}

#[test]
fn the_loss_of_the_process_that_orders_exchanges_ends_the_others() {
    let gpus = SimulatedGpus::new();
    let told = Mutex::new(Vec::new());
    LoopbackJob::new(3, 64).run(|index, job| {
        let end = launch(process(job, 1, &gpus, false), |world| {
            world.barrier("connects")?;
            if index == 0 {
                return Ok(());
            }
            let pair = world.group(&[1, 2])?;
            // The other rank may have found the loss by then.
            let connected = pair.barrier("connects".into()).wait();
            lose_ended(job, 0);
            let after = || pair.barrier("after".into()).wait();
            told.lock().extend(connected.and_then(|()| after()).err());
            Ok(())
        });
        drop(end);
    });
    let told = told.into_inner();
    let is_loss = |error: &CommError| matches!(error, CommError::Disconnected { rank: 0, .. });
    assert!(told.len() == 2 && told.iter().all(is_loss), "{told:?}");
}
