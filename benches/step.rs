//! Seconds a training step: fully sharded over 2 ranks, and data parallel, beside as many unsharded copies run at
//! once.
//!
//! ```text
//! cargo bench --bench step
//! cargo bench --bench step -- --replicate # also data parallel, by `replicate`
//! cargo bench --bench step -- --delay     # one rank sleeps somewhere in each step
//! cargo bench --features mpi --bench step -- --processes    # ranks are two processes
//! cargo bench --features cuda --bench step -- --device cuda --dim 2048    # all ranks share the first GPU
//! ```
//!
//! The model is a GPT of width 512, 8 layers, 8 heads, vocabulary 4096, untied, 29.53 M
//! parameters, f32, AdamW; sequence 256, batch 4 a rank. Two ranks, one compute thread each.
//! Sharded and unsharded steps alternate on the same two threads, so that whatever else the
//! machine does meets both alike: the ratio of their medians is the result, the seconds are the
//! machine's. On more than two cores run it under `taskset -c 0,1`.
//!
//! With `--delay` one rank, drawn anew for each step, sleeps half a block's forward before a block
//! that is drawn too, in the sharded step and in the unsharded one, whose ranks meet at its end.
//!
//! `--optimizer burn` steps sharded models with burn's operations too, `--optimizer in-backward` in
//! backward, whose seconds then contain AdamW's.
//!
//! A part of a step on a GPU ends when the GPU has done its work. The first steps of each kind
//! compile and tune kernels: `--warmup` is their number.

#[path = "../examples/train_gpt/device.rs"]
mod device;
#[path = "../examples/train_gpt/model.rs"]
#[allow(dead_code, reason = "the example uses the rest of it")]
mod model;

#[cfg(feature = "mpi")]
use std::env;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn_dtensor::comm::{Op, WaitBreakdown};
use burn_dtensor::optim::{self, ShardedOptimizer};
use burn_dtensor::prelude::*;
use burn_dtensor::replicate::{DataParallel, replicate};
#[cfg(feature = "mpi")]
use burn_dtensor::testing::mpirun;
use clap::{Parser, ValueEnum};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use device::{Nccl, RankDevice};
use model::{Gpt, GptConfig, mean_cross_entropy};

/// Sequences per rank and step.
const BATCH: usize = 4;
const LR: f64 = 1e-4;
const MODEL: GptConfig = GptConfig {
    vocab: 4096,
    seq: 256,
    dim: 512,
    layers: 8,
    heads: 8,
};

/// PyTorch 2.15 on the same work: FSDP2 on gloo over 2 processes, and two unsharded copies at
/// once, one thread each. Recorded on one quiet 2-core machine: there the ratio compares, on any
/// other only the ratio does.
const TORCH_FSDP2_S: f64 = 2.21;
const TORCH_UNSHARDED_S: f64 = 1.84;

#[derive(Parser)]
#[command(about = "Seconds a training step, fully sharded and unsharded")]
struct Cli {
    /// Timed steps of each kind in each repeat
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Untimed steps of each kind before them
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Width of the model; the recorded figures are for 512
    #[arg(long, default_value_t = MODEL.dim)]
    dim: usize,
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Device of the ranks: flex (the CPU), wgpu, cuda (the first GPU, which all ranks share), or cuda:0,1 and so on
    #[arg(long, default_value = "flex")]
    device: RankDevice,
    /// Exchange of tensors between GPUs [default: native with several GPUs, if it is built in]
    #[arg(long, value_enum)]
    nccl: Option<Nccl>,
    /// Groups of steps, whose ratios are compared
    #[arg(long, default_value_t = 5)]
    repeats: usize,
    /// One rank sleeps in each step
    #[arg(long)]
    delay: bool,
    /// Also train a model that is replicated, in steps that alternate with the others
    #[arg(long)]
    replicate: bool,
    /// Compare what ranks hold alike in every so-manieth step; 0: never
    #[arg(long, default_value_t = 10)]
    verify: u64,
    /// When gathered weights are freed between forward and backward
    #[arg(long, value_enum, default_value_t = Reshard::Auto)]
    reshard: Reshard,
    /// What steps the distributed models; burn's AdamW steps the unsharded ones
    #[arg(long, value_enum, default_value_t = Step::Sharded)]
    optimizer: Step,
    /// Start a process for each rank, under `mpirun`
    #[arg(long)]
    processes: bool,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Reshard {
    /// After forward, but for the root's
    Auto,
    /// After forward
    Always,
    /// In backward
    Never,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Step {
    /// burn's AdamW, one operation after another
    Burn,
    /// `optim::sharded`, in one pass
    Sharded,
    /// The same, in backward
    InBackward,
}

impl From<Reshard> for ReshardAfterForward {
    fn from(reshard: Reshard) -> Self {
        match reshard {
            Reshard::Auto => Self::Auto,
            Reshard::Always => Self::Always,
            Reshard::Never => Self::Never,
        }
    }
}

/// Seconds of one step, whole and by part.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct Seconds {
    step: f64,
    forward: f64,
    backward: f64,
    optimizer: f64,
    /// In collectives, waiting for other ranks.
    waiting: f64,
    /// In collectives, copying and reducing.
    moving: f64,
    /// Pages that the rank's thread had to be given.
    faults: f64,
}

/// Where one rank sleeps in one step.
#[derive(Clone, Copy)]
struct Delay {
    rank: usize,
    block: usize,
    length: Duration,
}

impl Delay {
    fn draw(rng: &mut StdRng, ranks: usize, length: Duration) -> Self {
        Self {
            rank: rng.random_range(0..ranks),
            block: rng.random_range(0..MODEL.layers),
            length,
        }
    }
}

/// Minor page faults of this thread so far; 0 where nobody tells.
fn page_faults() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
    // After the name in parentheses: state, and then the seventh is minor faults.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    fields
        .split(' ')
        .nth(7)
        .and_then(|faults| faults.parse().ok())
        .unwrap_or(0.0)
}

