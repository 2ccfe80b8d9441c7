//! Draws the memory of a rank over a training step: unsharded, fully sharded over 4 ranks, and with
//! steps in backward.
//!
//! ```text
//! cargo bench --bench memory -- docs/memory.svg
//! ```
//!
//! A thread samples what the allocator has given to rank 0 while the third step runs. The model is a
//! GPT in f32 with AdamW. Forward, backward and optimizer have the same widths in each curve.

#[path = "../tests/memory/live.rs"]
#[allow(dead_code, reason = "the tests use the rest of it")]
mod live;
#[path = "../examples/train_gpt/model.rs"]
#[allow(dead_code, reason = "the example uses the rest of it")]
mod model;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use std::{fs, thread};

use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use clap::Parser;
use itertools::Itertools;

use live::{allocates_for, alone, apart, own};
use model::{GptConfig, mean_cross_entropy};

const MODEL: GptConfig = GptConfig {
    vocab: 2048,
    seq: 64,
    dim: 256,
    layers: 8,
    heads: 8,
};
const RANKS: usize = 4;

#[derive(Parser)]
#[command(about = "Draws the memory of a rank over a training step as an SVG")]
struct Cli {
    /// File of the picture
    #[arg(default_value = "target/memory.svg")]
    picture: PathBuf,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Part of a step: forward, backward, optimizer; then none.
static PART: AtomicUsize = AtomicUsize::new(NOT_MEASURED);
const PARTS: [(&str, f64); 3] = [("forward", 0.3), ("backward", 0.55), ("optimizer", 0.15)];
const NOT_MEASURED: usize = 3;
const ENDED: usize = 4;

/// Kind of training.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Training {
    Unsharded,
    Sharded,
    InBackward,
}

/// Bytes of rank 0 in each part of its third step, above what it held before it had a model.
fn sampled(training: Training) -> Result<[Vec<usize>; 3]> {
    PART.store(NOT_MEASURED, SeqCst);
    let sampler = thread::spawn(|| {
        let mut samples = [(); 3].map(|()| Vec::with_capacity(1 << 20));
        allocates_for(0);
        loop {
            match PART.load(SeqCst) {
                NOT_MEASURED => thread::sleep(Duration::from_micros(100)),
                ENDED => return samples,
                part => samples[part].push(own()),
            }
            thread::sleep(Duration::from_micros(20));
        }
    });
    let ranks = if training == Training::Unsharded {
        1
    } else {
        RANKS
    };
    let before = launch(apart(ranks), |world| {
        allocates_for(world.rank());
        let is_first = world.rank() == 0;
        let device = world.device().clone().autodiff();
        let before = own();
        let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
        let mut model = world.run_seeded(1, || MODEL.init(&device))?;
        if training != Training::Unsharded {
            model = fully_shard(model, &mesh, FullyShard::new().with_units(["blocks.*"]))?;
        }
        let mut burn_optim = AdamWConfig::new().init();
        let mut optim = sharded(AdamWConfig::new());
        for step in 0..3 {
            let part = |part| {
                world.barrier("part")?;
                if is_first && step == 2 {
                    PART.store(part, SeqCst);
                }
                Ok::<_, Error>(())
            };
            let tokens = Tensor::<2, Int>::ones([1, MODEL.seq], &device);
            part(0)?;
            let loss = mean_cross_entropy(model.forward(tokens.clone()), tokens);
            part(1)?;
            model = match training {
                Training::InBackward => optim.backward(1e-4, model, loss)?,
                _ => {
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    part(2)?;
                    match training {
                        Training::Unsharded => burn_optim.step(1e-4, model, grads),
                        _ => optim.step(1e-4, model, grads)?,
                    }
                }
            };
            part(NOT_MEASURED)?;
        }
        Ok(before)
    });
    PART.store(ENDED, SeqCst);
    let samples = sampler.join().expect("the sampler does not panic");
    let before = before?[0].1;
    Ok(samples.map(|part| {
        part.into_iter()
            .map(|bytes| bytes.saturating_sub(before))
            .collect()
    }))
}

/// Size of the plot, and of the space around it.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 30.0;

