//! Time of a step of AdamW over a list of parameters: burn's, the fused one that `optim::sharded`
//! builds, a loop written by hand over one array, and a copy of as many bytes, in turns in one run.
//!
//! ```text
//! cargo bench --bench optimizer -- --elements 65536 --mib 64
//! ```
//!
//! A rank's threads are those of `--threads`. A step reads the parameter, the gradient and two
//! moments, and writes all but the gradient: seven times its bytes.

use std::hint::black_box;
use std::time::Instant;

use burn::optim::{AdamWConfig, AdamWState, Optimizer};
use burn::tensor::{Device, Distribution, Tensor};
use burn_dtensor::optim::ExactOnShards;
use clap::Parser;
use itertools::Itertools;
use rayon::prelude::*;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(about = "Time of a step of AdamW over a list of parameters on the CPU")]
struct Cli {
    /// Elements of each parameter
    #[arg(long, default_value_t = 1 << 20)]
    elements: usize,
    /// MiB of all parameters together
    #[arg(long, default_value_t = 64)]
    mib: usize,
    /// Threads of the rank
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Rounds, in each of which all take a turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

const LR: f64 = 1e-3;

/// Parameters and their state, with an optimizer.
struct List<O> {
    optimizer: O,
    parameters: Vec<(Tensor<1>, Option<AdamWState<1>>)>,
    elements: usize,
}

fn random(elements: usize) -> Tensor<1> {
    Tensor::random(
        [elements],
        Distribution::Uniform(-1.0, 1.0),
        &Device::flex(),
    )
}

impl<O: Optimizer<State<1> = AdamWState<1>>> List<O> {
    fn new(optimizer: O, count: usize, elements: usize) -> Self {
        let mut list = Self {
            optimizer,
            parameters: (0..count).map(|_| (random(elements), None)).collect(),
            elements,
        };
        // The first step makes the state.
        list.step(list.grads());
        list
    }

    /// Returns gradients as a backward leaves them: no other handle reads them.
    fn grads(&self) -> Vec<Tensor<1>> {
        self.parameters
            .iter()
            .map(|_| random(self.elements))
            .collect()
    }

    fn step(&mut self, grads: Vec<Tensor<1>>) {
        let parameters = std::mem::take(&mut self.parameters).into_iter().zip(grads);
        let step = |((param, state), grad)| self.optimizer.step(LR, param, grad, state);
        self.parameters = parameters.map(step).collect();
    }
}

/// The same in one array each, by hand.
struct Arrays {
    param: Vec<f32>,
    grad: Vec<f32>,
    moment_1: Vec<f32>,
    moment_2: Vec<f32>,
}

impl Arrays {
    fn step(&mut self, time: i32) {
        let [beta_1, beta_2, epsilon] = [0.9f32, 0.999, 1e-5];
        let corrections = [1.0 - beta_1.powi(time), 1.0 - beta_2.powi(time)];
        let (decay, lr) = ((1.0 - LR * 1e-4) as f32, LR as f32);
        const CHUNK: usize = 16 << 10;
        let chunks = self
            .param
            .par_chunks_mut(CHUNK)
            .zip(self.grad.par_chunks(CHUNK));
        let moments = self
            .moment_1
            .par_chunks_mut(CHUNK)
            .zip(self.moment_2.par_chunks_mut(CHUNK));
        chunks
            .zip(moments)
            .for_each(|((param, grad), (first, second))| {
                for (((p, g), m), v) in param.iter_mut().zip(grad).zip(first).zip(second) {
                    *m = *m * beta_1 + *g * (1.0 - beta_1);
                    *v = *v * beta_2 + *g * *g * (1.0 - beta_2);
                    let delta = (*m / corrections[0]) / ((*v / corrections[1]).sqrt() + epsilon);
                    *p = *p * decay - delta * lr;
                }
            });
    }
}

/// Copies `from` on the rank's threads.
fn copy(from: &[f32], to: &mut [f32]) {
    let chunk = 16 << 10;
    to.par_chunks_mut(chunk)
        .zip(from.par_chunks(chunk))
        .for_each(|(to, from)| to.copy_from_slice(from));
}

fn main() {
    let cli = Cli::parse();
    let count = (cli.mib << 20).div_ceil(4 * cli.elements);
    let total = count * cli.elements;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(cli.threads)
        .build();
    pool.expect("threads can be started")
        .install(|| measure(&cli, count, total));
}

fn measure(cli: &Cli, count: usize, total: usize) {
    let config = AdamWConfig::new();
    let mut burn = List::new(AdamWConfig::build(&config), count, cli.elements);
    let mut fused = List::new(ExactOnShards::build(config).0, count, cli.elements);
    let numbers = |seed: usize| {
        (0..total)
            .map(|at| ((at * 7 + seed) % 1013) as f32 / 1013.0 - 0.5)
            .collect()
    };
    let mut arrays = Arrays {
        param: numbers(1),
        grad: numbers(2),
        moment_1: numbers(3),
        moment_2: vec![1.0; total],
    };
    let mut target = vec![0.0; total];
    let names = ["burn", "fused", "loop", "copy"];
    let mut seconds = names.map(|_| Vec::new());
    for _ in 0..cli.rounds {
        let mut timed = |at: usize, run: &mut dyn FnMut()| {
            let start = Instant::now();
            run();
            seconds[at].push(start.elapsed().as_secs_f64());
        };
        let [mut of_burn, mut of_fused] = [burn.grads(), fused.grads()];
        timed(0, &mut || burn.step(std::mem::take(&mut of_burn)));
        timed(1, &mut || fused.step(std::mem::take(&mut of_fused)));
        timed(2, &mut || arrays.step(5));
        timed(3, &mut || {
            (0..7).for_each(|_| copy(&arrays.param, black_box(&mut target)))
        });
        // A copy reads and writes.
        *seconds[3].last_mut().expect("it was pushed") /= 2.0;
    }
    black_box((&burn.parameters, &fused.parameters, &arrays.param));
    println!(
        "AdamW, {count} parameters of {} elements, {} MiB, {} threads, median of {} rounds:",
        cli.elements, cli.mib, cli.threads, cli.rounds
    );
    let median = |of: &[f64]| {
        of.iter()
            .copied()
            .sorted_by(f64::total_cmp)
            .nth(of.len() / 2)
            .expect("a round")
    };
    for (name, of) in names.iter().zip(&seconds) {
        let (least, most) = of
            .iter()
            .copied()
            .minmax_by(f64::total_cmp)
            .into_option()
            .expect("a round");
        println!(
            "{name:>6}: {:8.2} ms ({:.2} to {:.2})",
            1e3 * median(of),
            1e3 * least,
            1e3 * most
        );
    }
    let ratios = |a: usize, b: usize| {
        seconds[a]
            .iter()
            .zip(&seconds[b])
            .map(|(a, b)| a / b)
            .collect_vec()
    };
    println!("ratio fused / burn: {:.3}", median(&ratios(1, 0)));
    println!("ratio fused / loop: {:.3}", median(&ratios(1, 2)));
}