/// A model in training; an option because the optimizer takes it and gives it back.
struct Training {
    model: Option<Gpt>,
    optim: Optim,
}

/// What steps a model.
enum Optim {
    /// burn's AdamW, one operation after another.
    Burn(ModuleOptimizer),
    /// That of `optim::sharded`, in one pass.
    Sharded(ShardedOptimizer),
    /// The same, in backward.
    InBackward(ShardedOptimizer),
}

impl Training {
    fn new(model: Gpt, step: Step) -> Self {
        let config = AdamWConfig::new();
        let optim = match step {
            Step::Burn => Optim::Burn(config.init()),
            Step::Sharded => Optim::Sharded(optim::sharded(config)),
            Step::InBackward => Optim::InBackward(optim::sharded(config)),
        };
        Self {
            model: Some(model),
            optim,
        }
    }

    /// One step on random tokens; barriers around it make ranks start and end together.
    fn step(
        &mut self,
        world: &World,
        rng: &mut StdRng,
        delay: Option<Delay>,
        device: &Device,
    ) -> Result<Seconds> {
        let model = self
            .model
            .take()
            .expect("the last step gave the model back");
        let (tokens, targets) = (random_tokens(rng, device), random_tokens(rng, device));
        world.barrier("step begins")?;
        world.ledger().reset();
        let faults = page_faults();
        let start = Instant::now();
        let own = delay.filter(|delay| delay.rank == world.rank());
        let before = |block| {
            own.iter()
                .filter(|delay| delay.block == block)
                .for_each(|delay| sleep(delay.length))
        };
        let loss = mean_cross_entropy(model.forward_after(tokens, before), targets);
        finish(device)?;
        let forward = start.elapsed().as_secs_f64();
        let grads = |loss: Tensor<1>, model: &Gpt| {
            let grads = GradientsParams::from_grads(loss.backward(), model);
            finish(device)?;
            Ok::<_, Error>((grads, start.elapsed().as_secs_f64()))
        };
        let (model, backward) = match &mut self.optim {
            Optim::Burn(optim) => {
                let (grads, backward) = grads(loss, &model)?;
                (optim.step(LR, model, grads), backward)
            }
            Optim::Sharded(optim) => {
                let (grads, backward) = grads(loss, &model)?;
                (optim.step(LR, model, grads)?, backward)
            }
            Optim::InBackward(optim) => {
                let model = optim.backward(LR, model, loss)?;
                finish(device)?;
                (model, start.elapsed().as_secs_f64())
            }
        };
        self.model = Some(model);
        finish(device)?;
        let optimizer = start.elapsed().as_secs_f64();
        let WaitBreakdown {
            waiting,
            local_work,
        } = world.ledger().spent();
        world.barrier("step ends")?;
        Ok(Seconds {
            step: start.elapsed().as_secs_f64(),
            forward,
            backward: backward - forward,
            optimizer: optimizer - backward,
            waiting: waiting.as_secs_f64(),
            moving: local_work.as_secs_f64(),
            faults: page_faults() - faults,
        })
    }
}

