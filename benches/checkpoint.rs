//! Checkpoints, as a share of what the machine does with the same bytes.
//!
//! ```text
//! cargo bench --bench checkpoint
//! cargo bench --bench checkpoint -- --folder /mnt/disk
//! cargo bench --bench checkpoint -- --peer .peer/bin/python    # beside PyTorch's distributed checkpoint
//! ```
//!
//! Two ranks, which are threads, hold a GPT and its AdamW in shards. In each round all take turns,
//! in another order each time, so that whatever else the machine does meets all of them. The
//! results are medians of the rounds' ratios, with the smallest and the largest.
//!
//! - `save`, and a plain loop of `write` over bytes in memory, by as many threads into as many
//!   files, with the same syncs;
//! - loading model and optimizer state, and plain positioned reads of the same files by as many
//!   threads into new memory, both from the page cache. Loading also compares the checksums.
//!   Handing the state to the optimizer is timed apart: PyTorch's `set_optimizer_state_dict` is not
//!   a part of its load either;
//! - training steps while `AsyncCheckpointer` writes, and steps before it.
//!
//! `--peer` names a Python with PyTorch 2. `checkpoint_dcp.py` then saves and loads the same
//! tensors in each round, from as many processes.

#[path = "../examples/train_gpt/model.rs"]
#[allow(dead_code, reason = "the example uses the rest of it")]
mod model;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Instant;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_dtensor::checkpoint::{
    self, AsyncCheckpointer, Checkpoint, CheckpointManager, LoadOptions, ReadOptions, State,
    inspect,
};
use burn_dtensor::optim::{ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use clap::Parser;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use model::{Gpt, GptConfig};

const RANKS: usize = 2;
const SEQ: usize = 64;
const VOCAB: usize = 4096;
/// Training steps of a round before a checkpoint is saved behind others.
const STEPS: usize = 4;
/// Bytes of a plain write or read.
const PART: usize = 4 << 20;

#[derive(Parser)]
#[command(about = "Checkpoints, as a share of what the machine does with the same bytes")]
struct Cli {
    /// Rounds, in each of which all take turns
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Width of the model; 768 makes 0.76 GB of state
    #[arg(long, default_value_t = 768)]
    dim: usize,
    /// Blocks of the model
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Folder to write to, on the disk to measure [default: target/tmp]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Python with PyTorch 2, whose distributed checkpoint takes turns
    #[arg(long, value_name = "PYTHON")]
    peer: Option<PathBuf>,
    /// Passed by cargo bench
    #[arg(long, hide = true)]
    bench: bool,
}

impl Cli {
    fn config(&self) -> GptConfig {
        GptConfig {
            vocab: VOCAB,
            seq: SEQ,
            dim: self.dim,
            layers: self.layers,
            heads: 12,
        }
    }
}

/// Sharded model and optimizer between two steps.
struct Training {
    /// An option because the optimizer takes it and returns it.
    model: Option<Gpt>,
    optim: ShardedOptimizer,
}

impl Training {
    /// Parameters are not initialized yet.
    fn new(cli: &Cli, mesh: &DeviceMesh) -> Result<Self> {
        let model = cli.config().init(&mesh.device().clone().autodiff());
        let model = fully_shard(model, mesh, FullyShard::new().with_units(["blocks.*"]))?;
        Ok(Self {
            model: Some(model),
            optim: sharded(AdamWConfig::new()),
        })
    }

    fn step(&mut self, rng: &mut StdRng, mesh: &DeviceMesh) -> Result<()> {
        let device = mesh.device().clone().autodiff();
        let mut tokens = || {
            let tokens: Vec<i32> = (0..SEQ)
                .map(|_| rng.random_range(0..VOCAB as i32))
                .collect();
            Tensor::<2, Int>::from_data(TensorData::new(tokens, [1, SEQ]), &device)
        };
        let model = self.model.take().expect("the last step returned it");
        let loss = model.loss(tokens(), tokens());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        self.model = Some(self.optim.step(1e-4, model, grads)?);
        Ok(())
    }

    fn state(&self, mesh: &DeviceMesh, step: u64) -> Result<State> {
        let model = self.model.as_ref().expect("the last step returned it");
        let state = State::new(mesh)
            .with_step(step)
            .with_model("model", model)?;
        state.with_optimizer("optimizer", &self.optim.state(model)?)
    }
}

/// Seconds of each round, by what took turns.
#[derive(Default)]
struct Rounds {
    ours: Vec<f64>,
    plain: Vec<f64>,
    peer: Vec<f64>,
    /// Seconds for which an optimizer takes the state that was loaded.
    handed: Vec<f64>,
}

/// Results of steps while a checkpoint is written.
#[derive(Default)]
struct Behind {
    /// Seconds of the median step before it.
    step: Vec<f64>,
    /// Seconds for which `save` did not return.
    blocked: Vec<f64>,
    /// Seconds of the slowest step while it was written.
    slowest: Vec<f64>,
    /// Steps while it was written.
    steps: Vec<f64>,
}

/// Returns the result of `run` on all ranks, and the seconds until the last of them had it.
fn timed<T>(world: &World, run: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    world.barrier("begin")?;
    let start = Instant::now();
    let result = run()?;
    world.barrier("end")?;
    Ok((result, start.elapsed().as_secs_f64()))
}

/// Saves once in each round, and then saves behind steps.
fn save(
    cli: &Cli,
    folder: &Path,
    mut peer: Option<&mut Peer>,
    world: &World,
) -> Result<(Rounds, Behind)> {
    let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
    let mut rng = StdRng::seed_from_u64(world.rank() as u64);
    let mut training = Training::new(cli, &mesh)?;
    training.step(&mut rng, &mesh)?; // The optimizer has state from now on.
    let (saved, plain) = (folder.join("saved"), folder.join("plain"));
    let mut rounds = Rounds::default();
    let mut bytes = None;
    for round in 0..cli.rounds {
        for turn in 0..3 {
            match (round + turn) % 3 {
                0 => {
                    world.run_on(0, || drop(fs::remove_dir_all(&saved)));
                    let run = || checkpoint::save(&saved, &training.state(&mesh, 1)?);
                    rounds.ours.push(timed(world, run)?.1);
                    if bytes.is_none() {
                        let file = format!("rank-{:05}.safetensors", world.rank());
                        bytes = Some((
                            fs::read(saved.join(file))?,
                            fs::read(saved.join("manifest.json"))?,
                        ));
                    }
                }
                1 => {
                    let (shards, manifest) = bytes.as_ref().expect("the first turn reads them");
                    rounds
                        .plain
                        .push(timed(world, || write(world, &plain, shards, manifest))?.1);
                    world.run_on(0, || drop(fs::remove_dir_all(&plain)));
                }
                _ => {
                    if let Some(peer) = &mut peer {
                        rounds.peer.push(peer.time("save")?);
                    }
                    world.barrier("peer")?;
                }
            }
        }
    }
    drop(bytes);
    Ok((rounds, behind(cli, folder, &mesh, &mut training, &mut rng)?))
}

/// Writes the bytes of a checkpoint with its syncs.
fn write(world: &World, folder: &Path, shards: &[u8], manifest: &[u8]) -> Result<()> {
    let parent = folder
        .parent()
        .expect("it is in the folder of the benchmark");
    let sync = |folder: &Path| File::open(folder)?.sync_all();
    if world.rank() == 0 {
        sync(parent.parent().expect("it is an absolute path"))?;
        fs::create_dir(folder)?;
    }
    world.barrier("created")?;
    let mut file = File::create_new(folder.join(world.rank().to_string()))?;
    shards
        .chunks(PART)
        .try_for_each(|part| file.write_all(part))?;
    file.sync_all()?;
    world.barrier("written")?;
    if world.rank() == 0 {
        sync(folder)?;
        let temporary = folder.join("manifest.tmp");
        let mut file = File::create_new(&temporary)?;
        file.write_all(manifest)?;
        file.sync_all()?;
        fs::rename(temporary, folder.join("manifest"))?;
        sync(folder)?;
        sync(parent)?;
    }
    Ok(())
}

fn behind(
    cli: &Cli,
    folder: &Path,
    mesh: &DeviceMesh,
    training: &mut Training,
    rng: &mut StdRng,
) -> Result<Behind> {
    let world = mesh.world();
    let run = CheckpointManager::new(folder.join("run"), mesh).with_keep(1);
    let mut checkpointer = AsyncCheckpointer::new(run)?;
    // Its memory is allocated once.
    checkpointer.save(&training.state(mesh, 1)?)?;
    checkpointer.finish()?;
    let mut behind = Behind::default();
    for round in 0..cli.rounds as u64 {
        let before = (0..STEPS)
            .map(|_| Ok(timed(world, || training.step(rng, mesh))?.1))
            .collect::<Result<Vec<_>>>()?;
        let save = || checkpointer.save(&training.state(mesh, round + 2)?);
        let blocked = timed(world, save)?.1;
        let mut steps = Vec::new();
        while checkpointer.is_writing() {
            let step = || {
                training.step(rng, mesh)?;
                checkpointer.poll()
            };
            steps.push(timed(world, step)?.1);
        }
        behind.step.push(sorted(&before)[STEPS / 2]);
        behind.blocked.push(blocked);
        behind
            .slowest
            .push(steps.iter().copied().fold(0.0, f64::max));
        behind.steps.push(steps.len() as f64);
    }
    Ok(behind)
}

/// Loads once in each round, each time from new threads, whose memory is new.
fn load(cli: &Cli, folder: &Path, mut peer: Option<&mut Peer>) -> Result<Rounds> {
    let saved = folder.join("saved");
    let mut rounds = Rounds::default();
    for round in 0..cli.rounds {
        for turn in 0..3 {
            match (round + turn) % 3 {
                0 => {
                    let outcomes = launch(Launch::threads(RANKS), |world| {
                        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
                        let Training { model, optim } = Training::new(cli, &mesh)?;
                        let model = model.expect("it is new");
                        let load = || {
                            let checkpoint = Checkpoint::open(&saved, &mesh)?;
                            let (model, _) =
                                checkpoint.load_model("model", model, &LoadOptions::new())?;
                            let (state, _) = checkpoint.load_optimizer(
                                "optimizer",
                                &model,
                                &LoadOptions::new(),
                            )?;
                            Ok((model, state))
                        };
                        let ((model, state), loaded) = timed(world, load)?;
                        let (_optim, handed) = timed(world, || optim.load_state(&model, state))?;
                        Ok((loaded, handed))
                    })?;
                    let (loaded, handed) = outcomes[0].1;
                    rounds.ours.push(loaded);
                    rounds.handed.push(handed);
                }
                1 => {
                    let outcomes = launch(Launch::threads(RANKS), |world| {
                        let file = saved.join(format!("rank-{:05}.safetensors", world.rank()));
                        Ok(timed(world, || read(&file, ReadOptions::new().threads))?.1)
                    })?;
                    rounds.plain.push(outcomes[0].1);
                }
                _ => {
                    if let Some(peer) = &mut peer {
                        rounds.peer.push(peer.time("load")?);
                    }
                }
            }
        }
    }
    Ok(rounds)
}

/// Reads a file into new memory by several threads.
fn read(file: &Path, threads: usize) -> Result<Vec<Vec<u8>>> {
    let file = File::open(file)?;
    let len = file.metadata()?.len() as usize;
    let read = |begin: usize, end: usize| -> Result<Vec<u8>> {
        let mut memory = vec![0; end - begin];
        for (at, part) in memory.chunks_mut(PART).enumerate() {
            file.read_exact_at(part, (begin + at * PART) as u64)?;
        }
        Ok(memory)
    };
    let read = &read;
    thread::scope(|scope| {
        let bounds = |thread: usize| len * thread / threads;
        let threads: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || read(bounds(thread), bounds(thread + 1))))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("reading does not panic"))
            .collect()
    })
}

