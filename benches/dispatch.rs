//! What an operator on a DTensor costs beyond the same operator on the local tensor.
//!
//! Two ranks, tensors of 8 x 8, every rule in its rank's cache. A row gives the local operator and
//! the difference, in nanoseconds and allocations; without autodiff, and under it with tracked
//! inputs. Times are medians over many rounds in which both are timed in turn.
//!
//! Run with `cargo bench --bench dispatch`; `-- --peer FILE` adds the ratio to PyTorch's overhead,
//! from the JSON line that measured it (`{"res": {"add": {"overhead_us": 4.5}, ..}}`).

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor, activation, module};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, World, launch};
use burn_dtensor::dtensor::{DTensor, ops};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement::{Replicate as R, Shard as S};
use clap::Parser;
use serde_json::Value;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// mimalloc, counting the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is mimalloc's; the counter does not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract is passed on.
        unsafe { mimalloc::MiMalloc.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { mimalloc::MiMalloc.dealloc(ptr, layout) }
    }
}

#[derive(Parser)]
struct Args {
    /// JSON line with PyTorch's overhead of the same operators.
    #[arg(long)]
    peer: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One operator: its name here and in the peer's file, the local form, the DTensor form.
struct Pair<'a> {
    name: &'a str,
    peer: &'a str,
    local: Box<dyn Fn() + 'a>,
    distributed: Box<dyn Fn() + 'a>,
}

/// What one call costs.
#[derive(Clone, Copy)]
struct Cost {
    nanoseconds: f64,
    allocations: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let peer: Value = match &args.peer {
        Some(path) => serde_json::from_str(&std::fs::read_to_string(path)?)?,
        None => Value::Null,
    };
    launch(Launch::threads(2), |world| {
        let device = world.device().clone();
        for (title, device) in [
            ("without autodiff", device.clone()),
            ("under autodiff", device.autodiff()),
        ] {
            if world.rank() == 0 {
                table(world, &device, title, &peer)?;
            } else {
                bystander(world)?;
            }
            // The others wait: nothing measured communicates.
            world.barrier("dispatch")?;
        }
        Ok(())
    })?;
    Ok(())
}

/// A mesh is made by all ranks, used by one.
fn bystander(world: &World) -> Result<(), Error> {
    DeviceMesh::new(world, [2], ["tp"])?;
    Ok(())
}

fn table(world: &World, device: &Device, title: &str, peer: &Value) -> Result<(), Error> {
    let mesh = &DeviceMesh::new(world, [2], ["tp"])?;
    println!(
        "\n{title:<26} {:>9} {:>11} {:>12} {:>14}",
        "local ns", "overhead ns", "allocations", "of PyTorch's"
    );
    let full = || Tensor::<2>::random([8, 8], Distribution::Default, device);
    let place = |placement| DTensor::distribute_replicated(full(), mesh, &[placement]);
    let track = |x: DTensor<2>| {
        if device.is_autodiff() {
            x.require_grad()
        } else {
            x
        }
    };
    let (x, y, w) = (track(place(S(0))?), track(place(S(0))?), track(place(R)?));
    let ones = Tensor::<1>::ones([8], device);
    let gain = DTensor::distribute_replicated(ones.clone(), mesh, &[R])?;
    let (lx, ly, lw) = (x.local(), y.local(), w.local());

    let pairs = [
        pair(
            "add",
            "add",
            || lx.clone() + ly.clone(),
            || x.clone() + y.clone(),
        ),
        pair(
            "matmul S(0) x R",
            "matmul_S0_R",
            || lx.clone().matmul(lw.clone()),
            || x.clone().matmul(w.clone()),
        ),
        pair(
            "layer norm",
            "layer_norm",
            || module::layer_norm(lx.clone(), ones.clone(), Some(ones.clone()), 1e-5),
            || ops::module::layer_norm(x.clone(), gain.clone(), Some(gain.clone()), 1e-5),
        ),
        pair(
            "softmax",
            "softmax",
            || activation::softmax(lx.clone(), 1),
            || ops::activation::softmax(x.clone(), 1),
        ),
        pair(
            "relu",
            "relu",
            || activation::relu(lx.clone()),
            || ops::activation::relu(x.clone()),
        ),
        pair(
            "sum along a whole dim",
            "sum_dim1",
            || lx.clone().sum_dim(1),
            || x.clone().sum_dim(1),
        ),
        pair(
            "reshape",
            "view",
            || lx.clone().reshape([4, 2, 4]),
            || x.clone().reshape([8, 2, 4]),
        ),
        pair(
            "from_local + to_local",
            "from_local_to_local",
            || lx.clone(),
            || {
                DTensor::from_local(lx.clone(), mesh, &[S(0)])
                    .expect("even shards")
                    .to_local()
            },
        ),
        pair(
            "redistribute, nothing to do",
            "redistribute_noop",
            || lx.clone(),
            || {
                x.clone()
                    .redistribute(&[S(0)])
                    .expect("the same placements")
            },
        ),
    ];
    for Pair {
        name,
        peer: key,
        local,
        distributed,
    } in &pairs
    {
        let (local, distributed) = measure(local, distributed);
        let overhead = distributed.nanoseconds - local.nanoseconds;
        let theirs = peer["res"][key]["overhead_us"].as_f64();
        let ratio = theirs.map_or("-".into(), |us| format!("{:.3}", overhead / (us * 1e3)));
        println!(
            "{name:<27} {:>8.0} {overhead:>11.0} {:>12.1} {ratio:>14}",
            local.nanoseconds,
            // The sum keeps a rounded zero from being negative.
            (10.0 * (distributed.allocations - local.allocations)).round() / 10.0 + 0.0
        );
    }
    Ok(())
}

fn pair<'a, A, B>(
    name: &'a str,
    peer: &'a str,
    local: impl Fn() -> A + 'a,
    distributed: impl Fn() -> B + 'a,
) -> Pair<'a> {
    let local = Box::new(move || drop(black_box(local())));
    let distributed = Box::new(move || drop(black_box(distributed())));
    Pair {
        name,
        peer,
        local,
        distributed,
    }
}

/// Costs of both, timed in turn: a noisy moment hits both alike.
fn measure(local: &dyn Fn(), distributed: &dyn Fn()) -> (Cost, Cost) {
    const ROUNDS: usize = 201;
    const CALLS: u32 = 200;
    let time = |f: &dyn Fn()| {
        let start = Instant::now();
        (0..CALLS).for_each(|_| f());
        start.elapsed().as_nanos() as f64 / f64::from(CALLS)
    };
    let (mut first, mut second): (Vec<_>, Vec<_>) = (0..ROUNDS)
        .map(|_| (time(local), time(distributed)))
        .unzip();
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    };
    let allocations = |f: &dyn Fn()| {
        let before = ALLOCATIONS.get();
        (0..CALLS).for_each(|_| f());
        (ALLOCATIONS.get() - before) as f64 / f64::from(CALLS)
    };
    let cost = |times: &mut Vec<f64>, f: &dyn Fn()| Cost {
        nanoseconds: median(times),
        allocations: allocations(f),
    };
    (cost(&mut first, local), cost(&mut second, distributed))
}
