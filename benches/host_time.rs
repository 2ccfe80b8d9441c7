//! Host time of a unit: forward and backward of units whose compute is next to nothing, in
//! microseconds.
//!
//! ```text
//! cargo bench --bench host_time
//! cargo bench --bench host_time -- --peer python3    # next to PyTorch's FSDP2: `pip install torch`
//! ```
//!
//! A unit multiplies `[4, 8]` by `[8, 8]` once for each of its parameters. Ranks are threads. A
//! round is some steps, its figure their median; sharded and unsharded rounds alternate. Printed
//! are the median and the range of the rounds, for a unit of rank 0. With more ranks than cores,
//! ranks also wait for each other's compute.
//!
//! `redistribute` is what a unit's all-gather would cost if FSDP were a redistribution `Shard(0)`
//! to `Replicate` of one [`DTensor`] after the other, and `planned` the one collective that a unit
//! posts, both without anything else.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use burn::module::Param;
use burn::prelude::*;
use burn::tensor::DType;
use burn_dtensor::comm::{Call, TensorMeta};
use burn_dtensor::placement::ShardSizes;
use burn_dtensor::prelude::*;
use clap::Parser;
use itertools::Itertools;
use serde::Deserialize;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(about = "Host time of a unit, in microseconds")]
struct Cli {
    /// Numbers of ranks, which are threads
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
    ranks: Vec<usize>,
    /// Numbers of parameters in a unit
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10])]
    params: Vec<usize>,
    /// Units of the model
    #[arg(long, default_value_t = 50)]
    units: usize,
    /// Steps in a round
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Rounds of each kind, after one that warms up
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Python with PyTorch, for FSDP2 on the same model
    #[arg(long)]
    peer: Option<PathBuf>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Module, Debug)]
struct Block {
    weights: Vec<Param<Tensor<2>>>,
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Block>,
}

impl Net {
    fn new(cli: &Cli, params: usize, device: &Device) -> Self {
        let weight = |_| Param::from_tensor(Tensor::full([8, 8], 0.125, device));
        let block = |_| Block {
            weights: (0..params).map(weight).collect(),
        };
        Self {
            blocks: (0..cli.units).map(block).collect(),
        }
    }

    /// Takes and returns `[4, 8]`. On a model that is not sharded, `unit` only calls the closure.
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let multiply = |block: &Block, x| {
            block
                .weights
                .iter()
                .fold(x, |x: Tensor<2>, weight| x.matmul(weight.val()))
        };
        unit(self, x, |net, x| {
            net.blocks
                .iter()
                .fold(x, |x, block| unit(block, x, multiply))
        })
    }
}

/// Microseconds a unit, one figure a round.
type Rounds = Vec<f64>;

/// The rounds of one number of ranks and of parameters.
#[derive(Default)]
struct Times {
    sharded: [Rounds; 2],
    unsharded: [Rounds; 2],
    redistribute: Rounds,
    planned: Rounds,
}

fn measure(cli: &Cli, world: &World, params: usize) -> Result<Times> {
    let device = world.device().clone().autodiff();
    let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
    let unsharded = Net::new(cli, params, &device);
    let sharded = fully_shard(
        unsharded.clone(),
        &mesh,
        FullyShard::new().with_units(["blocks.*"]),
    )?;
    let x = || Tensor::<2>::ones([4, 8], &device);
    let step = |net: &Net| {
        let (x, start) = (x(), Instant::now());
        let y = net.forward(x);
        let forward = start.elapsed();
        let start = Instant::now();
        drop(y.sum().backward());
        [forward, start.elapsed()]
    };
    let steps = |net: &Net| -> Result<[f64; 2]> {
        world.barrier("round")?;
        let steps: Vec<_> = (0..cli.steps).map(|_| step(net)).collect();
        Ok([0, 1].map(|way| cli.of_unit(steps.iter().map(|step| step[way]).collect())))
    };
    let weight = || Tensor::<2>::ones([8, 8], world.device());
    let shards: Vec<_> = (0..params)
        .map(|_| DTensor::distribute_replicated(weight(), &mesh, &[Placement::Shard(0)]))
        .collect::<Result<_>>()?;
    let redistribute = || -> Result<()> {
        shards.iter().try_for_each(|shard| {
            shard
                .clone()
                .redistribute(&[Placement::Replicate])
                .map(drop)
        })
    };
    let (comm, meta) = (
        world.all(),
        TensorMeta {
            shape: [8, 8].into(),
            dtype: DType::F32,
        },
    );
    let described = (0..params)
        .map(|_| (meta.clone(), 0, ShardSizes::Chunked(8)))
        .collect();
    let plan = comm.plan_all_gather(described)?;
    let planned = || -> Result<()> {
        let local = shards
            .iter()
            .map(|shard| shard.local().clone().into_dispatch())
            .collect();
        Ok(comm
            .execute_plan(Call::new("planned"), &plan, local)
            .wait()
            .map(drop)?)
    };
    let units = |call: &dyn Fn() -> Result<()>| -> Result<f64> {
        world.barrier("round")?;
        let pass = || {
            let start = Instant::now();
            (0..cli.units).try_for_each(|_| call())?;
            Ok(start.elapsed())
        };
        Ok(cli.of_unit((0..cli.steps).map(|_| pass()).collect::<Result<_>>()?))
    };
    let mut times = Times::default();
    for round in 0..=cli.rounds {
        let (plain, own) = (steps(&unsharded)?, steps(&sharded)?);
        let (one_by_one, together) = match world.size() {
            1 => (0.0, 0.0),
            _ => (units(&redistribute)?, units(&planned)?),
        };
        if round > 0 {
            times
                .unsharded
                .iter_mut()
                .zip(plain)
                .for_each(|(rounds, time)| rounds.push(time));
            times
                .sharded
                .iter_mut()
                .zip(own)
                .for_each(|(rounds, time)| rounds.push(time));
            times.redistribute.push(one_by_one);
            times.planned.push(together);
        }
    }
    Ok(times)
}

