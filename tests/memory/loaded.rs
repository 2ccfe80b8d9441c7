//! A load holds the new shards and the memory of `ReadOptions`: the old shards are freed before the
//! new ones are read.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::checkpoint::{
    self, Checkpoint, ConsolidateOptions, LoadOptions, ReadOptions, SafetensorsWeights, State,
    WeightSource,
};
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;

use crate::live::{alone, apart, peak};

const RANKS: usize = 2;
const LAYERS: usize = 8;
const WIDTH: usize = 1024;
/// Bytes of a rank's shards of the model.
const SHARDS: usize = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / RANKS;
/// Memory of a load on each rank.
const MEMORY: usize = 4 << 20;
/// Bookkeeping of the load and its collectives on each rank.
const OTHER: usize = 256 << 10;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Net {
    fn sharded(mesh: &DeviceMesh, device: &Device) -> Result<Self> {
        let net = Self {
            layers: (0..LAYERS)
                .map(|_| LinearConfig::new(WIDTH, WIDTH).init(device))
                .collect(),
        };
        fully_shard(net, mesh, FullyShard::new().with_units(["layers.*"]))
    }

    fn grads(&self, device: &Device) -> GradientsParams {
        let layer = |x, layer: &Linear| unit(layer, x, |layer, x| layer.forward(x));
        let loss = self
            .layers
            .iter()
            .fold(Tensor::<2>::ones([1, WIDTH], device), layer)
            .sum();
        GradientsParams::from_grads(loss.backward(), self)
    }
}

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("memory-{name}-{}", process::id()));
        drop(fs::remove_dir_all(&folder));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn read() -> ReadOptions {
    ReadOptions::new().with_memory(MEMORY).with_threads(2)
}

/// Saves a model and the state of its optimizer after a step.
fn save(folder: &Path, mesh: &DeviceMesh, device: &Device) -> Result<()> {
    let (mut model, mut optim) = (Net::sharded(mesh, device)?, sharded(AdamWConfig::new()));
    let grads = model.grads(device);
    model = optim.step(0.1, model, grads)?;
    let state = State::new(mesh)
        .with_model("model", &model)?
        .with_optimizer("optimizer", &optim.state(&model)?)?;
    checkpoint::save(folder, &state).map(drop)
}

/// Returns the bytes that `load` of a model adds to a rank at most, if its old shards may be freed
/// and if a clone holds them.
fn growth(
    mesh: &DeviceMesh,
    device: &Device,
    load: impl Fn(Net) -> Result<Net>,
) -> Result<[usize; 2]> {
    // What is allocated once.
    drop(load(Net::sharded(mesh, device)?)?);
    let model = Net::sharded(mesh, device)?;
    let (model, alone) = peak(mesh.world(), || load(model))?;
    let clone = model.clone();
    let (_, with_clone) = peak(mesh.world(), || load(clone))?;
    drop(model);
    Ok([alone, with_clone].map(|bytes| bytes / RANKS))
}

#[test]
fn a_load_holds_the_shards_once() {
    let _alone = alone();
    let folder = Folder::new("loaded");
    let (saved, exported) = (folder.0.join("saved"), folder.0.join("exported"));
    let growths = launch(apart(RANKS), |world| {
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let device = world.device().clone().autodiff();
        save(&saved, &mesh, &device)?;
        world.run_on(0, || {
            let options = ConsolidateOptions::new()
                .with_key("model")
                .with_transposed(|name| name.ends_with("weight"));
            checkpoint::consolidate(&saved, &exported, &options, |_, _| {}).unwrap();
        });
        world.barrier("exported")?;
        let checkpoint = Checkpoint::open(&saved, &mesh)?.with_read_options(read());
        let of_checkpoint = growth(&mesh, &device, |model| {
            Ok(checkpoint
                .load_model("model", model, &LoadOptions::new())?
                .0)
        })?;
        let weights = SafetensorsWeights::open(&exported, &mesh)?.with_read_options(read());
        let transposed = growth(&mesh, &device, |model| {
            let source = |path: &str| {
                let source = WeightSource::new(path);
                Some(if path.ends_with("weight") {
                    source.transposed()
                } else {
                    source
                })
            };
            Ok(weights.load_model(model, source)?.0)
        })?;
        Ok([of_checkpoint, transposed])
    });
    for (what, [alone, with_clone]) in ["a checkpoint", "transposed weights"]
        .into_iter()
        .zip(growths.unwrap()[0].1)
    {
        println!(
            "a load of {what} adds {alone} bytes, or {with_clone} if a clone has the old shards of {SHARDS} bytes"
        );
        assert!(alone <= MEMORY + OTHER, "{alone} bytes for {what}");
        assert!(
            (SHARDS..=SHARDS + MEMORY + OTHER).contains(&with_clone),
            "{with_clone} bytes for {what}"
        );
    }
}

#[test]
fn an_optimizer_takes_its_state_without_a_copy_and_gives_one() {
    let _alone = alone();
    let folder = Folder::new("loaded-optimizer");
    let growths = launch(apart(RANKS), |world| {
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let device = world.device().clone().autodiff();
        let saved = folder.0.join("saved");
        save(&saved, &mesh, &device)?;
        let checkpoint = Checkpoint::open(&saved, &mesh)?.with_read_options(read());
        let model = Net::sharded(&mesh, &device)?;
        let load = || checkpoint.load_optimizer("optimizer", &model, &LoadOptions::new());
        drop(sharded(AdamWConfig::new()).load_state(&model, load()?.0)?);
        let ((state, _), loaded) = peak(world, load)?;
        let (optim, handed) = peak(world, || {
            sharded(AdamWConfig::new()).load_state(&model, state)
        })?;
        let (_state, copied) = peak(world, || optim.state(&model))?;
        Ok([loaded, handed, copied].map(|bytes| bytes / RANKS))
    });
    let [loaded, handed, copied] = growths.unwrap()[0].1;
    let state = 2 * SHARDS;
    println!(
        "state of {state} bytes: loading adds {loaded}, handing it over {handed}, and a copy to save it {copied}"
    );
    assert!(
        (state..=state + MEMORY + OTHER).contains(&loaded),
        "{loaded} bytes"
    );
    assert!(handed <= OTHER, "{handed} bytes");
    // burn copies one tensor twice at a time, to align it.
    assert!(
        (state..=state + WIDTH * WIDTH * 4 / RANKS + OTHER).contains(&copied),
        "{copied} bytes"
    );
}
