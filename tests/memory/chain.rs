//! A chain of blocks under a root unit, in every mode and with tensor-parallel ranks.

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_dtensor::comm::World;
use burn_dtensor::prelude::*;

use crate::live::{self, Measured, alone};

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
        let block = |_| Block {
            norm: LayerNormConfig::new(WIDTH).init(device),
            first: linear(),
            second: linear(),
        };
        Self {
            table: EmbeddingConfig::new(VOCAB, WIDTH).init(device),
            blocks: (0..blocks).map(block).collect(),
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |net, tokens| {
            let x = net.table.forward(tokens);
            net.blocks
                .iter()
                .fold(x, |x, block| unit(block, x, Block::forward))
        })
    }

    /// The same, where reads open the blocks.
    fn forward_by_read(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |net, tokens| {
            let x = net.table.forward(tokens);
            net.blocks.iter().fold(x, |x, block| block.forward(x))
        })
    }

    /// The same with each block's features split over tensor-parallel ranks.
    fn forward_parallel(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        unit(self, tokens, |net, tokens| {
            let x = net.table.forward(tokens);
            net.blocks.iter().fold(x, |x, block| {
                unit(block, x, |block, x| {
                    block
                        .forward_parallel(x)
                        .unwrap_or_else(|error| error.unwind())
                })
            })
        })
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let h = self.first.forward(self.norm.forward(x.clone())).tanh();
        x + self.second.forward(h)
    }

    fn forward_parallel(&self, x: Tensor<3>) -> Result<Tensor<3>> {
        let (first, second) = (self.first.weight.dtensor()?, self.second.weight.dtensor()?);
        let tp = first.mesh().clone();
        let h = DTensor::from_local(self.norm.forward(x.clone()), &tp, &[Placement::Replicate])?
            .vary(&[0])?;
        let terms = h
            .matmul(first.to_local().unsqueeze())
            .tanh()
            .matmul(second.to_local().unsqueeze());
        let sum = DTensor::from_local(terms, &tp, &[Placement::Partial(PartialOp::Sum)])?
            .full_tensor()?;
        Ok(x + sum)
    }
}

/// Bytes of one block, of the root's table, and of everything one rank stores of `blocks` blocks.
const BLOCK: usize = (2 * WIDTH * WIDTH + 4 * WIDTH) * 4;
const TABLE: usize = VOCAB * WIDTH * 4;

fn shards(blocks: usize) -> usize {
    (blocks * BLOCK + TABLE) / RANKS
}

fn measure(blocks: usize, checkpointing: bool, reshard: ReshardAfterForward) -> Measured {
    measure_on(
        1,
        blocks,
        checkpointing,
        config(reshard),
        false,
        Net::forward,
    )
}

fn config(reshard: ReshardAfterForward) -> FullyShard {
    FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(reshard)
}

type Forward = fn(&Net, Tensor<2, Int>) -> Tensor<3>;

/// On two data-parallel ranks for each of `tp` tensor-parallel ones.
fn measure_on(
    tp: usize,
    blocks: usize,
    checkpointing: bool,
    config: FullyShard,
    frozen: bool,
    forward: Forward,
) -> Measured {
    let make = |world: &World, device: &Device| {
        let mesh = DeviceMesh::new(world, [RANKS, tp], ["shard", "tp"])?;
        let mut model = Net::new(blocks, device);
        if frozen {
            model.blocks = model.blocks.no_grad();
        }
        if tp > 1 {
            let plan = Plan::new()
                .with_style("blocks.*.first", Style::colwise())
                .with_style("blocks.*.second", Style::rowwise());
            model = parallelize(model, &mesh.slice("tp")?, plan)?;
        }
        fully_shard(model, &mesh.slice("shard")?, config.clone())
    };
    live::measure(RANKS * tp, checkpointing, make, |net, device| {
        let tokens = Tensor::<2, Int>::zeros([1, ROWS], device);
        forward(net, tokens).sum()
    })
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
            println!(
                "{blocks} blocks, checkpointing {checkpointing}: {m:?}, shards {}, block {BLOCK}",
                shards(blocks)
            );
            assert!(
                m.before <= shards(blocks) + small(blocks),
                "before forward: {m:?}"
            );
            // The root keeps its table: one unit, much smaller than a block.
            assert!(
                m.after_forward <= shards(blocks) + TABLE + small(blocks),
                "after forward: {m:?}"
            );
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
            assert!(
                above <= 4 * BLOCK + small(blocks),
                "peak in backward: {m:?}"
            );
            assert!(
                m.after_backward <= 2 * shards(blocks) + small(blocks),
                "after backward: {m:?}"
            );
            units.push(above);
        }
        // Both ranks count together, so a peak is of one unit more or less as theirs meet or not.
        // One buffer kept per block would be twelve units.
        assert!(
            units[1] <= units[0] + BLOCK,
            "the peak grows with depth: {units:?}"
        );
    }
}

