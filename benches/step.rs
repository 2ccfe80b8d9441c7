//! Seconds a training step: fully sharded over 2 ranks, beside two unsharded copies run at once.
//!
//! ```text
//! cargo bench --bench step
//! ```
//!
//! The model is a GPT of width 512, 8 layers, 8 heads, vocabulary 4096, untied, 29.53 M
//! parameters, f32, AdamW; sequence 256, batch 4 a rank. Two ranks, one compute thread each.
//! Sharded and unsharded steps alternate on the same two threads, so that whatever else the
//! machine does meets both alike: the ratio of their medians is the result, the seconds are the
//! machine's. On more than two cores run it under `taskset -c 0,1`.

#[path = "../examples/train_gpt/model.rs"]
mod model;

use std::time::Instant;

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn_dtensor::comm::{Op, Spent};
use burn_dtensor::prelude::*;
use clap::Parser;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use model::{Gpt, GptConfig};

const RANKS: usize = 2;
/// Sequences per rank and step.
const BATCH: usize = 4;
const LR: f64 = 1e-4;
const MODEL: GptConfig = GptConfig { vocab: 4096, seq: 256, dim: 512, layers: 8, heads: 8 };

/// PyTorch 2.15 on the same work: FSDP2 on gloo over 2 processes, and two unsharded copies at
/// once, one thread each. Recorded on one quiet 2-core machine: there the ratio compares, on any
/// other only the ratio does.
const TORCH_FSDP2_S: f64 = 2.21;
const TORCH_UNSHARDED_S: f64 = 1.84;

#[derive(Parser)]
#[command(about = "Seconds a training step, fully sharded and unsharded")]
struct Cli {
    /// Timed steps of each kind
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Untimed steps of each kind before them
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Width of the model; the recorded figures are for 512
    #[arg(long, default_value_t = MODEL.dim)]
    dim: usize,
    /// Keep gathered weights from forward to backward
    #[arg(long)]
    keep: bool,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Seconds of one step, whole and by part.
#[derive(Clone, Copy, Default)]
struct Seconds {
    step: f64,
    forward: f64,
    backward: f64,
    optimizer: f64,
    /// In collectives, waiting for the other rank.
    waiting: f64,
    /// In collectives, copying and reducing.
    moving: f64,
}

/// A model in training; an option because the optimizer takes it and gives it back.
struct Training {
    model: Option<Gpt>,
    optim: ModuleOptimizer,
}

impl Training {
    fn new(model: Gpt) -> Self {
        Self { model: Some(model), optim: AdamWConfig::new().init() }
    }

    /// One step on random tokens; barriers around it make ranks start and end together.
    fn step(&mut self, world: &World, rng: &mut StdRng, device: &Device) -> Result<Seconds> {
        let model = self.model.take().expect("the last step gave the model back");
        let (tokens, targets) = (random_tokens(rng, device), random_tokens(rng, device));
        world.barrier("step begins")?;
        world.ledger().reset();
        let start = Instant::now();
        let loss = model.loss(tokens, targets);
        let forward = start.elapsed().as_secs_f64();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let backward = start.elapsed().as_secs_f64();
        self.model = Some(self.optim.step(LR, model, grads));
        let optimizer = start.elapsed().as_secs_f64();
        let Spent { waiting, moving } = world.ledger().spent();
        world.barrier("step ends")?;
        Ok(Seconds {
            step: start.elapsed().as_secs_f64(),
            forward,
            backward: backward - forward,
            optimizer: optimizer - backward,
            waiting: waiting.as_secs_f64(),
            moving: moving.as_secs_f64(),
        })
    }
}

fn random_tokens(rng: &mut StdRng, device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = (0..BATCH * MODEL.seq).map(|_| rng.random_range(0..MODEL.vocab as i32)).collect();
    Tensor::from_data(TensorData::new(tokens, [BATCH, MODEL.seq]), device)
}

/// Steps of each kind on one rank, and calls and bytes a sharded step.
struct Measured {
    sharded: Vec<Seconds>,
    unsharded: Vec<Seconds>,
    traffic: String,
}

fn measure(cli: &Cli, world: &World) -> Result<Measured> {
    let device = world.device().clone().autodiff();
    let config = GptConfig { dim: cli.dim, ..MODEL };
    let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
    let reshard = if cli.keep { ReshardAfterForward::Never } else { ReshardAfterForward::Always };
    let fsdp = FullyShard::new().units(["blocks.*"]).reshard_after_forward(reshard);
    let mut sharded = Training::new(fully_shard(config.init(&device), &mesh, fsdp)?);
    let mut unsharded = Training::new(config.init(&device));
    let mut rng = StdRng::seed_from_u64(world.rank() as u64);
    let mut measured = Measured { sharded: Vec::new(), unsharded: Vec::new(), traffic: String::new() };
    for step in 0..cli.warmup + cli.steps {
        let one = sharded.step(world, &mut rng, &device)?;
        let ledger = world.ledger();
        let traffic = |op| format!("{} x {op}, {:.1} MB", ledger.calls(op), ledger.bytes(op) as f64 / 1e6);
        measured.traffic = format!("{}; {}", traffic(Op::AllGather), traffic(Op::ReduceScatter));
        let other = unsharded.step(world, &mut rng, &device)?;
        if step >= cli.warmup {
            measured.sharded.push(one);
            measured.unsharded.push(other);
        }
    }
    Ok(measured)
}

/// The median of each part.
fn medians(steps: &[Seconds]) -> Seconds {
    let median = |part: fn(&Seconds) -> f64| {
        let mut values: Vec<f64> = steps.iter().map(part).collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        if values.len().is_multiple_of(2) { (values[middle - 1] + values[middle]) / 2.0 } else { values[middle] }
    };
    Seconds {
        step: median(|s| s.step),
        forward: median(|s| s.forward),
        backward: median(|s| s.backward),
        optimizer: median(|s| s.optimizer),
        waiting: median(|s| s.waiting),
        moving: median(|s| s.moving),
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let ranks = launch(Launch::threads(RANKS), |world| measure(&cli, world))?;
    let (_, first) = &ranks[0];
    let [sharded, unsharded] = [medians(&first.sharded), medians(&first.unsharded)];
    println!("{:<24} {:>8} {:>8} {:>8} {:>8} {:>10}", "", "s/step", "forward", "backward", "AdamW", "tokens/s");
    for (name, Seconds { step, forward, backward, optimizer, .. }) in
        [("sharded, 2 ranks", sharded), ("2 unsharded copies", unsharded)]
    {
        let tokens = (RANKS * BATCH * MODEL.seq) as f64 / step;
        println!("{name:<24} {step:>8.3} {forward:>8.3} {backward:>8.3} {optimizer:>8.3} {tokens:>10.0}");
    }
    println!("{:<24} {TORCH_FSDP2_S:>8.3}  (recorded on one quiet 2-core machine)", "PyTorch FSDP2, gloo");
    println!("collectives a step: {}", first.traffic);
    for (rank, measured) in &ranks {
        let Seconds { waiting, moving, .. } = medians(&measured.sharded);
        println!("  rank {rank}: {moving:.3} s copying and reducing, {waiting:.3} s waiting for the other rank");
    }
    println!(
        "ratio sharded / unsharded: {:.3}  (PyTorch FSDP2: {:.2})",
        sharded.step / unsharded.step,
        TORCH_FSDP2_S / TORCH_UNSHARDED_S
    );
    Ok(())
}