impl Cli {
    /// Returns the median of passes through all units, in microseconds a unit.
    fn of_unit(&self, passes: Vec<Duration>) -> f64 {
        median(
            passes
                .into_iter()
                .map(|time| time.as_secs_f64() * 1e6 / self.units as f64)
                .collect(),
        )
    }

    /// Runs FSDP2 on the same model.
    fn run_peer(&self, python: &PathBuf, ranks: usize, params: usize) -> Peer {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/host_time_fsdp2.py");
        let numbers = [
            ("ranks", ranks),
            ("params", params),
            ("units", self.units),
            ("steps", self.steps),
            ("rounds", self.rounds),
        ];
        let mut command = Command::new(python);
        command.arg(script).args(
            numbers
                .iter()
                .flat_map(|(name, number)| [format!("--{name}"), number.to_string()]),
        );
        let output = command
            .output()
            .unwrap_or_else(|error| panic!("{}: {error}", python.display()));
        assert!(
            output.status.success(),
            "{script}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).expect("the peer prints one line of JSON")
    }
}

/// Output of the peer: forward and backward of each round, in microseconds a unit.
#[derive(Deserialize)]
struct Peer {
    torch: String,
    sharded: Vec<[f64; 2]>,
    unsharded: Vec<[f64; 2]>,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Describes the median and the range of rounds.
fn shown(rounds: &Rounds) -> String {
    let (low, high) = rounds
        .iter()
        .copied()
        .minmax()
        .into_option()
        .expect("at least one round");
    format!("{:.1} ({low:.1}..{high:.1})", median(rounds.clone()))
}

fn main() {
    let cli = Cli::parse();
    println!(
        "microseconds a unit: median of {} rounds of {} steps, and their range",
        cli.rounds, cli.steps
    );
    for (&ranks, &params) in cli.ranks.iter().cartesian_product(&cli.params) {
        let times = launch(Launch::threads(ranks), |world| measure(&cli, world, params));
        let times = times.unwrap_or_else(|error| panic!("{error}")).remove(0).1;
        println!("{ranks} ranks, {params} parameters a unit");
        let row = |name: &str, [forward, backward]: &[Rounds; 2]| {
            println!(
                "  {name:<24} forward {:<24} backward {}",
                shown(forward),
                shown(backward)
            );
        };
        row("sharded", &times.sharded);
        row("unsharded", &times.unsharded);
        if ranks > 1 {
            println!(
                "  all-gather               planned {:<24} redistribute {}",
                shown(&times.planned),
                shown(&times.redistribute)
            );
        }
        if let Some(python) = &cli.peer {
            let Peer {
                torch,
                sharded,
                unsharded,
            } = cli.run_peer(python, ranks, params);
            let ways = |rounds: &[[f64; 2]]| {
                [0, 1].map(|way| rounds.iter().map(|round| round[way]).collect())
            };
            row(&format!("FSDP2 {torch}"), &ways(&sharded));
            row("PyTorch, unsharded", &ways(&unsharded));
        }
    }
}
