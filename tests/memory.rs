//! Live bytes of a sharded model, by a counting allocator: this binary has nothing else in it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard};

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::comm::World;
use burn_dtensor::prelude::*;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is the system allocator's; the counters do not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), SeqCst) + layout.size();
        PEAK.fetch_max(live, SeqCst);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One measurement at a time: the counters are the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

const RANKS: usize = 2;
const WIDTH: usize = 512;
const ROWS: usize = 2;
const VOCAB: usize = 128;

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    first: Linear,
    second: Linear,
}

#[derive(Module, Debug)]
struct Net {
    table: Embedding,
    blocks: Vec<Block>,
}

impl Net {
    fn new(blocks: usize, device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        let block = |_| Block { norm: LayerNormConfig::new(WIDTH).init(device), first: linear(), second: linear() };
        Self { table: EmbeddingConfig::new(VOCAB, WIDTH).init(device), blocks: (0..blocks).map(block).collect() }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |net, tokens| {
            let mut x = net.table.forward(tokens);
            for block in &net.blocks {
                x = unit(block, x, |block, x| {
                    let h = block.first.forward(block.norm.forward(x.clone())).tanh();
                    x + block.second.forward(h)
                });
            }
            x
        })
    }

    /// The same with each block's features split over tensor-parallel ranks.
    fn forward_parallel(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |net, tokens| {
            let x = net.table.forward(tokens);
            net.blocks.iter().fold(x, |x, block| {
                unit(block, x, |block, x| block.forward_parallel(x).unwrap_or_else(|error| error.unwind()))
            })
        })
    }
}

impl Block {
    fn forward_parallel(&self, x: Tensor<3>) -> Result<Tensor<3>> {
        let (first, second) = (self.first.weight.dtensor()?, self.second.weight.dtensor()?);
        let tp = first.mesh().clone();
        let h = DTensor::from_local(self.norm.forward(x.clone()), &tp, &[Placement::Replicate])?.vary(&[0])?;
        let terms = h.matmul(first.to_local().unsqueeze()).tanh().matmul(second.to_local().unsqueeze());
        let sum = DTensor::from_local(terms, &tp, &[Placement::Partial(PartialOp::Sum)])?.full_tensor()?;
        Ok(x + sum)
    }
}

/// Bytes of one block, of the root's table, and of everything one rank stores of `blocks` blocks.
const BLOCK: usize = (2 * WIDTH * WIDTH + 4 * WIDTH) * 4;
const TABLE: usize = VOCAB * WIDTH * 4;

fn shards(blocks: usize) -> usize {
    (blocks * BLOCK + TABLE) / RANKS
}

/// What one rank holds, above what it held before it had a model.
#[derive(Debug, Clone, Copy)]
struct Measured {
    before: usize,
    after_forward: usize,
    peak_backward: usize,
    after_backward: usize,
}

fn measure(blocks: usize, checkpointing: bool, reshard: ReshardAfterForward) -> Measured {
    measure_on(1, blocks, checkpointing, reshard)
}

/// On two data-parallel ranks for each of `tp` tensor-parallel ones.
fn measure_on(tp: usize, blocks: usize, checkpointing: bool, reshard: ReshardAfterForward) -> Measured {
    let ranks = RANKS * tp;
    let measured = launch(Launch::threads(ranks), |world| {
        let device = world.device().clone().autodiff();
        let device = if checkpointing { device.gradient_checkpointing() } else { device };
        let settle = |world: &World| {
            world.barrier("measure")?;
            let live = LIVE.load(SeqCst);
            world.barrier("measured")?;
            Ok::<_, Error>(live)
        };
        // What the matrix products allocate once a thread, and keep.
        let warm = Net::new(1, &device);
        drop(warm.forward(Tensor::<2, Int>::zeros([1, ROWS], &device)).sum().backward());
        drop(warm);
        let empty = settle(world)?;
        let mesh = DeviceMesh::new(world, [RANKS, tp], ["shard", "tp"])?;
        let config = FullyShard::new().units(["blocks.*"]).reshard_after_forward(reshard);
        let mut model = Net::new(blocks, &device);
        if tp > 1 {
            let plan = Plan::new().with("blocks.*.first", Style::colwise()).with("blocks.*.second", Style::rowwise());
            model = parallelize(model, &mesh.slice("tp")?, plan)?;
        }
        let model = fully_shard(model, &mesh.slice("shard")?, config)?;
        let mut last = None;
        // The first step warms up what is allocated once.
        for _ in 0..3 {
            let before = settle(world)?;
            let tokens = Tensor::<2, Int>::zeros([1, ROWS], &device);
            let output = if tp > 1 { model.forward_parallel(tokens) } else { model.forward(tokens) };
            let loss = output.sum();
            let after_forward = settle(world)?;
            if world.rank() == 0 {
                PEAK.store(LIVE.load(SeqCst), SeqCst);
            }
            world.barrier("peak")?;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            world.barrier("backward")?;
            let peak_backward = PEAK.load(SeqCst);
            let after_backward = settle(world)?;
            drop(grads);
            let rank = |live: usize| (live - empty) / ranks;
            last = Some(Measured {
                before: rank(before),
                after_forward: rank(after_forward),
                peak_backward: rank(peak_backward),
                after_backward: rank(after_backward),
            });
            world.barrier("next")?;
        }
        Ok::<_, Error>(last.expect("three steps ran"))
    })
    .unwrap();
    measured[0]
}

