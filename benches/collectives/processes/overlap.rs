//! How much of a collective shows behind a rank's own work.
//!
//! A rank posts the collective, works, then waits for it. Nobody polls meanwhile: MPI makes
//! progress on the thread that communicates, or not at all. Beside it, in turns, the work alone and
//! the collective alone.
//!
//! - Work that sleeps leaves the cores free: at most a tenth of the collective is to show.
//! - Work that computes on all cores of the process leaves none, so that the collective takes its
//!   time of them: it is to cost what its threads compute, and a twentieth.

use std::fs;
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use burn::tensor::{DType, Tensor};
use burn_dtensor::comm::{Launch, World, launch};

use super::median;
use super::ours::of_slowest;
use crate::MIB;
use crate::steps::{Post, post_gather, post_scatter};

const BYTES: usize = 64 * MIB;
const WORK: Duration = Duration::from_millis(250);

/// How often the three take turns.
const REPEATS: usize = 9;

/// Of the matrices that work multiplies.
const SIDE: usize = 512;

/// Prints the table, on rank 0.
pub fn measure(count: usize) -> Result<()> {
    launch(Launch::from_env(count)?, |world| {
        if world.rank() == 0 {
            println!(
                "{count} processes, 64 MiB, {REPEATS} repeats in turns; medians of the slowest process, ms\n"
            );
            println!(
                "{:<14} {:<10} {:>8} {:>8} {:>8} {:>8} | {:>7} {:>7} {:>8} | {:>10}",
                "",
                "work",
                "C alone",
                "K alone",
                "CPU of K",
                "B both",
                "B - C",
                "moving",
                "waiting",
                "done after"
            );
        }
        let collectives: [(_, Post); 2] = [
            ("all-gather", post_gather(BYTES, 0, DType::F32, world)),
            ("reduce-scatter", post_scatter(BYTES, 0, DType::F32, world)),
        ];
        for (name, mut post) in collectives {
            let times = Times::take(world, &mut post, || thread::sleep(WORK))?;
            let (shown, most) = (times.both - times.work, 0.1 * times.alone);
            times.print(
                world,
                name,
                "sleeps",
                shown <= most,
                &format!("B - C at most {:.1} (0.1 K)", most * 1e3),
            );
            let times = Times::take(world, &mut post, computation(world)?)?;
            let most = 1.05 * (times.work + times.cpu);
            let bar = format!("B at most {:.1} (1.05 (C + CPU of K))", most * 1e3);
            times.print(world, name, "computes", times.both <= most, &bar);
        }
        if world.rank() == 0 {
            println!(
                "\nmoving, waiting: of B, in the wait. done after: how often K was, once the work was."
            );
        }
        Ok(())
    })?;
    Ok(())
}

/// Matrices multiplied on the rank's cores for as long as [`WORK`] where all ranks do nothing else.
fn computation(world: &World) -> burn_dtensor::Result<impl FnMut() + use<>> {
    let matrix = Tensor::<2>::ones([SIDE, SIDE], world.device());
    let multiply = move |times: usize| {
        (0..times).for_each(|_| drop(black_box(matrix.clone().matmul(matrix.clone()))))
    };
    multiply(20);
    world.barrier("all compute")?;
    let start = Instant::now();
    multiply(50);
    let seconds = of_slowest(&[start.elapsed().as_secs_f64() / 50.0], world)?[0];
    let times = (WORK.as_secs_f64() / seconds).ceil() as usize;
    Ok(move || multiply(times))
}

/// Seconds: medians, of the slowest process.
struct Times {
    work: f64,
    alone: f64,
    /// That the threads of a process compute in the collective alone.
    cpu: f64,
    both: f64,
    moving: f64,
    waiting: f64,
    /// How often the collective was done in all processes when the work was.
    done: usize,
}

impl Times {
    fn take(world: &World, post: &mut Post, mut work: impl FnMut()) -> burn_dtensor::Result<Self> {
        let wait = |post: &mut Post| post().wait().map(drop);
        for _ in 0..3 {
            wait(post)?;
        }
        work();
        let [
            mut alone,
            mut working,
            mut cpu,
            mut both,
            mut moving,
            mut waiting,
            mut late,
        ] = [(); 7].map(|()| vec![]);
        for _ in 0..REPEATS {
            world.barrier("work")?;
            let start = Instant::now();
            work();
            working.push(start.elapsed().as_secs_f64());

            world.barrier("alone")?;
            let (start, computed) = (Instant::now(), cpu_seconds());
            wait(post)?;
            alone.push(start.elapsed().as_secs_f64());
            cpu.push(cpu_seconds() - computed);

            world.barrier("both")?;
            let (start, before) = (Instant::now(), world.ledger().spent());
            let posted = post();
            work();
            late.push(if posted.is_complete() { 0.0 } else { 1.0 });
            drop(black_box(posted.wait()?));
            both.push(start.elapsed().as_secs_f64());
            let after = world.ledger().spent();
            moving.push((after.local_work - before.local_work).as_secs_f64());
            waiting.push((after.waiting - before.waiting).as_secs_f64());
        }
        let middle = |seconds: &[f64]| of_slowest(seconds, world).map(median);
        let late: f64 = of_slowest(&late, world)?.iter().sum();
        Ok(Self {
            work: middle(&working)?,
            alone: middle(&alone)?,
            // The system counts in ticks: a mean tells more than a median.
            cpu: middle(&[cpu.iter().sum::<f64>() / REPEATS as f64])?,
            both: middle(&both)?,
            moving: middle(&moving)?,
            waiting: middle(&waiting)?,
            done: REPEATS - late as usize,
        })
    }

    fn print(&self, world: &World, name: &str, kind: &str, met: bool, bar: &str) {
        if world.rank() != 0 {
            return;
        }
        let Self {
            work,
            alone,
            cpu,
            both,
            moving,
            waiting,
            done,
        } = self;
        let [shown, work, alone, cpu, both, moving, waiting] =
            [both - work, *work, *alone, *cpu, *both, *moving, *waiting]
                .map(|seconds| seconds * 1e3);
        let bar = if met {
            bar.into()
        } else {
            format!("MISSED: {bar}")
        };
        println!(
            "{name:<14} {kind:<10} {work:>8.1} {alone:>8.1} {cpu:>8.1} {both:>8.1} | {shown:>7.1} {moving:>7.1} \
             {waiting:>8.1} | {:>10}  {bar}",
            format!("{done} of {REPEATS}")
        );
    }
}

/// What the threads of this process have computed, where the system says so.
fn cpu_seconds() -> f64 {
    let threads = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten();
    let nanoseconds = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}