/// Waits until the device has done what was asked of it.
fn finish(device: &Device) -> Result<()> {
    device.sync().map_err(Error::other)
}

fn random_tokens(rng: &mut StdRng, device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = (0..BATCH * MODEL.seq)
        .map(|_| rng.random_range(0..MODEL.vocab as i32))
        .collect();
    Tensor::from_data(TensorData::new(tokens, [BATCH, MODEL.seq]), device)
}

/// Steps of each kind on one rank, and calls and bytes a sharded step.
#[derive(Serialize, Deserialize)]
struct Measured {
    sharded: Vec<Seconds>,
    /// None without `--replicate`.
    replicated: Vec<Seconds>,
    unsharded: Vec<Seconds>,
    /// Page faults of a step of each kind after others of its kind.
    faults: [f64; 2],
    traffic: String,
}

/// What each rank has measured, in order.
fn measure(cli: &Cli, world: &World) -> Result<Vec<Measured>> {
    let device = world.device().clone().autodiff();
    let config = GptConfig {
        dim: cli.dim,
        ..MODEL
    };
    let mesh = DeviceMesh::new(world, [cli.ranks], ["shard"])?;
    let fsdp = FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(cli.reshard.into())
        .with_replica_check_every(cli.verify);
    let model = fully_shard(config.init(&device), &mesh, fsdp)?;
    let mut sharded = Training::new(model, cli.optimizer);
    let mut replicated = match cli.replicate {
        false => None,
        true => {
            let config_of_units = DataParallel::new()
                .with_units(["blocks.*"])
                .with_replica_check_every(cli.verify);
            let model = replicate(config.init(&device), &mesh, config_of_units)?;
            Some(Training::new(model, cli.optimizer))
        }
    };
    let mut unsharded = Training::new(config.init(&device), Step::Burn);
    let mut rng = StdRng::seed_from_u64(world.rank() as u64);
    // The same on all ranks.
    let mut delays = StdRng::seed_from_u64(0xde1a);
    let mut half_a_block = Duration::ZERO;
    let mut measured = Measured {
        sharded: Vec::new(),
        replicated: Vec::new(),
        unsharded: Vec::new(),
        faults: [0.0; 2],
        traffic: String::new(),
    };
    for step in 0..cli.warmup + cli.steps * cli.repeats {
        let delay = Delay::draw(&mut delays, cli.ranks, half_a_block);
        let delay = Some(delay).filter(|_| cli.delay && step >= cli.warmup);
        let one = sharded.step(world, &mut rng, delay, &device)?;
        let second = replicated
            .as_mut()
            .map(|replicated| replicated.step(world, &mut rng, delay, &device))
            .transpose()?;
        let ledger = world.ledger();
        let traffic = |op| {
            format!(
                "{} x {op}, {:.1} MB",
                ledger.calls(op),
                ledger.bytes(op) as f64 / 1e6
            )
        };
        measured.traffic = [Op::AllGather, Op::ReduceScatter, Op::AllReduce]
            .map(traffic)
            .join("; ");
        let other = unsharded.step(world, &mut rng, delay, &device)?;
        // Of the layers all but the last, which is about as much.
        half_a_block = Duration::from_secs_f64(other.forward / (MODEL.layers + 1) as f64 / 2.0);
        if step >= cli.warmup {
            measured.sharded.push(one);
            measured.replicated.extend(second);
            measured.unsharded.push(other);
        }
    }
    // One after the other: what a step gives back to the system, the next one of the other kind may
    // have to get again.
    for (training, faults) in [&mut sharded, &mut unsharded]
        .into_iter()
        .zip(&mut measured.faults)
    {
        let steps: Vec<_> = (0..4)
            .map(|_| training.step(world, &mut rng, None, &device))
            .collect::<Result<_>>()?;
        *faults = medians(&steps[1..]).faults;
    }
    world.all().all_gather_object("measured".into(), &measured)
}

/// The median of each part.
fn medians(steps: &[Seconds]) -> Seconds {
    let median = |part: fn(&Seconds) -> f64| {
        let mut values: Vec<f64> = steps.iter().map(part).collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        if values.len().is_multiple_of(2) {
            (values[middle - 1] + values[middle]) / 2.0
        } else {
            values[middle]
        }
    };
    Seconds {
        step: median(|s| s.step),
        forward: median(|s| s.forward),
        backward: median(|s| s.backward),
        optimizer: median(|s| s.optimizer),
        waiting: median(|s| s.waiting),
        moving: median(|s| s.moving),
        faults: median(|s| s.faults),
    }
}