/// Weights of half a unit's bytes, and gradients of a whole unit's, which are cast to be reduced.
/// Between forward and backward each unit's cast shards wait to be gathered again: half the shards,
/// which go as gradients come.
#[test]
fn half_precision_reduced_in_single_takes_half_the_shards_more() {
    let _alone = alone();
    let policy = MixedPrecisionPolicy::new()
        .with_param_dtype(DType::BF16)
        .with_reduce_dtype(DType::F32);
    let mut units = Vec::new();
    for blocks in [4, 16] {
        let config = config(ReshardAfterForward::Always).with_mixed_precision(policy.clone());
        let m = measure_on(1, blocks, false, config, false, Net::forward);
        let above = m.peak_backward - 2 * shards(blocks);
        println!(
            "{blocks} blocks: {m:?}, {:.2} units above shards and gradients",
            above as f64 / BLOCK as f64
        );
        let cast = shards(blocks) / 2;
        assert!(
            m.after_forward <= shards(blocks) + cast + small(blocks),
            "after forward: {m:?}"
        );
        assert!(
            above <= 4 * BLOCK + small(blocks),
            "peak in backward: {m:?}"
        );
        assert!(
            m.after_backward <= 2 * shards(blocks) + small(blocks),
            "after backward: {m:?}"
        );
        units.push(above);
    }
    assert!(
        units[1] <= units[0] + BLOCK,
        "the peak grows with depth: {units:?}"
    );
}

/// Weights that every rank holds whole, but not as they are stored: a unit frees its copies, which
/// the graph has views of.
#[test]
fn casts_of_replicated_weights_are_freed_after_forward() {
    let _alone = alone();
    let blocks = 8;
    let config = config(ReshardAfterForward::Always)
        .with_mixed_precision(MixedPrecisionPolicy::new().with_param_dtype(DType::BF16))
        .with_shard_placement_fn(|_| Some(Placement::Replicate));
    let m = measure_on(1, blocks, false, config, false, Net::forward);
    let stored = blocks * BLOCK + TABLE;
    println!("{m:?}, stored {stored}, block {BLOCK}");
    assert!(
        m.after_forward <= stored + small(blocks),
        "after forward: {m:?}"
    );
}

/// Their nodes in the graph stand in for inputs to hang on: some bytes each.
#[test]
fn blocks_that_reads_open_take_no_more() {
    const NODES: usize = 96 * 1024;
    let _alone = alone();
    let mut units = Vec::new();
    for blocks in [4, 16] {
        let m = measure_on(
            1,
            blocks,
            false,
            config(ReshardAfterForward::Always),
            false,
            Net::forward_by_read,
        );
        let above = m.peak_backward - 2 * shards(blocks);
        println!(
            "{blocks} blocks: {m:?}, {:.2} units above shards and gradients",
            above as f64 / BLOCK as f64
        );
        assert!(
            m.after_forward <= shards(blocks) + small(blocks) + blocks * NODES,
            "after forward: {m:?}"
        );
        assert!(
            above <= 4 * BLOCK + small(blocks),
            "peak in backward: {m:?}"
        );
        units.push(above);
    }
    assert!(
        units[1] <= units[0] + BLOCK + 12 * NODES,
        "the peak grows with depth: {units:?}"
    );
}

#[test]
fn frozen_blocks_are_freed_after_forward_wherever_they_are_entered() {
    let _alone = alone();
    for forward in [Net::forward as Forward, Net::forward_by_read] {
        let m = measure_on(
            1,
            8,
            false,
            config(ReshardAfterForward::Always),
            true,
            forward,
        );
        println!("{m:?}, block {BLOCK}");
        assert!(
            m.after_forward <= shards(8) + BLOCK + small(8),
            "after forward: {m:?}"
        );
        assert!(
            m.peak_backward <= shards(8) + 4 * BLOCK + small(8),
            "peak in backward: {m:?}"
        );
    }
}

/// A unit frees the tensor-parallel shards that it gathered, too.
#[test]
fn after_forward_only_shards_of_tensor_parallel_shards_are_live() {
    let _alone = alone();
    for checkpointing in [false, true] {
        for blocks in [4, 16] {
            let m = measure_on(
                2,
                blocks,
                checkpointing,
                config(ReshardAfterForward::Always),
                false,
                Net::forward_parallel,
            );
            // Of a block's matrices each rank has a quarter; of the table and the rest, half.
            let shards = (blocks * BLOCK / 2 + TABLE) / RANKS;
            println!(
                "{blocks} blocks, checkpointing {checkpointing}: {m:?}, shards {shards}, block {BLOCK}"
            );
            assert!(m.before <= shards + small(blocks), "before forward: {m:?}");
            assert!(
                m.after_forward <= shards + small(blocks),
                "after forward: {m:?}"
            );
            assert!(
                m.peak_backward - 2 * shards <= 2 * BLOCK + small(blocks),
                "peak in backward: {m:?}"
            );
        }
    }
}

#[test]
fn without_resharding_the_full_model_stays() {
    let _alone = alone();
    let blocks = 4;
    let m = measure(blocks, false, ReshardAfterForward::Never);
    assert!(
        m.after_forward >= shards(blocks) + blocks * BLOCK,
        "the measurement sees kept units: {m:?}"
    );
}
