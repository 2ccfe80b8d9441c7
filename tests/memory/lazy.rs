//! A lazy model is sharded with one parameter whole at a time, on the rank that draws it, and parts
//! on the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use burn::module::{Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::prelude::*;

use crate::live::{allocates_for, alone, apart, live, own, own_peak, restart_peak};

const LAYERS: usize = 8;
const WIDTH: usize = 512;
/// Bytes of the largest parameter: a layer's weight.
const WEIGHT: usize = WIDTH * WIDTH * 4;
const MODEL: usize = LAYERS * (WEIGHT + WIDTH * 4);
/// Bookkeeping of the model's units, its graph and its collectives.
const OTHER: usize = 256 << 10;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn lazy(device: &Device) -> Self {
        Self {
            layers: (0..LAYERS)
                .map(|_| LinearConfig::new(WIDTH, WIDTH).init(device))
                .collect(),
        }
    }
}

/// Of a rank: what it holds once `program` has run beyond what it held before, and the most that it
/// held meanwhile.
fn measured<T>(rank: usize, program: impl FnOnce() -> Result<T>) -> Result<(T, usize, usize)> {
    allocates_for(rank);
    let before = own();
    restart_peak();
    let result = program()?;
    Ok((result, own() - before, own_peak() - before))
}

/// What each rank held at most beyond its shards.
fn beyond_shards(shape: &[usize]) -> Vec<usize> {
    let _alone = alone();
    let names = &["replicate", "shard"][2 - shape.len()..];
    let beyond = launch(apart(shape.iter().product()), |world| {
        let mesh = DeviceMesh::new(world, shape, names)?;
        let device = world.device().clone().autodiff();
        let shard = |device| {
            fully_shard(
                Net::lazy(device),
                &mesh,
                FullyShard::new().with_units(["layers.*"]),
            )
        };
        // What is allocated once.
        drop(shard(&device)?);
        let (_net, held, most) = measured(world.rank(), || shard(&device))?;
        let shards = MODEL / shape[shape.len() - 1];
        assert!(
            (shards..shards + OTHER).contains(&held),
            "{held} bytes of shards of {shards}"
        );
        Ok(most - shards)
    });
    beyond
        .unwrap()
        .into_iter()
        .map(|(_, beyond)| beyond)
        .collect()
}

#[test]
fn the_first_rank_holds_one_parameter_and_the_others_parts() {
    for shape in [&[4][..], &[2, 2], &[3], &[1, 4]] {
        let beyond = beyond_shards(shape);
        println!(
            "on {shape:?}: {beyond:?} bytes beyond the shards, of parameters of {WEIGHT} bytes"
        );
        // Where there are replicas, the part that is copied for them.
        let part = if shape.len() == 2 {
            WEIGHT / shape[1]
        } else {
            0
        };
        let first = beyond[0];
        assert!(
            (WEIGHT..=WEIGHT + part + OTHER).contains(&first),
            "{first} bytes on the first rank"
        );
        for &beyond in &beyond[1..] {
            assert!(beyond <= part + OTHER, "{beyond} bytes on another rank");
        }
    }
}

/// As the first rank draws one, nobody reads the one before any more.
#[test]
fn no_other_parameter_is_unsharded_while_one_is_drawn() {
    let _alone = alone();
    for _ in 0..4 {
        let most = Arc::new(AtomicUsize::new(0));
        launch(apart(4), |world| {
            let mesh = DeviceMesh::new(world, [4], ["shard"])?;
            let device = world.device().clone().autodiff();
            world.barrier("before")?;
            let before = live();
            world.barrier("all know")?;
            let layer = |at: usize| {
                let most = most.clone();
                let draw = move |device: &Device, _| {
                    let shards = at * WEIGHT;
                    most.fetch_max((live() - before).saturating_sub(shards), SeqCst);
                    Tensor::<2>::ones([WIDTH, WIDTH], device).require_grad()
                };
                Param::uninitialized(
                    ParamId::new(),
                    draw,
                    device.clone(),
                    true,
                    [WIDTH, WIDTH].into(),
                )
            };
            let net = Lone {
                weights: (0..LAYERS).map(layer).collect(),
            };
            drop(fully_shard(net, &mesh, FullyShard::new())?);
            Ok(())
        })
        .unwrap();
        let most = most.load(SeqCst);
        assert!(
            most < WEIGHT * 3 / 4,
            "{most} bytes beyond the shards of those before"
        );
    }
}

#[derive(Module, Debug)]
struct Lone {
    weights: Vec<Param<Tensor<2>>>,
}

/// The other order: tensor-parallel ranks cut a sharded model parameter by parameter.
#[test]
fn a_sharded_model_is_parallelized_with_one_parameter_gathered() {
    let _alone = alone();
    let beyond = launch(apart(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let device = world.device().clone().autodiff();
        let plan = || Plan::new().with_style("layers.*", Style::colwise());
        let sharded = || {
            fully_shard(
                Net::lazy(&device),
                &mesh.slice("dp")?,
                FullyShard::new().with_units(["layers.*"]),
            )
        };
        drop(parallelize(sharded()?, &mesh.slice("tp")?, plan())?);
        allocates_for(world.rank());
        let net = sharded()?;
        restart_peak();
        let held = own();
        let _net = parallelize(net, &mesh.slice("tp")?, plan())?;
        Ok(own_peak() - held)
    });
    for (rank, beyond) in beyond.unwrap() {
        println!(
            "{beyond} bytes beyond the shards on rank {rank}, of parameters of {WEIGHT} bytes"
        );
        assert!(
            beyond <= 2 * WEIGHT + OTHER,
            "{beyond} bytes on rank {rank}"
        );
    }
}