/// A curve of the greatest samples of narrow columns.
fn curve(samples: &[Vec<usize>; 3], most: f64) -> String {
    let mut points = Vec::new();
    let mut begin = 0.0;
    for ((_, width), part) in PARTS.iter().zip(samples) {
        let columns = (width * WIDTH / 2.0) as usize;
        for column in 0..columns {
            let [from, to] = [column, column + 1].map(|at| at * part.len() / columns);
            let Some(bytes) = part[from.min(part.len())..to.min(part.len())].iter().max() else {
                continue;
            };
            let x = LEFT + begin * WIDTH + 2.0 * column as f64;
            let y = TOP + HEIGHT * (1.0 - *bytes as f64 / most);
            points.push(format!("{x:.0},{y:.1}"));
        }
        begin += width;
    }
    points.join(" ")
}

fn draw(curves: &[(&str, &str, [Vec<usize>; 3])]) -> String {
    let peaks = curves.iter().map(|(.., samples)| peak(samples));
    let most = peaks.max().unwrap_or(1).next_multiple_of(20 << 20) as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {:.0}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<style>text{{fill:#222}}.axis{{stroke:#999}}@media(prefers-color-scheme:dark){{text{{fill:#ddd}}\
         .axis{{stroke:#777}}}}</style>\n",
        LEFT + WIDTH + 20.0,
        TOP + HEIGHT + 50.0
    );
    let text = |x: f64, y: f64, anchor: &str, text: &str| {
        format!("<text x=\"{x:.0}\" y=\"{y:.0}\" text-anchor=\"{anchor}\">{text}</text>\n")
    };
    for tick in 0..=4 {
        let y = TOP + HEIGHT * (1.0 - f64::from(tick) / 4.0);
        let mebibytes = most * f64::from(tick) / 4.0 / f64::from(1 << 20);
        svg += &text(LEFT - 8.0, y + 4.0, "end", &format!("{mebibytes:.0}"));
        svg += &line([LEFT, y], [LEFT + WIDTH, y]);
    }
    svg += &text(LEFT - 8.0, TOP - 12.0, "end", "MiB");
    let mut begin = 0.0;
    for (name, width) in PARTS {
        let x = LEFT + begin * WIDTH;
        svg += &text(x + width * WIDTH / 2.0, TOP - 12.0, "middle", name);
        svg += &line([x, TOP], [x, TOP + HEIGHT]);
        begin += width;
    }
    let mut x = LEFT;
    let y = TOP + HEIGHT + 32.0;
    for (name, color, samples) in curves {
        let name = format!("{name}: at most {} MiB", peak(samples) >> 20);
        svg += &format!(
            "<rect x=\"{x:.0}\" y=\"{:.0}\" width=\"10\" height=\"10\" fill=\"{color}\"/>\n",
            y - 9.0
        );
        svg += &text(x + 15.0, y, "start", &name);
        x += 28.0 + 6.4 * name.len() as f64;
        svg += &format!(
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\"{}\"/>\n",
            curve(samples, most)
        );
    }
    svg + "</svg>\n"
}

fn line([x, y]: [f64; 2], [to_x, to_y]: [f64; 2]) -> String {
    format!(
        "<line class=\"axis\" x1=\"{x:.0}\" y1=\"{y:.0}\" x2=\"{to_x:.0}\" y2=\"{to_y:.0}\" stroke-width=\"0.5\"/>\n"
    )
}

fn peak(samples: &[Vec<usize>; 3]) -> usize {
    samples.iter().flatten().copied().max().unwrap_or(0)
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let _alone = alone();
    let curves = [
        ("unsharded", "#d62728", Training::Unsharded),
        ("1 of 4 ranks", "#1f77b4", Training::Sharded),
        ("stepped in backward", "#2ca02c", Training::InBackward),
    ];
    let curves: Vec<_> = curves
        .into_iter()
        .map(|(name, color, training)| Ok::<_, Error>((name, color, sampled(training)?)))
        .try_collect()?;
    for (name, _, samples) in &curves {
        let parts = samples
            .iter()
            .map(|part| part.iter().max().unwrap_or(&0) >> 20);
        println!(
            "{name}: peaks of forward, backward, optimizer in MiB: {}",
            parts.format(", ")
        );
    }
    fs::write(&cli.picture, draw(&curves)).map_err(Error::other)?;
    println!("{}", cli.picture.display());
    Ok(())
}