/// `checkpoint_dcp.py`, which saves and loads when it is asked to.
struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts it for the tensors of a checkpoint.
    fn start(python: &Path, folder: &Path, shapes: serde_json::Value) -> Result<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/checkpoint_dcp.py");
        let mut command = Command::new(python);
        let mut child = command
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut to = child.stdin.take().expect("a pipe");
        let from = BufReader::new(child.stdout.take().expect("a pipe"));
        writeln!(
            to,
            "{}",
            json!({ "folder": folder, "ranks": RANKS, "shapes": shapes })
        )?;
        Ok(Self { child, to, from })
    }

    /// Returns the seconds that it took for a command.
    fn time(&mut self, command: &str) -> Result<f64> {
        writeln!(self.to, "{command}")?;
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        line.trim()
            .parse()
            .map_err(|_| Error::other(format!("the peer answered `{line}` to {command}")))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It ends with its input.
        drop(writeln!(self.to, "end"));
        drop(self.child.wait());
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

/// Formats the median of values, and the smallest and largest.
fn median(values: impl IntoIterator<Item = f64>, digits: usize) -> String {
    let values = sorted(&values.into_iter().collect::<Vec<_>>());
    let [median, least, most] = [values.len() / 2, 0, values.len() - 1].map(|at| values[at]);
    format!("{median:.digits$} ({least:.digits$} to {most:.digits$})")
}

/// Formats the ratio of each round.
fn ratio(of: &[f64], to: &[f64]) -> String {
    median(of.iter().zip(to).map(|(a, b)| a / b), 2)
}

impl Rounds {
    fn print(&self, what: &str, machine: &str, bytes: u64) {
        let speed = |seconds: &[f64]| {
            median(
                seconds.iter().map(|seconds| bytes as f64 / seconds / 1e9),
                2,
            )
        };
        println!(
            "{what}: {} GB/s; {machine}: {} GB/s",
            speed(&self.ours),
            speed(&self.plain)
        );
        println!("  share of the machine: {}", ratio(&self.plain, &self.ours));
        if !self.handed.is_empty() {
            let seconds = median(self.handed.iter().copied(), 3);
            println!(
                "  the optimizer takes the state in {seconds} s, {} of a plain read",
                ratio(&self.handed, &self.plain)
            );
        }
        if !self.peer.is_empty() {
            println!(
                "  PyTorch DCP: {} GB/s; ours is {} times as fast",
                speed(&self.peer),
                ratio(&self.peer, &self.ours)
            );
        }
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let folder = cli
        .folder
        .clone()
        .unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    fs::create_dir_all(&folder)?;
    let folder = folder
        .canonicalize()?
        .join(format!("checkpoint-{}", std::process::id()));
    fs::create_dir(&folder)?;
    let outcome = run(&cli, &folder);
    fs::remove_dir_all(&folder)?;
    outcome
}

fn run(cli: &Cli, folder: &Path) -> Result<()> {
    // One checkpoint shows what there is to write, and everything is warm after it.
    let tensors = folder.join("tensors");
    launch(Launch::threads(RANKS), |world| {
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let mut training = Training::new(cli, &mesh)?;
        training.step(&mut StdRng::seed_from_u64(0), &mesh)?;
        checkpoint::save(&tensors, &training.state(&mesh, 1)?)
    })?;
    let summary = inspect(&tensors)?;
    fs::remove_dir_all(&tensors)?;
    let bytes = summary
        .tensors
        .values()
        .map(|tensor| tensor.bytes)
        .sum::<u64>();
    let shapes: serde_json::Value = summary
        .tensors
        .iter()
        .map(|(key, tensor)| (key.clone(), json!(tensor.shape)))
        .collect();
    let mut peer = cli
        .peer
        .as_deref()
        .map(|python| Peer::start(python, &folder.join("dcp"), shapes))
        .transpose()?;
    println!(
        "{} tensors, {:.1} MB, {RANKS} ranks, {} rounds",
        summary.tensors.len(),
        bytes as f64 / 1e6,
        cli.rounds
    );

    let shared = parking_lot::Mutex::new(peer.as_mut());
    let mut outcomes = launch(Launch::threads(RANKS), |world| {
        let peer = if world.rank() == 0 {
            shared.lock().take()
        } else {
            None
        };
        save(cli, folder, peer, world)
    })?;
    let (_, (saves, behind)) = outcomes.swap_remove(0);
    saves.print("save", "plain writes", bytes);
    load(cli, folder, peer.as_mut())?.print("load", "plain reads", bytes);
    let Behind {
        step,
        blocked,
        slowest,
        steps,
    } = behind;
    println!(
        "steps while a checkpoint is written: {}, of {} s before it",
        median(steps, 0),
        median(step.clone(), 2)
    );
    println!(
        "  blocked: {} s, {} of a step",
        median(blocked.clone(), 3),
        ratio(&blocked, &step)
    );
    println!("  slowest step: {} of a step", ratio(&slowest, &step));
    Ok(())
}