/// Runs this again, with the same arguments but one, in two processes.
#[cfg(feature = "mpi")]
fn start_processes(ranks: usize) -> Result<()> {
    let count = ranks.to_string();
    let arguments = env::args()
        .skip(1)
        .filter(|argument| argument != "--processes");
    let status = mpirun()
        .args(["-n", &count])
        .arg(env::current_exe()?)
        .args(arguments)
        .status()?;
    status
        .success()
        .then_some(())
        .ok_or_else(|| Error::other(format!("mpirun has ended with {status}")))
}

#[cfg(not(feature = "mpi"))]
fn start_processes(_ranks: usize) -> Result<()> {
    Err(Error::other(
        "ranks in processes need MPI: cargo bench --features mpi --bench step -- --processes",
    ))
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    if cli.processes {
        return start_processes(cli.ranks);
    }
    let mut outcomes = launch(
        cli.device.launch(Launch::from_env(cli.ranks)?, cli.nccl)?,
        |world| measure(&cli, world),
    )?;
    // Of several processes that of the first rank tells.
    let Some((0, ranks)) = outcomes.first_mut() else {
        return Ok(());
    };
    let first = &ranks[0];
    let [sharded, unsharded] = [medians(&first.sharded), medians(&first.unsharded)];
    println!(
        "{:<24} {:>8} {:>8} {:>8} {:>8} {:>10}",
        "", "s/step", "forward", "backward", "AdamW", "tokens/s"
    );
    let replicated = (!first.replicated.is_empty()).then(|| {
        let name = format!("replicated, {} ranks", cli.ranks);
        (name, medians(&first.replicated))
    });
    let rows = [(format!("sharded, {} ranks", cli.ranks), sharded)]
        .into_iter()
        .chain(replicated)
        .chain([(format!("{} unsharded copies", cli.ranks), unsharded)]);
    for (
        name,
        Seconds {
            step,
            forward,
            backward,
            optimizer,
            ..
        },
    ) in rows
    {
        let tokens = (cli.ranks * BATCH * MODEL.seq) as f64 / step;
        println!(
            "{name:<24} {step:>8.4} {forward:>8.4} {backward:>8.4} {optimizer:>8.4} {tokens:>10.0}"
        );
    }
    let is_default = cli.reshard == Reshard::Auto && !cli.delay;
    let recorded =
        is_default && cli.device == RankDevice::Flex && cli.ranks == 2 && cli.dim == MODEL.dim;
    if recorded {
        println!(
            "{:<24} {TORCH_FSDP2_S:>8.3}  (recorded on one quiet 2-core machine)",
            "PyTorch FSDP2, gloo"
        );
    }
    println!("collectives a step: {}", first.traffic);
    for (rank, measured) in ranks.iter().enumerate() {
        let Seconds {
            waiting, moving, ..
        } = medians(&measured.sharded);
        let [sharded, unsharded] = measured.faults;
        println!(
            "  rank {rank}: {moving:.3} s copying and reducing, {waiting:.3} s waiting for other ranks; {sharded:.0} minor page \
             faults, unsharded {unsharded:.0}"
        );
    }
    let late = if cli.delay { ", one rank late" } else { "" };
    let torch = match recorded {
        true => format!(
            "  (PyTorch FSDP2: {:.2})",
            TORCH_FSDP2_S / TORCH_UNSHARDED_S
        ),
        false => String::new(),
    };
    for (name, steps, torch) in [
        ("sharded", &first.sharded, torch),
        ("replicated", &first.replicated, String::new()),
    ] {
        let repeats = steps
            .chunks(cli.steps)
            .zip(first.unsharded.chunks(cli.steps));
        let mut ratios: Vec<f64> = repeats
            .map(|(one, other)| medians(one).step / medians(other).step)
            .collect();
        ratios.sort_by(f64::total_cmp);
        if let [least, .., most] = ratios[..] {
            println!(
                "ratio {name} / unsharded{late}: {:.3}, of {} repeats {least:.3} to {most:.3}{torch}",
                ratios[ratios.len() / 2],
                ratios.len(),
            );
        }
    }
    Ok(())
}