/// Room for graph nodes, activations of two rows, and the ranks' own state: small against a unit.
fn small(blocks: usize) -> usize {
    256 * 1024 + blocks * 96 * 1024
}

#[test]
fn after_forward_only_shards_and_one_unit_are_live() {
    let _alone = alone();
    for checkpointing in [false, true] {
        for blocks in [4, 16] {
            let m = measure(blocks, checkpointing, ReshardAfterForward::Auto);
            println!("{blocks} blocks, checkpointing {checkpointing}: {m:?}, shards {}, block {BLOCK}", shards(blocks));
            assert!(m.before <= shards(blocks) + small(blocks), "before forward: {m:?}");
            // The root keeps its table: one unit, much smaller than a block.
            assert!(m.after_forward <= shards(blocks) + TABLE + small(blocks), "after forward: {m:?}");
        }
    }
}

#[test]
fn backward_peaks_at_shards_gradients_and_four_units() {
    let _alone = alone();
    for checkpointing in [false, true] {
        let mut units = Vec::new();
        for blocks in [4, 16] {
            let m = measure(blocks, checkpointing, ReshardAfterForward::Always);
            let above = m.peak_backward - 2 * shards(blocks);
            println!(
                "{blocks} blocks, checkpointing {checkpointing}: {m:?}, {:.2} units above shards and gradients",
                above as f64 / BLOCK as f64
            );
            assert!(above <= 4 * BLOCK + small(blocks), "peak in backward: {m:?}");
            assert!(m.after_backward <= 2 * shards(blocks) + small(blocks), "after backward: {m:?}");
            units.push(above);
        }
        // Both ranks count together, so a peak is of one unit more or less as theirs meet or not.
        // One buffer kept a block would be twelve units.
        assert!(units[1] <= units[0] + BLOCK, "the peak grows with depth: {units:?}");
    }
}

/// A unit frees the tensor-parallel shards that it gathered, too.
#[test]
fn after_forward_only_shards_of_tensor_parallel_shards_are_live() {
    let _alone = alone();
    for checkpointing in [false, true] {
        for blocks in [4, 16] {
            let m = measure_on(2, blocks, checkpointing, ReshardAfterForward::Always);
            // Of a block's matrices each rank has a quarter; of the table and the rest, half.
            let shards = (blocks * BLOCK / 2 + TABLE) / RANKS;
            println!("{blocks} blocks, checkpointing {checkpointing}: {m:?}, shards {shards}, block {BLOCK}");
            assert!(m.before <= shards + small(blocks), "before forward: {m:?}");
            assert!(m.after_forward <= shards + small(blocks), "after forward: {m:?}");
            assert!(m.peak_backward - 2 * shards <= 2 * BLOCK + small(blocks), "peak in backward: {m:?}");
        }
    }
}

#[test]
fn without_resharding_the_whole_model_stays() {
    let _alone = alone();
    let blocks = 4;
    let m = measure(blocks, false, ReshardAfterForward::Never);
    assert!(m.after_forward >= shards(blocks) + blocks * BLOCK, "the measurement sees kept units: {m:?}");
}
