//! A model gathered on one rank is whole on that rank alone.

use burn::nn::{Linear, LinearConfig};
use burn_dtensor::fsdp::full_model_on;
use burn_dtensor::prelude::*;

use crate::live::{self, alone, apart};

const RANKS: usize = 4;
const BLOCKS: usize = 16;
const WIDTH: usize = 256;
const BLOCK: usize = (WIDTH * WIDTH + WIDTH) * 4;

/// What gathering takes of all ranks together, at its peak, in blocks.
fn blocks(ranks: Launch, gather: fn(&Vec<Linear>) -> Result<Option<Vec<Linear>>>) -> f64 {
    let _alone = alone();
    let peaks = launch(ranks, |world| {
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let block = |_| LinearConfig::new(WIDTH, WIDTH).init(world.device());
        let model = fully_shard(
            (0..BLOCKS).map(block).collect(),
            &mesh,
            FullyShard::new().with_units(["*"]),
        )?;
        // What is allocated once.
        gather(&model)?;
        let (_model, peak) = live::peak(world, || gather(&model))?;
        Ok(peak)
    })
    .unwrap();
    let (_, peak) = peaks[0];
    peak as f64 / BLOCK as f64
}

#[test]
fn on_one_rank_the_others_hold_a_unit_at_a_time() {
    let most = (BLOCKS + RANKS) as f64 + 0.5;
    let found = blocks(apart(RANKS), |model| full_model_on(model, 1));
    assert!(found <= most, "{found} blocks, not {most}");
}

/// Else the other test would tell nothing.
#[test]
fn on_every_rank_each_holds_the_model() {
    let found = blocks(apart(RANKS), |model| full_model(model).map(Some));
    assert!(found >= (BLOCKS * RANKS) as f64 - 0.5, "{found} blocks");
}

#[test]
fn ranks_of_one_process_hold_it_together() {
    let most = (BLOCKS + RANKS) as f64 + 0.5;
    let found = blocks(Launch::threads(RANKS), |model| full_model(model).map(Some));
    assert!(found <= most, "{found} blocks, not {most}");
}
