//! The collectives as a program makes them, with one rank in each process.

use std::time::Instant;

use anyhow::Result;
use burn::tensor::{DType, Tensor, TensorData};
use burn_dtensor::comm::{Launch, ReduceOp, World, launch};

use super::{Collective, Sample, Way, rounds};
use crate::steps::{Step, all_reduce, gather, rows_to_all, scatter};
use crate::{SIZES, repeats};

/// Prints the samples of the collectives whose name has `only` in it.
pub fn measure(count: usize, only: &str) -> Result<()> {
    launch(Launch::from_env(count)?, |world| {
        for collective in Collective::named(only) {
            for bytes in SIZES {
                measure_one(collective, bytes, world)?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

fn step(collective: Collective, bytes: usize, world: &World) -> Step {
    match collective {
        Collective::AllGather => gather(bytes, 0, DType::F32, world),
        Collective::AllToAll => rows_to_all(bytes * world.size(), DType::F32, world),
        Collective::AllReduce => all_reduce(bytes, DType::F32, world),
        Collective::ReduceScatter => scatter(bytes, 0, DType::F32, world),
    }
}

fn measure_one(collective: Collective, bytes: usize, world: &World) -> burn_dtensor::Result<()> {
    let (mut step, repeats) = (step(collective, bytes, world), repeats(bytes));
    let (mut ours, mut moving) = (Vec::new(), Vec::new());
    (0..repeats.max(2)).for_each(|_| step());
    for _ in 0..rounds(bytes, repeats) {
        world.barrier("start")?;
        let before = world.ledger().spent().local_work;
        let start = Instant::now();
        (0..repeats).for_each(|_| step());
        ours.push(start.elapsed().as_secs_f64() / repeats as f64);
        moving.push((world.ledger().spent().local_work - before).as_secs_f64() / repeats as f64);
    }
    for (way, seconds) in [(Way::Ours, ours), (Way::Moving, moving)] {
        let seconds = of_slowest(&seconds, world)?;
        if world.rank() == 0 {
            Sample {
                collective,
                bytes,
                way,
                seconds,
            }
            .print();
        }
    }
    Ok(())
}

/// The greatest of each over the ranks.
pub fn of_slowest(seconds: &[f64], world: &World) -> burn_dtensor::Result<Vec<f64>> {
    let data = TensorData::new(seconds.to_vec(), [seconds.len()]);
    let tensor = Tensor::<1>::from_data(data, (world.device(), DType::F64)).into_dispatch();
    let slowest = world
        .all()
        .all_reduce("slowest".into(), vec![tensor], ReduceOp::Max)
        .wait()?
        .remove(0);
    Ok(Tensor::<1>::from_dispatch(slowest)
        .into_data()
        .try_into_vec()
        .expect("times are f64"))
}
