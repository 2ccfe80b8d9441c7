//! What worlds leave that fail: thousands of them, made anew in one process.
//!
//! Not among them are failures in backward, whose graphs burn keeps: README, Limits.

use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::{ShardedTensor, TensorMeta, Work};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::prelude::*;

use crate::live::{alone, live};

const RANKS: usize = 3;

/// What one rank does, while deposits and messages of the others are under way.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Panics,
    Fails,
    Returns,
    OtherShape,
    OtherLabel,
    /// The others wait for it, and it for one of them.
    Waits,
    /// Between two units of a sharded model.
    InForward,
}

const FAULTS: [Fault; 7] = [
    Fault::Panics,
    Fault::Fails,
    Fault::Returns,
    Fault::OtherShape,
    Fault::OtherLabel,
    Fault::Waits,
    Fault::InForward,
];

/// Elements of a deposit: 100 KB.
const LEN: usize = 25_600;

/// Of a layer, whose weight is as large.
const WIDTH: usize = 160;

fn ones(world: &World, len: usize) -> DispatchTensor {
    Tensor::<1>::ones([len], world.device()).into_dispatch()
}

fn sum(world: &World, label: &str, len: usize) -> Result<()> {
    Ok(world
        .all()
        .all_reduce(label.into(), vec![ones(world, len)], ReduceOp::Sum)
        .wait()
        .map(drop)?)
}

/// Calls that are under way while the world fails: the rank at fault makes none of them.
fn under_way(world: &World) -> [Work<()>; 4] {
    let comm = world.all().duplicate("under way");
    let sizes = || ShardSizes::Chunked(RANKS * LEN);
    let sharded = |len| {
        vec![ShardedTensor {
            tensor: ones(world, len),
            dim: 0,
            sizes: sizes(),
        }]
    };
    let next = (world.rank() + 1) % RANKS;
    let meta = TensorMeta {
        shape: [LEN].into(),
        dtype: DType::F32,
    };
    [
        comm.all_gather("gather".into(), sharded(LEN)).then(drop),
        comm.reduce_scatter("scatter".into(), sharded(RANKS * LEN), ReduceOp::Sum)
            .then(drop),
        comm.send("message".into(), vec![ones(world, LEN)], next, 1),
        // Which nobody sends.
        comm.receive("answer".into(), Some(vec![meta]), next, 2)
            .then(drop),
    ]
}

fn forward(world: &World, layers: &[Linear; 2], is_culprit: bool) -> Result<()> {
    let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
    let layers = fully_shard(layers.to_vec(), &mesh, FullyShard::new().with_units(["*"]))?;
    let x = Tensor::<2>::ones([2, WIDTH], world.device());
    Error::catch(|| {
        let x = unit(&layers[0], x, |layer, x| layer.forward(x));
        if is_culprit {
            return Err(Error::other("no such file"));
        }
        drop(unit(&layers[1], x, |layer, x| layer.forward(x)));
        Ok(())
    })
}

/// The program of a world that fails.
fn program(world: &World, layers: &[Linear; 2], fault: Fault, culprit: usize) -> Result<()> {
    let is_culprit = world.rank() == culprit;
    match fault {
        Fault::InForward => forward(world, layers, is_culprit),
        _ if !is_culprit => {
            let works = under_way(world);
            let failed = sum(world, "sum", LEN);
            drop(works);
            failed
        }
        Fault::Panics => resume_unwind(Box::new("boom")),
        Fault::Fails => Err(Error::other("no such file")),
        Fault::Returns => Ok(()),
        Fault::OtherShape => sum(world, "sum", LEN + 1),
        Fault::OtherLabel => sum(world, "other", LEN),
        Fault::Waits => Ok(world
            .all()
            .receive("answer".into(), None, (culprit + 1) % RANKS, 3)
            .wait()
            .map(drop)?),
    }
}

/// A world that fails. Of every second one the other ranks go on in another.
fn fail(nth: usize, layers: &[Linear; 2]) {
    let (fault, culprit, goes_on) = (
        FAULTS[nth % FAULTS.len()],
        nth % RANKS,
        nth.is_multiple_of(2),
    );
    let ends = launch(
        Launch::threads(RANKS).with_deadline(Duration::from_secs(60)),
        |world| {
            let ended = program(world, layers, fault, culprit);
            if world.rank() == culprit {
                return ended;
            }
            let error = ended.expect_err("a rank is at fault");
            if goes_on {
                sum(&world.shrink()?, "those that are left", LEN)
            } else {
                Err(error)
            }
        },
    );
    assert_eq!(
        ends.is_ok(),
        goes_on,
        "{fault:?} of rank {culprit}: {ends:?}"
    );
}

/// Bytes that are live once the threads of earlier worlds have ended.
fn settled() -> usize {
    let look = |_| {
        thread::sleep(Duration::from_millis(1));
        live()
    };
    (0..100).map(look).min().expect("looks")
}

#[test]
fn thousands_of_worlds_that_fail_leave_nothing() {
    let thousands = if crate::is_long() { 5 } else { 2 };
    let _alone = alone();
    let device = Device::flex();
    let layers = [0, 1].map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device));
    // Draw now, on one thread.
    layers
        .iter()
        .for_each(|layer| drop(layer.forward(Tensor::<2>::ones([1, WIDTH], &device))));
    let mut after = Vec::new();
    for thousand in 0..thousands {
        let start = Instant::now();
        (1000 * thousand..1000 * (thousand + 1)).for_each(|nth| fail(nth, &layers));
        let took = start.elapsed() / 1000;
        after.push(settled());
        println!(
            "thousand {thousand}: {took:?} a world, {} bytes are live",
            after[thousand]
        );
    }
    let left = after[thousands - 1].saturating_sub(after[0]);
    // Of each thousand, whose every world had more than a megabyte under way.
    assert!(
        left < (thousands - 1) * 25 * 1024,
        "{left} bytes: {after:?}"
    );
}
