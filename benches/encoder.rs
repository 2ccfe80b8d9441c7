//! A model of burn's own layers, whose loop is inside burn: units that reads open, beside units
//! that the program opens, and beside the unsharded model. Time, collectives and memory of a
//! training step.
//!
//! ```text
//! cargo bench --bench encoder
//! ```
//!
//! The model is an embedding, burn's `TransformerEncoder` and a linear head, f32, without dropout;
//! two ranks with one compute thread each. The three kinds of step alternate in one run. On more
//! than two cores run it under `taskset -c 0,1`.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn_dtensor::comm::Op;
use burn_dtensor::prelude::*;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// mimalloc, counting the bytes that are live.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is mimalloc's; the counters do not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { mimalloc::MiMalloc.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { mimalloc::MiMalloc.dealloc(ptr, layout) }
    }
}

const RANKS: usize = 2;
const VOCAB: usize = 1024;

#[derive(Parser)]
#[command(
    about = "A training step of burn's TransformerEncoder: units opened by reads, by the program, and unsharded"
)]
struct Cli {
    /// Timed steps of each kind
    #[arg(long, default_value_t = 8)]
    steps: usize,
    /// Untimed steps of each kind before them
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Layers of the encoder
    #[arg(long, default_value_t = 6)]
    layers: usize,
    /// Width of the model
    #[arg(long, default_value_t = 384)]
    dim: usize,
    /// Sequences a rank
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Length of a sequence
    #[arg(long, default_value_t = 64)]
    seq: usize,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Module, Debug)]
struct Model {
    table: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Model {
    fn new(cli: &Cli, device: &Device) -> Self {
        let encoder =
            TransformerEncoderConfig::new(cli.dim, 4 * cli.dim, 6, cli.layers).with_dropout(0.0);
        Self {
            table: EmbeddingConfig::new(VOCAB, cli.dim).init(device),
            encoder: encoder.init(device),
            head: LinearConfig::new(cli.dim, VOCAB).init(device),
        }
    }

    /// As one writes it for one device.
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.table.forward(tokens);
        self.head
            .forward(self.encoder.forward(TransformerEncoderInput::new(x)))
    }

    /// With burn's loop written out.
    fn forward_opening(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |model, tokens| {
            let x = model.table.forward(tokens);
            let layers = model.encoder.layers.iter();
            let x = layers.fold(x, |x, layer| {
                unit(layer, x, |layer, x| layer.forward(x, None, None))
            });
            model.head.forward(x)
        })
    }
}

type Forward = fn(&Model, Tensor<2, Int>) -> Tensor<3>;

const KINDS: [(&str, bool, Forward); 3] = [
    ("unit calls", true, Model::forward_opening),
    ("patterns, opened by reads", true, |model, tokens| {
        unit(model, tokens, |model, tokens| model.forward(tokens))
    }),
    ("unsharded", false, Model::forward),
];

/// What steps of one kind cost.
#[derive(Default)]
struct Cost {
    seconds: Vec<f64>,
    collectives: String,
    /// Bytes above what was live before, a rank.
    peak: usize,
}

fn measure(cli: &Cli, world: &World) -> Result<[Cost; 3]> {
    let device = world.device().clone().autodiff();
    let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
    let config = FullyShard::new()
        .with_units(["encoder.layers.*"])
        .with_reshard_after_forward(ReshardAfterForward::Always);
    let mut kinds = Vec::new();
    for (_, sharded, forward) in KINDS {
        let model = Model::new(cli, &device);
        let model = if sharded {
            fully_shard(model, &mesh, config.clone().with_implicit_unshard(false))?
        } else {
            model
        };
        let optim: ModuleOptimizer = AdamWConfig::new().init();
        kinds.push((Some(model), optim, forward));
    }
    let mut costs: [Cost; 3] = Default::default();
    let tokens = Tensor::<1, Int>::arange(0..(cli.batch * cli.seq) as i64, &device)
        .remainder_scalar(VOCAB as i64);
    let tokens = tokens.reshape([cli.batch, cli.seq]);
    for step in 0..cli.warmup + cli.steps {
        for ((model, optim, forward), cost) in kinds.iter_mut().zip(&mut costs) {
            let own = model.take().expect("the last step gave the model back");
            world.barrier("memory")?;
            let before = LIVE.load(Relaxed);
            PEAK.store(before, Relaxed);
            world.barrier("step begins")?;
            world.ledger().reset();
            let start = Instant::now();
            let loss = forward(&own, tokens.clone()).square().mean();
            let grads = GradientsParams::from_grads(loss.backward(), &own);
            let ledger = world.ledger();
            cost.collectives = format!(
                "{} + {}",
                ledger.calls(Op::AllGather),
                ledger.calls(Op::ReduceScatter)
            );
            world.barrier("backward ends")?;
            cost.peak = PEAK.load(Relaxed).saturating_sub(before) / RANKS;
            *model = Some(optim.step(1e-4, own, grads));
            world.barrier("step ends")?;
            if step >= cli.warmup {
                cost.seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    Ok(costs)
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let (_, costs) = launch(Launch::threads(RANKS), |world| measure(&cli, world))?.swap_remove(0);
    println!(
        "{:<26} {:>8} {:>26} {:>22}",
        "", "s/step", "all-gathers + reductions", "peak of step, MB"
    );
    for ((name, ..), mut cost) in KINDS.into_iter().zip(costs) {
        cost.seconds.sort_by(f64::total_cmp);
        let (median, peak) = (cost.seconds[cost.seconds.len() / 2], cost.peak as f64 / 1e6);
        println!(
            "{name:<26} {median:>8.3} {:>26} {peak:>22.1}",
            cost.collectives
        );
    }
    Ok(())
}
